"""The report as a self-contained HTML page: findings, the figures that support them, and all other sections collapsed."""

from __future__ import annotations

import html
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby, zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from .inline_svg import colours_of, inline_svg
from .markdown import is_numeric
from .plots import Finding, Heat, Plot, Section, Table
from .series_layout import lay_out

if TYPE_CHECKING:
    from .report import Account

FINDINGS, FIGURES = 5, 2  # the maximum numbers at the top of the page


@dataclass
class View:
    """A figure of the page, or one of several figures between which a control switches."""

    id: str
    item: Plot | Heat
    file: str
    svg: Markup
    words: str
    classes: str = ""


Views = list[View]


@dataclass
class Folded:
    """A section whose figures and tables are collapsed. A figure is a list of views."""

    id: str
    title: str
    paragraphs: list[str]
    items: list[Views | Table]

    @property
    def count(self) -> str:
        tables = sum(isinstance(item, Table) for item in self.items)
        counts = {"figure": len(self.items) - tables, "table": tables}
        return ", ".join(f"{count} {what}{'s' * (count > 1)}" for what, count in counts.items() if count)


@dataclass
class Part:
    """The part of the page for one experiment."""

    id: str
    account: Account
    findings: list[Finding]
    sections: list[Folded]

    @property
    def is_open(self) -> bool:
        """Whether sections are expanded: they are if there are no findings."""
        return not any(section.findings for section in self.account.sections)

    @property
    def made(self) -> list[tuple[str, dict[str, Any]]]:
        """How the results were produced, and the earlier reports that are shown with them."""
        own = {"command": self.account.command, "settings": self.account.settings, "facts": self.account.made}
        found = [("", own)]
        for earlier in self.account.baselines:
            facts = {name: value for name, value in earlier.items() if name not in ("command", "settings")}
            shown = {"command": earlier["command"], "settings": earlier.get("settings", {}), "facts": facts}
            found.append(("Beside it, from an earlier report", shown))
        return found

    def take(self, figure: str) -> Views | None:
        """Remove the figure that has a plot of this name from its section, and return it."""
        for section in self.sections:
            for item in section.items:
                if not isinstance(item, Table) and any(view.item.name == figure for view in item):
                    section.items.remove(item)
                    return item
        return None


def page_of(accounts: Sequence[Account], folder: Path) -> str:
    """The page, with the SVG files of all figures, which are in ``folder``."""
    parts = [part_of(account, folder) for account in accounts]
    svgs = [view.svg for part in parts for section in part.sections for item in section.items for view in views_in(item)]
    findings = first_findings(parts)
    for part, finding in findings:
        part.findings.remove(finding)
    leads: list[Views] = []
    for part, finding in findings:
        if finding.figure and len(leads) < FIGURES and (views := part.take(finding.figure)):
            leads.append(views)
    loader = PackageLoader("hesscale.experiments.lab", "")
    environment = Environment(loader=loader, autoescape=True, undefined=StrictUndefined, keep_trailing_newline=True)
    environment.filters["code"] = code
    environment.globals |= {"switches_of": switches_of, "side": side}
    css, script = (Markup(Path(__file__).with_name(f"page.{kind}").read_text(encoding="utf-8")) for kind in ("css", "js"))
    return environment.get_template("page.html.jinja").render(
        parts=parts, findings=findings, leads=leads, colours=colours_of(svgs), css=css, script=script
    )


def part_of(account: Account, folder: Path) -> Part:
    id = slug(account.name)
    view = partial(view_of, account, folder)
    sections = [folded(f"{id}-{number}", section, view) for number, section in enumerate(account.sections, 1)]
    columns = zip_longest(*[section.findings for section in account.sections])
    return Part(id, account, [finding for row in columns for finding in row if finding is not None], sections)


def first_findings(parts: Sequence[Part]) -> list[tuple[Part, Finding]]:
    """The findings at the top of the page: the first of each experiment, in the order of experiments."""
    ranked = [(rank, number) for number, part in enumerate(parts) for rank in range(len(part.findings))]
    chosen = sorted(sorted(ranked)[:FINDINGS], key=lambda found: (found[1], found[0]))
    return [(parts[number], parts[number].findings[rank]) for rank, number in chosen]


def folded(id: str, section: Section, view: Callable[[Plot | Heat], View]) -> Folded:
    paragraphs = [" ".join(part.split()) for part in section.text.split("\n\n") if part.strip()]
    items: list[Views | Table] = []
    for group, members in groupby(section.items, key=lambda item: isinstance(item, Plot) and item.group):
        found = list(members)
        if group:
            items.append(switched([view(item) for item in found if isinstance(item, Plot)]))
        else:
            items += [item if isinstance(item, Table) else [view(item)] for item in found]
    return Folded(id, section.title, paragraphs, items)


def views_in(item: Views | Table) -> Views:
    return [] if isinstance(item, Table) else item


def view_of(account: Account, folder: Path, item: Plot | Heat) -> View:
    file, id = f"figures/{account.file_name(item)}", account.file_name(item)
    svg = Markup(inline_svg((folder / f"{file}.svg").read_text(encoding="utf-8"), id, item.title))
    notes = lay_out(item, account.colours).notes if isinstance(item, Plot) else []
    return View(id, item, file, svg, " ".join(part for part in (item.caption, *notes) if part))


def switched(views: Views) -> Views:
    """Views with the CSS classes by which the style sheet shows the selected one."""
    switches = switches_of(views)
    for view in views:
        chosen = zip(switches, names_of(view), strict=True)
        view.classes = " ".join(f"v{number}{choices.index(name)}" for number, (choices, name) in enumerate(chosen))
    return views


def switches_of(views: Views) -> list[list[str]]:
    """The options of each control that switches between views."""
    return [list(dict.fromkeys(names)) for names in zip(*map(names_of, views), strict=True)]


def names_of(view: View) -> Sequence[str]:
    return view.item.view if isinstance(view.item, Plot) else ()


def side(table: Table, column: int) -> Markup:
    """The HTML attribute of a cell that is aligned right."""
    return Markup(' class="number"') if is_numeric(table, column) else Markup("")


def code(plain: object) -> Markup:
    """Text for HTML: text between backticks becomes code, and lines do not break before %, around ± or after "Fig."."""
    kept = html.escape(str(plain)).replace(" %", "\u00a0%").replace(" ± ", "\u00a0±\u00a0").replace("Fig. ", "Fig.\u00a0")
    return Markup(re.sub(r"`([^`]+)`", r"<code>\1</code>", kept))


def slug(name: str) -> str:
    """A name, converted for file names and URLs."""
    found = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
    if not found:
        raise ValueError(f"{name!r} cannot name a file: use letters a to z, or digits")
    return found
