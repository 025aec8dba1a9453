"""What rewards fresh responses: the sources that scoring has (feedback/scoring/scorer.py), or a user's function."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from threading import Lock, Thread
from typing import TYPE_CHECKING, Final

import pyarrow as pa

from feedback.config import RESERVED_NAMES, ApiConfig, ScoringConfig
from feedback.lake.tables import Lake
from feedback.processes.exit import skip_teardown
from feedback.scoring.composition import compose
from feedback.scoring.scorer import NO_REASON, Source, guarded, load_rollout_sources, scorer_name, values_of
from feedback.scoring.sources.judge_cache import JudgeCacheError
from feedback.scoring.sources.reward_model import RewardModelError
from feedback.scoring.sources.rules import COLUMNS, PerToken, Reasons, RuleError, Values, load_rule
from train.config.training import TrainConfig
from train.context import TrainingStopped
from train.data.teacher import NAME as TEACHER
from train.data.teacher import Teacher

if TYPE_CHECKING:
    from train.controller.worker_group import WorkerGroup

RewardSettings = str | ScoringConfig | ApiConfig
"""What rewards rollouts: module:function, the sources of feedback.scoring that can, or a teacher."""

_OF_THE_DEADLINE: Final = 0.9
"""Of the time that a reward may take: what a judge or a teacher may. What it has not answered by then is missing."""
_MOST_REASONS: Final = 3
_MOST_QUOTED: Final = 160

CHECKED_RESPONSES: Final = f"""
SELECT {", ".join(COLUMNS)}, prompt_token_ids FROM interactions
SEMI JOIN (
    SELECT max((created_at, response_id)) AS newest FROM interactions
    WHERE status = 'complete' AND len(response_token_ids) > 0
    GROUP BY hash(prompt_token_ids) ORDER BY newest DESC LIMIT 32
) ON (created_at, response_id) = newest
ORDER BY created_at DESC, response_id
"""
"""The responses that a reward is tried out on: the last one to each of the last prompts. One request, whose responses a
source may be unable to read, does not decide alone."""


class RewardError(RuntimeError):
    """The reward can't be loaded, can't be used at all, or took too long. The message names it."""


@dataclass(frozen=True)
class Rewards:
    """One reward or None per response; by name the values of each component, and why it has none.

    ``tokens``: of each response, the reward that came with each of its tokens, which add up to its reward, where a
    component rewards parts of it; None where none does.
    """

    values: Values
    components: dict[str, Values] = field(default_factory=dict)
    reasons: dict[str, Reasons] = field(default_factory=dict)
    tokens: list[list[float] | None] | None = None

    def row(self, number: int) -> Rewards:
        """Those of one response, as plain numbers, which JSON can hold."""
        value = self.values[number]
        return Rewards(
            [None if value is None else float(value)],
            {name: [None if of[number] is None else float(of[number] or 0.0)] for name, of in self.components.items()},
            {name: [of[number]] for name, of in self.reasons.items()},
            None if self.tokens is None else [self.tokens[number]],
        )

    @classmethod
    def joined(cls, parts: Sequence[Rewards]) -> Rewards:
        """Those of consecutive rows as one."""
        first = parts[0] if parts else cls([])
        tokens = [row for part in parts for row in part.tokens or [None] * len(part.values)]
        return cls(
            [value for part in parts for value in part.values],
            {name: [value for part in parts for value in part.components[name]] for name in first.components},
            {name: [why for part in parts for why in part.reasons[name]] for name in first.reasons},
            tokens if any(part.tokens is not None for part in parts) else None,
        )

    def __str__(self) -> str:
        return "; ".join(self._of_component(name) for name in self.components)

    def _of_component(self, name: str) -> str:
        there = [value for value in self.components[name] if value is not None]
        mean = f", mean {sum(there) / len(there):.3f}" if there else ""
        why = commonest(self.reasons[name])
        return f"{name} {len(there)} of {len(self.values)}{mean}" + (f" (missing: {why})" if why else "")


def rewarded_by(config: TrainConfig, given: str | ScoringConfig | None) -> RewardSettings:
    """What rewards what is sampled: ``given`` by the context of a job, unless the algorithm has a teacher."""
    return config.algorithm.teacher or given or ScoringConfig()


RewardFunction = Callable[[pa.Table], Rewards]


class Reward:
    """Rewards rows of responses, as ``feedback.scoring.sources.rules`` describes them.

    The reward is the mean, by their weights, of the components that have a value for the response; one that fails is
    missing, with its reason. So does scoring, by the same code. ``scorer`` identifies all that decides it.
    """

    def __init__(self, settings: RewardSettings, timeout_s: float) -> None:
        """``timeout_s``: of one call, train.step_timeout_s. Raises RewardError if a source can't be loaded."""
        self.settings, self.timeout_s = settings, timeout_s
        try:
            if isinstance(settings, str):
                rule = load_rule(settings)
                self.sources = [Source(rule.name, 1.0, rule.digest, by_row=guarded(rule.name, rule.by_row))]
            elif isinstance(settings, ApiConfig):
                self.sources = [Teacher(settings, _OF_THE_DEADLINE * timeout_s).source]
            else:
                self.sources = load_rollout_sources(_within(settings, timeout_s))
        except (RuleError, RewardModelError, JudgeCacheError, ValueError) as error:
            raise RewardError(f"{_setting_of(settings)}: {error}") from error
        self.scorer = scorer_name(self.sources)
        self._turn = Lock()  # of the threads that ask: a user's function, or a tokenizer, may not bear two calls

    def __call__(self, rows: pa.Table) -> Rewards:
        """Raises RewardError if a source can't be used at all, or time is up."""
        with self._turn:
            return with_timeout(self._rewards, self.timeout_s)(rows)  # not kept: it knows this object and its models

    def _rewards(self, rows: pa.Table) -> Rewards:
        if not isinstance(self.settings, ApiConfig):
            rows = rows.select(COLUMNS)  # what scoring hands out too
        try:
            return reward_rows(self.sources, rows)
        except (RewardModelError, JudgeCacheError) as error:
            raise RewardError(str(error)) from error


