"""Figures as SVG elements of a page, in the page's light or dark colours.

CSS variables of the page replace two colours, INK and RULE. Draw data in mid-tones, seen on both
backgrounds, and make figures readable without colour, too.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from functools import wraps
from typing import Any, TypeAlias

INK, RULE = "#010203", "#040506"  # stand for the page's --ink and --rule
BLUE, ORANGE = "#3b82c4", "#d9730d"  # seen on white and on black
STYLE = {
    "font.size": 9,
    "font.family": "sans-serif",
    "svg.fonttype": "none",
    "text.parse_math": False,  # names may have dollars
    "text.color": INK,
    "axes.edgecolor": RULE,
    "axes.labelcolor": INK,
    "axes.titlesize": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "grid.color": RULE,
    "grid.alpha": 0.5,
    "xtick.color": INK,
    "ytick.color": INK,
    "xtick.major.size": 0,
    "ytick.major.size": 0,
    "xtick.minor.size": 0,
    "ytick.minor.size": 0,
    "legend.frameon": False,
}
WIDTH = 9.4  # inches; a page scales figures to its own width, and a phone scrolls them
Draw: TypeAlias = Callable[[Any, Any], None]  # on a matplotlib figure, of what


def figure(height: Callable[[Any], float]) -> Callable[[Draw], Callable[[Any], str]]:
    """Decorate a function (matplotlib figure, subject) to map subjects to SVG; height in inches."""

    def decorate(draw: Draw) -> Callable[[Any], str]:
        @wraps(draw)
        def svg(subject: Any) -> str:
            import matplotlib
            from matplotlib.figure import Figure

            # the salt makes ids that differ from those of the other figures
            with matplotlib.rc_context(STYLE | {"svg.hashsalt": draw.__name__}):
                sheet = Figure(figsize=(WIDTH, height(subject)), layout="constrained")
                draw(sheet, subject)
                text = io.StringIO()
                sheet.savefig(text, format="svg", transparent=True, metadata={"Date": None})
            return _inline(text.getvalue(), draw.__name__)

        return svg

    return decorate


def _inline(svg: str, name: str) -> str:
    """Turn an SVG file into an element of a page: no prologue, the page's colours, own ids."""
    svg = svg[svg.index("<svg") :].replace(INK, "var(--ink)").replace(RULE, "var(--rule)")
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'(\bid="|href="#|url\(#)', rf"\1{name}-", svg)
    return re.sub(r'(<svg [^>]*?) width="[^"]*"|height="[^"]*pt" ', r"\1", svg, count=2).strip()


def log_axis(axes: Any, name: str = "y") -> None:
    """Make an axis, "x" or "y", logarithmic with plain labels; call it after drawing the data."""
    axes.set(**{f"{name}scale": "log"})
    plain_ticks(getattr(axes, f"{name}axis"), *getattr(axes, f"get_{name}lim")())


def plain_ticks(axis: Any, low: float, high: float) -> None:
    """Label a log axis 0.02, not 2 x 10^-2; with 2 and 5 where it spans few powers of ten."""
    from matplotlib.ticker import LogLocator, NullLocator

    few = high < 300 * low
    axis.set_major_locator(LogLocator(subs=(1, 2, 5) if few else (1,)))
    axis.set_major_formatter("{x:g}")
    axis.set_minor_locator(NullLocator())
