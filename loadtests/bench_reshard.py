"""Resharding by plan against gathering whole tensors: ``make bench-reshard``.

For each number of ranks, of those that share an engine and of those that share each layer in training, torchrun starts
that many processes of ``python -m deploy.examples.bench.training.reshard`` over gloo, each with a rank of training and
one of vLLM, and a model of 25M parameters in bfloat16. There the two ways take turns. Bytes are the most that any rank
receives, counted at the collectives.

``received``, by plan; ``least``, what a rank must receive: (N - t)/(tN) of the tensors that are cut in t, (N - 1)/N of
the replicated ones; ``excess``, the difference, over the bytes of all weights. ``over_gather``: what the plan moves
over what gathering moves, which is all weights in generation's type. ``seconds_over_gather``: medians.
``peak_extra_bytes``: by how much a process grew at most during one hand-over, what vLLM takes to prepack a layer
included; ``staging_bytes``: what of that are buffers of exchanges, at most BUCKET_BYTES. So that memory is seen, freed
blocks go back to the system at once, which costs both ways some time. The last line printed is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Final

from loadtests.tiny_model import make_model_folder

CASES: Final = (
    (2, 1, 1),
    (2, 2, 1),
    (4, 1, 1),
    (4, 2, 1),
    (4, 4, 1),
    (2, 1, 2),
    (2, 2, 2),
    (4, 1, 2),
    (4, 2, 2),
    (4, 4, 2),
    (4, 2, 4),
)
"""(ranks, tensor-parallel ranks of an engine, tensor-parallel ranks in training)"""

BUCKET_BYTES: Final = 4 * 2**20
TIMEOUT_S: Final = 600
BARS: Final = {"excess": 0.02, "staging_bytes": BUCKET_BYTES}
ENVIRONMENT: Final = {
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "TORCHDYNAMO_DISABLE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "WARNING",
}


def main() -> None:
    """Measure, print, and exit 1 if a bar is missed."""
    parser = argparse.ArgumentParser(description="Resharding by plan against gathering whole tensors.")
    parser.add_argument("--rounds", type=int, default=9, help="times that each way is run in a case, in turn")
    parser.add_argument("--most-ranks", type=int, default=4, help="no cases of more: on GPUs as many as there are")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = make_model_folder(Path(folder), 1, hidden=512, layers=8, heads=8, intermediate=1536)
        cases = []
        for ranks, tp, training_tp in [case for case in CASES if case[0] <= arguments.most_ranks] or [(1, 1, 1)]:
            cases.append(run_case(model, ranks, tp, training_tp, arguments.rounds))
            print(line(cases[-1]), flush=True)
    missed = [
        f"N={case['n']}, t={case['tp']}, training {case['training_tp']}: {name} {case[name]} over {bar}"
        for case in cases
        for name, bar in BARS.items()
        if case[name] > bar
    ]
    for text in missed:
        print(f"missed: {text}", flush=True)
    print(json.dumps({"cases": cases, "bucket_bytes": BUCKET_BYTES, "missed": missed}))
    if missed:
        raise SystemExit(1)


def run_case(model: Path, ranks: int, tp: int, training_tp: int, rounds: int) -> dict[str, Any]:
    """One case's measurements. Raises RuntimeError with the processes' last words if they give none."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    options = ["--policy", str(model), "--tp", str(tp), "--training-tp", str(training_tp), "--rounds", str(rounds)]
    options += ["--bucket-bytes", str(BUCKET_BYTES)]
    done = subprocess.run(
        [*torchrun, "-m", "deploy.examples.bench.training.reshard", *options],
        env={**os.environ, **ENVIRONMENT},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    answers = [text for text in done.stdout.splitlines() if text.startswith("{")]
    if not answers:
        raise RuntimeError(f"{ranks} ranks, {tp} tensor-parallel, ended with {done.returncode}:\n{done.stderr[-4000:]}")
    case: dict[str, Any] = json.loads(answers[-1])
    return case


def line(case: dict[str, Any]) -> str:
    moved = f"{case['received']:,} bytes, least {case['least']:,} (excess {case['excess']:.4f})"
    share = "" if case["over_gather"] is None else f"{case['over_gather']:.3f} of gathering's, "
    compared = f"{share}in {case['seconds_over_gather']:.2f} of its time"
    grown = f"{case['peak_extra_bytes']:,} bytes, gathering by {case['peak_extra_bytes_gather']:,}"
    sizes = f"N={case['n']} t={case['tp']} training {case['training_tp']}"
    return f"{sizes}: a rank receives {moved}, {compared}; it grows by {grown}"


if __name__ == "__main__":
    main()
