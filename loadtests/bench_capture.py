"""The data plane's bars, measured through the command line: ``make bench-capture``.

The runs alternate, so that a machine whose speed drifts treats them alike, and medians are reported. The last line is
JSON; ``bars`` has each bar, and whether it was met.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

from loadtests.server import MILLRACE

SETTLE_S = 3
EXACT_MATCH = "{exact: {ready: exact_match}}"

BARS: dict[str, tuple[str, float]] = {
    "durable_rows_per_s": ("at least", 20_000),
    "added_ms_p50": ("at most", 1.5),
    "added_ms_p99": ("at most", 8),
    "scoring_rows_per_s": ("at least", 500_000),
    "scoring_history_ratio": ("at most", 1.2),
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


def median(results: list[dict[str, Any]], name: str) -> float:
    return statistics.median(result[name] for result in results)


def judged(value: float, relation: str, bar: float) -> dict[str, Any]:
    return {"bar": f"{relation} {bar:g}", "met": value >= bar if relation == "at least" else value <= bar}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=3, help="runs of each capture measurement")
    parser.add_argument("--seconds", type=float, default=10, help="length of a capture run")
    parser.add_argument("--rows", type=int, default=20_000, help="rows to seal, compact and read")
    parser.add_argument("--history", type=int, default=10_000_000, help="rows already scored")
    options = parser.parse_args()
    runs = Path("runs").absolute()
    runs.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="bench-", dir=runs) as folder:
        home = Path(folder)
        flat_out, paced = [], []
        for _ in range(options.runs):
            flat_out.append(bench(home, "capture", "--seconds", str(options.seconds)))
            paced.append(bench(home, "capture", "--seconds", str(options.seconds), "--rate", "1000"))
        stored = bench(home, "storage", "--rows", str(options.rows))
        scored = bench(home, "scoring", "--history", str(options.history))
    result = {
        "durable_rows_per_s": median(flat_out, "rows_per_s"),
        "added_ms_p50": median(paced, "ms_p50"),
        "added_ms_p99": median(paced, "ms_p99"),
        "scoring_rows_per_s": scored["scoring_rows_per_s"],
        "scoring_history_ratio": scored["history_ratio"],
        "scoring_late_history_ratio": scored["late_history_ratio"],
        "scoring_history": scored["history"],
        "scoring_peak_mib": scored["peak_mib"],
        "scoring_memory_limit": scored["memory_limit"],
        **{name: value for name, value in stored.items() if name not in ("rows", "peak_mib")},
    }
    result = {name: round(value, 3) if isinstance(value, float) else value for name, value in result.items()}
    result["bars"] = {name: judged(result[name], relation, bar) for name, (relation, bar) in BARS.items()}
    print(json.dumps(result))


if __name__ == "__main__":
    main()
