"""The report's pictures, as SVG text. Titles and words about them are the page's; here are axes and marks only."""

from __future__ import annotations

import io
import re
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any, Final, NamedTuple

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.patheffects import withStroke
from matplotlib.ticker import MaxNLocator, PercentFormatter

from evaluation.report.evidence import Race, Spent
from evaluation.report.rows import LivePath
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
_POINTS: Final = 160  # of a sequence that are drawn, and no more: the page is one file

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
    "axes.formatter.useoffset": False,
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


class Point(NamedTuple):
    """A policy's figure: hollow and red if it was ``refused``, joined to its neighbours if it ``served``."""

    version: int
    found: Interval
    refused: bool
    served: bool


@mpl.rc_context(_STYLE)
def by_policy(suites: Sequence[tuple[str, Sequence[Point]]], *, colour: str, percent: bool, label: str) -> str:
    """One measure by policy, suite by suite (what is written under it, points): a line joins the policies that served,
    and never those of two suites."""
    figure, axes = _figure(5.2, 3.1 if len(suites) == 1 else 3.4)
    count = sum(len(points) for _, points in suites)
    at, ticks = 0.0, list[tuple[float, str]]()
    for under, points in suites:
        places = at + np.arange(len(points))
        served = [i for i, point in enumerate(points) if point.served]
        values = [points[i].found.value for i in served]
        axes.plot(places[served], values, color=colour, alpha=0.35, linewidth=1.6, zorder=2)
        for place, (version, found, refused, _) in zip(places, points, strict=True):
            shade = BAD if refused else colour
            axes.plot([place, place], [found.low, found.high], color=shade, linewidth=2.2, alpha=0.55, zorder=3)
            for end in (found.low, found.high):
                axes.plot([place - 0.07, place + 0.07], [end, end], color=shade, linewidth=1.6, alpha=0.55, zorder=3)
            axes.plot(
                place, found.value, "o", markersize=7.5, markeredgewidth=2, color=shade, zorder=4,
                markerfacecolor="white" if refused else shade,
            )  # fmt: skip
            words = f"{found.value:.1%}" if percent else f"{found.value:.3f}"
            axes.annotate(
                words if count <= _CROWD // (1 if len(suites) == 1 else 2) else "", (place, found.value),
                xytext=(9, 0), textcoords="offset points", va="center", fontsize=10, zorder=5,
                path_effects=[withStroke(linewidth=4, foreground="white")],
            )  # fmt: skip
            ticks.append((place, f"v{version}"))
        if under:
            axes.annotate(
                under, ((places[0] + places[-1]) / 2, 0), xycoords=("data", "axes fraction"), xytext=(0, -20),
                textcoords="offset points", ha="center", va="top", fontsize=9.5, color=MUTED, annotation_clip=False,
            )  # fmt: skip
        if at:
            axes.axvline(at - 0.75, color=GRID, linewidth=1, zorder=1)
        at = places[-1] + 1.5
    every = count // _CROWD + 1
    axes.set_xticks([place for place, _ in ticks[::every]], [name for _, name in ticks[::every]])
    axes.set_xlim(-0.5, at - 1.0 + 0.35)
    axes.grid(axis="x", visible=False)
    all_found = [point.found for _, points in suites for point in points]
    low, high = min(one.low for one in all_found), max(one.high for one in all_found)
    span = (high - low) or max(abs(high), 1.0) * 0.2
    axes.set_ylim(max(low - 0.15 * span, -0.02 * span if low >= 0 else -np.inf), high + 0.15 * span)
    if percent:
        axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    axes.yaxis.set_major_locator(MaxNLocator(6, steps=[1, 2, 5, 10]))
    return _svg(figure, label)


class Moved(NamedTuple):
    """A policy at the root of its KL from the first one, with the means of each reward of its answers."""

    version: int
    sqrt_kl: float
    refused: bool
    rewards: Mapping[str, Interval | None]


