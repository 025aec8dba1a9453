"""The report's pictures, as SVG text. Titles and words about them are the page's; here are axes and marks only."""

from __future__ import annotations

import io
import re
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any, Final

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.patheffects import withStroke
from matplotlib.ticker import MaxNLocator, PercentFormatter

from evaluation.results import Interval
from evaluation.statistics.intervals import Floats

INK: Final = "#1d2733"
MUTED: Final = "#6b7685"
GRID: Final = "#e8ebef"
GOOD: Final = "#0f766e"  # accuracy, passed, after
REWARD: Final = "#4459c9"
KL: Final = "#b7651b"
BAD: Final = "#b4233f"  # refused
SWAP: Final = "#8a63b8"

_WIDE: Final = 10.6  # inches that fill the page, so that text is as large as in half-page pictures of 5.2
_CROWD: Final = 14  # more marks than this get no words of their own

_STYLE: Final = {
    "svg.fonttype": "none",  # text stays text: it takes the page's font and can be selected
    "font.size": 10.5,
    "axes.edgecolor": "#c5ccd5",
    "axes.labelcolor": MUTED,
    "axes.linewidth": 0.8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.labelsize": 10,
    "grid.color": GRID,
    "grid.linewidth": 0.8,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.major.size": 0,
    "ytick.major.size": 0,
    "xtick.major.pad": 6,
    "lines.linewidth": 1.8,
    "lines.solid_capstyle": "round",
    "legend.frameon": False,
    "legend.fontsize": 10,
    "legend.labelcolor": INK,
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    "savefig.facecolor": "none",
    "text.color": INK,
    "text.parse_math": False,
}


@mpl.rc_context(_STYLE)
def by_policy(points: Sequence[tuple[int, Interval, bool]], *, colour: str, percent: bool, label: str) -> str:
    """One measure by policy (version, estimate, whether it was refused); the line joins those that served."""
    figure, axes = _figure(5.2, 3.1)
    places = np.arange(len(points))
    served = [i for i, (_, _, refused) in enumerate(points) if not refused]
    axes.plot(served, [points[i][1].value for i in served], color=colour, alpha=0.35, linewidth=1.6, zorder=2)
    for i, (_, found, refused) in enumerate(points):
        shade = BAD if refused else colour
        axes.plot([i, i], [found.low, found.high], color=shade, linewidth=2.2, alpha=0.55, zorder=3)
        for end in (found.low, found.high):
            axes.plot([i - 0.07, i + 0.07], [end, end], color=shade, linewidth=1.6, alpha=0.55, zorder=3)
        axes.plot(
            i, found.value, "o", markersize=7.5, markeredgewidth=2, color=shade, zorder=4,
            markerfacecolor="white" if refused else shade,
        )  # fmt: skip
        words = "" if len(points) > _CROWD else f"{found.value:.1%}" if percent else f"{found.value:.3f}"
        axes.annotate(
            words, (i, found.value), xytext=(9, 0), textcoords="offset points", va="center", fontsize=10, zorder=5,
            path_effects=[withStroke(linewidth=4, foreground="white")],
        )  # fmt: skip
    every = len(points) // _CROWD + 1
    axes.set_xticks(places[::every], [f"v{point[0]}" for point in points[::every]])
    axes.set_xlim(-0.5, len(points) - 0.5 + 0.35)
    axes.grid(axis="x", visible=False)
    low, high = min(found.low for _, found, _ in points), max(found.high for _, found, _ in points)
    span = (high - low) or max(abs(high), 1.0) * 0.2
    axes.set_ylim(max(low - 0.15 * span, -0.02 * span if low >= 0 else -np.inf), high + 0.15 * span)
    if percent:
        axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    axes.yaxis.set_major_locator(MaxNLocator(6, steps=[1, 2, 5, 10]))
    return _svg(figure, label)


_VERDICTS = {"pass": (GOOD, "passed"), "undecided": (MUTED, "undecided")}


