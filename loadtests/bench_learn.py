"""Samples and seconds to 80 % held-out accuracy, against TRL's GRPOTrainer: ``make bench-learn``.

Both start from the same weights (1.4M parameters, ``loadtests.word_policy``), learn from the same 128 prompts with the
same reward (1 for the right answer, else 0), sample groups of 8 at temperature 1 in float32, and are measured in the
same way: greedy answers to the same 256 held-out prompts (``loadtests.words``), before training and then each ``EVERY``
samples. Millrace runs by its command line: a local Ray, vLLM, FSDP2 on gloo, one rank. TRL runs with transformers'
generation. Both have one thread (``--threads``), and take turns, a seed each.

``samples``: responses sampled in training until the accuracy is first measured to be at least 0.8. ``seconds``: of wall
clock from the start of training (workers, or the trainer, are up) to then, without the evaluations, of which there is
one before the first step too, so that both have generated before their clock runs. ``seconds_with_start`` also has what
comes before, from the start of the process. A run that samples ``BUDGET`` responses without getting there is censored:
it counts with the budget and the seconds that it took for it, which are too few. The ratios are of the geometric means
over seeds, Millrace over TRL; their 95 % intervals are from a bootstrap that draws seeds of each side by themselves.

Each side has, for either figure, its best settings out of a grid of eighteen (``GRIDS``), found with seeds that are not
among those measured: so TRL's fewest samples are compared with, and its fewest seconds, though it has them with other
settings. All were run with one seed, and the best few for either figure with three more; those with the least geometric
mean are chosen. ``--grid`` searches anew, first. The search as it was made, on two cores that had other work too, so
that its seconds say less than its samples (samples / seconds of the first seed; >: not in so many samples):

========  =======  ============  ============  ============
Samples   Rate     1 pass        2 passes      4 passes
========  =======  ============  ============  ============
Millrace
-----------------------------------------------------------
64        5e-4     1920 / 7.1    1408 / 9.3    1152 / 13.1
64        1e-3     1280 / 4.7    2048 / 12.9   >2560
64        2e-3     >2560         >2560         >2560
128       5e-4     >2560         1664 / 8.3    768 / 6.3
128       1e-3     2048 / 5.6    1152 / 5.4    >2560
128       2e-3     >2560         >2560         >2560
-----------------------------------------------------------
TRL
-----------------------------------------------------------
64        7.5e-5   3712 / 18.5   2304 / 18.2   1280 / 24.8
64        1.5e-4   3968 / 12.2   3456 / 20.8   3584 / 69.1
64        3e-4     3584 / 28.4   >7168         >4352
128       7.5e-5   >4352         3200 / 23.5   2304 / 24.3
128       1.5e-4   3840 / 11.4   2176 / 13.9   2560 / 27.9
128       3e-4     5504 / 57.0   4608 / 37.2   3456 / 83.4
========  =======  ============  ============  ============

Geometric means over four seeds of those that were run again (over nine in brackets, where seeds 0 to 4 had been
measured too, which is why ``FIRST_SEED`` then was 10):

========  =======  ======  ==========================
Samples   Rate     Passes  Samples / seconds
========  =======  ======  ==========================
Millrace
-----------------------------------------------------
64        5e-4     4       1787 / 19.3
64        1e-3     1       1805 / 6.4 (2287 / 7.7)
128       5e-4     4       1038 / 7.9 (1042 / 7.4)
128       1e-3     1       2387 / 6.4
128       1e-3     2       1516 / 6.7
-----------------------------------------------------
TRL
-----------------------------------------------------
64        7.5e-5   4       1867 / 33.0 (1714 / 23.2)
64        1.5e-4   1       3182 / 14.6
128       7.5e-5   4       2137 / 35.2
128       1.5e-4   1       4423 / 21.2 (4577 / 17.3)
128       1.5e-4   2       2604 / 22.6
========  =======  ======  ==========================

Since then Millrace leaves out groups of equal rewards (``filter_groups``), from which GRPO learns nothing: half of the
groups of these runs, and of an update's time. With four seeds it took 2252 samples for 2387 without, at 1e-3 in one
pass of 128, and with three of them 1103 for about 1038 at 5e-4 in four: no fewer beyond noise, in less time each. As
``FIRST_SEED`` was 10 until then, it has moved on.

Millrace's optimizer is Muon, which TRL's settings do not have, and which was chosen before, as it learns at rates at
which AdamW does not: in 8192 samples AdamW did not get there at 6e-4 and 1e-3, on either side. Lower rates of it were
tried on TRL's side alone. ``train.data.curriculum`` gained nothing (2816 samples for 1280 at 1e-3, 1920 for 1920 at
5e-4). Of ``train.rollout.staleness`` 1, with generation on a pool of its own, two seeds took a tenth more samples; it
is not among the settings, as it samples while answers to held-out prompts are measured, which would not count, and has
a second core at work, which TRL's trainer would get by two processes. TRL's other settings are its defaults (loss dapo,
beta 0, AdamW), but for a constant learning rate; Millrace has no KL term either, and GRPO as the algorithm.
The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import math
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from loadtests import words
from loadtests.bench_train import trl_environment
from loadtests.paired import CONFIDENCE, Ratio
from loadtests.server import MILLRACE, run

HERE: Final = Path(__file__).parent
TARGET: Final = 0.8
GROUP: Final = 8
EVERY: Final = 128
"""Samples from one evaluation to the next."""
BUDGET: Final = 12_288
"""Samples of a run, at most."""
RUN_TIMEOUT_S: Final = 900.0
SEARCH_SEEDS: Final = (100, 101, 102, 103)
"""Those behind the first are of the settings that did best with it."""
FIRST_SEED: Final = 20
"""Of those measured."""
FINALISTS: Final = 3
"""Settings, for either figure, that are run with all seeds of the search."""
BARS: Final = {"samples_over_trl": 0.8, "seconds_over_trl": 0.5}
RESAMPLES: Final = 10_000
CHOSEN_FOR: Final = ("samples", "seconds")
FIGURES: Final = ("samples", "seconds", "seconds_with_start")
LEAST: Final = 1e-3
"""In place of 0, of a policy that needs no training."""
SEARCHED: Final = 4
"""A run of the search ends when it has sampled this many times as many responses as the best one before it."""
HOOK: Final = """
from learning_curve import Curve
from train.observe.hooks import Hook


