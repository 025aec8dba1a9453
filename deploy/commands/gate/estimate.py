"""estimate: what a candidate would earn on traffic that another policy answered."""

from __future__ import annotations

import math
from collections.abc import Iterator
from datetime import datetime
from functools import partial
from typing import TYPE_CHECKING

import click

from deploy import devices
from deploy.commands.common import as_json_option, date_and_time, existing_lake, pass_settings, utc
from deploy.config.root import ConfigError, Settings
from deploy.server_sleep import asleep
from deploy.supervise.children import NOTHING_TO_LEARN, no_leftovers
from feedback.processes.signals import stop_on_signals

if TYPE_CHECKING:
    from evaluation.estimation.estimate import Baseline, TrafficEstimate
    from evaluation.estimation.logged_responses import LoggedTraffic
    from evaluation.statistics.off_policy import Estimate
    from feedback.config import ClassifierConfig
    from feedback.lake.tables import Lake
    from serve.policies.store import Policy


def _bounds(_: click.Context, __: click.Parameter, value: tuple[float, float]) -> tuple[float, float]:
    if not value[0] < value[1]:
        raise click.BadParameter(f"{value[0]:g} is not below {value[1]:g}")
    return value


@click.command()
@click.argument("candidate", type=int)
@click.option(
    "--incumbent", type=int, metavar="VERSION", help="Policy whose responses are used; the serving one by default."
)
@click.option("--since", type=date_and_time, callback=utc, help="Only responses as young (UTC).")
@click.option(
    "--limit",
    type=click.IntRange(min=1),
    default=10_000,
    show_default=True,
    help="How many responses of traffic to look at, the newest.",
)
@click.option(
    "--bounds",
    type=float,
    nargs=2,
    default=(0.0, 1.0),
    show_default=True,
    callback=_bounds,
    metavar="LOW HIGH",
    help="What rewards lie between.",
)
@click.option(
    "--samples",
    type=click.IntRange(min=0),
    default=4,
    show_default=True,
    help="Responses of CANDIDATE to each prompt that the reward model reads; 0: do without it.",
)
@as_json_option
@pass_settings
def estimate(
    settings: Settings,
    candidate: int,
    incumbent: int | None,
    since: datetime | None,
    limit: int,
    bounds: tuple[float, float],
    samples: int,
    as_json: bool,
) -> int:
    """Estimate what policy CANDIDATE would earn on traffic that the serving policy answered, before anybody meets it.

    From responses that have a reward, each weighted by how much likelier CANDIDATE makes it than the policy that
    sampled it. Those that CANDIDATE may have learned from are left out: without evaluation.holdout, all that were there
    when it was trained.

    It is good for choosing which candidate to evaluate first, and for seeing one that users would like less. It decides
    nothing and is recorded nowhere. It can't tell where CANDIDATE answers very differently, or at great length, and
    knows nothing of responses that nobody rewarded, or of greedy ones.

    Exit code 3 if it can't tell: the effective sample size is below 100, or the responses lack what CANDIDATE says.
    """
    from deploy.loop.preflight import judging_problems
    from evaluation.estimation.estimate import estimate as from_traffic
    from evaluation.estimation.logged_responses import read_logged
    from evaluation.estimation.training_reads import learned_from, reads_of_policy

    devices.take(settings, "evaluate")
    store = settings.policy_store()
    if incumbent is None:
        pointer = store.serving()
        if pointer is None:
            raise click.UsageError("no policy serves: name the one whose responses to use (--incumbent VERSION)")
        incumbent = pointer.version
    if problems := judging_problems(settings, store.get(candidate)):
        raise ConfigError("\n".join(problems))
    lake = existing_lake(settings)
    with no_leftovers(), stop_on_signals(), store.hold(candidate), store.hold(incumbent) as answered:
        policy = store.verify(candidate)
        traffic = read_logged(lake, incumbent, since=since, limit=limit)
        learned = learned_from(lake, reads_of_policy(store, policy), traffic.responses)
        traffic = traffic.without(learned, f"that policy {candidate} may have learned from")
        baseline = _baseline(settings, lake, policy, traffic) if samples else "--samples is 0"
        config = settings.resolved().evaluation
        with asleep(settings, "evaluate", say=partial(click.echo, err=True)):
            found = from_traffic(policy, answered, traffic, config, baseline=baseline, bounds=bounds, samples=samples)
    if as_json:
        click.echo(found.to_json())
    else:
        for line in _lines(found):
            click.echo(line)
    return 0 if found.verdict == "estimated" else NOTHING_TO_LEARN


