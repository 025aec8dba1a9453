"""What offline algorithms learn from: feedback as token ids.

An item is what is learned together: the two responses of a pair, or one response. A response that was served keeps the
token ids that the policy sampled, since tokenised anew it would often have others. So a response that ran into its
longest length or into a stop string has no EOS at its end, and is learned like that: people judged what they saw, and
an EOS there would teach to stop in mid-sentence. Aborted responses are in no dataset. What people wrote themselves is
tokenised and ended by train/data/demonstrations.py, and so is what was imported.
"""

from __future__ import annotations

import hashlib
import itertools
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Final, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from evaluation.suites.held_out import HeldOut
from feedback import datasets
from feedback.config import HumanConfig, KindsConfig
from feedback.lake.tables import Lake
from feedback.scoring.aggregation import OVER_CAP
from feedback.trusted_code import trusted
from train.batch.packed import PackedBatch, Rollout
from train.config.context_length import longest_context
from train.config.training import TrainConfig
from train.data.demonstrations import DemonstrationTokenizer, UnfitTextError
from train.data.own_prompts import FOREIGN_TOKENS
from train.data.prompts import Cycled, repr_pieces, sha256_of

T = TypeVar("T")

Item = list[Rollout]
"""Sequences of one prompt that are learned together."""

JudgedRow = tuple[dict[str, Any], "list[Response]"]
"""A row of the dataset (its prompt) and its responses."""

Response = tuple[list[int] | None, str, float]
"""(token ids as captured, None if people wrote it or it was imported; its text; reward: 1, 0, or a vote between)."""

TOO_LONG: Final = "longer than the model's context"
EMPTY: Final = "no tokens"
NO_WEIGHT: Final = "without a weight in train.reward_model.weights"
_BATCH_ROWS: Final = 1024
_IDS_OF_A_PAIR: Final = ("chosen_response_id", "rejected_response_id")
OVER_MOST: Final = "over train.data.max_prompts (users' newest come first, then imported ones)"


@dataclass(frozen=True)
class OfflineData:
    """Items in the order in which a run's steps draw them, and those that it is measured by."""

    learned: Cycled
    held_out: list[Item]
    held_out_rows: list[JudgedRow]
    """What the held-out items were made of."""
    kinds: dict[str, int]  # items by kind of feedback
    left_out: dict[str, int]  # feedback and items, by reason
    digest: str
    learned_prompts: frozenset[str] = frozenset()  # hashes of the prompts of ``learned``, as suites know them

    @classmethod
    def of(
        cls,
        lake: Lake,
        versions: Mapping[str, int],
        config: TrainConfig,
        policy: Path,
        seed: int,
        dataset: str,
        reader: type[Reader] | None = None,
    ) -> OfflineData:
        """The feedback of the lake at these versions.

        Args:
            dataset: one of ``DATASETS``: pairs, with the chosen response first, of reward 1, and the rejected one of
                reward 0; thumbs, of reward 1 if up and 0 if down; demonstrations, of reward 1; judgements, which are
                pairs, and responses whose reward is what people voted, from 0 to 1.
            reader: of responses; ``Reader`` if None.

        Raises:
            feedback.lake.tables.LakeError: it can't be read any more.
            evaluation.suites.suite.SuiteError: a suite whose prompts are to be left out can't be read.
            ValueError: what people wrote can't be ended (see train/data/demonstrations.py).
        """
        left_out: Counter[str] = Counter()
        judged_by = HeldOut.load(config.data.exclude_suites, policy, config.data.holdout, config.data.holdout_side)
        read, kinds = (reader or Reader)(policy, config), Counter[str]()
        items: list[Item] = []
        rows: list[JudgedRow] = []
        fit, unfit = set[str](), set[str]()  # responses of pairs that could be read, and that could not
        for kind, row, responses in DATASETS[dataset](lake, versions, config, left_out):
            if row.get("in_a_pair") and (row["response_id"] in fit or row["response_id"] not in unfit):
                continue
            if reason := judged_by.reason(row):
                left_out[reason] += 1
                continue
            try:
                items.append(read.item(row, responses))
            except UnfitTextError as error:
                left_out[str(error)] += 1
                unfit |= {row[name] for name in _IDS_OF_A_PAIR if name in row}
            else:
                fit |= {row[name] for name in _IDS_OF_A_PAIR if name in row}
                kinds[kind] += 1
                rows.append((row, responses))
        ranks = config.data_parallel_ranks
        share, most = config.data.held_out_share, config.data.held_out_most
        prompts = [tuple(row["prompt_token_ids"]) for row, _ in rows]
        learned, held_out = split(list(zip(items, rows, strict=True)), prompts, share, least=ranks, most=most)
        return cls(
            learned=Cycled([item for item, _ in learned], config.data.prompts_per_step, f"{seed}:{dataset}"),
            held_out=[item for item, _ in held_out],
            held_out_rows=[row for _, row in held_out],
            kinds=dict(sorted(kinds.items())),
            left_out={reason: count for reason, count in sorted(left_out.items()) if count},
            digest=sha256_of(repr_pieces([[item for item, _ in part] for part in (learned, held_out)], 3)),
            learned_prompts=frozenset[str]().union(*(judged_by.keys(row) for _, (row, _) in learned)),
        )

    @property
    def usable(self) -> int:
        """Items to learn from."""
        return len(self.learned.items)

    def __str__(self) -> str:
        of = ", ".join(f"{count} {kind}" for kind, count in self.kinds.items())
        out = ", ".join(f"{count} {reason}" for reason, count in self.left_out.items())
        return f"{self.usable} items to learn from and {len(self.held_out)} held out ({of}); left out: {out or 'none'}"


