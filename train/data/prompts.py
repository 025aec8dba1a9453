"""What the steps of a run draw: prompts to sample responses for, and logged responses."""

from __future__ import annotations

import hashlib
import json
import math
import random
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import chain
from pathlib import Path
from typing import Any, Literal

import numpy as np

from evaluation.suites.held_out import HELD_OUT, IN_SLICE, HeldOut
from evaluation.suites.suite import Suite
from feedback.datasets import Prompt, prompts, redacted
from feedback.lake.tables import Lake
from serve.policies.store import MANIFEST
from train.batch.packed import Rollout
from train.config.algorithms import ONLINE_DPO
from train.config.context_length import longest_context, longest_prompt
from train.config.training import TrainConfig
from train.data import own_prompts, pass_rates
from train.data.logged.traffic import Traffic
from train.data.own_prompts import DUPLICATE, OwnPrompts


@dataclass(frozen=True)
class TrainingData:
    """Prompts, and logged responses to the same prompt each, in the order in which a run's steps draw them."""

    prompts: Cycled | Mixed
    traffic: Cycled
    summary: str  # how much there is, and what was left out and why
    left_out: int  # logged responses that can't be learned from
    digest: str  # of all of it
    own: list[OwnPrompts] = field(default_factory=list)  # of train.data.prompts, in their order
    learned_prompts: frozenset[str] = frozenset()  # hashes of them all, as suites know prompts
    held_out: Sequence[Prompt] = ()  # of train.evaluate_suite
    split: Mapping[str, int] = field(default_factory=dict)  # as of ``Traffic``

    @classmethod
    def of(
        cls,
        lake: Lake,
        versions: Mapping[str, int],
        config: TrainConfig,
        policy: Path,
        seed: int,
        singleton_baseline: Literal["batch", "leave_out"] | None = None,
    ) -> TrainingData:
        """What the lake held at these versions.

        Args:
            policy: folder of the parent, in the policy store.
            singleton_baseline: as of ``Traffic.of``.

        Raises:
            feedback.lake.tables.LakeError: it can't be read any more.
            evaluation.suites.suite.SuiteError: a suite whose prompts are to be left out can't be read.
            ValueError: train.rollout leaves no room for a prompt in the model's context, or for one of
                train.evaluate_suite; or
                ``feedback.exchange.record_files.RecordError``, a file of train.data.prompts can't be read.
        """
        data = config.data
        held_out = HeldOut.load(data.exclude_suites, policy, data.holdout, data.holdout_side)
        own: list[OwnPrompts] = []
        if data.prompts:
            own = _own_prompts(config, policy, held_out)
        in_files = {tuple(prompt.prompt_token_ids) for of in own for prompt in of.prompts}
        found: list[Prompt] = []
        from_traffic = data.fresh_prompts_per_step > 0 and data.traffic_weight > 0
        if from_traffic:  # more, in place of those that are held out or in the files
            limit = math.ceil((data.max_prompts + len(held_out.items) + len(in_files)) / (1 - data.holdout))
            found = prompts(lake, versions=versions, limit=limit)
        reasons = [held_out.reason(vars(p)) for p in found]
        kept = [p for p, reason in zip(found, reasons, strict=True) if reason is None]
        asked = [p for p in kept if tuple(p.prompt_token_ids) not in in_files]
        allowed, repeated = asked[: data.max_prompts], len(kept) - len(asked)
        longest = longest_prompt(config.rollout, policy) if allowed else 0
        usable = [p for p in allowed if len(p.prompt_token_ids) <= longest]
        logged: Sequence[list[Rollout]] = ()
        traffic: Traffic | None = None
        per_step = data.traffic_prompts_per_step
        if per_step:

            def drawn(groups: int) -> Iterable[int]:
                return Cycled(range(groups), min(per_step, groups), f"{seed}:traffic").drawn_before(config.steps)

            traffic = Traffic.read(
                lake,
                versions,
                drawn,
                parent=json.loads((policy / MANIFEST).read_bytes())["version"],
                max_staleness=config.algorithm.correction.max_staleness,
                longest=longest_context(config.rollout, policy),
                singleton_baseline=singleton_baseline,
                filter_groups=singleton_baseline is not None and config.algorithm.filter_groups,
                held_out=held_out,
                sessions=data.sessions == "episodes",
                splits=config.algorithm.name != ONLINE_DPO,
                by_turn=config.algorithm.credit == "turn",
                mean=data.session_reward == "mean",
                folder=config.runs if config.runs.is_dir() else None,
            )
            logged = traffic.groups
        fresh = ""
        if from_traffic:
            fresh = f"{len(usable)} prompts{' of traffic' if own else ''} "
            fresh += f"(left out: {len(allowed) - len(usable)} too long, "
            fresh += f"{reasons.count(HELD_OUT)} {HELD_OUT}"
            fresh += f", {reasons.count(IN_SLICE)} {IN_SLICE}" if data.holdout else ""
            fresh += (f", {repeated} {DUPLICATE}" if own else "") + ")"
        out = redacted(lake, versions=versions)
        without = f"{out} redacted responses and their prompts left out" if out else ""
        content: list[Iterable[str]] = [
            repr_pieces([p.prompt_token_ids for p in usable], 1),
            [traffic.digest if traffic is not None else "[]"],
        ]
        asked_for = Cycled(usable, data.fresh_prompts_per_step, f"{seed}:prompts")
        if own:
            content.append(repr_pieces([of.prompts for of in own], 2))
        evaluated: list[Prompt] = []
        if config.evaluate_suite is not None:
            longest = longest_prompt(config.rollout, policy)
            evaluated = own_prompts.of_suite(Suite.load(config.evaluate_suite), policy, longest)
            content.append(repr_pieces(evaluated, 1))
        read = [*usable, *(prompt for of in own for prompt in of.prompts)]
        return cls(
            learned_prompts=frozenset(traffic.learned_prompts if traffic is not None else ()).union(
                *(held_out.keys(vars(prompt)) for prompt in read)
            ),
            prompts=Mixed.of(asked_for, data.traffic_weight, own) if own else asked_for,
            traffic=Cycled(logged, min(per_step, len(logged)), f"{seed}:traffic"),
            summary=", ".join(part for part in (fresh, *map(str, own), str(traffic or ""), without) if part),
            left_out=sum(traffic.left_out.values()) if traffic is not None else 0,
            digest=sha256_of(chain.from_iterable(content)),
            own=own,
            held_out=evaluated,
            split=traffic.split if traffic is not None else {},
        )

    @property
    def prompts_left_out(self) -> dict[str, float]:
        """Metrics: rows of train.data.prompts that were left out, by reason."""
        counts: Counter[str] = Counter()
        for of in self.own:
            counts.update(of.left_out)
        return {f"prompts_left_out/{reason.replace(' ', '_')}": float(n) for reason, n in sorted(counts.items())}

    @property
    def conversations_split(self) -> dict[str, float]:
        """Metrics: turns of logged conversations that begin a sequence of their own, by reason."""
        return {f"traffic_split/{reason.replace(' ', '_')}": float(n) for reason, n in sorted(self.split.items())}

    @property
    def usable(self) -> int:
        """Prompts that there are: to sample responses for or, if none are sampled, with logged ones."""
        return len(self.prompts.items) if self.prompts.count else len(self.traffic.items)

    def __str__(self) -> str:
        return self.summary


