"""score, train, evaluate, cycle: the stages of the loop, and all of them in a row."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NoReturn

import click

from deploy import devices
from deploy.commands.common import as_json_option, json_out, log_lines, pass_settings, write_result
from deploy.config.root import ConfigError, Settings
from deploy.loop import lineage, promotion
from deploy.server_sleep import asleep
from deploy.supervise.children import NOTHING_TO_LEARN, no_leftovers
from deploy.supervise.resident import joined
from feedback.processes.signals import stop_on_signals
from serve.policies.folder import PolicyError
from serve.policies.store import PolicyStore

if TYPE_CHECKING:
    import pyarrow as pa
    from rich.progress import TaskID

    from evaluation.config import EvaluationConfig
    from evaluation.decisions.judgement import Verdict
    from evaluation.judging import Sources, TrainingReward
    from evaluation.results import BestOfPoint, Evaluation, PolicyResult
    from evaluation.suites.decoding import Decoding
    from serve.policies.store import Policy
    from train.context import JobResult
    from train.data.rewards import RewardSettings

_LINE_SECONDS: Final = 5.0
_REASONS_SHOWN: Final = 3
_REASONS_KEPT: Final = 20
_MOST_NAMED: Final = 20


@click.command()
@click.option("--nice", type=click.IntRange(0, 19), default=0, help="Give way to other processes, as `nice -n` has it.")
@json_out
@pass_settings
def score(settings: Settings, nice: int, json_out: Path | None) -> None:
    """Turn new interactions and feedback into rewards."""
    os.nice(nice)
    devices.take(settings, "evaluate")
    from deploy.loop.traces import export_rewards
    from feedback.datasets import count_given
    from feedback.ingest.seal import seal
    from feedback.lake.tables import LakeError
    from feedback.scoring.run import score as score_lake

    feedback, began = settings.resolved().feedback, datetime.now(UTC)
    lake = settings.lake()
    with stop_on_signals():
        lake.create()
        sealed = seal(lake, Path(feedback.journal.folder))
        with _turn_of_models(settings), _scoring_progress() as progress:
            result = score_lake(lake, feedback.scoring, feedback.kinds, progress=progress)
        if result.scored:
            try:
                export_rewards(settings, began)
            except LakeError as error:  # the rewards are there all the same
                click.echo(f"warning: they are not exported as evaluation events: {error}", err=True)
    click.echo(
        f"scored {result.scored} responses in {result.seconds:.2f} s, {result.missing} of them without a reward "
        f"({len(sealed)} journal segments sealed first)"
    )
    for name, count in result.components.items():
        shown = [f"{times} {reason}" for reason, times in list(result.reasons[name].items())[:_REASONS_SHOWN]]
        more = "; …" if len(result.reasons[name]) > _REASONS_SHOWN else ""
        if result.scored:
            click.echo(f"  {name}: {count}" + (f", missing: {'; '.join(shown)}{more}" if shown else ""))
    if result.retried:
        click.echo(f"  the next run retries {result.retried}")
    reasons = {name: dict(list(why.items())[:_REASONS_KEPT]) for name, why in result.reasons.items()}
    counts = lake.counts() | {"feedback": count_given(lake)}
    write_result(asdict(result) | {"reasons": reasons, "counts": counts}, json_out)


@contextmanager
def _turn_of_models(settings: Settings) -> Iterator[None]:
    """Within, the server sleeps if a model scores on a device that it has, too."""
    if not devices.scores_on_device(settings):
        yield
        return
    with asleep(settings, "evaluate", say=click.echo):
        yield


@contextmanager
def _scoring_progress() -> Iterator[Callable[[str, int, int], None]]:
    """What scoring calls as it goes: a bar on a terminal, a line every few seconds without one."""
    from train.observe.progress import progress_bar

    printed = time.monotonic()
    tasks: dict[str, TaskID] = {}
    with progress_bar() as bar:

        def progress(what: str, done: int, total: int) -> None:
            nonlocal printed
            if what not in tasks:
                tasks[what] = bar.add_task(what, total=total)
            bar.update(tasks[what], completed=done, total=total)
            if bar.disable and time.monotonic() - printed >= _LINE_SECONDS:
                printed = time.monotonic()
                click.echo(f"{what}: {done} of {total} responses")

        yield progress


def run_name(_: click.Context, __: click.Parameter, name: str | None) -> str | None:
    """The name of a run, which is a folder's, and no path."""
    from train.context import RUN_NAME

    if name is not None and not re.fullmatch(RUN_NAME, name):
        raise click.BadParameter(f"{name!r} is no name: letters, digits, '.', '_' and '-', at most 128")
    return name


