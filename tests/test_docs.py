"""The documentation is correct: its Python runs and prints what it says, its links work, and it lists all operators."""

from __future__ import annotations

import contextlib
import io
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from run_page import blocks, run

from hesscale.rules import RULES

ROOT = Path(__file__).parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
LINK = re.compile(r"\]\(([^)#:]+)(?:#[^)]*)?\)")


@pytest.fixture
def rules_restored():
    """Rules that a page registers end with it."""
    before = dict(RULES)
    yield
    RULES.clear()
    RULES.update(before)


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.mark.usefixtures("rules_restored")
@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_code_runs_and_prints_what_the_page_says(page, monkeypatch, tmp_path):
    """A ``text`` block after a ``python`` block is what that prints. Figures that a page saves go to an empty folder."""
    monkeypatch.chdir(tmp_path)
    main = ModuleType("__main__")  # where TorchDynamo looks for the page's global variables
    monkeypatch.setitem(sys.modules, "__main__", main)
    printed = ""
    for language, content, line in blocks(page.read_text(encoding="utf-8")):
        if language == "python":
            with contextlib.redirect_stdout(io.StringIO()) as output:
                run(content, line, page, vars(main))
            printed = output.getvalue()
        elif language == "text":
            assert content == printed


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_to_files(page):
    for target in LINK.findall(page.read_text(encoding="utf-8")):
        assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_the_page_of_operators_is_up_to_date():
    done = subprocess.run([sys.executable, ROOT / "docs/generate.py", "--check"], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