@mpl.rc_context(_STYLE)
def over_optimisation(points: Sequence[Moved], *, label: str) -> str:
    """Each reward of the policies over the root of their KL from the first, a panel per reward."""
    colours = dict(zip(points[0].rewards, (KL, REWARD, GOOD), strict=False))
    names = [name for name in colours if any(point.rewards[name] for point in points)]
    figure = Figure(figsize=(_WIDE, 1.9 * len(names) + 0.5), layout="constrained")
    panels = figure.subplots(len(names), 1, sharex=True, squeeze=False)[:, 0]
    for axes, name in zip(panels, names, strict=True):
        for point in points:
            if (found := point.rewards[name]) is None:
                continue
            shade = BAD if point.refused else colours[name]
            at = point.sqrt_kl
            axes.plot([at, at], [found.low, found.high], color=shade, linewidth=2.2, alpha=0.5, zorder=3)
            axes.plot(
                at, found.value, "o", markersize=7.5, markeredgewidth=2, color=shade, zorder=4,
                markerfacecolor="white" if point.refused else shade,
            )  # fmt: skip
            axes.annotate(
                f"v{point.version}" if len(points) <= _CROWD else "", (at, found.value), xytext=(9, 0),
                textcoords="offset points", va="center", fontsize=10, zorder=5,
                path_effects=[withStroke(linewidth=4, foreground="white")],
            )  # fmt: skip
        axes.set_ylabel(name, color=colours[name])
        axes.yaxis.set_major_locator(MaxNLocator(4))
        axes.margins(x=0.06, y=0.15)
    panels[-1].set_xlabel("√KL from the first policy, root of nats per token")
    figure.align_ylabels(list(panels))
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
def spending(candidates: Sequence[Spent], *, label: str) -> str:
    """What was spent of the error budget after each candidate, under the alpha that was in force."""
    figure, axes = _figure(_WIDE, 2.2)
    x = np.arange(1, len(candidates) + 1)
    spent = np.array([one.so_far for one in candidates])
    alpha = np.array([one.alpha for one in candidates])
    edges = np.append(x - 0.5, x[-1] + 0.5)
    axes.stairs(alpha, edges, baseline=None, color=INK, linewidth=1.2, label="alpha")
    axes.stairs(spent, edges, color=KL, fill=True, alpha=0.16, linewidth=0)
    axes.stairs(spent, edges, baseline=None, color=KL, linewidth=2, label="spent so far")
    every = len(x) // _CROWD + 1
    axes.set_xticks(x[::every], [f"v{one.candidate}" for one in candidates[::every]])
    axes.set_xlim(0.5, len(x) + 0.5)
    axes.set_ylim(0, alpha.max() * 1.12)
    axes.yaxis.set_major_locator(MaxNLocator(4))
    axes.grid(axis="x", visible=False)
    axes.legend(loc="lower right", ncols=2)
    return _svg(figure, label)