@click.command()
@click.option(
    "--run",
    "name",
    metavar="NAME",
    callback=run_name,
    help="Name of the run: its folder under train.runs. One that was killed goes on from its last checkpoint.",
)
@click.option("--parent", type=int, metavar="VERSION", help="Policy to start from; the serving one by default.")
@click.option("--reward-model", is_flag=True, help="Train the reward model, on what people said, in place of a policy.")
@click.option(
    "--held-out",
    is_flag=True,
    help="With --reward-model: the one that evaluation scores by, on what people said of held-out prompts alone.",
)
@json_out
@pass_settings
def train(
    settings: Settings,
    name: str | None,
    parent: int | None,
    reward_model: bool,
    held_out: bool,
    json_out: Path | None,
) -> int:
    """Train a candidate from what traffic brought, or prompts of your own, and publish it.

    It serves only once it is promoted.

    Exit code 3 if there was nothing to learn from (too few prompts, or rewards that do not differ), or what it learned
    from was erased meanwhile, 1 if the run was stopped for its health or failed; nothing is then published.
    """
    from deploy import memory_check
    from deploy.loop.cycle import training_parent
    from deploy.loop.preflight import no_reward, training_problems
    from deploy.low_precision_check import fp8_problem, torchao_problem

    devices.take(settings, "train")
    if held_out and not reward_model:
        raise click.UsageError("--held-out is of a reward model: no policy learns from held-out prompts")
    if held_out and not settings.evaluation.holdout:
        raise ConfigError("evaluation.holdout is 0: there are no held-out prompts; set it, such as to 0.1")
    if not reward_model and (problems := [why for why in (no_reward(settings), *training_problems(settings)) if why]):
        raise ConfigError("\n".join(problems))
    if reward_model:
        of_reward_model = settings.train.of_reward_model()
        if why := fp8_problem(of_reward_model) or torchao_problem(of_reward_model):
            raise ConfigError(why)
    resolved = settings.resolved()
    name = name or f"manual-{datetime.now(UTC):%Y%m%d-%H%M%S}"
    store = settings.policy_store()
    if parent is None and (pointer := store.serving()) and store.get(pointer.version).marked:
        parent = training_parent(store, pointer.version, click.echo)
    with no_leftovers(), stop_on_signals():
        from train.context import JobContext
        from train.launch import run_job

        if not reward_model:
            memory_check.require_training(settings, parent, partial(click.echo, err=True))
        context = JobContext(
            run=name,
            runs=resolved.train.runs,
            policies=Path(resolved.serve.policies),
            policy_store=resolved.serve.policy_store,
            reward_models=resolved.evaluation.reward_model_folder if held_out else resolved.train.reward_model.folder,
            lake_uri=resolved.feedback.lake.uri,
            lake=resolved.feedback.lake,
            reward=None if reward_model else settings.rollout_reward(),
            parent=parent,
            python_path=[str(Path.cwd())],
            lineage=lineage.current(settings),
        )
        if not resolved.evaluation.suite.is_file() and not resolved.evaluation.holdout:
            click.echo(f"there is no evaluation.suite {resolved.evaluation.suite}: no prompts are kept out of training")
        if resolved.train.data.prompts:
            settings.lake().create()  # with prompts of one's own there need not have been any traffic
        config = settings.training(reward_model=reward_model, held_out=held_out)
        with asleep(settings, "train", say=click.echo), joined(settings, "train"):
            result = run_job(config, context)
    write_result(result.model_dump(mode="json"), json_out)
    return print_result(result)