class Measured(Hook):
    def on_start(self):
        self.samples, self.curve = 0, Curve()

    def on_step(self, step, metrics):
        self.samples += int(metrics["responses"] + metrics["unrewarded_responses"])
        self.curve.step(self.samples, metrics.get("held_out/reward"), metrics.get("seconds_held_out", 0.0))
"""

Settings = dict[str, Any]
GRIDS: Final[dict[str, dict[str, list[Any]]]] = {
    "millrace": {
        "optimizer.learning_rate": [5e-4, 1e-3, 2e-3],
        "samples_per_step": [64, 128],
        "epochs": [1, 2, 4],
    },
    "trl": {
        "learning_rate": [7.5e-5, 1.5e-4, 3e-4],
        "samples_per_step": [64, 128],
        "num_iterations": [1, 2, 4],
    },
}
"""Settings that are searched, by side: all combinations. Epochs, or iterations, are passes over what a step sampled."""
CHOSEN: Final[dict[str, dict[str, Settings]]] = {
    "millrace": {
        "samples": {"optimizer.learning_rate": 5e-4, "samples_per_step": 128, "epochs": 4},
        "seconds": {"optimizer.learning_rate": 1e-3, "samples_per_step": 128, "epochs": 1},
    },
    "trl": {
        "samples": {"learning_rate": 7.5e-5, "samples_per_step": 64, "num_iterations": 4},
        "seconds": {"learning_rate": 1.5e-4, "samples_per_step": 64, "num_iterations": 1},
    },
}
"""The best of them by side, for fewest samples and for fewest seconds."""


class Point(NamedTuple):
    """After a step: responses sampled so far, seconds of training so far, and accuracy if it was measured."""

    samples: int
    seconds: float
    accuracy: float | None


class Reached(NamedTuple):
    """What a run took until its accuracy was first at the target, or to the budget (``censored``)."""

    samples: int
    seconds: float
    censored: bool


def reached(curve: Iterable[Point], *, target: float, budget: int) -> Reached | None:
    """What a run took; None while it has neither got there nor sampled ``budget`` responses."""
    for point in curve:
        if point.accuracy is not None and point.accuracy >= target and point.samples <= budget:
            return Reached(point.samples, point.seconds, censored=False)
        if point.samples >= budget:
            return Reached(budget, point.seconds, censored=True)
    return None


def ratio_of_means(ours: Sequence[float], theirs: Sequence[float], resamples: int = RESAMPLES) -> Ratio:
    """The geometric mean of ours over that of theirs, and its interval from a bootstrap over either's values.

    The interval is of the percentiles; one value of a side leaves it open.
    """
    logs = [[math.log(value) for value in values] for values in (ours, theirs)]
    value = math.exp(statistics.fmean(logs[0]) - statistics.fmean(logs[1]))
    if min(map(len, logs)) < 2:
        return Ratio(value, 0.0, math.inf)
    chance = random.Random(0)
    drawn = sorted(
        statistics.fmean(chance.choices(logs[0], k=len(logs[0])))
        - statistics.fmean(chance.choices(logs[1], k=len(logs[1])))
        for _ in range(resamples)
    )
    outside = int((1 - CONFIDENCE) / 2 * resamples)
    return Ratio(value, math.exp(drawn[outside]), math.exp(drawn[-1 - outside]))


# ---------------------------------------------------------------------------------------------------------- the runs


class Bench:
    """What the runs of both sides share, in a folder: the policy to start from, a home with it, TRL's Python."""

    def __init__(self, folder: Path, trl: Path, threads: int) -> None:
        self.folder, self.trl, self.threads, self.runs = folder, trl, threads, 0
        self.model, self.home = folder / "model", folder / "home"
        subprocess.run([sys.executable, "-m", "loadtests.word_policy", str(self.model)], check=True, timeout=1800)
        self.home.mkdir()
        for file in ("words.py", "learning_curve.py"):
            shutil.copy(HERE / file, self.home / file)
        (self.home / "learn_hook.py").write_text(HOOK)
        write_lines(self.home / "prompts.jsonl", ({"prompt": prompt} for prompt in words.trained_on()))
        write_lines(self.home / "held_out.jsonl", ({"id": str(i), "prompt": p} for i, p in enumerate(words.held_out())))
        run("init", "--model", str(self.model), "--home", str(self.home), folder=folder)

    def measure(self, side: str, settings: Settings, *, seed: int, budget: int) -> dict[str, Any]:
        """A run of a side, until it has reached the target or the budget; prints what it took."""
        self.runs += 1
        name = f"{side}-{self.runs}"
        command = self.our_command(name, settings, seed) if side == "millrace" else self.trl_command(settings, seed)
        found = measured(command, self.home, self.folder / name, budget)
        found |= {"side": side, "seed": seed, "settings": settings}
        print(json.dumps(found), flush=True)
        return found

    def our_command(self, name: str, settings: Settings, seed: int) -> list[str]:
        samples = settings["samples_per_step"]
        how = {
            "seed": seed,
            "steps": 100_000,
            "dtype": "float32",
            "threads_per_rank": self.threads,
            "measure_kl": "false",
            "max_length_growth": "null",
            "reward": "words:reward",
            "hooks": json.dumps(["learn_hook:Measured"]),
            "evaluate_suite": "held_out.jsonl",
            "evaluate_every": EVERY // samples,
            "checkpoint.every_steps": "null",
            "algorithm.name": "grpo",
            "algorithm.group_size": GROUP,
            "algorithm.filter_groups": "true",
            "optimizer.name": "muon",
            "optimizer.warmup_steps": 0,
            "rollout.max_tokens": words.MAX_TOKENS,
            "rollout.max_model_len": 32,
            "rollout.kv_cache_bytes": 64 << 20,
            "data.prompts": json.dumps([{"path": "prompts.jsonl"}]),
            "data.traffic_weight": 0,
            "data.prompts_per_step": samples // GROUP,
            "data.min_prompts": 1,
        } | {key: value for key, value in settings.items() if key != "samples_per_step"}
        flags = [text for key, value in how.items() for text in (f"--train.{key}", str(value))]
        return [MILLRACE, "train", "--run", name, "--home", str(self.home), *flags]

    def trl_command(self, settings: Settings, seed: int) -> list[str]:
        how = {"every": EVERY, "threads": self.threads, "seed": seed} | settings
        return [str(self.trl), str(HERE / "trl_words.py"), str(self.model), str(self.folder / "trl"), json.dumps(how)]


