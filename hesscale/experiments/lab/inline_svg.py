"""Matplotlib's SVG files as a part of a page: with unique ids, the page's font, and colours for light and dark mode."""

from __future__ import annotations

import colorsys
import html
import re
from collections.abc import Iterable

from .matplotlib_files import GRID, INK, PAPER, SOFT_INK

PAGE = {INK: "--ink", SOFT_INK: "--soft-ink", GRID: "--grid", PAPER: "--paper"}
LIGHTEST, DARKEST = 0.62, 0.75  # lightness on a dark background, of saturated colours and of greys


def inline_svg(text: str, prefix: str, label: str) -> str:
    """The ``svg`` element of a file. ``prefix`` makes its ids differ from those of other figures."""
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>|<style.*?</style>|<!--.*?-->", "", text, flags=re.DOTALL)
    text = re.sub(r"<defs>\s*</defs>", "", text)
    text = re.sub(
        r"<svg [^>]*?(viewBox=\"[^\"]*\")[^>]*>", rf'<svg \1 role="img" aria-label="{html.escape(label)}">', text, count=1
    )
    text = re.sub(r""" id=(["'])(series|axes) (.*?)\1""", r" data-\2=\1\3\1", text)
    used = set(re.findall(r'(?:url\(|href=")#([^")]+)', text))
    text = re.sub(r' id="([^"]*)"', lambda found: f' id="{prefix}-{found[1]}"' if found[1] in used else "", text)
    text = re.sub(r'(url\(|href=")#', rf"\1#{prefix}-", text).replace("xlink:href", "href")
    text = re.sub(r" font-family: [^;\"]*;", "", text)
    text = re.sub(r"#[0-9a-f]{6}\b(?=[;\"])", lambda found: f"var({variable(found[0])})", text)
    return re.sub(r">\s+<", "><", text).strip()


def variable(colour: str) -> str:
    """The CSS variable of a colour."""
    return PAGE.get(colour, f"--{colour[1:]}")


def colours_of(figures: Iterable[str]) -> list[tuple[str, str, str]]:
    """The CSS variables of all colours in the figures of a page, each with its colours in light and dark mode."""
    used = sorted({found for text in figures for found in re.findall(r"var\(--([0-9a-f]{6})\)", text)})
    return [(f"--{name}", f"#{name}", on_dark(name)) for name in used]


def on_dark(name: str) -> str:
    """The colour of the same hue that is light enough for a dark background."""
    hue, lightness, saturation = colorsys.rgb_to_hls(*(int(name[i : i + 2], 16) / 255 for i in (0, 2, 4)))
    least = LIGHTEST if saturation > 0.15 else DARKEST
    return "#" + "".join(f"{round(255 * part):02x}" for part in colorsys.hls_to_rgb(hue, max(lightness, least), saturation))
