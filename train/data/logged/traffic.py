"""Logged responses that a run learns from, and why others are left out.

A lake may hold more tokens than memory does, and so may those that a run's steps draw. Of all responses that can be
learned from only an index is kept, which says which belong together and what they earned. Tokens and logprobs of those
that are drawn are read once, onto disk (``train.data.logged.spool``), and memory has those of the step that draws them.

Responses of one session that continue each other (``train.data.logged.sessions``) are an episode of as many turns,
those of a conversation; any other response is an episode of one turn. A conversation is learned from whole, or not at
all.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import groupby, islice, pairwise
from pathlib import Path
from typing import Any, Final, Literal, Protocol, TypeVar, overload

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from evaluation.suites.held_out import HeldOut
from feedback.datasets import logged_prompts, logged_responses, logged_turns
from feedback.lake.tables import Lake
from feedback.sampling_parameters import altered_by
from feedback.schema import TIMESTAMP
from train.batch.packed import Rollout
from train.data.episode_rollouts import rollout_of
from train.data.logged.sessions import Conversation, Turn, assistants, conversations
from train.data.logged.spool import Spool
from train.environments.episode import Episode, TrainedSequence

BELOW_FULL_SUPPORT: Final = "sampled below full support"
ALONE: Final = "alone for their prompt"
ALL_EQUAL: Final = "in groups with equal rewards"
TWICE: Final = "with an id that others have"
MISSING_TURN: Final = "of conversations with a turn that is missing"
BESIDE: Final = "of conversations with such a turn"
SPLIT: Final = "of conversations of several sequences"

_OF_TOKENS: Final = ("response_id", "prompt_token_ids", "response_token_ids", "logprobs", "sampling", "finish_reason")
_OF_PROMPTS: Final = ("prompt", "messages")
_AT_ONCE: Final = 10_000  # conversations that are Python's objects


_EPISODES: Final = pa.schema(
    [
        pa.field("created_at", TIMESTAMP),  # of the first turn
        pa.field("ids", pa.list_(pa.string())),  # of its turns
        pa.field("prompts", pa.list_(pa.binary(16))),  # hashes of the prompts' token ids
        pa.field("rewards", pa.list_(pa.float64())),  # null where a turn has none
        pa.field("joined", pa.list_(pa.bool_())),  # whether a turn's tokens go on behind those of the turn before
    ]
)


@dataclass(frozen=True)
class Index:
    """E episodes that can be learned from, oldest first, in G groups: one for each first prompt, by its first episode.

    ``groups``: of each episode, from 0 to G - 1. ``left_out``: how many responses, by reason. ``split``: how many turns
    begin a sequence of their own, by reason.
    """

    turns: pa.Table  # [E], the columns of ``_EPISODES``
    groups: np.ndarray[Any, np.dtype[np.int64]]  # [E]
    rewards: np.ndarray[Any, np.dtype[np.float64]]  # [E]
    left_out: Counter[str] = field(default_factory=Counter)
    split: Counter[str] = field(default_factory=Counter)

    @classmethod
    def of(cls, parts: Sequence[_Read], *, mean: bool = True) -> Index:
        """Of what was read; first prompts are the same if their token ids are.

        ``mean``: an episode's reward is the mean of those that its turns have; else their sum.
        """
        left_out, split = (sum((counts[i] for _, *counts in parts), Counter[str]()) for i in range(2))
        rows = pa.concat_tables([_EPISODES.empty_table(), *(of for of, *_ in parts)]).combine_chunks()
        # Tokens are read by ids later, and must be this row's.
        ids, owners = pc.list_flatten(rows["ids"]).combine_chunks(), pc.list_parent_indices(rows["ids"])
        counts = pc.value_counts(ids)
        repeated = counts.field("values").filter(pc.greater(counts.field("counts"), 1))
        if len(repeated):
            twice = pc.is_in(ids, value_set=repeated)
            left_out[TWICE] += pc.sum(twice).as_py()
            keep = np.ones(len(rows), np.bool_)
            keep[owners.to_numpy()[twice.to_numpy(zero_copy_only=False)]] = False
            left_out[BESIDE] += len(ids) - int(keep[owners.to_numpy()].sum()) - pc.sum(twice).as_py()
            rows = rows.filter(pa.array(keep))
        first = pc.list_element(rows["ids"], 0) if len(rows) else pa.array([], pa.string())
        order = pa.table({"created_at": rows["created_at"], "id": first})
        rows = rows.take(pc.sort_indices(order, [("created_at", "ascending"), ("id", "ascending")]))
        rows = rows.combine_chunks()
        # Encoded in order of appearance: a group's number is its first episode's place among the groups'.
        prompts = pc.list_element(rows["prompts"], 0).combine_chunks() if len(rows) else pa.array([], pa.binary(16))
        groups = prompts.dictionary_encode().indices.to_numpy().astype(np.int64)
        return cls(rows, groups, _episode_rewards(rows["rewards"], mean=mean), +left_out, split)

    def only(self, groups: np.ndarray[Any, np.dtype[np.bool_]]) -> Index:
        """The same without some groups, the others numbered anew. ``groups``: bool [G]."""
        kept = groups[self.groups]
        numbers = np.cumsum(groups) - 1
        turns = self.turns.filter(pa.array(kept)).combine_chunks()
        return Index(turns, numbers[self.groups[kept]], self.rewards[kept], self.left_out, self.split)

    @cached_property
    def sizes(self) -> np.ndarray[Any, np.dtype[np.int64]]:
        """Episodes of each group, [G]."""
        return np.bincount(self.groups)

    def responses(self, groups: np.ndarray[Any, np.dtype[np.bool_]]) -> int:
        """How many responses some groups have. ``groups``: bool [G]."""
        return int(pc.sum(pc.list_value_length(self.turns["ids"]).filter(pa.array(groups[self.groups]))).as_py() or 0)

    @property
    def different(self) -> np.ndarray[Any, np.dtype[np.bool_]]:
        """Of each group, whether not all its rewards are equal, as a batch holds them: float32. [G]."""
        rewards = self.rewards.astype(np.float32)
        low, high = (np.full(len(self.sizes), start, np.float32) for start in (np.inf, -np.inf))
        np.minimum.at(low, self.groups, rewards)
        np.maximum.at(high, self.groups, rewards)
        return low != high

    @property
    def of_turns(self) -> np.ndarray[Any, np.dtype[np.bool_]]:
        """Of each group, whether an episode has several turns. [G]."""
        several = pc.greater(pc.list_value_length(self.turns["ids"]), 1).to_numpy(zero_copy_only=False)
        return np.bincount(self.groups, weights=several) > 0

    @property
    def digest(self) -> str:
        """Of which responses there are, how they are grouped and what they earned, as text."""
        found = hashlib.sha256()
        lengths = pc.list_value_length(self.turns["ids"]).combine_chunks()
        of_turns = (pc.list_flatten(self.turns[name]).combine_chunks() for name in ("ids", "rewards", "joined"))
        for part in (*of_turns, lengths, pa.array(self.groups), pa.array(self.rewards)):
            for buffer in pa.concat_arrays([part]).buffers():
                if buffer is not None:
                    found.update(buffer)
        return found.hexdigest()


_Read = tuple[pa.Table, Counter[str], Counter[str]]
"""(episodes, with the columns of ``_EPISODES``; as ``left_out`` and ``split`` of ``Index``)."""


def _single(batches: Iterable[pa.RecordBatch], held_out: HeldOut | None, *, whole: bool) -> _Read:
    """Each of the rows of ``feedback.datasets.logged_prompts`` as an episode.

    ``whole``: not those of a session in whose prompt a turn is missing.
    """
    parts, left_out = [_EPISODES.empty_table()], Counter[str]()
    for batch in batches:
        kept, prompts = [], []
        hashes = _digests(batch["prompt_token_ids"])
        for at, row in enumerate(batch.drop_columns(["created_at"]).to_pylist()):
            if problem := _problem(row, held_out) or (_lacks_turns(row) if whole else None):
                left_out[problem] += 1
            else:
                kept.append(at)
                prompts.append(hashes[at])
        part = pa.table(batch.select(["created_at", "response_id", "reward"])).take(pa.array(kept, pa.int64()))
        one = pa.array(range(len(kept) + 1), pa.int32())
        columns = {
            "ids": part["response_id"].cast(pa.string()),
            "prompts": pa.array(prompts, pa.binary(16)),
            "rewards": part["reward"],
            "joined": pa.array([False] * len(kept), pa.bool_()),
        }
        lists = {
            name: pa.ListArray.from_arrays(one, _chunkless(values)).cast(_EPISODES.field(name).type)
            for name, values in columns.items()
        }
        parts.append(pa.table({"created_at": part["created_at"], **lists}).cast(_EPISODES))
    return pa.concat_tables(parts), left_out, Counter()


def _of_sessions(batches: Iterable[pa.RecordBatch], held_out: HeldOut | None, *, splits: bool) -> _Read:
    """The conversations in the rows of ``feedback.datasets.logged_turns``; without ``splits``, in one sequence each."""
    left_out, split, episodes = Counter[str](), Counter[str](), []
    parts = [_EPISODES.empty_table()]
    rows = (row for batch in batches for row in batch.to_pylist())
    for _, session in groupby(rows, key=lambda row: (row["tenant"], row["user"], row["session_id"])):
        for found in conversations([Turn(row) for row in session]):
            if all(turn.row["reward"] is None for turn in found.turns):
                continue
            whys = list(_problems(found, held_out, splits=splits))
            if any(whys):
                left_out.update(why or BESIDE for why in whys)
                continue
            split.update(filter(None, found.splits))
            episodes.append(
                {
                    "created_at": found.turns[0].row["created_at"],
                    "ids": [turn.row["response_id"] for turn in found.turns],
                    "prompts": [_digest(turn.prompt) for turn in found.turns],
                    "rewards": [turn.row["reward"] for turn in found.turns],
                    "joined": [why is None for why in found.splits],
                }
            )
            if len(episodes) == _AT_ONCE:  # of a large lake Python's objects would take ten times as much
                parts.append(pa.Table.from_pylist(episodes, _EPISODES))
                episodes.clear()
    return pa.concat_tables([*parts, pa.Table.from_pylist(episodes, _EPISODES)]), left_out, split


def _problems(found: Conversation, held_out: HeldOut | None, *, splits: bool) -> Iterator[str | None]:
    """Of each turn why a conversation can't be learned from."""
    several = any(found.splits)
    for turn in found.turns:
        if found.missing:
            yield MISSING_TURN
        else:
            yield turn.row["unfit"] or _problem(turn.row, held_out) or (SPLIT if several and not splits else None)