def pack(items: list[Item], *, whole_groups: bool) -> PackedBatch:
    """Items as one batch; each is a group."""
    numbered = [replace(rollout, group=i) for i, item in enumerate(items) for rollout in item]
    return PackedBatch.pack(numbered).with_(whole_groups=whole_groups)


def split(
    items: list[T], prompts: list[tuple[int, ...]], share: float, *, least: int, most: int
) -> tuple[list[T], list[T]]:
    """(items to learn from, items held out), each in their order. Items of one prompt are all in one of the two.

    The prompts whose hashes are smallest are held out: as items come in, most of those held out before stay so.

    Args:
        prompts: of each item.
        share: of the prompts.
        least: prompts held out, if any are: every rank needs one to measure. If that is more than half, none is.
        most: items held out, beyond those of ``least`` prompts.
    """
    of_prompt: dict[tuple[int, ...], int] = defaultdict(int)
    for prompt in prompts:
        of_prompt[prompt] += 1
    count = max(round(share * len(of_prompt)), least)
    held: set[tuple[int, ...]] = set()
    if share > 0 and 2 * count <= len(of_prompt):
        room = most
        for prompt in sorted(of_prompt, key=_hash)[:count]:
            room -= of_prompt[prompt]
            if room < 0 and len(held) >= least:
                break
            held.add(prompt)
    parts: tuple[list[T], list[T]] = ([], [])
    for item, prompt in zip(items, prompts, strict=True):
        parts[prompt in held].append(item)
    return parts


class Reader:
    """Turns rows of the datasets into items of a policy."""

    def __init__(self, policy: Path, config: TrainConfig) -> None:
        from transformers import AutoConfig

        self.policy = policy
        self.longest = longest_context(config.rollout, policy)
        model = AutoConfig.from_pretrained(policy, trust_remote_code=trusted(policy))
        self.vocabulary = model.get_text_config().vocab_size

    @cached_property
    def demonstrations(self) -> DemonstrationTokenizer:
        return DemonstrationTokenizer(self.policy)

    def item(self, row: Mapping[str, Any], responses: list[Response]) -> Item:
        """Raises UnfitTextError if a response can't be learned from; the message is the reason to count it by."""
        return [self._rollout(row, *response) for response in responses]

    def _rollout(self, row: Mapping[str, Any], token_ids: list[int] | None, text: str, reward: float) -> Rollout:
        prompt = row["prompt_token_ids"]
        if token_ids is None:
            token_ids = self.demonstrations.token_ids(
                text, prompt=row["prompt"], prompt_token_ids=prompt, messages=row["messages"]
            )
        if not prompt or not token_ids:
            raise UnfitTextError(EMPTY)
        if len(prompt) + len(token_ids) > self.longest:
            raise UnfitTextError(TOO_LONG)
        if max(*prompt, *token_ids) >= self.vocabulary:
            raise UnfitTextError(FOREIGN_TOKENS)
        return Rollout(prompt, token_ids, [0.0] * len(token_ids), reward, group=0, fresh=False)