def _own_prompts(config: TrainConfig, policy: Path, held_out: HeldOut) -> list[OwnPrompts]:
    window = config.data.pass_rate
    counts = pass_rates.of_lineage(window, policy, config.runs) if window else {}

    def unfit(prompt: Prompt) -> str | None:
        if reason := held_out.reason(vars(prompt)):
            return reason
        return pass_rates.left_out(window, counts, prompt.prompt_token_ids) if window else None

    return own_prompts.read_all(config.data.prompts, policy, longest_prompt(config.rollout, policy), unfit)


@dataclass(frozen=True)
class Cycled:
    """``count`` items per step, endlessly: every item once, in a new order, before any comes again.

    What a step gets is a function of the items, the seed and the step alone, so that a run that goes on from a step
    draws what it would have drawn.
    """

    items: Sequence[Any]
    count: int
    seed: str

    def drawn_before(self, step: int) -> Sequence[Any]:
        """The items that steps before this one draw, each once."""
        drawn = step * self.count
        return self.items if drawn >= len(self.items) else self.draws(0, drawn)

    def at(self, step: int) -> list[Any]:
        """The items of a step; none if there are none."""
        return self.draws(step * self.count, self.count)

    def draws(self, first: int, count: int) -> list[Any]:
        """``count`` items from the draw numbered ``first`` on."""
        if not self.items or not count:
            return []
        size = len(self.items)
        orders = {t: _order(f"{self.seed}:{t}", size) for t in range(first // size, (first + count - 1) // size + 1)}
        return [self.items[orders[i // size][i % size]] for i in range(first, first + count)]


@lru_cache(maxsize=8)  # a curriculum looks at one step after the other
def _order(seed: str, size: int) -> array[int]:
    return array("q", random.Random(seed).sample(range(size), size))


@dataclass(frozen=True)
class Mixed:
    """``count`` items per step of several sources, each as often as its weight says, as evenly as can be.

    Like ``Cycled``, what a step gets follows from the items, the seed and the step alone.
    """

    sources: list[Cycled]
    """None is empty."""
    weights: list[float]
    count: int

    @classmethod
    def of(cls, traffic: Cycled, traffic_weight: float, own: list[OwnPrompts]) -> Mixed:
        """Prompts of traffic and of one's own; sources without any don't count."""
        parts = [(traffic.items, traffic_weight), *((of.prompts, of.weight) for of in own)]
        numbered = [(items, weight, number) for number, (items, weight) in enumerate(parts) if items and weight]
        sources = [Cycled(items, 1, f"{traffic.seed}:{number}") for items, _, number in numbered]
        return cls(sources, [weight for _, weight, _ in numbered], traffic.count)

    @property
    def items(self) -> list[Any]:
        """All of them."""
        return [item for source in self.sources for item in source.items]

    def at(self, step: int) -> list[Any]:
        """The items of a step; none if there are none."""
        if not self.sources or not self.count:
            return []
        last = (step + 1) * self.count
        # The k-th draw of a source is due at (k + 1/2) / weight: in this order the sources take turns.
        share = np.array(self.weights) / sum(self.weights)
        due = [(np.arange(int(last * part) + 2) + 0.5) / part for part in share]
        source = np.repeat(np.arange(len(due)), [len(times) for times in due])
        turns = source[np.argsort(np.concatenate(due), kind="stable")][:last]
        before, now = (np.bincount(part, minlength=len(due)) for part in (turns[: -self.count], turns[-self.count :]))
        drawn = [iter(of.draws(int(k), int(n))) for of, k, n in zip(self.sources, before, now, strict=True)]
        return [next(drawn[i]) for i in turns[-self.count :]]


def sha256_of(pieces: Iterable[str]) -> str:
    """The sha256 of a text in pieces, which is never there as a whole."""
    found = hashlib.sha256()
    for piece in pieces:
        found.update(piece.encode())
    return found.hexdigest()


def repr_pieces(value: object, depth: int) -> Iterator[str]:
    """``repr(value)`` in pieces: lists, down to a depth, item by item."""
    if depth == 0 or not isinstance(value, list):
        yield repr(value)
        return
    yield "["
    for number, item in enumerate(value):
        if number:
            yield ", "
        yield from repr_pieces(item, depth - 1)
    yield "]"