def print_result(result: JobResult) -> int:
    """Print the end of a run; the exit code of `train`."""
    if result.reward_model is not None:
        click.echo(
            f"{result.run}: {result.reason} (from policy {result.parent}, {result.steps} steps, {result.seconds:.0f} s)"
        )
    elif result.candidate is not None:
        click.echo(
            f"{result.run}: policy {result.candidate}, from {result.parent}, {result.steps} steps, "
            f"{result.seconds:.0f} s"
        )
    elif result.stopped:
        click.echo(f"error: {result.run} was stopped: {result.reason}", err=True)
        return 1
    else:
        click.echo(f"{result.run}: no candidate: {result.reason}")
        return NOTHING_TO_LEARN
    return 0


class _Evaluate(click.Command):
    """What stands behind ``--`` is the harness's."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        own = args.index("--") if "--" in args else len(args)
        ctx.meta["millrace.harness_arguments"] = tuple(args[own + 1 :])
        return super().parse_args(ctx, args[:own])

    def collect_usage_pieces(self, ctx: click.Context) -> list[str]:
        return [*super().collect_usage_pieces(ctx), "[-- HARNESS OPTIONS]"]


@click.command(cls=_Evaluate)
@click.argument("candidate", type=int, required=False)
@click.option("--incumbent", type=int, metavar="VERSION", help="Compare with this policy; the serving one by default.")
@click.option(
    "--harness",
    type=click.Choice(["lm-eval", "inspect"]),
    help="Run this harness on CANDIDATE instead, in an environment of its own (evaluation.harness). It decides "
    "nothing. What stands behind -- goes to it.",
)
@click.option(
    "--environment",
    metavar="NAME",
    help="Play an episode of each item of the suite with CANDIDATE and this environment instead, with the settings of "
    "train.environment if it is the same. It decides nothing.",
)
@click.option("--tasks", metavar="A,B", help="The harness's tasks.")
@click.option("--include-path", type=click.Path(path_type=Path), metavar="DIR", help="lm-eval: more tasks.")
@click.option("--limit", metavar="K", help="So many samples of each task, as the harness takes it.")
@click.option("--model-args", metavar="K=V,…", help="The harness's own, beside those that Millrace gives it.")
@click.option(
    "--endpoint",
    is_flag=True,
    help="Have the harness, or the environment, ask the running server, with a key for evaluation, in place of a "
    "server of CANDIDATE alone.",
)
@click.option("--harness-results", is_flag=True, help="List what all harnesses have found.")
@as_json_option
@json_out
@pass_settings
@click.pass_context
def evaluate(
    ctx: click.Context,
    settings: Settings,
    candidate: int | None,
    incumbent: int | None,
    harness: str | None,
    environment: str | None,
    tasks: str | None,
    include_path: Path | None,
    limit: str | None,
    model_args: str | None,
    endpoint: bool,
    harness_results: bool,
    as_json: bool,
    json_out: Path | None,
) -> None:
    """Compare policy CANDIDATE (by default the newest) with the one that serves, and apply the gate.

    It looks at as many fresh items of the suite as a verdict takes. A pass or a refusal is final; an undecided
    candidate goes on with the next fresh items, as soon as there are some, when it is evaluated again.
    """
    arguments = ctx.meta["millrace.harness_arguments"]
    if as_json and not harness_results:
        raise click.UsageError("--json is of --harness-results; --json-out FILE writes a result")
    if harness_results:
        from deploy.commands.gate import harness as harnesses

        harnesses.show(settings, as_json=as_json)
        return
    devices.take(settings, "evaluate")
    if harness is None:
        given = {"--tasks": tasks, "--include-path": include_path, "--limit": limit, "--model-args": model_args}
        given |= {"--endpoint": "given" if endpoint and environment is None else None, "--": " ".join(arguments)}
        if stray := next((name for name, value in given.items() if value), None):
            raise click.UsageError(f"{stray} is of --harness")
        if environment is None:
            _gate(settings, candidate, incumbent, json_out)
            return
        if incumbent is not None:
            raise click.UsageError("--environment evaluates one policy: leave --incumbent out")
        from deploy.commands.gate import environment as environments

        write_result(environments.run(settings, environment, candidate, endpoint=endpoint), json_out)
        return
    if environment is not None:
        raise click.UsageError("--environment is not of --harness: leave either out")
    if incumbent is not None:
        raise click.UsageError("--harness evaluates one policy: leave --incumbent out")
    if not tasks:
        raise click.UsageError(f"name what {harness} is to run: --tasks A,B")
    from deploy.commands.gate import harness as harnesses
    from evaluation.harness.run import HarnessRequest

    request = HarnessRequest(tuple(tasks.split(",")), limit, include_path, model_args, arguments)
    result = harnesses.run(settings, harness, request, candidate, endpoint=endpoint)
    write_result(result.model_dump(mode="json"), json_out)


def _gate(settings: Settings, candidate: int | None, incumbent: int | None, json_out: Path | None) -> None:
    """Judge a candidate, and print the verdict."""
    from deploy import memory_check
    from deploy.loop.preflight import judging_problems
    from evaluation.decisions.judgement import judge
    from evaluation.suites.decoding import count_requests
    from evaluation.suites.suite import Suite

    store = settings.policy_store()
    candidate, incumbent = _which(store, candidate, incumbent)
    config = settings.resolved().evaluation
    if problems := [
        problem for version in (incumbent, candidate) for problem in judging_problems(settings, store.get(version))
    ]:
        raise ConfigError("\n".join(problems))
    memory_check.require_evaluation(settings, candidate, partial(click.echo, err=True))
    suite = Suite.load(config.suite)
    with no_leftovers(), stop_on_signals(), store.hold(candidate), store.hold(incumbent), ExitStack() as held:
        click.echo(f"policy {candidate} against policy {incumbent}, with {len(suite.items)} items of {config.suite}")
        training_reward = None
        if (rewarded_by := settings.rollout_reward()) is not None:
            training_reward = _training_reward(rewarded_by, settings.train.step_timeout_s)
        policies, sources = (store.verify(candidate), store.verify(incumbent)), settings.evaluation_sources()
        if sources.note:
            click.echo(sources.note)
        learned, unknown = store.learned_prompts(candidate)
        if unknown:
            versions = ", ".join(map(str, unknown))
            click.echo(
                f"what policy {candidate} has learned from is not all known: not what went into policy {versions}"
            )
        held.enter_context(asleep(settings, "evaluate", say=click.echo))
        held.enter_context(joined(settings, "evaluate"))
        first = _first(store, candidate, incumbent)
        if first is None and config.gate.guardrails.kl_v1 is not None:
            first = held.enter_context(store.hold(store.first_of(candidate).version))
        judged = judge(
            *policies,
            suite,
            config,
            config.folder,
            settings.ledger(),
            who=promotion.person(),
            sources=sources,
            training_reward=training_reward,
            learned=learned,
            first=first,
            traffic=partial(count_requests, settings.lake()),
        )
        verdict, evaluation = judged.verdict, judged.evaluation
        file = evaluation and evaluation.save(config.folder)
        store.record_gate(candidate, verdict.model_dump(mode="json"))
        click.echo(f"answered {verdict.sampling.adverb}")
        for line in _evaluation_lines(evaluation):
            click.echo(line)
        others = _other_suites(policies, config, sources, verdict.sampling)
    click.echo(
        f"{verdict.items} items looked at, e-value {verdict.e_value:.3g} of the {_needed(verdict)} that a pass needs; "
        f"levels given so far: {verdict.levels_given:.2g}; {verdict.budget}"
    )
    for line in _rewards_lines(verdict):
        click.echo(line)
    if verdict.learned:
        click.echo(_refused(verdict))
    click.echo(f"gate: {verdict.verdict}: {'; '.join(verdict.reasons)}")
    results = () if evaluation is None else (evaluation.incumbent, evaluation.candidate)
    write_result(
        {
            "candidate": candidate,
            "incumbent": incumbent,
            "verdict": verdict.model_dump(mode="json"),
            **{
                measure: {str(result.version): result.model_dump()[measure] for result in results}
                for measure in ("accuracy", "reward")
            },
            "greedy": evaluation and evaluation.greedy and evaluation.greedy.model_dump(mode="json"),
            "best_of": evaluation and evaluation.best_of and evaluation.best_of.model_dump(mode="json"),
            "seconds": {} if evaluation is None else evaluation.seconds,
            "engines": {} if evaluation is None else evaluation.engines,
            "evaluation": file and str(file),
            "suites": others,
        },
        json_out,
    )


def _other_suites(
    policies: tuple[Policy, Policy], config: EvaluationConfig, sources: Sources, decoding: Decoding
) -> dict[str, Any]:
    """The results on each further suite, kept and printed. Why there are none is too: none of this decides."""
    from evaluation.evaluate import evaluate as compare
    from evaluation.suites.suite import Suite

    found: dict[str, Any] = {}
    for name, of in config.suites.items():
        try:
            suite, own = Suite.load(of.path), config.of_suite(name)
            result = compare(*policies, suite, own, config.folder, sources, decoding=decoding)
        except (RuntimeError, ValueError) as error:
            click.echo(f"suite {name} ({of.role}): no results: {error}", err=True)
            found[name] = {"role": of.role, "error": str(error)}
            continue
        result = result.model_copy(update={"name": name, "role": of.role})
        click.echo(f"suite {name} ({of.role}), {result.n} items:")
        for line in _evaluation_lines(result):
            click.echo(f"  {line}")
        kept = result.model_dump(
            mode="json", include={"role", "n", "missing", "reward", "accuracy", "scorer", "greedy"}
        )
        found[name] = kept | {"evaluation": str(result.save(config.folder))}
    return found


@click.command()
@json_out
@pass_settings
def cycle(settings: Settings, json_out: Path | None) -> int:
    """Run one cycle: score, train, evaluate, promote.

    Exit code 1 if it failed, a training that was stopped for its health included; 75 if another one is running. A cycle
    that finds nothing to learn from is skipped, which is no failure: it says how many in a row have been.
    """
    from deploy.loop.cycle import run_cycle

    with no_leftovers(), stop_on_signals():
        record = run_cycle(settings, say=log_lines(settings, "cycle"))
    write_result(record.model_dump(mode="json"), json_out)
    return 1 if record.status == "failed" else 0


def _training_reward(rewarded_by: RewardSettings, timeout_s: float) -> TrainingReward:
    """What training optimises. If that can't be loaded, it says so when it is asked."""
    from evaluation.judging import TrainingReward
    from train.data.rewards import Reward, RewardError

    try:
        reward = Reward(rewarded_by, timeout_s)
    except RewardError as error:
        return TrainingReward("none", partial(_refuse, error), str(error))
    return TrainingReward(reward.scorer, lambda rows: reward(rows).values)


