"""The packed batch: flat tokens and sequence offsets, never padding.

Sequence ``s`` is ``tokens[cu_seqlens[s] : cu_seqlens[s + 1]]``, its prompt first. A per-token tensor has the length
of ``tokens``; its entry at ``t`` speaks of token ``t`` given those before it, and counts only where ``response_mask``
is set: where a policy sampled it. In an episode of several turns, what the environment said between them is not.

An *episode* is what a reward is of: a response, or all turns with an environment or of a logged conversation. It is one
sequence, or several that follow each other, where the chat template rewrote the turns before (``train.environments``).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any, Final

import torch
from torch import Tensor

from train.batch.packing import EVEN, balance, fill
from train.batch.prompt_rows import families


@dataclass(frozen=True)
class Sample:
    """A response that generation sampled. ``log_probs``: nats, of the distribution it was sampled from, by token.

    ``policies``: (first token, version of the policy in training) for each that sampled a part of it, rising.
    """

    token_ids: list[int]
    text: str
    log_probs: list[float]
    finish_reason: str | None
    policies: list[tuple[int, int]] = field(default_factory=list)


@dataclass(frozen=True)
class Rollout:
    """One response and what it was worth.

    ``log_probs``: nats, of the behaviour policy, one per response token. ``truncated``: it ended at the longest length.
    ``fresh``: sampled by this run. ``baseline``: reward of the greedy response to its prompt, where that is asked for.
    ``token_rewards``: what came with each response token, where that is known; they add up to ``reward``. ``weight``:
    of what was judged, in the likelihood of a reward model.

    ``sampled``: which of the response's tokens a policy sampled, the last one always; None: all. The others, what an
    environment said between two turns, are context, with logprobs and rewards of 0. ``earlier``: of the same episode,
    the sequences of the turns before, if the turns are sequences of their own; ``reward`` is of the whole episode.

    ``policies``: as of a ``Sample``; none of a response that another run's policies sampled.
    """

    prompt: list[int]
    response: list[int]
    log_probs: list[float]
    reward: float
    group: int
    temperature: float = 1.0
    truncated: bool = False
    fresh: bool = True
    baseline: float = 0.0
    token_rewards: list[float] | None = None
    weight: float = 1.0
    sampled: list[bool] | None = None
    earlier: tuple[Rollout, ...] = ()
    policies: Sequence[tuple[int, int]] = ()

    def in_group(self, group: int) -> Rollout:
        """The same, with all of its episode, in another group."""
        return replace(self, group=group, earlier=tuple(before.in_group(group) for before in self.earlier))

    @property
    def sampled_tokens(self) -> int:
        """Tokens that a policy sampled in the whole episode."""
        own = len(self.response) if self.sampled is None else sum(self.sampled)
        return own + sum(before.sampled_tokens for before in self.earlier)

    @property
    def turns(self) -> int:
        """Turns of the whole episode: each a run of tokens that a policy sampled."""
        own = self.sampled or [True]
        return sum(now and not before for before, now in zip([False, *own], own, strict=False)) + sum(
            before.turns for before in self.earlier
        )

    @property
    def tokens_by_policy(self) -> Counter[int]:
        """Tokens of the whole episode that each version of the policy in training has sampled."""
        found = sum((before.tokens_by_policy for before in self.earlier), Counter[int]())
        ends = [*(start for start, _ in self.policies[1:]), len(self.response)]
        for (start, version), end in zip(self.policies, ends, strict=False):
            found[version] += end - start if self.sampled is None else sum(self.sampled[start:end])
        return found


PER_SEQUENCE: Final = frozenset(
    (
        *("prompt_lengths", "temperatures", "rewards", "groups", "truncated", "fresh", "baselines", "weights"),
        *("episodes", "episode_lengths"),
    )
)
"""Fields of a batch with one value per sequence."""


@dataclass(frozen=True)
class PackedBatch:
    """S sequences of T tokens in all.

    ``whole_groups``: sequences of a group are kept together, on a rank and in a micro-batch.
    """

    tokens: Tensor  # int64 [T]
    cu_seqlens: Tensor  # int64 [S + 1]
    prompt_lengths: Tensor  # int64 [S]
    temperatures: Tensor  # float32 [S]
    rewards: Tensor  # float32 [S]
    groups: Tensor  # int64 [S]
    truncated: Tensor  # bool [S]
    fresh: Tensor  # bool [S]
    baselines: Tensor  # float32 [S]
    weights: Tensor  # float32 [S]
    episodes: Tensor  # int64 [S], a number for each; its sequences follow each other, in the order of its turns
    episode_lengths: Tensor  # int64 [S], tokens that were sampled in the sequence's whole episode
    response_mask: Tensor  # bool [T], the tokens that a policy sampled
    behaviour_log_probs: Tensor  # float32 [T]
    token_rewards: Tensor | None = None  # float32 [T], 0 at prompts; None: all rewards come with the last token
    advantages: Tensor | None = None  # float32 [T]
    old_log_probs: Tensor | None = None  # float32 [T]
    ref_log_probs: Tensor | None = None  # float32 [T]
    values: Tensor | None = None  # float32 [T], of the critic, before each token
    returns: Tensor | None = None  # float32 [T], what the critic learns
    entropy: Tensor | None = None  # float32 [T], of the policy in training before each token, with gradient
    whole_groups: bool = False

    @classmethod
    def pack(cls, rollouts: Sequence[Rollout]) -> PackedBatch:
        """Lay rollouts end to end.

        Raises:
            ValueError: no rollouts, an empty prompt or response, logprobs that don't match the response, or one whose
                last token was not sampled.
        """
        if not rollouts:
            raise ValueError("a batch needs at least one rollout")
        whole, rollouts = rollouts, [part for rollout in rollouts for part in (*rollout.earlier, rollout)]
        for i, r in enumerate(rollouts):
            if not r.prompt or not r.response:
                raise ValueError(
                    f"rollout {i} has {len(r.prompt)} prompt and {len(r.response)} response tokens; both must be > 0"
                )
            if len(r.log_probs) != len(r.response):
                raise ValueError(f"rollout {i} has {len(r.log_probs)} logprobs for {len(r.response)} response tokens")
            if r.token_rewards is not None and len(r.token_rewards) != len(r.response):
                raise ValueError(f"rollout {i} has {len(r.token_rewards)} rewards for {len(r.response)} tokens")
            if r.sampled is not None and (len(r.sampled) != len(r.response) or not r.sampled[-1]):
                raise ValueError(
                    f"rollout {i}: sampled has {len(r.sampled)} entries for {len(r.response)} tokens; the last must be "
                    "sampled"
                )
        lengths = torch.tensor([len(r.prompt) + len(r.response) for r in rollouts])
        return cls(
            tokens=torch.tensor([t for r in rollouts for t in (*r.prompt, *r.response)]),
            cu_seqlens=offsets(lengths),
            prompt_lengths=torch.tensor([len(r.prompt) for r in rollouts]),
            temperatures=torch.tensor([r.temperature for r in rollouts], dtype=torch.float32),
            rewards=torch.tensor([r.reward for r in rollouts], dtype=torch.float32),
            groups=torch.tensor([r.group for r in rollouts]),
            truncated=torch.tensor([r.truncated for r in rollouts]),
            fresh=torch.tensor([r.fresh for r in rollouts]),
            baselines=torch.tensor([r.baseline for r in rollouts], dtype=torch.float32),
            weights=torch.tensor([r.weight for r in rollouts], dtype=torch.float32),
            episodes=torch.tensor([e for e, r in enumerate(whole) for _ in (*r.earlier, r)]),
            episode_lengths=torch.tensor([r.sampled_tokens for r in whole for _ in (*r.earlier, r)]),
            response_mask=torch.tensor(
                [s for r in rollouts for s in (*[False] * len(r.prompt), *(r.sampled or [True] * len(r.response)))]
            ),
            behaviour_log_probs=torch.tensor(
                [p for r in rollouts for p in (*([0.0] * len(r.prompt)), *r.log_probs)], dtype=torch.float32
            ),
            token_rewards=_token_rewards(rollouts),
        )

    def __len__(self) -> int:
        return len(self.prompt_lengths)

    @property
    def lengths(self) -> Tensor:
        """int64 [S]: tokens of each sequence."""
        return self.cu_seqlens.diff()

    @property
    def response_lengths(self) -> Tensor:
        """int64 [S]: tokens that were sampled of each."""
        return self.response_sums(torch.ones_like(self.tokens))

    @property
    def position_ids(self) -> Tensor:
        """int64 [T]: a token's place in its own sequence."""
        return places(self.lengths)

    def per_token(self, per_sequence: Tensor) -> Tensor:
        """[S] → [T]: a sequence's value at each of its tokens."""
        return per_sequence.repeat_interleave(self.lengths)

    def response_sums(self, per_token: Tensor) -> Tensor:
        """[T] → [S]: the sum over the tokens that were sampled of each."""
        sequence = torch.arange(len(self)).repeat_interleave(self.lengths)
        return per_token.new_zeros(len(self)).index_add(0, sequence, per_token * self.response_mask)

    def with_(self, **fields: Any) -> PackedBatch:
        """The batch with some of its fields replaced."""
        return replace(self, **fields)

    def select(self, sequences: Tensor | Sequence[int]) -> PackedBatch:
        """The named sequences, in that order, as a batch of their own."""
        sequences = torch.as_tensor(sequences, dtype=torch.int64)
        cu_seqlens = offsets(self.lengths[sequences])
        token_index = self.token_index(sequences)
        picked: dict[str, Any] = {"cu_seqlens": cu_seqlens, "whole_groups": self.whole_groups}
        for of in fields(self):
            value = getattr(self, of.name)
            if of.name not in picked:
                index = sequences if of.name in PER_SEQUENCE else token_index
                picked[of.name] = None if value is None else value[index]
        return PackedBatch(**picked)

    def token_index(self, sequences: Tensor) -> Tensor:
        """int64: the places of the tokens of the named sequences (int64 [n]), in that order."""
        lengths = self.lengths[sequences]
        return places(lengths) + self.cu_seqlens[sequences].repeat_interleave(lengths)

    def balanced(self, parts: int) -> list[Tensor]:
        """Sequence indices for each of ``parts`` ranks, which have about as many tokens to compute.

        Responses to one prompt go to one rank, which computes it once, as far as that leaves no rank with much more
        than the others; see ``train.batch.packing.balance``.

        Raises:
            ValueError: fewer sequences than parts.
        """
        if (count := len(self.units())) < parts:
            what = "groups" if self.whole_groups else "sequences"
            raise ValueError(f"{count} {what} cannot be split over {parts} ranks; each needs at least one")
        best: tuple[int, list[Tensor]] | None = None
        for units in self._ways():
            if len(units) < parts:
                continue
            costs = self._computed(units)
            split = balance(costs, parts)
            most = max(sum(costs[u] for u in part) for part in split)
            if best is None or most < best[0]:
                best = most, _joined(units, split)
            if most * parts <= EVEN * sum(costs):
                break
        assert best is not None
        return best[1]

    def micro_batches(self, tokens: int, at_least: int = 1) -> list[Tensor]:
        """Sequence indices in few groups of about equal size; see ``train.batch.packing.fill``.

        Responses to one prompt are in one group, as far as that takes no more groups.

        Args:
            tokens: the most that are computed for a group, the prompt of several responses once; a longer sequence
                goes alone.
            at_least: groups that are wanted even if fewer would do; there are never more than sequences.
        """
        best: tuple[tuple[int, int, int], list[Tensor]] | None = None
        for units in self._ways(tokens):
            costs = self._computed(units)
            groups = fill(costs, tokens, at_least)
            price = max(0, at_least - len(groups)), len(groups), sum(costs)
            if best is None or price < best[0]:
                best = price, _joined(units, groups)
            if len(groups) == max(at_least, -(-sum(costs) // tokens)):
                break
        assert best is not None
        return best[1]

    def units(self) -> list[list[int]]:
        """Indices of the sequences that have to stay together, ascending: each by itself, or by groups."""
        if not self.whole_groups:
            return [[s] for s in range(len(self))]
        members: dict[int, list[int]] = {}
        for s, group in enumerate(self.groups.tolist()):
            members.setdefault(group, []).append(s)
        return [members[group] for group in sorted(members)]

    @cached_property
    def _families(self) -> list[list[int]]:
        return families(self.tokens, self.cu_seqlens[:-1].tolist(), self.prompt_lengths.tolist())

    def _ways(self, budget: int | None = None) -> Iterator[list[list[int]]]:
        """Ways to keep sequences together: all responses to a prompt, half of them, a quarter, down to each alone.

        None of several sequences needs more than ``budget`` tokens computed.
        """
        if self.whole_groups:
            yield self.units()
            return
        lengths, prompts = self.lengths.tolist(), self.prompt_lengths.tolist()
        members = [sorted(family, key=lambda s: (-lengths[s], s)) for family in self._families]
        pieces, most = 1, max(len(family) for family in members)
        while True:
            units = []
            for family in members:
                prompt = prompts[family[0]]
                rest = [lengths[s] - prompt for s in family]
                count = min(pieces, len(family))
                while budget is not None and count < len(family) and prompt + sum(rest[::count]) > budget:
                    count += 1
                units += [family[i::count] for i in range(count)]
            yield units
            if pieces >= most:
                return
            pieces *= 2

    def _computed(self, units: list[list[int]]) -> list[int]:
        """Tokens that a model computes for each unit: each prompt once."""
        lengths, prompts = self.lengths.tolist(), self.prompt_lengths.tolist()
        family = {s: members[0] for members in self._families for s in members}
        return [
            sum(lengths[s] - prompts[s] for s in unit) + sum(prompts[first] for first in {family[s] for s in unit})
            for unit in units
        ]

    def minibatches(self, count: int, seed: int | None = None) -> Iterator[PackedBatch]:
        """``count`` batches of whole groups, about equal in groups.

        Args:
            seed: of the order in which groups are dealt out, a function of it alone; None: by their numbers.
        """
        names = self.groups.unique()
        if seed is not None:
            names = names[torch.randperm(len(names), generator=torch.Generator().manual_seed(seed))]
        for chunk in names.tensor_split(min(count, len(names))):
            yield self.select(torch.isin(self.groups, chunk).nonzero().flatten())


def _token_rewards(rollouts: Sequence[Rollout]) -> Tensor | None:
    """float32 [T]; None if no rollout has any."""
    if all(r.token_rewards is None for r in rollouts):
        return None
    rewards = []
    for r in rollouts:
        last = [0.0] * (len(r.response) - 1) + [r.reward]
        rewards += [0.0] * len(r.prompt) + (last if r.token_rewards is None else r.token_rewards)
    return torch.tensor(rewards, dtype=torch.float32)


def offsets(lengths: Tensor) -> Tensor:
    """int64 [S] → int64 [S + 1]: where each sequence starts, and the end."""
    return torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])


def places(lengths: Tensor) -> Tensor:
    """int64 [S] → int64 [sum]: 0, 1, … for each of the lengths."""
    return torch.arange(int(lengths.sum())) - offsets(lengths)[:-1].repeat_interleave(lengths)


def _joined(units: list[list[int]], parts: list[list[int]]) -> list[Tensor]:
    """The sequences of each part's units, ascending: int64."""
    return [torch.tensor(sorted(s for u in part for s in units[u])) for part in parts]