def _problem(row: Mapping[str, Any], held_out: HeldOut | None) -> str | None:
    """Why a logged response can't be learned from, by its prompt or by how it was sampled; None if it can."""
    if held_out is not None and (reason := held_out.reason(row)):
        return reason
    return BELOW_FULL_SUPPORT if altered_by(row["sampling"], row["metadata"]) else None


def _lacks_turns(row: Mapping[str, Any]) -> str | None:
    """Of the only response of a session: whether its prompt has a turn of the assistant's."""
    messages = row["messages"] if row["session_id"] is not None else None
    return MISSING_TURN if messages is not None and assistants(json.loads(messages)) else None


def _episode_rewards(rewards: pa.ChunkedArray, *, mean: bool) -> np.ndarray[Any, np.dtype[np.float64]]:
    """float64 [E]: what each episode is worth, of the lists of its turns' rewards."""
    owners, values = pc.list_parent_indices(rewards).to_numpy(), pc.list_flatten(rewards)
    own = pc.fill_null(values, 0.0).to_numpy()
    found = np.zeros(len(rewards))
    np.add.at(found, owners, own / _shares(owners, values, len(rewards))[owners] if mean else own)
    return found


def _shares(
    owners: np.ndarray[Any, np.dtype[np.int64]], values: pa.ChunkedArray, count: int
) -> np.ndarray[Any, np.dtype[np.int64]]:
    """int64 [E]: how many turns of each have a reward, at least 1."""
    return np.maximum(1, np.bincount(owners, pc.is_valid(values).to_numpy(), minlength=count).astype(np.int64))


