"""What sampling ahead (train.rollout.staleness 1) saves, on a random model: ``python -m loadtests.bench_overlap``.

Arguments that it does not know go to ``python -m deploy.examples.bench.overlap``, which says what it measures and
prints one JSON object as its last line.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Final

from loadtests.tiny_model import make_model_folder

SHAPES: Final[dict[str, dict[str, Any]]] = {
    "3M": {"hidden": 256, "layers": 4, "heads": 4},
    "25M": {"hidden": 512, "layers": 8, "heads": 8, "intermediate": 1536},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=list(SHAPES), default="3M")
    parser.add_argument("--timeout-all", type=float, default=3600.0, help="of the whole, in seconds")
    arguments, rest = parser.parse_known_args()
    with tempfile.TemporaryDirectory() as folder:
        policy = make_model_folder(Path(folder) / "model", 0, eos=False, **SHAPES[arguments.model])
        command = [sys.executable, "-m", "deploy.examples.bench.overlap", "--policy", str(policy), *rest]
        subprocess.run(command, check=True, timeout=arguments.timeout_all)


if __name__ == "__main__":
    main()
