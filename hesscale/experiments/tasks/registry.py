"""All problems by name."""

from __future__ import annotations

from ..lab.choices import Choices
from .images import IMAGE_PROBLEMS
from .text import TEXT_PROBLEMS

PROBLEMS = Choices([*IMAGE_PROBLEMS, *TEXT_PROBLEMS])
