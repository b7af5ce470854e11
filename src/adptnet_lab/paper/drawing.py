"""Figures as SVG: as a file, or to stand inside a page and take its colours."""

import io
import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["inline", "standalone", "svg"]


def svg(figure: "Figure", name: str) -> str:
    """The figure without background. The same figure is the same text, and names inside differ between figures."""
    import matplotlib

    page = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": name, "svg.fonttype": "none", "font.family": "sans-serif"}):
        figure.savefig(page, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    return re.sub(r"<metadata>.*?</metadata>", "", page.getvalue(), flags=re.DOTALL)


def standalone(text: str) -> str:
    """A file, on white."""
    return re.sub(r"(<svg[^>]*>)", r'\1<rect width="100%" height="100%" fill="#ffffff"/>', text, count=1)


def inline(text: str) -> str:
    """An element whose black is the colour of the text around it, never larger than it was drawn."""
    text = re.sub(r'<g id="[^"]*"', "<g", text[text.index("<svg") :])  # the same names occur in every figure
    text = re.sub(r'width="([\d.]+)pt" height="[\d.]+pt"', r'style="max-width: \1pt"', text, count=1)
    return text.replace("#000000", "currentColor")
