"""What one look at a candidate saw: figures of both policies' answers, item by item, and what tests make of them.

Items that depend on each other are one *voice*: those with the same prompt, and those that name the same cluster. A
voice is one observation, the mean of its items, however often its prompt stands in the suite.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, Final, TypeVar

import numpy as np
import pyarrow as pa
from pydantic import BaseModel, ConfigDict

from evaluation.statistics.betting import cluster_means
from evaluation.statistics.guardrails import relative_difference
from evaluation.statistics.intervals import Floats
from evaluation.suites.held_out import prompt_key
from evaluation.suites.suite import Item
from evaluation.suites.text_metrics import distinct_n, repeated

Pair = tuple[float, float]
"""(candidate's, incumbent's)."""

PartialPair = tuple[float | None, float | None]
"""The same, where either may be missing."""

REPEATED_NGRAM: Final = 4

Member = TypeVar("Member")


class Observation(BaseModel):
    """One item. ``prompt`` identifies the prompt in any suite; a missing reward is None.

    Of the answers: ``length`` in tokens, ``truncated`` 0 or 1, ``distinct`` and ``repeated`` shares. ``kl``: KL
    of the incumbent to the candidate on this prompt, in nats per token, and ``kl_v1`` that of the first policy; None
    where it was not measured. ``verdicts``: of a judge that compared, for the candidate's as the first answer and as
    the second; None without, and where both texts are the same. ``proxy``: what the reward that training saw gives
    both answers, and ``holdout`` what a reward model gives them that training did not see; None where they were not
    compared. ``sampling``: which of the plan's sets of sampling parameters both were sampled by; None: greedily.
    ``latency``: seconds that a token takes; None where it was not timed.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    item: str
    prompt: str
    cluster: str | None = None
    segment: str | None = None
    candidate: float | None
    incumbent: float | None
    length: Pair
    truncated: Pair
    distinct: Pair
    repeated: Pair
    kl: float | None = None
    kl_v1: float | None = None
    verdicts: Pair | None = None
    proxy: PartialPair | None = None
    holdout: PartialPair | None = None
    sampling: int | None = None
    latency: Pair | None = None


class Look(BaseModel):
    """What a look adds: fresh items, which decide, and items that have decided before (the regression suite).

    ``suites``: by name, the items of guardrail suites; all of them at a candidate's first look.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    fresh: tuple[Observation, ...]
    regression: tuple[Observation, ...] = ()
    suites: dict[str, tuple[Observation, ...]] = {}


def observe(
    items: Sequence[Item],
    tables: tuple[pa.Table, pa.Table],
    scores: tuple[Floats, Floats],
    verdicts: Floats | None = None,
    kl: Sequence[float | None] | None = None,
    kl_v1: Sequence[float | None] | None = None,
    proxy: tuple[Floats, Floats] | None = None,
    holdout: tuple[Floats, Floats] | None = None,
    sampling: Sequence[int | None] | None = None,
    latency: Sequence[Pair | None] | None = None,
) -> tuple[Observation, ...]:
    """The observations of some items.

    Args:
        items: [n], in the order of all that follows.
        tables: of the candidate and of the incumbent, [n] rows with response_token_ids and finish_reason.
        scores: of both, [n]; NaN where there is none.
        verdicts: [n, 2], as of ``evaluation.judging.Judged``.
        kl, kl_v1: [n], nats per token.
        proxy, holdout: rewards of both, [n]; NaN where there is none.
        sampling, latency: [n], as of Observation.
    """
    figures = [_figures(table) for table in tables]
    rewards = _known(scores)
    compared = {name: _known(of) for name, of in (("proxy", proxy), ("holdout", holdout)) if of is not None}
    return tuple(
        Observation(
            item=item.id,
            prompt=prompt_key(item),
            cluster=item.cluster,
            segment=item.segment,
            candidate=rewards[0][i],
            incumbent=rewards[1][i],
            kl=None if kl is None else kl[i],
            kl_v1=None if kl_v1 is None else kl_v1[i],
            verdicts=None if verdicts is None or np.isnan(verdicts[i]).any() else tuple(verdicts[i].tolist()),
            sampling=None if sampling is None else sampling[i],
            latency=None if latency is None else latency[i],
            **{name: (of[0][i], of[1][i]) for name, of in compared.items()},
            **{name: (figures[0][name][i], figures[1][name][i]) for name in figures[0]},
        )
        for i, item in enumerate(items)
    )


def voices(members: Sequence[Member], names: Callable[[Member], Iterable[Hashable]]) -> list[int]:
    """The number of each member's voice [n], counted as they appear: members that share a name have the same one."""
    parents = list(range(len(members)))

    def root(i: int) -> int:
        while parents[i] != i:
            parents[i] = parents[parents[i]]
            i = parents[i]
        return i

    first: dict[Hashable, int] = {}
    for i, member in enumerate(members):
        for name in names(member):
            a, b = root(i), root(first.setdefault(name, i))
            parents[max(a, b)] = min(a, b)
    numbers: dict[int, int] = {}
    return [numbers.setdefault(root(i), len(numbers)) for i in range(len(members))]


def names_of(prompt: str, cluster: str | None) -> tuple[Hashable, ...]:
    """By what an item belongs to a voice."""
    return (("prompt", prompt),) if cluster is None else (("prompt", prompt), ("cluster", cluster))


def per_voice(
    observations: Sequence[Observation], value: Callable[[Observation], float | None]
) -> tuple[Floats, list[str]]:
    """The mean of each voice [k], and its first item's id; observations without a value, and voices of them, drop out.

    In the order in which voices appear.
    """
    numbers = voices(observations, lambda one: names_of(one.prompt, one.cluster))
    found = [
        (number, one.item, of)
        for number, one in zip(numbers, observations, strict=True)
        if (of := value(one)) is not None
    ]
    if not found:
        return np.empty(0), []
    means, order = cluster_means([of for _, _, of in found], [number for number, _, _ in found])
    ids: dict[Hashable, str] = {}
    for number, item, _ in found:
        ids.setdefault(number, item)
    return means, [ids[number] for number in order]


def difference(pair: Pair) -> float:
    """Candidate less incumbent."""
    return pair[0] - pair[1]


def relative(pair: Pair) -> float:
    """The same of figures without a bound, as a share of the larger one."""
    return float(relative_difference([pair[0]], [pair[1]])[0])


def _known(scores: tuple[Floats, Floats]) -> list[list[float | None]]:
    return [[None if np.isnan(value) else float(value) for value in of] for of in scores]


def _figures(table: pa.Table) -> dict[str, list[float]]:
    tokens: list[Any] = table.column("response_token_ids").to_pylist()
    return {
        "length": [float(len(ids)) for ids in tokens],
        "truncated": [float(reason == "length") for reason in table.column("finish_reason").to_pylist()],
        "distinct": [distinct_n([ids], 2) if len(ids) > 1 else 1.0 for ids in tokens],
        "repeated": [repeated(ids, REPEATED_NGRAM) for ids in tokens],
    }
