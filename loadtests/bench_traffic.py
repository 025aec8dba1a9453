"""What the driver of a training run reads of a large lake, and in how much memory: ``make bench-traffic``.

The lake has a hundred million tokens of scored traffic: 400,000 responses of 150 tokens, four to a prompt of 100. A
process reads and draws what a run on logged responses would (``train.data.traffic_share=1``, all else at its defaults),
and another one what a run of 2,000 steps would, which draws most of the lake. ``driver_peak_mib``: the most memory that
the first had, of which ``imports_mib`` is what the run's modules take by themselves; ``long_run``: the same of the
other. The bar of both is a gigabyte. The last line is one JSON object; the exit
code is 1 if a bar is missed.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any, Final

from loadtests.server import run
from loadtests.tiny_model import make_model_folder

PROMPT, RESPONSE = 100, 150
BAR_MIB: Final = 1e9 / 2**20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=100_000_000, help="of prompts and responses")
    parser.add_argument("--steps", type=int, default=2000, help="of the long run")
    options = parser.parse_args()
    runs = Path("runs").absolute()
    runs.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="bench-", dir=runs) as folder:
        home = Path(folder) / "home"
        home.mkdir()
        model = make_model_folder(
            home / "model", 1, hidden=256, layers=4, heads=4, intermediate=1024, eos=False, printable=True
        )
        flags = ["--home", str(home), "--feedback.scoring.rules", "{exact: {ready: exact_match}}"]
        flags += ["--train.data.traffic_share", "1"]
        run("init", "--model", str(model), *flags, folder=home)
        rows = str(options.tokens // (PROMPT + RESPONSE))
        sizes = ["--prompt-tokens", str(PROMPT), "--response-tokens", str(RESPONSE)]
        print(run("bench", "fill", "--rows", rows, *sizes, *flags, folder=home).strip(), flush=True)
        found = measure(home, flags)
        print(json.dumps(found), flush=True)
        long_run = measure(home, [*flags, "--train.steps", str(options.steps)])
    peaks = {"driver_peak_mib": found["driver_peak_mib"], "long_run.driver_peak_mib": long_run["driver_peak_mib"]}
    bars = {
        name: {"bar": f"at most {BAR_MIB:.0f}", "verdict": "met" if peak <= BAR_MIB else "missed"}
        for name, peak in peaks.items()
    }
    print(
        json.dumps({"tokens": options.tokens, **found, "long_run": {"steps": options.steps, **long_run}, "bars": bars})
    )
    if any(bar["verdict"] == "missed" for bar in bars.values()):
        raise SystemExit(1)


def measure(home: Path, flags: list[str]) -> dict[str, Any]:
    """What a process of its own reads and draws."""
    found = json.loads(run("bench", "traffic", *flags, folder=home).splitlines()[-1])
    found = {"driver_peak_mib": found.pop("peak_mib"), **found}
    return {name: round(value, 1) if isinstance(value, float) else value for name, value in found.items()}


if __name__ == "__main__":
    main()