# ---------------------------------------------------------------------------------------------- the datasets' rows

Rows = Iterator[tuple[str, dict[str, Any], list[Response]]]
"""(kind of feedback, the row, its responses), oldest first."""


def pairs(lake: Lake, versions: Mapping[str, int], config: TrainConfig, left_out: Counter[str]) -> Rows:
    for row in _newest(datasets.preference_pairs(lake, versions=versions), config, left_out):
        chosen = (row["chosen_token_ids"], row["chosen"], 1.0)
        imported = "imported " if row["imported"] else ""
        yield f"{imported}pairs by {row['kind']}", row, [chosen, (row["rejected_token_ids"], row["rejected"], 0.0)]


def thumbs(lake: Lake, versions: Mapping[str, int], config: TrainConfig, left_out: Counter[str]) -> Rows:
    for row in _newest(datasets.thumbs(lake, versions=versions), config, left_out):
        up = bool(row["desirable"])
        imported = "imported " if row["imported"] else ""
        yield (
            f"{imported}thumbs {'up' if up else 'down'}",
            row,
            [(row["response_token_ids"], row["response"], float(up))],
        )


def judgements(lake: Lake, versions: Mapping[str, int], config: TrainConfig, left_out: Counter[str]) -> Rows:
    """Preferences and corrections as pairs; of responses in no pair what people's votes on each come to.

    Last come the votes on responses in a pair (``in_a_pair``), for where no pair of theirs can be read. Each has its
    weight, by ``train.reward_model.weights``; what has none is no judgement.
    """
    weights, votes = config.reward_model.weights, config.reward_model.votes or {}
    compared = datasets.preference_pairs(lake, versions=versions, max_thumb_pairs_per_prompt=0)
    left_out.update({why: count for why, count in compared.left_out.items() if why != OVER_CAP})
    by_kind = pa.array([float(getattr(weights, kind)) for kind in compared.table["kind"].to_pylist()], pa.float64())
    weighed = pc.not_equal(by_kind, 0.0)
    of_pairs = compared.table.append_column("weight", by_kind).filter(weighed)
    left_out[NO_WEIGHT] += len(by_kind) - of_pairs.num_rows
    alone, covered = _votes(lake, versions, votes, config, of_pairs)
    order = _by_time(of_pairs, alone)
    imported = pa.chunked_array([*of_pairs["imported"].chunks, *alone["imported"].chunks], pa.bool_())
    kept = order[_kept(imported.take(pa.array(order)).to_pylist(), config, left_out)]
    is_pair = kept < of_pairs.num_rows
    pairs_left = iter(of_pairs.take(pa.array(kept[is_pair])).to_pylist())
    votes_left = iter(alone.take(pa.array(kept[~is_pair] - of_pairs.num_rows)).to_pylist())
    for compares in is_pair:
        if compares:
            row = next(pairs_left)
            chosen = (row["chosen_token_ids"], row["chosen"], 1.0)
            yield f"pairs by {row['kind']}", row, [chosen, (row["rejected_token_ids"], row["rejected"], 0.0)]
        else:
            yield _voted(next(votes_left), in_a_pair=False)
    for batch in covered.take(pa.array(_by_time(covered))).to_batches(_BATCH_ROWS):
        for row in batch.to_pylist():
            yield _voted(row, in_a_pair=True)


