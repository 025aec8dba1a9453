"""Logged responses that a run learns from, and why others are left out.

A lake may hold more tokens than memory does. Of all responses that can be learned from only an index is kept, which
says which belong together and what they earned; tokens and logprobs are read of those that the run's steps draw.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final, Literal, overload

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from evaluation.suites.held_out import HeldOut
from feedback.datasets import logged_prompts, logged_responses
from feedback.lake.tables import Lake
from feedback.sampling_parameters import altered_by
from train.batch.packed import Rollout

BELOW_FULL_SUPPORT: Final = "sampled below full support"
ALONE: Final = "alone for their prompt"
ALL_EQUAL: Final = "in groups with equal rewards"
TWICE: Final = "with an id that others have"

_OF_TOKENS: Final = ("response_id", "prompt_token_ids", "response_token_ids", "logprobs", "sampling", "finish_reason")
_OF_PROMPTS: Final = ("prompt", "messages")


@dataclass(frozen=True)
class Index:
    """R responses that can be learned from, oldest first, in G groups: one for each prompt, by its first response.

    ``groups``: of each response, from 0 to G - 1. ``left_out``: how many others, by reason.
    """

    ids: pa.Array  # string [R]
    prompts: pa.Array  # binary [R], hashes of the prompts' token ids
    groups: np.ndarray[Any, np.dtype[np.int64]]  # [R]
    rewards: np.ndarray[Any, np.dtype[np.float64]]  # [R]
    left_out: Counter[str]

    @classmethod
    def of(cls, batches: Iterable[pa.RecordBatch], held_out: HeldOut | None) -> Index:
        """Of the rows of ``feedback.datasets.logged_prompts``; prompts are the same if their token ids are."""
        parts: list[pa.Table] = []
        left_out: Counter[str] = Counter()
        for batch in batches:
            kept, prompts = [], []
            for at, row in enumerate(batch.drop_columns(["created_at"]).to_pylist()):
                if problem := (held_out.reason(row) if held_out is not None else None) or _unusable(row):
                    left_out[problem] += 1
                else:
                    kept.append(at)
                    prompts.append(_digest(row["prompt_token_ids"]))
            part = pa.table(batch.select(["created_at", "response_id", "reward"])).take(pa.array(kept, pa.int64()))
            parts.append(part.append_column("prompt", pa.array(prompts, pa.binary(16))))
        if not parts:
            nothing = pa.array([], pa.string()), pa.array([], pa.binary(16))
            return cls(*nothing, np.empty(0, np.int64), np.empty(0), left_out)
        rows = pa.concat_tables(parts).sort_by([("created_at", "ascending"), ("response_id", "ascending")])
        ids = rows.column("response_id").combine_chunks().cast(pa.string())
        counts = pc.value_counts(ids)
        repeated = counts.field("values").filter(pc.greater(counts.field("counts"), 1))
        if len(repeated):  # tokens are read by ids later, and must be this row's
            twice = pc.is_in(ids, value_set=repeated)
            left_out[TWICE] += pc.sum(twice).as_py()
            rows, ids = rows.filter(pc.invert(twice)), ids.filter(pc.invert(twice))
        # Encoded in order of appearance: a group's number is its first response's place among the groups'.
        of = rows.column("prompt").combine_chunks()
        groups = of.dictionary_encode().indices.to_numpy().astype(np.int64)
        return cls(ids, of, groups, rows.column("reward").to_numpy(), left_out)

    def only(self, groups: np.ndarray[Any, np.dtype[np.bool_]]) -> Index:
        """The same without some groups, the others numbered anew. ``groups``: bool [G]."""
        kept = groups[self.groups]
        numbers = np.cumsum(groups) - 1
        ids, prompts = (part.filter(pa.array(kept)) for part in (self.ids, self.prompts))
        return Index(ids, prompts, numbers[self.groups[kept]], self.rewards[kept], self.left_out)

    @cached_property
    def sizes(self) -> np.ndarray[Any, np.dtype[np.int64]]:
        """Responses of each group, [G]."""
        return np.bincount(self.groups)

    @property
    def different(self) -> np.ndarray[Any, np.dtype[np.bool_]]:
        """Of each group, whether not all its rewards are equal, as a batch holds them: float32. [G]."""
        rewards = self.rewards.astype(np.float32)
        low, high = (np.full(len(self.sizes), start, np.float32) for start in (np.inf, -np.inf))
        np.minimum.at(low, self.groups, rewards)
        np.maximum.at(high, self.groups, rewards)
        return low != high

    @property
    def digest(self) -> str:
        """Of which responses there are, how they are grouped and what they earned, as text."""
        found = hashlib.sha256()
        for part in (self.ids, pa.array(self.groups), pa.array(self.rewards)):
            for buffer in pa.concat_arrays([part]).buffers():
                if buffer is not None:
                    found.update(buffer)
        return found.hexdigest()


class LoggedGroups(Sequence[list[Rollout]]):
    """The responses to one prompt each, oldest first, with their tokens, which are read once a group is asked for.

    A group of one is a response without company.
    """

    def __init__(self, index: Index, read: Callable[[pa.Array], pa.Table]) -> None:
        """``read``: the columns ``_OF_TOKENS`` of responses by their ids, in any order."""
        self._index = index
        self._read = read
        self._order = np.argsort(index.groups, kind="stable")
        self._ends = np.cumsum(index.sizes)
        self._held: dict[int, list[tuple[pa.Table, int]]] = {}

    def _members(self, group: int) -> np.ndarray[Any, np.dtype[np.int64]]:
        """Which responses a group has."""
        end = self._ends[group]
        return self._order[end - self._index.sizes[group] : end]

    def hold(self, groups: Iterable[int]) -> None:
        """Read the tokens of these groups at once."""
        wanted = sorted(set(groups) - self._held.keys())
        if not wanted:
            return
        rows = np.concatenate([self._members(group) for group in wanted])
        ids, prompts = (part.take(pa.array(rows)).to_pylist() for part in (self._index.ids, self._index.prompts))
        table = self._read(pa.array(ids, pa.string()))
        found = (table.column(name).to_pylist() for name in ("response_id", "prompt_token_ids"))
        # By the prompt too: what else has the id, such as a response to a prompt that is held out, is another one.
        places = {(name, _digest(prompt)): place for place, (name, prompt) in enumerate(zip(*found, strict=True))}
        if missing := [name for name, prompt in zip(ids, prompts, strict=True) if (name, prompt) not in places]:
            raise LookupError(f"{len(missing)} of {len(ids)} responses are not in the lake any more: {missing[0]}, …")
        members = zip(ids, prompts, strict=True)
        for group in wanted:
            self._held[group] = [(table, places[next(members)]) for _ in self._members(group)]

    def __len__(self) -> int:
        return len(self._ends)

    @overload
    def __getitem__(self, at: int) -> list[Rollout]: ...

    @overload
    def __getitem__(self, at: slice) -> list[list[Rollout]]: ...

    def __getitem__(self, at: int | slice) -> list[Rollout] | list[list[Rollout]]:
        if isinstance(at, slice):
            return [self[one] for one in range(*at.indices(len(self)))]
        group = range(len(self))[at]
        self.hold([group])
        return [
            _rollout(table, place, float(self._index.rewards[row]))
            for (table, place), row in zip(self._held[group], self._members(group), strict=True)
        ]


@dataclass(frozen=True)
class Traffic:
    """Logged responses by prompt, with the rewards that scoring gave them.

    ``left_out``: how many responses were, by reason. ``digest``: of all that can be drawn. ``learned_prompts``: the
    hashes of the prompts of the groups that are drawn.
    """

    groups: LoggedGroups
    singletons: int
    left_out: dict[str, int]
    digest: str
    learned_prompts: frozenset[str] = frozenset()

    @classmethod
    def read(
        cls,
        lake: Lake,
        versions: Mapping[str, int],
        drawn: Callable[[int], Iterable[int]],
        *,
        parent: int | None = None,
        max_staleness: int | None = None,
        longest: int | None = None,
        singleton_baseline: Literal["batch", "leave_out"] | None = None,
        filter_groups: bool = False,
        held_out: HeldOut | None = None,
    ) -> Traffic:
        """What the lake has at these versions.

        Args:
            drawn: of so many groups, the numbers of those that the run's steps draw.
            parent: as ``max_staleness`` and ``longest`` of ``feedback.datasets.logged_prompts``.
            singleton_baseline: ``algorithm.lone_baseline``, where responses are compared with their group. None: they
                are not compared.
            filter_groups: ``algorithm.filter_groups``: groups of equal rewards are left out.
            held_out: the prompts that policies are judged by; responses to them are left out.

        Raises:
            feedback.lake.tables.LakeError: it can't be read any more.
        """
        index, unfit = logged_prompts(
            lake,
            lambda batches: Index.of(batches, held_out),
            versions=versions,
            parent=parent,
            max_staleness=max_staleness,
            longest=longest,
        )
        left_out = Counter(unfit) + index.left_out
        alone = index.sizes == 1
        keep = np.ones(len(alone), np.bool_)
        if singleton_baseline == "leave_out":
            keep &= ~alone
            left_out[ALONE] += int(alone.sum())
        if filter_groups:
            equal = ~alone & ~index.different
            keep &= ~equal
            left_out[ALL_EQUAL] += int(index.sizes[equal].sum())
        index = index.only(keep)
        learned: set[str] = set()

        def read(ids: pa.Array) -> pa.Table:
            def take(batches: Iterable[pa.RecordBatch]) -> pa.Table:
                parts = []
                for batch in batches:
                    if held_out is not None:
                        columns = batch.select([*_OF_PROMPTS, "prompt_token_ids"])
                        learned.update(*(held_out.keys(row) for row in columns.to_pylist()))
                    parts.append(pa.table(batch.select(_OF_TOKENS)))
                return pa.concat_tables(parts).combine_chunks()

            return logged_responses(lake, ids, (*_OF_TOKENS, *_OF_PROMPTS), take, versions=versions)

        groups = LoggedGroups(index, read)
        groups.hold(drawn(len(groups)))
        singletons = int((index.sizes == 1).sum())
        return cls(groups, singletons, dict(+left_out), index.digest, frozenset(learned))

    def __str__(self) -> str:
        text = f"{len(self.groups) - self.singletons} groups and {self.singletons} lone responses of traffic"
        if not self.left_out:
            return text
        return f"{text} (left out: {', '.join(f'{count} {why}' for why, count in sorted(self.left_out.items()))})"


def _unusable(row: Mapping[str, Any]) -> str | None:
    """Why a logged response can't be learned from, by how it was sampled; None if it can."""
    return BELOW_FULL_SUPPORT if altered_by(row["sampling"], row["metadata"]) else None


def _digest(token_ids: Sequence[int]) -> bytes:
    return hashlib.blake2b(np.asarray(token_ids, np.int32).tobytes(), digest_size=16).digest()


def _rollout(table: pa.Table, row: int, reward: float) -> Rollout:
    """A row of the columns ``_OF_TOKENS``."""
    values = {name: table.column(name)[row].as_py() for name in _OF_TOKENS}
    return Rollout(
        prompt=values["prompt_token_ids"],
        response=values["response_token_ids"],
        log_probs=values["logprobs"],
        reward=reward,
        group=0,
        temperature=float(values["sampling"]["temperature"]),
        truncated=values["finish_reason"] == "length",
        fresh=False,
    )


def differ(group: list[Rollout]) -> bool:
    """Whether not all rewards are equal, as a batch holds them: float32."""
    rewards = np.array([rollout.reward for rollout in group], np.float32)
    return bool((rewards != rewards[0]).any())
