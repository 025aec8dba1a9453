"""estimate: what a candidate would earn on traffic that another policy answered."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

import click

from deploy.commands.common import as_json_option, date_and_time, pass_settings, utc
from deploy.config.root import ConfigError, Settings
from deploy.supervise.children import NOTHING_TO_LEARN, no_leftovers, stop_on_signals

if TYPE_CHECKING:
    from evaluation.estimation.estimate import Baseline
    from evaluation.estimation.logged_responses import LoggedTraffic
    from evaluation.estimation.result import TrafficEstimate
    from evaluation.results import Interval
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

    From responses of traffic that have a reward, each weighted by how much likelier CANDIDATE makes it. Those that it
    may have learned from are left out: with evaluation.holdout there are always some that it has not. It decides
    nothing. The result is kept in evaluation.folder.

    Exit code 3 if it can't tell: the effective sample size is below 100.
    """
    from deploy.loop.preflight import judging_problems
    from evaluation.estimation.estimate import estimate as from_traffic
    from evaluation.estimation.logged_responses import read_logged
    from evaluation.estimation.training_reads import learned_from, reads_of_policy
    from feedback.ingest.seal import seal

    store = settings.policy_store()
    if incumbent is None:
        pointer = store.serving()
        if pointer is None:
            raise click.UsageError("no policy serves: name the one whose responses to use (--incumbent VERSION)")
        incumbent = pointer.version
    config, lake = settings.resolved().evaluation, settings.lake()
    if problems := judging_problems(settings, store.get(candidate)):
        raise ConfigError("\n".join(problems))
    store.get(incumbent)
    lake.versions()  # raises if there is none
    with no_leftovers(), stop_on_signals(), store.hold(candidate), store.hold(incumbent):
        policy, other = store.verify(candidate), store.verify(incumbent)
        seal(lake, Path(settings.resolved().feedback.journal.folder))
        traffic = read_logged(lake, incumbent, since=since, limit=limit)
        learned = learned_from(lake, reads_of_policy(store, policy), traffic.responses)
        traffic = traffic.without(learned, f"that policy {candidate} may have learned from")
        baseline = _baseline(settings, lake, policy, traffic) if samples else "--samples is 0"
        found = from_traffic(
            *(policy, other, traffic, config),
            baseline=baseline,
            bounds=bounds,
            samples=samples,
            since=since,
            limit=limit,
        )
    file = found.save(config.folder)
    if as_json:
        click.echo(found.model_dump_json(indent=2))
    else:
        for line in _lines(found):
            click.echo(line)
        click.echo(f"kept in {file}")
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

    own = set(ClassifierConfig.model_fields)
    scoring, resolved = settings.feedback.scoring, settings.resolved().feedback.scoring
    how = ClassifierConfig(name=TRAINED)  # to run one that was trained
    for set_to, model in ((scoring.model, resolved.model), (scoring.human.model, resolved.human.model)):
        if set_to is not None and set_to.name == TRAINED:
            how = ClassifierConfig(**set_to.model_dump(include=own))
        elif model is not None:
            yield f"the reward model {model.name}", ClassifierConfig(**model.model_dump(include=own)), None
    stores = settings.stores()
    for of, store in (("training", stores.reward_models), ("evaluation", stores.evaluation_reward_models)):
        pointer = store.serving()
        if pointer is not None and not (trained := store.get(pointer.version)).marked:
            folder = {"name": str(trained.path), "revision": None, "label": 0}
            yield f"{of}'s reward model {trained.version}", how.model_copy(update=folder), trained


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
    if found.ess is not None:
        rows = [
            ["IPS", *_cells(found.ips)],
            ["SNIPS", *_cells(found.snips)],
            ["doubly robust", *_cells(found.doubly_robust)],
            ["lower bound", f"{found.lower:.3f}", f"weights clipped at {found.clip:.1f}"],
            [f"{incumbent}, as logged", *_cells(found.incumbent_reward)],
            ["gain", *_cells(found.gain, signed=True)],
        ]
        yield table(["", "reward", f"{found.confidence:.0%} interval"], rows)
        if found.doubly_robust_missing:
            yield f"doubly robust: none: {found.doubly_robust_missing}"
        weights = "" if found.mean_weight is None else f"; weights average {found.mean_weight.value:.3f}"
        heaviest = f"the heaviest has {found.largest_share:.1%} of all weight"
        yield f"effective sample size {found.ess:.1f} of {found.clusters}{weights}; {heaviest}"
    yield found.verdict + (f": {'; '.join(found.reasons)}" if found.reasons else "")


def _cells(interval: Interval | None, *, signed: bool = False) -> list[str]:
    if interval is None:
        return ["-", "-"]
    sign = "+" if signed else ""
    return [f"{interval.value:{sign}.3f}", f"[{interval.low:{sign}.3f}, {interval.high:{sign}.3f}]"]