def _chunkless(values: pa.Array | pa.ChunkedArray) -> pa.Array:
    return values.combine_chunks() if isinstance(values, pa.ChunkedArray) else values


_T = TypeVar("_T")


class ReadTokens(Protocol):
    """Gives ``take`` the columns ``_OF_TOKENS`` of responses by their ids, in any order, and ``place`` among these."""

    def __call__(self, ids: pa.Array, take: Callable[[Iterable[pa.RecordBatch]], _T], /) -> _T: ...


class LoggedGroups(Sequence[list[Rollout]]):
    """The episodes that begin with one prompt each, oldest first, with their tokens, which are read when asked for.

    Those that are spooled come from disk, others from the lake. A group of one is an episode without company.
    """

    def __init__(
        self,
        index: Index,
        read: ReadTokens,
        *,
        by_turn: bool = False,
        mean: bool = True,
        folder: Path | None = None,
    ) -> None:
        """``by_turn``: as of ``episode_rollouts.rollout_of``; ``mean``: as of ``Index.of``; ``folder``: as of
        ``Spool``."""
        self._index = index
        self._read = read
        self._by_turn, self._mean = by_turn, mean
        self._order = np.argsort(index.groups, kind="stable")
        self._ends = np.cumsum(index.sizes)
        self._folder = folder
        self._lengths = pc.list_value_length(index.turns["ids"]).to_numpy().astype(np.int64)  # of episodes, in turns
        self._turn_ends = np.cumsum(self._lengths)
        self._ids, self._prompts = (_chunkless(pc.list_flatten(index.turns[name])) for name in ("ids", "prompts"))
        self._spool: Spool | None = None
        self._rows = np.full(len(self._ids), -1, np.int64)  # of each turn, in the spool

    def _members(self, group: int) -> np.ndarray[Any, np.dtype[np.int64]]:
        """Which episodes a group has."""
        end = self._ends[group]
        return self._order[end - self._index.sizes[group] : end]

    def _turns(self, episodes: np.ndarray[Any, np.dtype[np.int64]]) -> np.ndarray[Any, np.dtype[np.int64]]:
        """The numbers of these episodes' turns, among all."""
        ends = self._turn_ends[episodes]
        parts = zip(ends - self._lengths[episodes], ends, strict=True)
        return np.concatenate([np.arange(start, end) for start, end in parts])

    def spool(self, groups: Iterable[int]) -> None:
        """Read the tokens of these groups at once, onto disk; once."""
        assert self._spool is None
        wanted = np.zeros(len(self), np.bool_)
        wanted[np.fromiter(groups, np.int64)] = True
        turns = np.flatnonzero(np.repeat(wanted[self._index.groups], self._lengths))
        if len(turns):
            self._spool, self._rows[turns] = self._fetch(turns, self._folder)

    def _fetch(
        self, turns: np.ndarray[Any, np.dtype[np.int64]], folder: Path | None
    ) -> tuple[Spool, np.ndarray[Any, np.dtype[np.int64]]]:
        """Read these turns: (their rows, the number of each turn's)."""
        ids, prompts = self._ids.take(pa.array(turns)), self._prompts.take(pa.array(turns))
        rows = np.full(len(turns), -1, np.int64)

        def take(batches: Iterable[pa.RecordBatch]) -> Spool | None:
            spool: Spool | None = None
            for batch in batches:
                # By the prompt too: what else has the id, such as a response to a prompt that is held out, is another.
                hashes = pa.array(_digests(batch["prompt_token_ids"]), pa.binary(16))
                its_own = pc.equal(hashes, prompts.take(batch["place"]))
                found = batch.select(_OF_TOKENS).filter(its_own)
                spool = spool or Spool(found.schema, folder)
                rows[batch["place"].filter(its_own).to_numpy()] = np.arange(found.num_rows) + len(spool)
                spool.append(found)
            if spool is not None:
                spool.finish()
            return spool

        spool = self._read(ids, take)
        missing = np.flatnonzero(rows < 0)
        if spool is None or len(missing):
            first = ids[int(missing[0])]
            raise LookupError(f"{len(missing)} of {len(turns)} responses are not in the lake any more: {first}, …")
        return spool, rows

    def __len__(self) -> int:
        return len(self._ends)

    @overload
    def __getitem__(self, at: int) -> list[Rollout]: ...

    @overload
    def __getitem__(self, at: slice) -> list[list[Rollout]]: ...

    def __getitem__(self, at: int | slice) -> list[Rollout] | list[list[Rollout]]:
        if isinstance(at, slice):
            return [self[one] for one in range(*at.indices(len(self)))]
        members = self._members(range(len(self))[at])
        turns = self._turns(members)
        spool, rows = self._spool, self._rows[turns]
        if spool is None or rows.min() < 0:  # no step draws it
            spool, rows = self._fetch(turns, self._folder)
        found = iter(spool.take(rows).to_pylist())
        return [self._rollout(list(islice(found, self._lengths[row])), int(row)) for row in members]

    def _rollout(self, turns: list[dict[str, Any]], row: int) -> Rollout:
        """The episode of a row of the index, whose turns have these values of ``_OF_TOKENS``."""
        joined, rewards = (self._index.turns[name][row].as_py() for name in ("joined", "rewards"))
        share = max(1, len(rewards) - rewards.count(None)) if self._mean else 1
        sequences: list[TrainedSequence] = []
        for turn, goes_on in zip(turns, joined, strict=True):
            if goes_on:
                said = turn["prompt_token_ids"][len(sequences[-1].prompt) + len(sequences[-1].token_ids) :]
                sequences[-1].add(said, [0.0] * len(said), sampled=False)
            else:
                sequences.append(TrainedSequence(turn["prompt_token_ids"]))
            sequences[-1].add(turn["response_token_ids"], turn["logprobs"], sampled=True)
        made = rollout_of(
            Episode(sequences, [(r or 0.0) / share for r in rewards], turns[-1]["finish_reason"] == "length"),
            [float(t["sampling"]["temperature"]) for t, goes_on in zip(turns, joined, strict=True) if not goes_on],
            by_turn=self._by_turn and len(turns) > 1,
            fresh=False,
        )
        return made if len(turns) > 1 else replace(made, sampled=None)