def _votes(
    lake: Lake, versions: Mapping[str, int], votes: Mapping[str, Any], config: TrainConfig, of_pairs: pa.Table
) -> tuple[pa.Table, pa.Table]:
    """The votes on responses that are in none of the pairs, and on those that are."""
    weights = config.reward_model.weights
    human, kinds = (
        HumanConfig.model_validate(votes.get("human", {})),
        KindsConfig.model_validate(votes.get("kinds", {})),
    )
    of_kinds = {"thumbs": weights.thumb, "ratings": weights.rating, "metrics": weights.metric}
    weighed = {name: weight * getattr(human, name) for name, weight in of_kinds.items()}
    if not any(weighed.values()):
        none = datasets.VOTES.empty_table()
        return none, none
    human = human.model_copy(update={**weighed, "preferences": 0.0})
    found = datasets.votes(lake, human, kinds, versions=versions).table
    known = pa.chunked_array([chunk for name in _IDS_OF_A_PAIR for chunk in of_pairs[name].chunks], pa.string())
    covered = pc.is_in(found["response_id"], value_set=known)
    return found.filter(pc.invert(covered)), found.filter(covered)


def _by_time(*tables: pa.Table) -> np.ndarray[Any, np.dtype[np.int64]]:
    """The numbers of the rows of these tables, one after the other, oldest first."""
    times = [table["created_at"].cast(pa.int64()).to_numpy() for table in tables]
    return np.argsort(np.concatenate(times), kind="stable")


def _voted(row: dict[str, Any], *, in_a_pair: bool) -> tuple[str, dict[str, Any], list[Response]]:
    voted = (row["response_token_ids"], row["response"], row["vote"])
    return "votes", row | {"in_a_pair": in_a_pair}, [voted]


def demonstrations(lake: Lake, versions: Mapping[str, int], config: TrainConfig, left_out: Counter[str]) -> Rows:
    """Corrections; by ``algorithm.thumbs_up`` also liked responses without a correction."""
    rows = _newest(datasets.demonstrations(lake, versions=versions), config, left_out)
    corrections: Rows = (("corrections", row, [(None, row["text"], 1.0)]) for row in rows)
    if not config.algorithm.thumbs_up:
        yield from corrections
        return
    corrected = {row["response_id"] for row in rows}
    liked = (
        item
        for item in thumbs(lake, versions, config, left_out)
        if item[1]["desirable"] and item[1]["response_id"] not in corrected
    )
    both = sorted([*corrections, *liked], key=lambda item: item[1]["created_at"])
    yield from itertools.compress(both, _kept([row["imported"] for _, row, _ in both], config, left_out))


DATASETS: Final[dict[str, Callable[[Lake, Mapping[str, int], TrainConfig, Counter[str]], Rows]]] = {
    "pairs": pairs,
    "thumbs": thumbs,
    "demonstrations": demonstrations,
    "judgements": judgements,
}


def _newest(found: datasets.Dataset, config: TrainConfig, left_out: Counter[str]) -> list[dict[str, Any]]:
    """At most ``train.data.max_prompts`` rows; what is not among them is counted."""
    left_out.update(found.left_out)
    rows: list[dict[str, Any]] = found.table.filter(
        pa.array(_kept(found.table["imported"].to_pylist(), config, left_out), pa.bool_())
    ).to_pylist()
    return rows


def _kept(imported: list[bool], config: TrainConfig, left_out: Counter[str]) -> list[bool]:
    """Of rows, oldest first, which to keep: the newest of traffic, then as many of the newest imported as fit.

    An import is as young as its day, so by age alone a large one would take the place of what users said.
    """
    ranked = sorted(range(len(imported)), key=lambda i: (imported[i], -i))
    left = set(ranked[config.data.max_prompts :])
    left_out[OVER_MOST] += len(left)
    return [i not in left for i in range(len(imported))]


def _hash(prompt: tuple[int, ...]) -> str:
    return hashlib.sha256(repr(prompt).encode()).hexdigest()