@mpl.rc_context(_STYLE)
def races(rows: Sequence[Race], *, label: str) -> str:
    """Mean gain and its bounds after each item, a panel per candidate; the gain that must be shown is the dark line."""
    columns = min(3, len(rows))
    lines = -(-len(rows) // columns)
    figure = Figure(figsize=(_WIDE, 2.5 * lines + 0.2), layout="constrained")
    panels = figure.subplots(lines, columns, squeeze=False).ravel()
    for axes in panels[len(rows) :]:
        axes.set_visible(False)
    for axes, row in zip(panels, rows, strict=False):
        shade, words = _VERDICTS.get(row.verdict, (BAD, "refused"))
        n, mean = len(row.gains), row.running_mean
        at = np.unique(np.linspace(0, n - 1, _POINTS).round().astype(int))
        x, low, high = np.append(at + 1, n * 1.02 + 1), _held(row.lower[at]), _held(row.upper[at])
        axes.fill_between(x, low, high, color=shade, alpha=0.15, linewidth=0, step="post")
        axes.step(x, low, where="post", color=shade, linewidth=1.1, alpha=0.8)
        axes.step(x, high, where="post", color=shade, linewidth=1.1, alpha=0.8)
        axes.plot(at + 1, mean[at], color=shade)
        axes.axhline(row.least, color=INK, linewidth=1.1)
        if row.worthwhile > row.least:
            axes.axhline(row.worthwhile, color=MUTED, linewidth=1, linestyle=(0, (4, 3)))
        # Bounds begin as wide as rewards can be: what is drawn is where they have narrowed to the scale of the gain.
        late = slice(n // 4, None)
        seen = np.concatenate([row.lower[late], row.upper[late], mean[late], [row.least, row.worthwhile]])
        room = 0.08 * (seen.max() - seen.min() or 1.0)
        axes.set_ylim(seen.min() - room, seen.max() + room)
        axes.set_xlim(0, n * 1.02 + 1)
        axes.set_title(f"v{row.candidate} against v{row.incumbent}: {words}", fontsize=10.5, color=shade, loc="left")
        axes.yaxis.set_major_locator(MaxNLocator(5))
        axes.xaxis.set_major_locator(MaxNLocator(4, integer=True))
        axes.yaxis.set_major_formatter(lambda value, _: _signed(value, 2))
        axes.grid(axis="x", visible=False)
    for axes in panels[max(0, len(rows) - columns) : len(rows)]:
        axes.set_xlabel("items that decided")
    return _svg(figure, label)


@mpl.rc_context(_STYLE)
def segments(race: Race, *, label: str) -> str:
    """Gain and interval of each segment of a candidate's items; the dark line is what none may fall below."""
    rows = race.segments
    figure, axes = _figure(_WIDE, 0.9 + 0.4 * len(rows))
    for i, row in enumerate(rows):
        shade = {"refuted": BAD, "shown": GOOD}.get(row.state or "", MUTED)
        axes.plot([row.low, row.high], [i, i], color=shade, linewidth=7, alpha=0.22, zorder=2)
        axes.plot(row.gain, i, "o", color=shade, markersize=8, zorder=3)
        axes.annotate(
            f"{row.n:,} items", (1.0, i), xycoords=("axes fraction", "data"), xytext=(8, 0),
            textcoords="offset points", va="center", color=MUTED, fontsize=10, annotation_clip=False,
        )  # fmt: skip
    axes.axvline(0, color="#aab3bf", linewidth=1, zorder=1)
    if race.segment_margin is not None:
        axes.axvline(-race.segment_margin, color=INK, linewidth=1.2, zorder=1)
    axes.set_yticks(range(len(rows)), [row.name for row in rows])
    axes.tick_params(axis="y", labelcolor=INK)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.grid(axis="y", visible=False)
    axes.spines["left"].set_visible(False)
    axes.xaxis.set_major_formatter(lambda value, _: _signed(value, 2))
    axes.set_xlabel(f"v{race.candidate} less v{race.incumbent}")
    return _svg(figure, label)


@mpl.rc_context(_STYLE)
def experiment(paths: Sequence[LivePath], *, label: str, over: str = "closed blocks or users") -> str:
    """Candidate less control over closed blocks, a panel per outcome; behind a commit its bounds begin anew."""
    outcomes = list(dict.fromkeys(path.outcome for path in paths))
    figure = Figure(figsize=(_WIDE, 1.95 * len(outcomes) + 0.5), layout="constrained")
    panels = figure.subplots(len(outcomes), 1, sharex=True, squeeze=False)[:, 0]
    for axes, outcome in zip(panels, outcomes, strict=True):
        ends = [0.0]
        for path in (path for path in paths if path.outcome == outcome):
            shade = SWAP if path.watched else REWARD
            x, value = np.array(path.blocks), np.array(path.value)
            low, high = np.array(path.low), np.array(path.high)
            axes.fill_between(x, low, high, color=shade, alpha=0.14, linewidth=0, step="post")
            axes.plot(x, value, color=shade, marker="o", markersize=2.6, linewidth=1.6)
            axes.step(x, low, where="post", color=shade, linewidth=1, alpha=0.8)
            axes.step(x, high, where="post", color=shade, linewidth=1, alpha=0.8)
            late = slice(len(x) // 4, None)
            ends += [*low[late], *high[late], *value[late]]
            if path.watched:
                axes.axvline(x[0] - 0.5, color=SWAP, linewidth=1.2, linestyle=(0, (4, 3)))
                axes.annotate(
                    "committed", (x[0] - 0.5, 1.0), xycoords=("data", "axes fraction"), xytext=(0, 3),
                    textcoords="offset points", ha="center", va="bottom", color=SWAP, fontsize=9.5,
                    annotation_clip=False,
                )  # fmt: skip
            if path.bar is not None:
                axes.axhline(path.bar, color=INK, linewidth=1, linestyle=(0, (4, 3)))
                ends.append(path.bar)
        known = [end for end in ends if np.isfinite(end)]
        room = 0.08 * (max(known) - min(known) or 1.0)
        axes.set_ylim(min(known) - room, max(known) + room)
        axes.axhline(0, color=INK, linewidth=1.1)
        axes.set_ylabel(outcome.replace("latency_s", "latency, s"))
        axes.yaxis.set_major_locator(MaxNLocator(5))
        axes.grid(axis="x", visible=False)
    panels[-1].set_xlabel(over)
    panels[-1].xaxis.set_major_locator(MaxNLocator(integer=True))
    figure.align_ylabels(list(panels))
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


def _held(bounds: Floats) -> Floats:
    """With the last one once more, so that a step at the very end shows."""
    return np.append(bounds, bounds[-1])


def _signed(value: float, digits: int) -> str:
    return f"{value:+.{digits}f}".replace("-", "−") if round(value, digits) else "0"


def _time_unit(seconds: float) -> tuple[float, str]:
    for scale, unit, least in ((86400.0, "days", 3 * 86400), (3600.0, "hours", 3 * 3600), (60.0, "minutes", 180)):
        if seconds >= least:
            return scale, unit
    return 1.0, "seconds"


def _duration(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds < 120 else f"{int(seconds // 60)} min {int(seconds % 60)} s"