@dataclass(frozen=True)
class Traffic:
    """Logged responses by prompt, with the rewards that scoring gave them.

    ``left_out``: how many responses were, by reason. ``split``: how many turns of conversations begin a sequence of
    their own, by reason. ``conversations``: how many there are, of several turns. ``digest``: of all that can be drawn.
    ``learned_prompts``: the hashes of the prompts of the groups that are drawn.
    """

    groups: LoggedGroups
    singletons: int
    left_out: dict[str, int]
    split: dict[str, int]
    conversations: int
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
        sessions: bool = True,
        splits: bool = True,
        by_turn: bool = False,
        mean: bool = True,
        folder: Path | None = None,
    ) -> Traffic:
        """What the lake has at these versions.

        Args:
            drawn: of so many groups, the numbers of those that the run's steps draw.
            parent: as ``max_staleness`` and ``longest`` of ``feedback.datasets.logged_prompts``.
            singleton_baseline: ``algorithm.lone_baseline``, where responses are compared with their group. None: they
                are not compared.
            filter_groups: ``algorithm.filter_groups``: groups of equal rewards are left out.
            held_out: the prompts that policies are judged by; responses to them are left out.
            sessions: responses of a session that continue each other are one episode; False: each is by itself.
            splits: conversations of several sequences are learned from; False: they are left out.
            by_turn: as of ``episode_rollouts.rollout_of``; ``mean``: as of ``Index.of``.
            folder: whose disk what is drawn lies on; as of ``Spool``.

        Raises:
            feedback.lake.tables.LakeError: it can't be read any more.
            OSError: the disk is full.
        """
        bounds: dict[str, Any] = {
            "versions": versions,
            "parent": parent,
            "max_staleness": max_staleness,
            "longest": longest,
        }
        single, unfit = logged_prompts(
            lake, lambda batches: _single(batches, held_out, whole=sessions), sessions=not sessions, **bounds
        )
        parts = [single]
        if sessions:
            parts.append(logged_turns(lake, lambda batches: _of_sessions(batches, held_out, splits=splits), **bounds))
        index = Index.of(parts, mean=mean)
        left_out = Counter(unfit) + index.left_out
        alone = index.sizes == 1
        keep = np.ones(len(alone), np.bool_)
        if singleton_baseline == "leave_out":
            keep &= ~alone
            left_out[ALONE] += index.responses(alone)
        if filter_groups:
            # Rewards that count by turn may differ where their sums don't: conversations are looked at when drawn.
            equal = ~alone & ~index.different
            if by_turn:
                equal &= ~index.of_turns
            keep &= ~equal
            left_out[ALL_EQUAL] += index.responses(equal)
        index = index.only(keep)
        learned: set[str] = set()

        def read(ids: pa.Array, take: Callable[[Iterable[pa.RecordBatch]], _T]) -> _T:
            def noted(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
                for batch in batches:
                    if held_out is not None:
                        learned.update(*(held_out.keys(row) for row in _prompt_rows(batch)))
                    yield batch

            columns = (*_OF_TOKENS, *_OF_PROMPTS)
            return logged_responses(lake, ids, columns, lambda batches: take(noted(batches)), versions=versions)

        groups = LoggedGroups(index, read, by_turn=by_turn, mean=mean, folder=folder)
        groups.spool(drawn(len(groups)))
        return cls(
            groups=groups,
            singletons=int((index.sizes == 1).sum()),
            left_out=dict(+left_out),
            split=dict(index.split),
            conversations=int(pc.sum(pc.greater(pc.list_value_length(index.turns["ids"]), 1)).as_py() or 0),
            digest=index.digest,
            learned_prompts=frozenset(learned),
        )

    def __str__(self) -> str:
        text = f"{len(self.groups) - self.singletons} groups and {self.singletons} lone responses of traffic"
        if self.conversations:
            text += f", {self.conversations} conversations among them"
        counts = (("left out", self.left_out), ("turns in sequences of their own", self.split))
        notes = [f"{what}: {', '.join(f'{n} {why}' for why, n in sorted(of.items()))}" for what, of in counts if of]
        return f"{text} ({'; '.join(notes)})" if notes else text


def _digest(token_ids: Sequence[int] | np.ndarray[Any, np.dtype[np.int32]]) -> bytes:
    return hashlib.blake2b(np.asarray(token_ids, np.int32).tobytes(), digest_size=16).digest()


def _digests(prompts: pa.ListArray) -> list[bytes]:
    """The hash of each prompt's token ids."""
    token_ids = prompts.values.to_numpy()
    return [_digest(token_ids[start:end]) for start, end in pairwise(prompts.offsets.to_numpy())]


def _prompt_rows(batch: pa.RecordBatch) -> Iterator[dict[str, Any]]:
    """What ``HeldOut`` knows prompts by; token ids only where there is no text."""
    for row, token_ids in zip(batch.select(_OF_PROMPTS).to_pylist(), batch["prompt_token_ids"], strict=True):
        yield row | {"prompt_token_ids": None if row["prompt"] is not None else token_ids.as_py()}


def differ(group: list[Rollout], *, by_turn: bool = False) -> bool:
    """Whether not all rewards are equal, as a batch holds them: float32. ``by_turn``: those of each turn."""
    if by_turn:
        return len({_turn_rewards(rollout) for rollout in group}) > 1
    rewards = np.array([rollout.reward for rollout in group], np.float32)
    return bool((rewards != rewards[0]).any())


def _turn_rewards(rollout: Rollout) -> tuple[np.float32, ...]:
    """The reward of each turn of its episode, whose last token it comes with."""
    found: list[np.float32] = []
    for part in (*rollout.earlier, rollout):
        sampled = part.sampled or [True] * len(part.response)
        rewards = part.token_rewards or [*[0.0] * (len(sampled) - 1), part.reward]
        ends = (now and not after for now, after in zip(sampled, [*sampled[1:], False], strict=True))
        found += [np.float32(reward) for reward, end in zip(rewards, ends, strict=True) if end]
    return tuple(found)