def write_lines(file: Path, rows: Iterable[dict[str, str]]) -> None:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def measured(command: list[str], cwd: Path, folder: Path, budget: int) -> dict[str, Any]:
    """Run a training until it has reached the target or the budget, and leave what it says in a new folder.

    Raises SystemExit if it ends by itself before.
    """
    folder.mkdir()
    log, lines, began = folder / "log", folder / "curve.jsonl", time.time()
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            stdout=output,
            stderr=subprocess.STDOUT,
            cwd=cwd,
            env=os.environ | {"BENCH_CURVE": str(lines), "TOKENIZERS_PARALLELISM": "false"},
            start_new_session=True,
        )
    try:
        while True:
            ended = process.poll() is not None
            started, curve = read_curve(lines)
            if found := reached(curve, target=TARGET, budget=budget):
                break
            if ended or time.time() - began > RUN_TIMEOUT_S:
                what = f"ended with {process.returncode}" if ended else f"took more than {RUN_TIMEOUT_S:g} s"
                raise SystemExit(f"{command[0]} {what}:\n{log.read_text(errors='replace')[-3000:]}")
            time.sleep(0.2)
    finally:
        stop(process)
    assert started is not None
    return {
        **found._asdict(),
        "seconds_with_start": round(found.seconds + started - began, 3),
        "accuracies": [point.accuracy for point in curve if point.accuracy is not None],
    }