def _first(store: PolicyStore, candidate: int, incumbent: int) -> Policy | None:
    """The incumbent, if the candidate's lineage began with it: KL to the first policy is then measured anyway."""
    try:
        first = store.first_of(candidate)
    except PolicyError:  # what the lineage began with is gone
        return None
    return first if first.version == incumbent else None


def _rewards_lines(verdict: Verdict) -> Iterator[str]:
    """What the reward that training saw says beside the one that it did not see; or why they are not compared."""
    if verdict.not_compared is not None:
        yield f"the guardrail holdout_reward does not decide: {verdict.not_compared}"
    if (found := verdict.over_optimisation) is None:
        return
    pairs = ((name, getattr(found.incumbent, name), getattr(found.candidate, name)) for name in ("proxy", "holdout"))
    shown = [f"{name} {old.value:.3f} → {new.value:.3f}" for name, old, new in pairs if old and new]
    moved = "" if found.sqrt_kl_v1 is None else f", at √KL {found.sqrt_kl_v1:.3f} from the first policy"
    yield f"rewards, policy {verdict.incumbent} → {verdict.candidate}: {'; '.join(shown) or 'none'}{moved}"


def _refuse(why: RuntimeError, _: pa.Table) -> NoReturn:
    raise why


def _refused(verdict: Verdict) -> str:
    """Which items were refused, since the candidate has learned from them."""
    named = ", ".join(map(repr, verdict.learned[:_MOST_NAMED]))
    more = f" and {len(verdict.learned) - _MOST_NAMED} more" if len(verdict.learned) > _MOST_NAMED else ""
    return f"items refused, as policy {verdict.candidate} has learned from them: {named}{more}"


