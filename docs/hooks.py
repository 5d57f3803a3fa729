"""Puts every file of the repository that a page links to on the site, so that links work there as they do in the repository.

On the site, files are known by their paths in the repository, and the pages of docs/ are at the top.
"""

from __future__ import annotations

import re
from pathlib import Path
from urllib.parse import unquote

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parent.parent
LINK = re.compile(r"\]\(([^)#:]+)(?:#[^)]*)?\)")
NOT_IN_SEARCH = "---\nsearch: { exclude: true }\n---\n"
IN_NAVIGATION = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"]


class SourceFile(File):
    """A Python file or a folder, which gets a page."""

    def is_documentation_page(self) -> bool:
        return True


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Rename the files of docs/, and add those that are linked to."""
    of_docs = [Path(file.abs_src_path) for file in files if file.src_dir == config.docs_dir]
    result = [file for file in files if file.src_dir != config.docs_dir]  # those of the theme
    for path in of_docs:
        if path.suffix == ".py":
            continue
        short = File(str(path.relative_to(config.docs_dir)), config.docs_dir, config.site_dir, config.use_directory_urls)
        result.append(site_file(path, config, short.dest_uri))
    pages = [path for path in of_docs if path.suffix == ".md"]
    result += [site_file(path, config) for path in sorted(reachable([*pages, *IN_NAVIGATION]) - set(of_docs))]
    return Files(result)


def site_file(path: Path, config: MkDocsConfig, dest_uri: str | None = None) -> File:
    name = path.relative_to(ROOT).as_posix()
    kind = File
    if path.suffix == ".py" or path.is_dir():
        kind, dest_uri = SourceFile, f"source/{name}/index.html"
    elif name == "README.md":
        dest_uri = "readme/index.html"  # index.html is the page Start here
    return kind(name, str(ROOT), config.site_dir, config.use_directory_urls, dest_uri=dest_uri)


def reachable(pages: list[Path]) -> set[Path]:
    """These pages, and all files and folders that links lead to from them."""
    found: set[Path] = set()
    queue = [page.resolve() for page in pages]
    while queue:
        path = queue.pop()
        if path in found or not path.exists() or ROOT not in path.parents:
            continue
        found.add(path)
        if path.suffix == ".md":
            queue += [(path.parent / unquote(target)).resolve() for target in LINK.findall(path.read_text(encoding="utf-8"))]
        elif path.is_dir():
            queue += entries(path)
    return found


def entries(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.name != "__pycache__")


def on_page_read_source(page: Page, config: MkDocsConfig) -> str | None:
    """The text of a page about a Python file or a folder."""
    name, path = page.file.src_uri, ROOT / page.file.src_uri
    if path.suffix == ".py":
        return f"{NOT_IN_SEARCH}# {name}\n\n````python\n{path.read_text(encoding='utf-8')}````\n"
    if path.is_dir():
        lines = [f"- [{entry.name}]({path.name}/{entry.name})" for entry in entries(path)]
        return "\n".join([f"{NOT_IN_SEARCH}# {name}", "", *lines])
    return None
