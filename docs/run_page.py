"""Runs the Python blocks of pages, in order, as the tests do: `python docs/run_page.py docs/tutorials/prune.md`.

What a page prints is printed, and the figures that it draws are saved beside it.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(text: str) -> Iterator[tuple[str, str, int]]:
    """The language, the content and the line of each block."""
    for block in BLOCK.finditer(text):
        yield block[1], block[2], text.count("\n", 0, block.start()) + 1


def run(block: str, line: int, page: Path, variables: dict[str, object]) -> None:
    """Line numbers in errors are those of the page."""
    exec(compile("\n" * line + block, str(page), "exec"), variables)


if __name__ == "__main__":
    for page in [Path(argument).resolve() for argument in sys.argv[1:]]:
        os.chdir(page.parent)
        for language, content, line in blocks(page.read_text(encoding="utf-8")):
            if language == "python":
                run(content, line, page, vars(sys.modules["__main__"]))
