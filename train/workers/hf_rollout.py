"""Fresh responses without vLLM: transformers' generation, on the weights in training."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoConfig, GenerationConfig

from feedback.tokenizers import load_tokenizer
from feedback.trusted_code import trusted
from serve.generation.tokenizer import Text
from serve.kv_cache import token_bytes
from train.batch.packed import Sample
from train.checkpoint.random_state import seed_of
from train.config.context_length import longest_context, rollout_cache
from train.config.training import TrainConfig
from train.controller.dispatch import by_engine, dispatch, to_all
from train.controller.worker import Worker
from train.model.generation import Generated, Sampling, generate


class HfRolloutWorker(Worker):
    """One rank of all that generate together; called as ``RolloutWorker`` is. It has no weights but the actor's."""

    def __init__(self, *, policy: Path, config: TrainConfig, seed: int, **peers: object) -> None:
        super().__init__(**peers)  # type: ignore[arg-type]
        r = config.rollout
        self.text = Text(load_tokenizer(policy))
        self.stop = stop_tokens(policy, self.text.tokenizer.eos_token_id)
        self.context = longest_context(r, policy)
        self.cache = rollout_cache(config, policy).size
        self.token_bytes = token_bytes(policy, config.dtype)
        self.max_num_seqs = r.max_num_seqs
        self.sampling = Sampling(r.max_tokens, r.temperature, r.top_p, r.top_k)

    @dispatch(to_all)
    def sleep(self, _: None = None) -> None:
        """Nothing: between calls it holds nothing."""

    @dispatch(to_all)
    def load_actor_weights(self, _: int) -> None:
        """Nothing: it generates with the actor's own."""

    @dispatch(by_engine)
    def generate(
        self, prompts: list[list[int]], *, n: int, seed: int | None = None, greedy: bool = False
    ) -> list[list[Sample]]:
        """As of ``RolloutWorker.generate``; a seed gives other samples than there."""
        for prompt in prompts:
            if len(prompt) + self.sampling.max_tokens > self.context:
                raise ValueError(
                    f"a prompt of {len(prompt)} tokens and train.rollout.max_tokens={self.sampling.max_tokens} are "
                    f"more than the context of {self.context}"
                )
        if seed is None:
            seed = int(torch.randint(2**62, ()))
        # In the whole call, which is dealt out to the ranks.
        numbers = [self.rank + i * self.world_size for i in range(len(prompts))]
        seeds = [seed_of(seed, number) + i for number in numbers for i in range(n)]
        found = self._generate([prompt for prompt in prompts for _ in range(n)], seeds) if n else []
        likeliest = self._generate(prompts, None) if greedy else []
        return [found[i * n : (i + 1) * n] + likeliest[i : i + 1] for i in range(len(prompts))]

    def _generate(self, prompts: list[list[int]], seeds: list[int] | None) -> list[Sample]:
        model = self.peers["actor"].model  # type: ignore[attr-defined]
        responses = generate(model, prompts, seeds, self.sampling, self.stop, self.rows_at)
        return [self.to_sample(prompt, response) for prompt, response in zip(prompts, responses, strict=True)]

    def rows_at(self, length: int) -> int:
        """Sequences of so many tokens that are decoded at once, as far as the KV cache has room for them."""
        if self.cache is None or self.token_bytes is None:  # a model of which no size is known
            return self.max_num_seqs
        return min(self.max_num_seqs, self.cache // (self.token_bytes * length))

    def to_sample(self, prompt: list[int], response: Generated) -> Sample:
        # The token that ended a response is part of it, but not of its text.
        spoken = response.token_ids[:-1] if response.stopped else response.token_ids
        text = self.text.response(prompt, spoken)
        return Sample(response.token_ids, text, response.log_probs, "stop" if response.stopped else "length")


def stop_tokens(policy: Path, end_token: int | None) -> frozenset[int]:
    """What ends a response in vLLM: the tokenizer's end token, and those of generation_config.json, or of config.json
    where that is not there."""
    try:
        config = GenerationConfig.from_pretrained(policy)
    except OSError:
        model = AutoConfig.from_pretrained(policy, trust_remote_code=trusted(policy))
        config = GenerationConfig.from_model_config(model)
    ends = config.eos_token_id
    listed = ends if isinstance(ends, list) else [ends]
    return frozenset(token for token in (end_token, *listed) if token is not None)