def _baseline(settings: Settings, lake: Lake, policy: Policy, traffic: LoggedTraffic) -> Baseline | str:
    """The first reward model that has not learned from the responses; or why there is none.

    Training's can't have learned from held-out prompts, and evaluation's from no others.
    """
    from evaluation.estimation.estimate import Baseline
    from evaluation.estimation.training_reads import TrainingRead, learned_from

    why = "there is no reward model: cycle.recipe rlhf trains one, and feedback.scoring.model names one"
    for name, model, trained in _reward_models(settings):
        read = None if trained is None else TrainingRead.of(trained, policy.path)
        learned = set[str]() if read is None else learned_from(lake, [read], traffic.responses)
        if not learned:
            return Baseline(name, model)
        why = f"{name} may have learned from {len(learned)} of the responses"
    return why


def _reward_models(settings: Settings) -> Iterator[tuple[str, ClassifierConfig, Policy | None]]:
    """(name, settings, manifest) of those that there are; one that Millrace did not train has no manifest."""
    from feedback.config import TRAINED, ClassifierConfig

    scoring = settings.resolved().feedback.scoring
    own = settings.feedback.scoring.model
    if own is not None and own.name != TRAINED and scoring.model is not None:
        yield f"the reward model {own.name}", scoring.model, None
    how = settings.feedback.scoring.human.model or ClassifierConfig(name=TRAINED)
    stores = settings.stores()
    for of, store in (("training", stores.reward_models), ("evaluation", stores.evaluation_reward_models)):
        pointer = store.serving()
        if pointer is not None and not (trained := store.get(pointer.version)).marked:
            version = {"name": str(trained.path), "revision": None, "label": 0}
            yield f"{of}'s reward model {trained.version}", how.model_copy(update=version), trained


def _lines(found: TrafficEstimate) -> Iterator[str]:
    """The result for people."""
    from deploy.display.tables import table

    candidate, incumbent = f"policy {found.candidate}", f"policy {found.incumbent}"
    kinds = ", ".join(f"{count} {kind}{'s' * (count != 1)}" for kind, count in found.clustered_by.items())
    yield (
        f"{candidate} on traffic that {incumbent} answered: {found.responses} of {found.considered} responses used"
        + (f", of {kinds}" if kinds else "")
    )
    if found.left_out:
        yield "left out: " + ", ".join(f"{count} {reason}" for reason, count in found.left_out.items())
    if (numbers := found.numbers) is not None:
        robust = ["-", f"none: {found.no_baseline}"]
        rows = [
            ["IPS", *_cells(numbers.ips)],
            ["SNIPS", *_cells(numbers.snips)],
            ["doubly robust", *(robust if numbers.doubly_robust is None else _cells(numbers.doubly_robust))],
            ["at least", f"{numbers.lower:.3f}", f"weights clipped at {numbers.clip:.1f}"],
            [f"{incumbent}, as logged", *_cells(numbers.logged)],
            ["gain", *_cells(numbers.gain, "+")],
        ]
        yield table(["", "reward", f"{found.confidence:.0%} interval"], rows)
        yield (
            f"effective sample size {numbers.ess:.1f} of {found.clusters}; weights average "
            f"{numbers.mean_weight.value:.3f}, the heaviest has {numbers.largest_share:.1%} of all"
        )
    yield found.verdict + (f": {'; '.join(found.reasons)}" if found.reasons else "")


def _cells(estimate: Estimate, sign: str = "") -> list[str]:
    ends = estimate.low, estimate.high
    interval = "[{:{sign}.3f}, {:{sign}.3f}]".format(*ends, sign=sign) if all(map(math.isfinite, ends)) else "-"
    return [f"{estimate.value:{sign}.3f}", interval]