@mpl.rc_context(_STYLE)
def gates(rows: Sequence[Any], *, percent: bool, label: str) -> str:
    """Difference and interval of each verdict, one row each, first on top; the bar to pass is the dark line."""
    figure, axes = _figure(_WIDE, 0.9 + 0.46 * len(rows))
    for i, row in enumerate(rows):
        shade, words = _VERDICTS.get(row.verdict, (BAD, "refused"))
        axes.plot([row.ci_low, row.ci_high], [i, i], color=shade, linewidth=7, alpha=0.22, zorder=2)
        axes.plot(row.difference, i, "o", color=shade, markersize=8, zorder=3)
        axes.annotate(
            words, (1.0, i), xycoords=("axes fraction", "data"), xytext=(8, 0), textcoords="offset points",
            va="center", color=shade, fontsize=10.5, annotation_clip=False,
        )  # fmt: skip
    for bar in sorted({row.min_difference for row in rows}):
        axes.axvline(bar, color=INK, linewidth=1.2, zorder=1)
    axes.set_yticks(range(len(rows)), [f"v{row.candidate} against v{row.incumbent}" for row in rows])
    axes.tick_params(axis="y", labelcolor=INK)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    ends = [0.0, *(row.ci_low for row in rows), *(row.ci_high for row in rows)]
    span = (max(ends) - min(ends)) or 1.0
    axes.set_xlim(min(ends) - 0.06 * span, max(ends) + 0.06 * span)
    axes.grid(axis="y", visible=False)
    axes.spines["left"].set_visible(False)
    scale, digits = (100, 0) if percent else (1, 2)
    axes.xaxis.set_major_formatter(lambda value, _: _signed(scale * value, digits))
    axes.set_xlabel("candidate less incumbent" + (", points" if percent else ""))
    return _svg(figure, label)


@mpl.rc_context(_STYLE)
def training(
    runs: Mapping[str, Sequence[Mapping[str, Any]]], measures: Sequence[tuple[str, str, str]], *, label: str
) -> str:
    """Measures (key, name, colour) over the steps of all runs, one under the other; runs are set apart by lines."""
    figure = Figure(figsize=(_WIDE, 1.75 * len(measures) + 0.6), layout="constrained")
    panels = figure.subplots(len(measures), 1, sharex=True, squeeze=False)[:, 0]
    starts, at = [], 0
    for rows in runs.values():
        starts.append(at)
        at += len(rows)
    for axes, (key, name, colour) in zip(panels, measures, strict=True):
        for start, rows in zip(starts, runs.values(), strict=True):
            measured = (row.get(key) for row in rows)
            values = np.array([float(v) if isinstance(v, int | float) else np.nan for v in measured])
            values[~np.isfinite(values)] = np.nan
            steps = np.arange(start + 1, start + len(rows) + 1)
            axes.plot(steps, values, color=colour, linewidth=1.0, alpha=0.35, marker="o", markersize=2.6)
            axes.plot(steps, _smooth(values), color=colour, linewidth=2.2)
        for start in starts[1:]:
            axes.axvline(start + 0.5, color="#aab3bf", linewidth=1, linestyle=(0, (4, 3)))
        axes.set_ylabel(name, color=colour)
        axes.yaxis.set_major_locator(MaxNLocator(4))
        axes.grid(axis="x", visible=False)
        axes.margins(y=0.12)
        axes.set_xlim(0.5, max(at, 1) + 0.5)
    every = len(runs) // _CROWD + 1
    for start, name in list(zip(starts, runs, strict=True))[::every]:
        panels[0].annotate(
            name, (start + 0.5, 1.0), xycoords=("data", "axes fraction"), xytext=(5, 3),
            textcoords="offset points", fontsize=9.5, color=MUTED, va="bottom", annotation_clip=False,
        )  # fmt: skip
    panels[-1].set_xlabel("training step")
    panels[-1].xaxis.set_major_locator(MaxNLocator(integer=True))
    figure.align_ylabels(list(panels))
    return _svg(figure, label)


