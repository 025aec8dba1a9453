"""One algorithm: trained by the product's own job in a process of its own, then measured against the seed policy."""

from __future__ import annotations

import hashlib
import sys
import time
from dataclasses import dataclass
from typing import Any

from deploy.examples.learn import home as homes
from deploy.examples.learn import pairs
from deploy.examples.learn.home import Home, LearnError, Say
from deploy.supervise.children import Child
from evaluation.evaluate import evaluate
from evaluation.results import Interval
from evaluation.suites.decoding import GREEDY
from evaluation.suites.suite import Suite
from serve.policies.store import Policy
from train.config.training import TrainConfig
from train.context import JobContext, JobResult, write_job


@dataclass(frozen=True)
class Outcome:
    """What came of a trial. ``reason`` says why it is no proof; None if it is one.

    ``before``, ``after``: share of held-out items that are right. ``ci_low``: lower end of the 95 % interval of
    their difference, which is paired item by item.
    """

    before: float | None = None
    after: float | None = None
    ci_low: float | None = None
    steps: int = 0
    seconds: float = 0.0
    reason: str | None = None


def run(
    home: Home,
    name: str,
    settings: dict[str, Any],
    *,
    longest_s: float,
    say: Say,
    twice: bool = False,
    **context: Any,
) -> Outcome:
    """Train and measure. What fails is an outcome too, with its reason.

    ``twice``: train once more with the same settings, which must give the same weights. ``context``: as of ``train``.
    """
    started = time.monotonic()
    steps = 0
    try:
        result = train(home, name, settings, longest_s=longest_s, say=say, **context)
        steps = result.steps
        before, after, gain = measure(home, result)
        if twice:
            again = train(home, f"{name}-again", settings, longest_s=longest_s, say=say, **context)
            if digest(home, again) != digest(home, result):
                raise LearnError(f"the same settings gave other weights: see {name} and {name}-again")
    except (RuntimeError, ValueError, OSError) as error:
        return Outcome(steps=steps, seconds=time.monotonic() - started, reason=f"{type(error).__name__}: {error}")
    return Outcome(
        before=before,
        after=after,
        ci_low=gain.low,
        steps=steps,
        seconds=time.monotonic() - started,
        reason=None if gain.low > 0 else f"the interval of the gain, {gain.low:+.3f} to {gain.high:+.3f}, holds zero",
    )


def train(
    home: Home, name: str, settings: dict[str, Any], *, longest_s: float, say: Say, parent: int = 1, **context: Any
) -> JobResult:
    """Run the job ``name`` to its end, from policy ``parent``. ``context``: of the job, where not the home's own."""
    config = TrainConfig.model_validate(settings)
    job = JobContext(
        run=name,
        runs=home.work / "runs",
        policies=home.store.root,
        reward_models=home.reward_models.root,
        parent=parent,
        **{"lake_uri": str(home.lake), "reward": homes.REWARD} | context,
    )
    job.folder.mkdir(parents=True)
    spec = write_job(config, job)
    command = [sys.executable, "-P", "-m", "train.launch", str(spec), "--launcher", "torchrun"]

    def follow(line: str) -> None:
        if line.startswith(f"{name}: "):  # the job's own lines; the log has the others too
            say(line)

    child = Child(name, command, log=job.folder / "log", environment=homes.ONE_THREAD, grace=5.0, follow=follow)
    if code := child.finish(longest_s):
        raise LearnError(child.ended(code))
    return JobResult.model_validate_json((job.folder / "result.json").read_text())


def measure(home: Home, result: JobResult) -> tuple[float, float, Interval]:
    """(before, after, the gain) of what a job left: a policy, or a reward model. Raises LearnError if neither."""
    if result.reward_model is not None:
        return pairs.measure(home.reward_models.get(result.reward_model).path, home.first().path)
    return compare(home, candidate(home, result), home.first())


def digest(home: Home, result: JobResult) -> str:
    """SHA-256 of the weights that a job left."""
    model = None if result.reward_model is None else home.reward_models.get(result.reward_model)
    folder = (model or candidate(home, result)).path
    return hashlib.sha256(b"".join(file.read_bytes() for file in sorted(folder.glob("*.safetensors")))).hexdigest()


def candidate(home: Home, result: JobResult) -> Policy:
    """The policy that a job published. Raises LearnError if it published none."""
    if result.candidate is None:
        raise LearnError(result.reason or "the job published no policy, and gave no reason")
    return home.store.get(result.candidate)


def compare(home: Home, candidate: Policy, incumbent: Policy) -> tuple[float, float, Interval]:
    """(share of right greedy answers of the incumbent, of the candidate, the difference with its 95 % interval)."""
    suite, config = Suite.load(home.suite), homes.evaluation_config()
    found = evaluate(candidate, incumbent, suite, config, home.evaluations, decoding=GREEDY)
    before, after, gain = found.incumbent.accuracy, found.candidate.accuracy, found.accuracy
    if before is None or after is None or gain is None:
        raise LearnError(f"{found.scorer} says of no answer that it is right")
    return before.value, after.value, gain
