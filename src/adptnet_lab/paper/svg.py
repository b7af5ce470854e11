"""Figures as SVG: as a file, or as an element of an HTML page that takes its text colour from the page."""

import io
import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["add_background", "make_inline", "render_svg"]

_STYLE: Any = {"svg.fonttype": "none", "font.family": "sans-serif", "font.sans-serif": ["DejaVu Sans"]}
_MARKER = r'<use xlink:href="#\w+" x="[^"]*" y="[^"]*" style="%s"/>\s*'
_MARKERS = _MARKER % '([^"]*)' + "(?:" + _MARKER % r"\1" + ")+"  # consecutive ones of the same style


def render_svg(figure: "Figure", name: str) -> str:
    """Return the figure as compact SVG, without background.

    Args:
        figure: The figure. The same figure gives the same text.
        name: Makes the ids of this figure different from those of other figures on the same page.
    """
    import matplotlib

    page = io.StringIO()
    with matplotlib.rc_context({**_STYLE, "svg.hashsalt": name}):
        figure.savefig(page, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    return _compact(re.sub(r"<metadata>.*?</metadata>", "", page.getvalue(), flags=re.DOTALL))


def add_background(svg: str) -> str:
    """Return the SVG on white, for a file of its own.

    Args:
        svg: From `render_svg`.
    """
    return re.sub(r"(<svg[^>]*>)", r'\1<rect width="100%" height="100%" fill="#ffffff"/>', svg, count=1)


def make_inline(svg: str) -> str:
    """Return the SVG as an element of a page: black becomes the text colour, and it is never enlarged.

    Args:
        svg: From `render_svg`.
    """
    svg = re.sub(r'width="([\d.]+)pt" height="[\d.]+pt"', r'style="max-width: \1pt"', svg, count=1)
    return svg.replace("#000000", "currentColor")


def _compact(svg: str) -> str:
    """Round coordinates to a hundredth of a point and remove redundant markup: the rendering stays the same."""
    svg = re.sub(r'<g id="[^"]*"', "<g", svg[svg.index("<svg") :])  # nothing refers to groups
    svg = re.sub(r' transform="rotate\(-0 [^"]*"', "", svg)
    svg = re.sub(r' (d|x|y)="([^"]*)"', lambda match: f' {match[1]}="{_compact_numbers(match[2])}"', svg)
    svg = re.sub(_MARKERS, _share_style, svg)
    svg = re.sub(r">\s+<", "><", svg)
    while (fewer := re.sub(r"<g>((?:(?!</?g\b).)*)</g>", r"\1", svg, flags=re.DOTALL)) != svg:
        svg = fewer
    return svg


def _compact_numbers(text: str) -> str:
    text = re.sub(r"-?\d+\.\d{3,}", lambda number: f"{float(number[0]):.2f}".rstrip("0").rstrip("."), text)
    return re.sub(r"\s*([MLCQz])\s*", r"\1", text)


def _share_style(markers: re.Match[str]) -> str:
    """Write the style of consecutive markers once, on a group around them."""
    style = f' style="{markers[1]}"'
    return f"<g{style}>{markers[0].replace(style, '')}</g>"