def read_curve(lines: Path) -> tuple[float | None, list[Point]]:
    """The Unix time at which training began, and what came after each step; a line that is being written is left."""
    if not lines.exists():
        return None, []
    whole = [json.loads(line) for line in lines.read_text().splitlines(keepends=True) if line.endswith("\n")]
    return (whole[0]["time"], [Point(**line) for line in whole[1:]]) if whole else (None, [])


def stop(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        process.send_signal(signal.SIGTERM)
    try:
        process.wait(60)
    except subprocess.TimeoutExpired:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


# ----------------------------------------------------------------------------------------------------------- figures


def combinations(grid: dict[str, list[Any]]) -> list[Settings]:
    return [dict(zip(grid, values, strict=True)) for values in itertools.product(*grid.values())]


def distinct(settings: Iterable[Settings]) -> list[Settings]:
    """Each once, in order."""
    return [json.loads(text) for text in dict.fromkeys(json.dumps(each) for each in settings)]


def search(bench: Bench, side: str) -> dict[str, Settings]:
    """The best settings of a side's grid for either figure: all with one seed, then the best few with others."""
    runs: list[dict[str, Any]] = []
    first, *others = SEARCH_SEEDS

    def measure(settings: Settings, seed: int) -> None:
        best = min((found["samples"] for found in runs), default=BUDGET)
        runs.append(bench.measure(side, settings, seed=seed, budget=min(BUDGET, SEARCHED * best)))

    for settings in combinations(GRIDS[side]):
        measure(settings, first)
    if all(found["censored"] for found in runs):
        raise SystemExit(f"{side}: no settings of the grid got to {TARGET:.0%} in {BUDGET} samples")
    for settings in distinct(settings for of in CHOSEN_FOR for settings in finalists(runs, of)):
        for seed in others:
            measure(settings, seed)
    return {of: best_settings(runs, of) for of in CHOSEN_FOR}


def finalists(runs: Iterable[dict[str, Any]], of: str) -> list[Settings]:
    """The settings of the runs that did best, without those that did not get there."""
    there = sorted((found for found in runs if not found["censored"]), key=lambda found: found[of])
    return [found["settings"] for found in there[:FINALISTS]]


def best_settings(runs: Sequence[dict[str, Any]], of: str) -> Settings:
    """Of the settings that have been run most often, those with the least geometric mean, by runs that got there."""
    by_settings: dict[str, list[dict[str, Any]]] = {}
    for found in runs:
        by_settings.setdefault(json.dumps(found["settings"]), []).append(found)
    there = [of_one for of_one in by_settings.values() if not any(found["censored"] for found in of_one)]
    if not there:
        raise SystemExit(f"no settings got to {TARGET:.0%} with each seed of the search")
    most = max(map(len, there))
    means = [(math.prod(found[of] for found in of_one), of_one) for of_one in there if len(of_one) == most]
    best: Settings = min(means, key=lambda mean: mean[0])[1][0]["settings"]
    return best


def figures(runs: Sequence[dict[str, Any]], chosen: dict[str, dict[str, Settings]]) -> dict[str, Any]:
    """The ratios, each of both sides' runs with their best settings for it, and whether they meet the bars."""
    found: dict[str, Any] = {"bars": {}, "geometric_means": {}, "censored": {}}
    for of in FIGURES:
        best_for = "samples" if of == "samples" else "seconds"
        sides = {
            side: [run for run in runs if run["side"] == side and run["settings"] == chosen[side][best_for]]
            for side in GRIDS
        }
        ratio = ratio_of_means(*([max(run[of], LEAST) for run in sides[side]] for side in ("millrace", "trl")))
        found |= {f"{of}_over_trl": round(ratio.value, 3), f"{of}_interval": ratio.interval()}
        if (bar := BARS.get(f"{of}_over_trl")) is not None:
            found["bars"][f"{of}_over_trl"] = {"bar": f"at most {bar:g}", "judged": ratio.judge("at most", bar)}
        found["geometric_means"][of] = {
            side: round(statistics.geometric_mean(max(run[of], LEAST) for run in of_side), 2)
            for side, of_side in sides.items()
        }
        found["censored"][of] = {side: sum(run["censored"] for run in of_side) for side, of_side in sides.items()}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5, help="of the runs of each side")
    parser.add_argument("--grid", nargs="*", choices=list(GRIDS), help="search settings anew, of both sides or of some")
    parser.add_argument(
        "--threads", type=int, default=1, help="of each side; a model this small takes no less time on two"
    )
    parser.add_argument("--folder", type=Path, help="where to leave all of it; emptied first")
    parser.add_argument("--trl-python", type=Path, help="a Python that has TRL; else one is installed in runs/trl")
    options = parser.parse_args()
    runs_folder = Path("runs").absolute()
    runs_folder.mkdir(exist_ok=True)
    with contextlib.ExitStack() as stack:
        trl = stack.enter_context(trl_environment(options.trl_python))
        folder = (options.folder or Path(stack.enter_context(tempfile.TemporaryDirectory(dir=runs_folder)))).absolute()
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        bench, chosen = Bench(folder, trl, options.threads), dict(CHOSEN)
        for side in [] if options.grid is None else options.grid or GRIDS:
            chosen[side] = search(bench, side)
        runs = []
        for seed in range(FIRST_SEED, FIRST_SEED + options.seeds):
            for side in GRIDS if seed % 2 == 0 else reversed(GRIDS):
                for settings in distinct(chosen[side].values()):
                    runs.append(bench.measure(side, settings, seed=seed, budget=BUDGET))
    shown = [{name: value for name, value in run.items() if name != "accuracies"} for run in runs]
    found = figures(runs, chosen) if runs else {}
    print(json.dumps(found | {"chosen": chosen, "grids": GRIDS, "runs": shown}))


if __name__ == "__main__":
    main()
