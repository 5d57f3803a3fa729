"""The report as a single self-contained HTML page."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from .markdown import is_numeric
from .plotly_figures import figures, text
from .plots import Heat, Plot, Section, Table
from .series_layout import lay_out

if TYPE_CHECKING:
    from .report import Account

# Buttons are listed one by one, since plotly.js's default ones offer to upload the data.
SCRIPT = """
const touch = matchMedia("(pointer: coarse)").matches;
const bar = {displaylogo: false, displayModeBar: touch ? false : "hover", modeBarButtons: [["zoom2d", "pan2d", "resetScale2d"]]};
for (const place of document.querySelectorAll(".plot")) {
  const figure = JSON.parse(place.nextElementSibling.textContent);
  if (touch) figure.layout.dragmode = false;
  Plotly.newPlot(place, figure.data, figure.layout, {responsive: true, ...bar});
}
for (const button of document.querySelectorAll(".legend button")) {
  button.onclick = () => {
    const place = button.closest("figure").querySelector(".plot");
    const shown = button.getAttribute("aria-pressed") !== "true";
    const traces = place.data.flatMap((trace, number) => trace.name === button.dataset.name ? [number] : []);
    button.setAttribute("aria-pressed", shown);
    Plotly.restyle(place, {visible: shown}, traces);
  };
}
"""
STYLE = """
*, *::before { box-sizing: border-box; }
html { scroll-padding-top: 1rem; -webkit-text-size-adjust: 100%; }
body { margin: 0 auto; padding: 1.5rem 1.25rem 4rem; max-width: 62rem; }
body { font: 16px/1.55 system-ui, sans-serif; color: #222; background: #fff; }
h1, h2, h3, h4 { line-height: 1.25; overflow-wrap: anywhere; }
h1 { margin: 0 0 .25rem; font-size: 1.8rem; }
h2 { margin: 3.5rem 0 .5rem; padding-top: 1.25rem; border-top: 2px solid #ddd; font-size: 1.45rem; }
h3 { margin: 2.2rem 0 .4rem; font-size: 1.15rem; }
h4 { margin: 1.8rem 0 .3rem; font-size: 1rem; }
p, li, dd { overflow-wrap: anywhere; }
p { margin: .5rem 0; max-width: 48rem; }
a { color: #1b5fa8; }
nav { margin: 1.2rem 0; padding: .8rem 1rem; background: #f5f6f8; border-radius: 6px; }
nav ul { margin: 0; padding-left: 1.1rem; }
figure { margin: 0 0 1.5rem; }
figcaption, .quiet { font-size: .875rem; color: #555; }
.plot { width: 100%; height: 24rem; }
.legend { display: flex; flex-wrap: wrap; gap: .1rem .9rem; padding-left: .5rem; }
.legend button { padding: .1rem 0; border: 0; background: none; font: inherit; font-size: .875rem; color: inherit; }
.legend button { cursor: pointer; }
.legend button::before { content: ""; display: inline-block; margin-right: .4em; background: var(--colour); }
.legend .dots::before, .legend .bars::before { width: .75em; height: .75em; }
.legend .dots::before { border-radius: 50%; }
.legend .line::before { width: 1.6em; height: 0; border-top: 3px solid var(--colour); vertical-align: .25em; }
.legend .dashed::before { border-top-style: dashed; background: none; }
.legend [aria-pressed=false] { opacity: .4; }
.panels { display: grid; grid-template-columns: repeat(auto-fill, minmax(14.5rem, 1fr)); gap: .5rem; }
.panels > div { min-width: 0; }
.panels .plot { height: 14.5rem; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-size: .9rem; font-variant-numeric: tabular-nums; }
th, td { padding: .3rem .9rem .3rem 0; min-width: 7rem; text-align: left; vertical-align: top; border-bottom: 1px solid #e4e4e4; }
th { vertical-align: bottom; }
th { border-bottom: 1.5px solid #888; }
.number { min-width: 4rem; text-align: right; }
td.number { white-space: nowrap; }
.problem { padding: .5rem .8rem; background: #fff4e0; border-left: 4px solid #e08e00; }
.problem p, .problem ul { margin: 0; }
pre { margin: .4rem 0; padding: .6rem .8rem; overflow-x: auto; background: #f5f6f8; border-radius: 6px; font-size: .875rem; }
dl { display: grid; grid-template-columns: minmax(6rem, max-content) 1fr; gap: .15rem 1rem; margin: .5rem 0; font-size: .875rem; }
dt { color: #555; }
dd { margin: 0; min-width: 0; }
img { max-width: 100%; height: auto; }
@media (max-width: 40rem) {
  body { padding: 1rem .9rem 3rem; }
  h1 { font-size: 1.5rem; }
  .plot { height: 22rem; }
  .panels { grid-template-columns: repeat(auto-fill, minmax(9.5rem, 1fr)); }
  .panels .plot { height: 10.5rem; }
}
"""


def page_of(accounts: Sequence[Account]) -> str:
    from plotly.offline import get_plotlyjs  # type: ignore[import-untyped]

    contents = "".join(contents_of(account) for account in accounts)
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>hesscale: results</title>\n<style>{STYLE}</style>\n</head>\n<body>\n"
        "<h1>Results</h1>\n"
        '<p class="quiet">Written by <code>hesscale report</code>. All tables: <a href="tables.md">tables.md</a>; '
        'all numbers: <a href="summary.json">summary.json</a>.</p>\n'
        f'<nav aria-label="contents"><ul>{contents}</ul></nav>\n'
        f"<main>\n{''.join(experiment(account) for account in accounts)}</main>\n"
        f"<script>{get_plotlyjs()}</script>\n<script>{SCRIPT}</script>\n</body>\n</html>\n"
    )


def contents_of(account: Account) -> str:
    parts = [link(f"#{slug(account.name)}-{number}", section.title) for number, section in enumerate(account.sections, 1)]
    below = f"<ul>{''.join(f'<li>{part}</li>' for part in parts)}</ul>" if len(parts) > 1 else ""
    return f"<li>{link(f'#{slug(account.name)}', account.title)}{below}</li>"


def experiment(account: Account) -> str:
    parts = [f'<section id="{slug(account.name)}">\n<h2>{escape(account.title)}</h2>\n']
    if account.is_partial:
        lines = "".join(f"<li>{escape(problem)}</li>" for problem in account.problems)
        parts.append(f'<div class="problem"><p>{escape(account.progress)}</p>{f"<ul>{lines}</ul>" if lines else ""}</div>\n')
    for number, section in enumerate(account.sections, 1):
        parts.append(f'<div id="{slug(account.name)}-{number}">\n{section_of(account, section)}</div>\n')
    parts.append(how_made("How this was made", account.command, account.settings, account.made))
    for found in account.baselines:
        others = {name: value for name, value in found.items() if name not in ("command", "settings")}
        parts.append(how_made("Beside it, from an earlier report", found["command"], found.get("settings", {}), others))
    return "".join([*parts, "</section>\n"])


def how_made(title: str, command: str, settings: Mapping[str, str], made: Mapping[str, str]) -> str:
    return f"<h4>{title}</h4>\n<pre>{html.escape(command)}</pre>\n{facts(settings)}{facts(made)}"


def section_of(account: Account, section: Section) -> str:
    paragraphs = [f"<p>{escape(' '.join(part.split()))}</p>\n" for part in section.text.split("\n\n") if part.strip()]
    items = [table(item) if isinstance(item, Table) else figure(account, item) for item in section.items]
    return f"<h3>{escape(section.title)}</h3>\n{''.join(paragraphs)}{''.join(items)}"


def figure(account: Account, item: Plot | Heat) -> str:
    file = f"figures/{account.file_name(item)}"
    plots = [
        f'<div><div class="plot" role="img" aria-label="{escape(item.title)}"></div>'
        f'<script type="application/json">{as_script(found)}</script></div>'
        for found in figures(item, account.colours)
    ]
    drawn = f'<div class="panels">{"".join(plots)}</div>' if isinstance(item, Heat) else legend(item, account.colours) + plots[0]
    words = " ".join(part for part in (item.caption, *notes(item, account.colours)) if part)
    files = f"{link(f'{file}.png', 'PNG')} · {link(f'{file}.svg', 'SVG')}"
    return (
        f"<figure>\n<h4>{escape(item.title)}</h4>\n{drawn}\n"
        f'<noscript><img src="{file}.png" alt="{escape(item.title)}"></noscript>\n'
        f"<figcaption>{escape(words)} {files}</figcaption>\n</figure>\n"
    )


def legend(plot: Plot, colours: Mapping[str, str] | None) -> str:
    """The labels of a plot as buttons that show and hide their series."""
    buttons = [
        f'<button type="button" class="{mark.kind}{" dashed" if mark.dashed else ""}" style="--colour: {mark.colour}" '
        f'aria-pressed="true" data-name="{html.escape(text(mark.label))}">{html.escape(mark.label)}</button>'
        for mark in lay_out(plot, colours)[0]
        if mark.in_legend
    ]
    return f'<div class="legend">{"".join(buttons)}</div>' if buttons else ""


def notes(item: Plot | Heat, colours: Mapping[str, str] | None) -> list[str]:
    """Notes on a figure that depend on how it is drawn."""
    if isinstance(item, Heat):
        return []
    drawn, left_out = lay_out(item, colours)
    return ["Dashes are medians." if any(mark.medians for mark in drawn) else "", left_out]


def table(item: Table) -> str:
    sides = [' class="number"' if is_numeric(item, column) else "" for column in range(len(item.header))]
    header = "".join(f'<th scope="col"{side}>{escape(cell)}</th>' for cell, side in zip(item.header, sides, strict=True))
    rows = [
        "<tr>" + "".join(f"<td{side}>{escape(str(cell))}</td>" for cell, side in zip(row, sides, strict=True)) + "</tr>\n"
        for row in item.rows
    ]
    return (
        f'<figure>\n<h4>{escape(item.title)}</h4>\n<div class="wide" tabindex="0"><table>\n<thead><tr>{header}</tr></thead>\n'
        f"<tbody>\n{''.join(rows)}</tbody></table></div>\n<figcaption>{escape(item.caption)}</figcaption>\n</figure>\n"
    )


def facts(found: Mapping[str, str]) -> str:
    return f"<dl>{''.join(f'<dt>{escape(name)}</dt><dd>{escape(value)}</dd>' for name, value in found.items())}</dl>\n"


def as_script(value: Any) -> str:
    """JSON for a script element, in which no text can close the element."""
    return json.dumps(value, allow_nan=False, ensure_ascii=False, separators=(",", ":")).replace("<", "\\u003c")


def link(target: str, words: str) -> str:
    return f'<a href="{escape(target)}">{escape(words)}</a>'


def escape(plain: str) -> str:
    """Text for HTML; text between backticks becomes code."""
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", html.escape(plain))


def slug(name: str) -> str:
    """A name in a form that fits into file names and URLs."""
    found = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
    if not found:
        raise ValueError(f"{name!r} cannot name a file: use letters a to z, or digits")
    return found