def _needed(verdict: Verdict) -> str:
    """The e-value that shows a gain at the candidate's level."""
    return f"{1 / verdict.level:.3g}" if verdict.level > 0 else "infinitely many"


def _evaluation_lines(evaluation: Evaluation | None) -> Iterator[str]:
    """What was measured, for people; none of it decides."""
    if evaluation is None:
        return
    for result in (evaluation.incumbent, evaluation.candidate):
        yield f"policy {result.version}: {_scores(result)}, {result.length_mean:.1f} tokens"
    if (greedy := evaluation.greedy) is not None:
        for result in (greedy.incumbent, greedy.candidate):
            yield f"policy {result.version}, greedy: {_scores(result)}, {result.length_mean:.1f} tokens"
    elif evaluation.greedy_missing is not None:
        yield f"no scores of greedy answers: {evaluation.greedy_missing}"
    if evaluation.position_consistency is not None:
        yield f"judged alike in both orders: {evaluation.position_consistency:.1%} of the pairs"
    if (wins := evaluation.wins) is not None:
        yield (
            f"of answers of one length policy {evaluation.candidate.version} wins {wins.rate.value:.1%} "
            f"[{wins.rate.low:.1%}, {wins.rate.high:.1%}], {wins.raw:.1%} as judged; of two equal ones the judge takes "
            f"the longer {wins.longer:.1%} of the time, the first {wins.first:.1%}"
        )
    elif evaluation.wins_missing is not None:
        yield f"no win rate of answers of one length: {evaluation.wins_missing}"
    for reason, count in evaluation.missing_reasons.items():
        yield f"no score: {count} × {reason}"
    yield from _best_of_lines(evaluation)


