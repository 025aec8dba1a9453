"""A load test as one HTML file, with its pictures in it."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Sequence
from html import escape
from typing import Any, Final, NamedTuple

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

from loadtests.capacity.figures import SPARE, Limits, Rows, percentile, rates

MARKS: Final = ("#0f766e", "#4459c9", "#b7651b", "#8a63b8")
BAD: Final = "#b4233f"
MUTED: Final = "#6b7685"
BINS: Final = 60
STYLE: Final = {
    "svg.fonttype": "none",  # text stays text
    "font.size": 10.5,
    "axes.edgecolor": "#c5ccd5",
    "axes.labelcolor": MUTED,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e8ebef",
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "legend.frameon": False,
    "legend.fontsize": 9.5,
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    "savefig.facecolor": "none",
    "text.parse_math": False,
}
CSS: Final = """
body{font:16px/1.5 system-ui,sans-serif;color:#1d2733;background:#fff;max-width:960px;margin:2rem auto;padding:0 1rem}
h1{font-size:1.5rem;margin:0}h2{font-size:1.1rem;margin:2rem 0 .2rem}p{margin:.3rem 0}.muted,figcaption{color:#596472}
.answer{font-size:1.15rem;border-left:4px solid #0f766e;padding:.3rem 1rem;margin:1rem 0}.failed{border-color:#b4233f}
table{border-collapse:collapse;width:100%;font-variant-numeric:tabular-nums}td,th{text-align:right;padding:.25rem .6rem;
border-bottom:1px solid #e8ebef}td:first-child,th:first-child{text-align:left}th{color:#596472;font-weight:500}
figure{margin:.8rem 0}svg{width:100%;height:auto;font-family:inherit}.bad{color:#b4233f}.wide{overflow-x:auto}
"""


class Timeline(NamedTuple):
    """start: in seconds of Unix time; swaps: when, likewise, and to which policy."""

    start: float
    seconds: float
    swaps: Sequence[tuple[float, int]]

    def minute(self, at: float) -> float:
        return (at - self.start) / 60


@mpl.rc_context(STYLE)
def page(title: str, found: dict[str, Any], account: Rows, samples: Rows) -> str:
    """The page. found: what ``figures.summary`` found."""
    limits = Limits(**found["limits"])
    start = min((row["at"] - row["ms"] / 1e3 for row in account), default=0.0)
    seconds = max((row["at"] for row in account), default=start + 1) - start
    time = Timeline(start, seconds, [(one["at"], one["policy"]) for one in found["swaps"]])
    problems = "".join(f"<li>{escape(one)}</li>" for one in found["problems"])
    parts = [
        f"<h1>{escape(title)}</h1>",
        f'<p class="muted">{escape(found["when"])}</p>',
        f'<div class="answer{"" if found["passed"] else " failed"}">{_answer(found)}</div>',
        f"<p>Not passed:</p><ul>{problems}</ul>" if problems else "",
        "<h2>Times of answers</h2>",
        _figure("Times of answers", time, lambda axes: _times(axes, time, account, limits)),
        "<h2>Users, answers and errors</h2>",
        _figure("Users, answers and errors", time, lambda axes: _throughput(axes, time, account)),
        _levels(found),
        *_server(time, samples),
        _memory(time, samples, found),
        _routes(found),
    ]
    head = f'<meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{escape(title)}</title>'
    return (
        f'<!doctype html><html lang="en"><head>{head}<style>{CSS}</style></head><body>{"".join(parts)}</body></html>\n'
    )


def _answer(found: dict[str, Any]) -> str:
    limits, most = found["limits"], found["most_users"]
    bound = (
        f"p95 at most {limits['p95'] * (1 - SPARE):.2f} s, which leaves {SPARE:.0%} of the limit of {limits['p95']:g} s"
    )
    breaks = found["breaks_at_users"]
    where = f"It breaks at <b>{breaks}</b>." if breaks else f"It did not break at {most}, the most there were."
    limited = "; ".join(map(escape, found["limited_by"]))
    whole = "Limited by" if breaks else f"At {most} users, used most"
    swaps = len(found["swaps"])
    swapped = f"<br>Swaps of policies meanwhile, the violet lines: {swaps}." if swaps else ""
    return f"Holds <b>{found['holds_users']} users</b>: {bound}. {where}<br>{whole}: {limited}.{swapped}"


def _times(axes: Axes, time: Timeline, account: Rows, limits: Limits) -> None:
    answers = [row for row in account if row["kind"] == "generate" and row["ok"]]
    rows = {"whole answer": [(row["at"], row["ms"] / 1e3) for row in answers]}
    rows["first token"] = [(row["at"], row["first_ms"] / 1e3) for row in answers if "first_ms" in row]
    for colour, (name, each) in zip(MARKS, rows.items(), strict=False):
        for percent, line in ((95, "-"), (50, ":")):
            at, values = _binned(each, time, percent)
            if at:
                axes.plot(at, values, line, color=colour, label=f"{name}, p{percent}")
    axes.axhline(limits.p95, color=BAD, linewidth=1, linestyle="--", label=f"limit on p95, {limits.p95:g} s")
    axes.set_ylabel("seconds")
    axes.set_ylim(bottom=0)


def _throughput(axes: Axes, time: Timeline, account: Rows) -> None:
    by_time = sorted((time.minute(row["at"] - row["ms"] / 1e3), row["users"]) for row in account)
    axes.step(*_columns(by_time), where="post", color=MUTED, label="users")
    width = max(time.seconds / BINS, 1.0)
    edges = np.arange(0, time.seconds + width, width)
    for name, ok, colour in (("answers per second", True, MARKS[0]), ("errors per second", False, BAD)):
        counts = np.histogram([row["at"] - time.start for row in account if row["ok"] is ok], edges)[0] / width
        axes.plot((edges[:-1] + width / 2) / 60, counts, color=colour, label=name)
    axes.set_ylim(bottom=0)


def _server(time: Timeline, samples: Rows) -> list[str]:
    if not any("codes" in sample for sample in samples):
        return [
            '<h2>Server</h2><p class="muted">Its /metrics could not be read: what it was limited by is not known.</p>'
        ]

    def queue(axes: Axes) -> None:
        for name, colour in (("running", MARKS[0]), ("waiting", BAD)):
            points = [(time.minute(one["at"]), one[name]) for one in samples if name in one]
            axes.plot(*_columns(points), color=colour, label=f"responses {name}")
        axes.set_ylim(bottom=0)

    def shares(axes: Axes) -> None:
        cache = [(time.minute(one["at"]), one["kv_cache"]) for one in samples if "kv_cache" in one]
        axes.plot(*_columns(cache), color=MARKS[3], label="KV cache, share in use")
        busy = {
            "API process, cores": rates(samples, "api_cpu_s"),
            "engine, cores": rates(samples, "cpu_s", "engine"),
            "users, cores": rates(samples, "users_cpu_s"),
            "machine, share of all cores": [
                (one["at"], one["machine_busy"]) for one in samples if "machine_busy" in one
            ],
        }
        for (name, each), colour in zip(busy.items(), (*MARKS[:3], MUTED), strict=True):
            if any(value for _, value in each):
                at, values = _binned(each, time, 50)
                axes.plot(at, values, color=colour, label=name)
        axes.set_ylim(bottom=0)

    return [
        "<h2>The engine's queue</h2>",
        _figure("Responses that run and wait", time, queue),
        "<h2>What is in use</h2>",
        _figure("KV cache and processors", time, shares),
    ]


def _memory(time: Timeline, samples: Rows, found: dict[str, Any]) -> str:
    if not found["memory_by_process"]:
        return ""

    def draw(axes: Axes) -> None:
        known = [one for one in samples if "memory" in one]
        for colour, role in zip(MARKS, found["memory_by_process"], strict=False):
            points = [(time.minute(one["at"]), one["memory"].get(role, 0) / 2**20) for one in known]
            axes.plot(*_columns(points), color=colour, label=role)
        axes.set_ylabel("MiB")
        axes.set_ylim(bottom=0)

    rows = "".join(
        f"<tr><td>{role}</td><td>{a / 2**20:.1f}</td><td>{b / 2**20:.1f}</td><td>{(b - a) / 2**20:+.1f}</td></tr>"
        for role, (a, b) in found["memory_by_process"].items()
    )
    table = (
        f"<table><tr><th>Process</th><th>After warm-up, MiB</th><th>At the end</th><th>Growth</th></tr>{rows}</table>"
    )
    words = (
        f"<p>Without mapped files, shared pages counted once, it grew by {found['memory_growth']:.2%} after warm-up; "
        f"a soak allows {found['limits']['growth']:.1%}.</p>"
    )
    return f"<h2>Memory of the server</h2>{words}{_figure('Memory by process', time, draw)}{table}"


def _levels(found: dict[str, Any]) -> str:
    rows = "".join(
        f"<tr><td>{one['users']}</td><td>{one['end'] - one['start']:.0f}</td><td>{one['requests']}</td>"
        f"<td>{one['rate']:.1f}</td><td>{_s(one['p50'])}</td>"
        f'<td class="{"bad" if (one["p95"] or 0) > found["limits"]["p95"] else ""}">{_s(one["p95"])}</td>'
        f"<td>{_s(one['p99'])}</td><td>{_s(one['first_p95'])}</td><td>{one['errors']}</td></tr>"
        for one in found["levels"]
    )
    head = "<tr><th>Users</th><th>Seconds</th><th>Requests</th><th>Per second</th><th>p50, s</th><th>p95, s</th>"
    head += "<th>p99, s</th><th>First token p95, s</th><th>Errors</th></tr>"
    return f'<h2>By number of users</h2><div class="wide"><table>{head}{rows}</table></div>'


def _routes(found: dict[str, Any]) -> str:
    rows = "".join(
        f"<tr><td>{escape(one['route'])}</td><td>{one['requests']}</td><td>{one['failed']}</td><td>{_s(one['p50_s'])}</td>"
        f"<td>{_s(one['p95_s'])}</td><td>{_s(one['first_p95_s'])}</td></tr>"
        for one in found["routes"]
    )
    head = "<tr><th>Route</th><th>Requests</th><th>Failed</th><th>p50, s</th><th>p95, s</th>"
    head += "<th>First token p95, s</th></tr>"
    errors = "".join(f"<tr><td>{escape(name)}</td><td>{count}</td></tr>" for name, count in found["errors"].items())
    table = f"<h2>Errors</h2><table><tr><th>Error</th><th>Times</th></tr>{errors}</table>" if errors else ""
    return f'<h2>By route</h2><div class="wide"><table>{head}{rows}</table></div>{table}'


def _s(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"


def _binned(points: Sequence[tuple[float, float]], time: Timeline, percent: float) -> tuple[list[float], list[float]]:
    """A percentile of the values in each of BINS equal times: minutes, and values."""
    bins: dict[int, list[float]] = {}
    width = max(time.seconds / BINS, 1.0)
    for at, value in points:
        bins.setdefault(int((at - time.start) / width), []).append(value)
    return [(i + 0.5) * width / 60 for i in sorted(bins)], [percentile(bins[i], percent) or 0.0 for i in sorted(bins)]


def _columns(points: Sequence[tuple[float, float]]) -> tuple[list[float], list[float]]:
    return [x for x, _ in points], [y for _, y in points]


def _figure(label: str, time: Timeline, draw: Callable[[Axes], None]) -> str:
    """A picture over time, with a line where another policy began to serve."""
    figure = Figure(figsize=(10.6, 3.0), layout="constrained")
    axes = figure.subplots()
    draw(axes)
    for at, policy in time.swaps:
        axes.axvline(time.minute(at), color=MARKS[3], linewidth=1.2, alpha=0.8)
        axes.annotate(
            f" policy {policy}",
            (time.minute(at), 1),
            xycoords=("data", "axes fraction"),
            va="top",
            color=MARKS[3],
            fontsize=9,
        )
    axes.set_xlabel("minutes")
    axes.set_xlim(0, time.seconds / 60)
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=5)
    FigureCanvasSVG(figure)
    out = io.StringIO()
    with mpl.rc_context({"svg.hashsalt": label}):  # ids must differ between the pictures of a page
        figure.savefig(out, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    svg = re.sub(r"<metadata>.*?</metadata>", "", out.getvalue()[out.getvalue().index("<svg") :], flags=re.DOTALL)
    svg = re.sub(r'(<svg[^>]*?) width="[^"]*" height="[^"]*"', r"\1", svg, count=1)
    svg = re.sub(r'<g id="[^"]*"', "<g", svg)
    named = f'<svg role="img" aria-label="{escape(label)}"'
    return f"<figure>{svg.replace('<svg', named, 1)}</figure>"
