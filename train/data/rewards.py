"""What rewards fresh responses: a user's function, or the configured rules, each a component with a weight."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from threading import Thread
from typing import Final

import pyarrow as pa

from feedback.config import RuleConfig
from feedback.lake.tables import Lake
from feedback.process_exit import skip_teardown
from feedback.scoring.sources.rules import COLUMNS, Rule, RuleError, load_rule, load_rules
from train.controller.worker_group import WorkerGroup

Values = list[float | None]


@dataclass(frozen=True)
class Rewards:
    """One reward or None per response, and by name the values of each component."""

    values: Values
    components: dict[str, Values] = field(default_factory=dict)

    @classmethod
    def joined(cls, parts: Sequence[Rewards]) -> Rewards:
        """Those of consecutive rows as one."""
        names = parts[0].components if parts else {}
        return cls(
            [value for part in parts for value in part.values],
            {name: [value for part in parts for value in part.components[name]] for name in names},
        )


RewardFunction = Callable[[pa.Table], Rewards]

CHECKED_RESPONSES: Final = f"""
SELECT {", ".join(COLUMNS)} FROM interactions
WHERE status = 'complete' AND len(response_token_ids) > 0
ORDER BY created_at DESC, response_id LIMIT 4
"""
"""The responses that a reward is tried out on: the last ones."""


def load_reward_function(reward: str | Mapping[str, RuleConfig]) -> RewardFunction:
    """The function that rewards rows of responses, as ``feedback.scoring.sources.rules`` describes them.

    A reward of several rules is the mean, by their weights, of those that have one for the response. A rule that
    fails, or returns something else than rewards, is an error here. Scoring leaves such a response without a reward;
    in training a batch would be paid for and teach something else. ``reward``: a function by name, or rules by the name
    of their component.

    Raises:
        feedback.scoring.sources.rules.RuleError: a rule can't be loaded; called, that it failed, or returned what is no
            reward.
    """
    if isinstance(reward, str):
        function = load_rule(reward)
        return lambda rows: Rewards(function(rows))
    rules = load_rules(reward)
    if not rules:
        raise RuleError("no rule has a weight above 0")
    return lambda rows: weighted_mean(rules, rows)


def with_timeout(reward: RewardFunction, timeout_s: float) -> RewardFunction:
    """``reward``, waited for no longer than ``timeout_s``, which is train.step_timeout_s.

    Raises, when called:
        feedback.scoring.sources.rules.RuleError: it took longer. Its thread goes on as
            long as this process does, which has to be ended without waiting for it (``feedback.process_exit``).
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
            raise RuleError(
                f"the reward of {rows.num_rows} responses took longer than train.step_timeout_s={timeout_s:g} s"
            )
        return answer.result()

    return limited


def check_reward(
    reward: str | Mapping[str, RuleConfig], lake: Lake, versions: Mapping[str, int], *, timeout_s: float
) -> None:
    """Reward a few logged responses: a failing reward ends the run here, before any model is loaded.

    Raises:
        feedback.scoring.sources.rules.RuleError: the reward failed, returned something else than rewards, or took
            longer than ``timeout_s``; the message names it.
    """
    read = {"interactions": versions["interactions"]}
    rows = lake.read(lambda views: views.sql(CHECKED_RESPONSES).to_arrow_table(), versions=read, tables=read)
    if not rows.num_rows:  # all prompts are one's own
        return
    try:
        with_timeout(load_reward_function(reward), timeout_s)(rows)
    except RuleError as error:
        setting = f"train.reward={reward}" if isinstance(reward, str) else "feedback.scoring.rules"
        raise RuleError(f"{setting}: {error}. A reward gives one number per response, or None for no reward") from error


def weighted_mean(rules: Sequence[tuple[Rule, float]], rows: pa.Table) -> Rewards:
    """The mean by weight of the values that the rules give to each row; a rule without one for a row does not count."""
    components = {rule.name: rule(rows) for rule, _ in rules}
    weights = {rule.name: weight for rule, weight in rules}
    values: Values = []
    for row in range(len(rows)):
        scored = [(weights[name], value) for name, of in components.items() if (value := of[row]) is not None]
        total = sum(weight for weight, _ in scored)
        values.append(sum(weight * value for weight, value in scored) / total if scored else None)
    return Rewards(values, components)


def rewards_of(group: WorkerGroup, ranks: int, rows: pa.Table) -> Rewards:
    """The rewards by a group of workers; each rank rewards some consecutive rows, so no rule may compare rows."""
    each = -(-len(rows) // ranks)
    return Rewards.joined(group.rewards([rows.slice(start, each) for start in range(0, len(rows), each)]))