@mpl.rc_context(_STYLE)
def serving(bins: Mapping[str, Floats], swaps: Sequence[tuple[float, str]], *, label: str) -> str:
    """Requests/s, tokens/s and latency over time; ``swaps`` are (time, words), at the same clock as ``bins``."""
    figure = Figure(figsize=(_WIDE, 6.0), layout="constrained")
    panels = figure.subplots(3, 1, sharex=True)
    time, width = bins["time"], bins["seconds"][0]
    origin = time.min()
    scale, unit = _time_unit(time.max() + width - origin)
    x = (time + width / 2 - origin) / scale
    for axes, key, name, colour in (
        (panels[0], "requests", "requests/s", REWARD),
        (panels[1], "tokens", "tokens/s", REWARD),
    ):
        rate = bins[key] / width
        axes.fill_between(x, rate, color=colour, alpha=0.12, linewidth=0)
        axes.plot(x, rate, color=colour)
        axes.set_ylabel(name)
        axes.set_ylim(0, max(rate.max() * 1.15, 1e-9))
    p50, p95 = bins["p50_ms"], bins["p95_ms"]
    panels[2].fill_between(x, p50, p95, color=GOOD, alpha=0.14, linewidth=0)
    panels[2].plot(x, p95, color=GOOD, linewidth=1.2, alpha=0.75, label="95 of 100 are faster")
    panels[2].plot(x, p50, color=GOOD, label="median")
    panels[2].set_ylim(0, max(float(np.nanmax(p95)) * 1.15, 1e-9) if np.isfinite(p95).any() else 1.0)
    panels[2].set_ylabel("latency, ms")
    panels[2].legend(loc="lower right", bbox_to_anchor=(1, 0.94), ncols=2, borderaxespad=0.1)
    for axes in panels:
        axes.yaxis.set_major_locator(MaxNLocator(4))
        axes.grid(axis="x", visible=False)
        for at, _ in swaps:
            axes.axvline((at - origin) / scale, color=SWAP, linewidth=1.2, linestyle=(0, (4, 3)))
    for at, words in swaps[:: len(swaps) // _CROWD + 1]:
        panels[0].annotate(
            words, ((at - origin) / scale, 1.0), xycoords=("data", "axes fraction"), xytext=(0, 4),
            textcoords="offset points", ha="center", va="bottom", color=SWAP, fontsize=9.5, annotation_clip=False,
        )  # fmt: skip
    panels[-1].set_xlabel(f"{unit} since the first request")
    panels[-1].set_xlim(0, (time.max() + width - origin) / scale)
    figure.align_ylabels(list(panels))
    return _svg(figure, label)


@mpl.rc_context(_STYLE)
def stages(seconds: Mapping[str, float], *, label: str) -> str:
    """Seconds by stage, one bar each, in their order."""
    figure, axes = _figure(_WIDE, 0.35 + 0.38 * len(seconds))
    axes.barh(range(len(seconds)), list(seconds.values()), height=0.58, color="#8fa3c8")
    longest = max(seconds.values(), default=0.0) or 1.0
    for i, value in enumerate(seconds.values()):
        axes.annotate(_duration(value), (value, i), xytext=(6, 0), textcoords="offset points", va="center", fontsize=10)
    axes.set_yticks(range(len(seconds)), list(seconds))
    axes.tick_params(axis="y", labelcolor=INK)
    axes.set_ylim(len(seconds) - 0.5, -0.5)
    axes.set_xlim(0, longest * 1.12)
    axes.set_xticks([])
    axes.grid(visible=False)
    axes.spines[["left", "bottom"]].set_visible(False)
    return _svg(figure, label)


def _figure(width: float, height: float) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.subplots()


def _svg(figure: Figure, label: str) -> str:
    # Ids must differ between the pictures of one page, and be the same for the same page.
    with mpl.rc_context({"svg.hashsalt": label, "svg.id": None}):
        FigureCanvasSVG(figure)
        out = io.StringIO()
        figure.savefig(out, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    svg = out.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'(<svg[^>]*?) width="[^"]*"', r"\1", svg, count=1)
    svg = re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", svg, count=1)
    # The groups' ids (figure_1, axes_1 …) are the same in every picture and nothing refers to them.
    svg = re.sub(r'<g id="[^"]*"', "<g", svg)
    return svg.replace("<svg", f'<svg role="img" aria-label="{escape(label, quote=True)}"', 1)


def _smooth(values: Floats) -> Floats:
    """Centred mean over five steps, fewer at the ends; NaN counts for nothing."""
    windows = (values[max(0, i - 2) : i + 3] for i in range(len(values)))
    return np.array([np.nan if np.isnan(near).all() else np.nanmean(near) for near in windows])


def _signed(value: float, digits: int) -> str:
    return f"{value:+.{digits}f}".replace("-", "−") if round(value, digits) else "0"


def _time_unit(seconds: float) -> tuple[float, str]:
    for scale, unit, least in ((86400.0, "days", 3 * 86400), (3600.0, "hours", 3 * 3600), (60.0, "minutes", 180)):
        if seconds >= least:
            return scale, unit
    return 1.0, "seconds"


def _duration(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds < 120 else f"{int(seconds // 60)} min {int(seconds % 60)} s"
