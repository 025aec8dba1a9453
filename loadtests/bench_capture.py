"""The data plane's bars, measured through the command line: ``make bench-capture``.

All figures but ``scoring_rows_per_s`` are ratios of two measurements of one run, made in turns that alternate, so
that a machine whose speed drifts treats both alike. Of each there is the geometric mean over the turns and its 95 %
interval; a bar is met or missed when all of the interval says so, and undecided otherwise: take more ``--turns``.

``durable_over_sqlite``: durable rows a second of 64 writers, a sealer beside them, over SQLite (WAL,
synchronous=FULL) with 64 threads that commit each row. ``durable_over_sqlite_grouped``: over SQLite behind one thread
that commits all that wait, with locks, pages and checkpoints as they are fastest. ``durable_over_disk``: without a
sealer, over the disk's own limit, which is the same bytes in the same groups, written and fdatasynced with nothing
between; ``durable_beside_sealer_over_disk``: with a sealer, over that same limit.
``added_over_fsync``: what an append takes at 1,000 rows a second over the write of one row and an fdatasync, as
often. ``scoring_history_ratio``: the time to score new rows beside a large history of scored ones over that beside a
small one; ``scoring_late_history_ratio``: the same of a hundred thumbs on old responses, and nothing else that is new.
Each is measured on a fresh copy of its history. ``scoring_rows_per_s``: of the whole large history, a few times.
``seal_over_deltalake`` and ``compact_over_deltalake``: the time of sealing and compacting over that of
``write_deltalake`` writing the same rows, which syncs nothing to the disk; ``…_synced``: with an fsync of all it
wrote.

The last line is JSON; ``intervals`` has the intervals, ``bars`` each bar and its verdict.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

from loadtests.paired import Ratio, mean, ratio
from loadtests.server import MILLRACE

SETTLE_S = 3
EXACT_MATCH = "{exact: {ready: exact_match}}"

BARS: dict[str, tuple[str, float]] = {
    "durable_over_sqlite": ("at least", 8),
    "durable_over_sqlite_grouped": ("at least", 1.5),
    "durable_over_disk": ("at least", 0.6),
    "added_over_fsync_p50": ("at most", 2),
    "added_over_fsync_p99": ("at most", 6),
    "scoring_history_ratio": ("at most", 1.2),
    "scoring_late_history_ratio": ("at most", 2),
}


def bench(home: Path, *arguments: str) -> dict[str, Any]:
    """Run `millrace bench …`; its JSON, and the most memory its process had, in MiB."""
    os.sync()  # what an earlier run wrote and removed is not this one's to wait for
    time.sleep(SETTLE_S)
    command = [MILLRACE, "bench", *arguments, "--home", str(home), "--feedback.scoring.rules", EXACT_MATCH]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=home) as process:
        assert process.stdout is not None
        text = process.stdout.read()
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode != 0:
        raise SystemExit(f"{' '.join(command)} ended with {process.returncode}")
    result: dict[str, Any] = json.loads(text.splitlines()[-1])
    print(f"{' '.join(arguments)}: {json.dumps(result)}", flush=True)
    return result | {"peak_mib": used.ru_maxrss / 1024}


def ratios_of(captured: dict[str, Any], stored: dict[str, Any], scored: dict[str, Any]) -> dict[str, Ratio]:
    seconds = scored["seconds"]
    return {
        "durable_over_sqlite": ratio(captured["journal"], captured["sqlite"]),
        "durable_over_sqlite_grouped": ratio(captured["journal"], captured["sqlite_grouped"]),
        "durable_over_disk": ratio(captured["alone"], captured["disk"]),
        "durable_beside_sealer_over_disk": ratio(captured["journal"], captured["disk"]),
        **{
            f"added_over_fsync_{percent}": ratio(captured[f"added_ms_{percent}"], captured[f"fdatasync_ms_{percent}"])
            for percent in ("p50", "p99")
        },
        "scoring_history_ratio": ratio(seconds["large new"], seconds["small new"]),
        "scoring_late_history_ratio": ratio(seconds["large late"], seconds["small late"]),
        **{
            f"{name}_over_deltalake{suffix}": ratio(stored[f"{name}_s"], stored[f"deltalake_{name}{suffix}_s"])
            for name in ("seal", "compact")
            for suffix in ("", "_synced")
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=10, help="turns of each measurement")
    parser.add_argument("--seconds", type=float, default=3, help="length of a turn of the journal and its peers")
    parser.add_argument("--rows", type=int, default=20_000, help="rows to seal, compact and read in a turn")
    parser.add_argument("--history", type=int, default=10_000_000, help="rows already scored")
    options = parser.parse_args()
    runs = Path("runs").absolute()
    runs.mkdir(exist_ok=True)
    turns = ["--turns", str(options.turns)]
    with tempfile.TemporaryDirectory(prefix="bench-", dir=runs) as folder:
        home = Path(folder)
        captured = bench(home, "capture", "--seconds", str(options.seconds), *turns)
        stored = bench(home, "storage", "--rows", str(options.rows), *turns)
        scored = bench(home, "scoring", "--history", str(options.history), *turns)
    ratios, rate = ratios_of(captured, stored, scored), mean([scored["scoring_rows_per_s"]])
    means = {name: round(found.value, 3) for name, found in ratios.items()}
    result = {
        **{name: mean for name, mean in means.items() if not name.startswith("added_over_fsync")},
        "added_over_fsync": {percent: means[f"added_over_fsync_{percent}"] for percent in ("p50", "p99")},
        "scoring_rows_per_s": round(rate.value),
        "scoring_history": scored["history"],
        "scoring_peak_mib": round(scored["peak_mib"]),
        "scoring_memory_limit": scored["memory_limit"],
        "storage": {name: round(value, 1) for name, value in stored.items() if not isinstance(value, list)},
        "intervals": {
            **{name: found.interval() for name, found in ratios.items()},
            "scoring_rows_per_s": [round(rate.low), round(rate.high)],
        },
        "bars": {
            name: {"bar": f"{relation} {bar:g}", "verdict": ratios[name].judge(relation, bar)}
            for name, (relation, bar) in BARS.items()
        },
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