def reward_rows(sources: Sequence[Source], rows: pa.Table) -> Rewards:
    """The weighted mean, for each row, of what the sources give it. All of them give values by row."""
    components, reasons = values_of(sources, rows)
    weights = {source.name: source.weight for source in sources}
    composed = compose(
        list(weights),
        list(weights.values()),
        [pa.array(values, pa.float64()) for values in components.values()],
        [pa.array(whys, pa.string()) for whys in reasons.values()],
    )
    tokens = None
    if any(isinstance(value, PerToken) for values in components.values() for value in values):
        tokens = [
            token_rewards({name: value for name, of in components.items() if (value := of[row]) is not None}, weights)
            for row in range(len(rows))
        ]
    return Rewards(composed.reward.to_pylist(), components, reasons, tokens)


def token_rewards(values: Mapping[str, float], weights: Mapping[str, float]) -> list[float] | None:
    """What came with each token, of components that have a value; None if all of them reward the response as a whole.

    Each component has its share by weight. One that rewards the whole response comes with its last token.
    """
    total = sum(weights[name] for name in values)
    shares = [(value, weights[name] / total) for name, value in values.items()]
    parts = [([share * reward for reward in value.tokens]) for value, share in shares if isinstance(value, PerToken)]
    if not parts or not parts[0]:
        return None
    tokens = [sum(rewards) for rewards in zip(*parts, strict=True)]
    tokens[-1] += sum(share * value for value, share in shares if not isinstance(value, PerToken))
    return tokens


def with_timeout(reward: RewardFunction, timeout_s: float) -> RewardFunction:
    """``reward``, waited for no longer than ``timeout_s``, which is train.step_timeout_s.

    Raises, when called:
        RewardError: it took longer. Its thread goes on as long as this process does, which has to be ended without
            waiting for it (``feedback.processes.exit``).
    """

    def limited(rows: pa.Table) -> Rewards:
        answer: Future[Rewards] = Future()

        def work() -> None:
            try:
                answer.set_result(reward(rows))
            except BaseException as error:  # noqa: BLE001  handed to the caller
                answer.set_exception(error)

        Thread(target=work, name="reward", daemon=True).start()
        if not wait([answer], timeout_s).done:
            skip_teardown("a reward function still runs")
            raise RewardError(
                f"the reward of {rows.num_rows} responses took longer than train.step_timeout_s={timeout_s:g} s"
            )
        return answer.result()

    return limited