def _scores(result: PolicyResult | BestOfPoint) -> str:
    accuracy = "" if result.accuracy is None else f"accuracy {result.accuracy.value:.3f}, "
    return f"{accuracy}reward {result.reward.value:.3f} [{result.reward.low:.3f}, {result.reward.high:.3f}]"


def _best_of_lines(evaluation: Evaluation) -> Iterator[str]:
    who = f"policy {evaluation.incumbent.version}, best of"
    if (best := evaluation.best_of) is not None:
        for point in best.points:
            yield f"{who} {point.k} by {best.by}: {_scores(point)}"
    elif evaluation.best_of_missing:
        yield f"{who} n: none: {evaluation.best_of_missing}"


def _which(store: PolicyStore, candidate: int | None, incumbent: int | None) -> tuple[int, int]:
    """The two versions to compare. Raises click.UsageError if that can't be known."""
    if incumbent is None:
        pointer = store.serving()
        if pointer is None:
            raise click.UsageError("no policy serves: name the one to compare with (--incumbent VERSION)")
        incumbent = pointer.version
    if candidate is None:
        newest = store.latest()
        candidate = newest.version if newest else incumbent
    if candidate == incumbent:
        raise click.UsageError(f"policy {candidate} is the one that serves: name a CANDIDATE to compare with it")
    return candidate, incumbent
