"""One look for every figure of the course.

The palette stays apart under the common colour blindnesses (it starts from the one of Okabe and
Ito, darkened for white). Figures are SVG, narrow enough that their text is still readable on a
phone, and byte for byte the same on each run.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK = "#22272e"
BLUE = "#0b6aa8"
ORANGE = "#d55e00"
GREEN = "#00795a"
PINK = "#b8568c"
GREY = "#6b7280"
GRID = "#d9dde3"
SEQUENTIAL = "cividis"  # for heat maps: perceptually even, safe for colour-blind readers

_STYLE: dict[Any, Any] = {
    "figure.figsize": (5.2, 3.5),
    "figure.constrained_layout.use": True,
    "font.size": 12,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "text.color": INK,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": GRID,
    "grid.linewidth": 0.8,
    "lines.linewidth": 2.2,
    "lines.markersize": 6,
    "legend.frameon": False,
    "svg.fonttype": "path",
    "svg.hashsalt": "inference-from-scratch",
}


def figure(xlabel: str, ylabel: str) -> "tuple[Figure, Axes]":
    """Make a figure with one pair of labelled axes; say the unit in each label.

    In a notebook the figure appears as SVG at the end of the cell. matplotlib is imported here,
    so that a chapter's checks need not load it.
    """
    import matplotlib.pyplot as plt

    _svg_inline()
    plt.rcParams.update(_STYLE)
    plt.rcParams["axes.prop_cycle"] = plt.cycler(color=[BLUE, ORANGE, GREEN, PINK, GREY])
    fig, ax = plt.subplots()
    ax.set_xlabel(xlabel)
    ax.set_ylabel(ylabel)
    return fig, ax


def ink_on(color: tuple[float, ...]) -> str:
    """Black or white, whichever reads better on `color` (RGB or RGBA in 0..1): at least 4.5:1."""
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in color[:3]]
    luminance = 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]  # WCAG 2
    return "black" if luminance > 0.179 else "white"


def _svg_inline() -> None:
    """Ask IPython, if this is one, for SVG without a date or a version in it."""
    try:
        from IPython import get_ipython
        from matplotlib_inline.backend_inline import set_matplotlib_formats
    except ImportError:
        return
    if get_ipython() is not None:
        set_matplotlib_formats("svg", metadata={"Date": None, "Creator": None})