def rewards_of(group: WorkerGroup, ranks: int, rows: pa.Table) -> Rewards:
    """The rewards by a group of workers; each rank rewards some consecutive rows, so no rule may compare rows.

    Raises:
        RewardError: a source can't be used at all, or time is up.
    """
    each = max(1, -(-len(rows) // ranks))
    parts = group.rewards([rows.slice(start, each) for start in range(0, max(1, len(rows)), each)])
    for part in parts:
        if isinstance(part, str):
            raise RewardError(part)
    return Rewards.joined(parts)


# ------------------------------------------------------------------------------------------------- what is good enough


def logged_responses(lake: Lake, versions: Mapping[str, int]) -> pa.Table:
    """Rows to try a reward on."""
    read = {"interactions": versions["interactions"]}
    return lake.read(lambda views: views.sql(CHECKED_RESPONSES).to_arrow_table(), versions=read, tables=read)


def try_reward(reward: RewardFunction, settings: RewardSettings, rows: pa.Table, *, per_token: bool) -> Rewards:
    """Reward a few logged responses: a reward that can't be used ends the run here, before any model is loaded.

    ``per_token``: as in ``check_rewards``.

    Raises:
        RewardError: a source can't be used, failed on all of them, or took too long; the message names it.
    """
    try:
        found = reward(rows)
        problem = unusable(found) or ("" if per_token else _per_token_problem(found))
        if problem:
            raise RewardError(problem)
    except RewardError as error:
        raise RewardError(f"{_setting_of(settings)}: {error}") from error
    return found


def check_rewards(rewards: Rewards, *, max_missing: float, per_token: bool) -> None:
    """Whether a step can learn from these. ``per_token``: whether its algorithm learns from rewards of tokens.

    Raises:
        TrainingStopped: a source failed on all, too large a share of the responses has no reward, or tokens are
            rewarded and the algorithm can't learn from that.
    """
    if problem := unusable(rewards) or ("" if per_token else _per_token_problem(rewards)):
        raise TrainingStopped(f"{problem}; nothing is published")
    lost = [row for row, value in enumerate(rewards.values) if value is None]
    if len(lost) > max_missing * len(rewards.values):
        whys = [f"{name}: {reasons[row]}" for row in lost for name, reasons in rewards.reasons.items()]
        raise TrainingStopped(
            f"{len(lost)} of {len(rewards.values)} sampled responses have no reward, a larger share than "
            f"train.reward_max_missing={max_missing:g} ({commonest(whys) or NO_REASON}); nothing is published"
        )


def unusable(rewards: Rewards) -> str:
    """Which source failed on every response, and how; empty if none did.

    A rule may have nothing to say of a response; that it raises, or returns what is no reward, is a failure.
    """
    for name, reasons in rewards.reasons.items():
        failed = [
            why for why in reasons if why and (name in (*RESERVED_NAMES, TEACHER) or why.startswith(f"rule {name} "))
        ]
        if reasons and len(failed) == len(reasons):
            return f"{name} gave none of {len(reasons)} responses a value ({commonest(failed)})"
    return ""


def commonest(reasons: Iterable[str | None]) -> str:
    """The commonest of the reasons, with how often each occurs."""
    counted = Counter(" ".join(why.split())[:_MOST_QUOTED] for why in reasons if why)
    shown = ", ".join(f"{count} × {why}" for why, count in counted.most_common(_MOST_REASONS))
    return shown + (", …" if len(counted) > _MOST_REASONS else "")


def _per_token_problem(rewards: Rewards) -> str:
    if rewards.tokens is None:
        return ""
    return (
        "it rewards single tokens or steps of a response, and train.algorithm.name compares whole responses: use ppo "
        "or reinforce_pp, or return one number per response"
    )


def _within(config: ScoringConfig, timeout_s: float) -> ScoringConfig:
    """With a judge that is done before time is up."""
    if config.judge is None:
        return config
    deadline = min(config.judge.deadline_s, _OF_THE_DEADLINE * timeout_s)
    return config.model_copy(update={"judge": config.judge.model_copy(update={"deadline_s": deadline})})


def _setting_of(settings: RewardSettings) -> str:
    if isinstance(settings, ApiConfig):
        return "train.algorithm.teacher"
    return f"train.reward={settings}" if isinstance(settings, str) else "feedback.scoring"
