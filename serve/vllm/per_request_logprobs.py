"""vLLM's sampler, which looks for no more than was asked for, and for that of each request.

Where one request of a step asks for the logprobs of certain tokens, vLLM's V1 runner answers all requests of that step
with such logprobs: one that asked for its likeliest tokens gets token 0 at -inf instead of them, and where it sampled
token 0, that stands for the logprob it was sampled at (https://github.com/vllm-project/vllm/pull/51789). And where all
ask for the sampled token's logprob alone, as Millrace does, it ranks that token among all others. The V2 runner has
another sampler, which keeps requests apart.

The engine's process imports this module.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.v1.outputs import LogprobsTensors, SamplerOutput
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.sampler import Sampler

_FULL_VOCABULARY = -1


class PerRequestLogprobs(Sampler):
    """The sampler that answers each request with the logprobs it asked for."""

    _most: int | None = None  # likeliest tokens that a request of this step asked for
    _sampling = False

    def forward(self, logits: torch.Tensor, sampling_metadata: SamplingMetadata, *args: Any, **kwargs: Any) -> Any:
        self._most, self._sampling = sampling_metadata.max_num_logprobs, True
        try:
            output: SamplerOutput = super().forward(logits, sampling_metadata, *args, **kwargs)
        finally:
            self._sampling = False
        return output

    def gather_logprobs(self, logprobs: torch.Tensor, num_logprobs: int, token_ids: torch.Tensor) -> LogprobsTensors:
        """As vLLM's; of sampled tokens without any likeliest one, their ranks are not counted, and are 0.

        ``logprobs``: [tokens, vocabulary]; ``token_ids``: int64 [tokens].
        """
        if num_logprobs or not self._sampling:
            return super().gather_logprobs(logprobs, num_logprobs, token_ids)
        columns = token_ids.unsqueeze(-1)
        return LogprobsTensors(columns.to(torch.int32), logprobs.gather(-1, columns), torch.zeros_like(token_ids))

    def gather_specific_token_logprobs(
        self, logprobs: torch.Tensor, logprob_token_ids: dict[int, list[int]], sampled: torch.Tensor
    ) -> LogprobsTensors | None:
        """As vLLM's for the requests in ``logprob_token_ids`` (by their row); for the others their likeliest tokens.

        ``logprobs``: [requests, vocabulary]; ``sampled``: [requests]. Each row begins with the sampled token.
        """
        specific = super().gather_specific_token_logprobs(logprobs, logprob_token_ids, sampled)
        if specific is None or self._most is None:  # no other request asked for any
            return specific
        if self._most == _FULL_VOCABULARY:
            return None
        likeliest = self.gather_logprobs(logprobs, self._most, sampled)
        missing = specific.logprobs.shape[1] - likeliest.logprobs.shape[1]
        token_ids = _widened(likeliest.logprob_token_ids, missing)
        values = _widened(likeliest.logprobs, missing)
        for row, tokens in logprob_token_ids.items():
            token_ids[row, : len(tokens) + 1] = specific.logprob_token_ids[row, : len(tokens) + 1]
            values[row, : len(tokens) + 1] = specific.logprobs[row, : len(tokens) + 1]
        return LogprobsTensors(token_ids, values, likeliest.selected_token_ranks)


def install(runner: Any) -> None:
    """Have a model runner keep the logprobs of its requests apart. Raises RuntimeError if it samples in another way."""
    if runner.sampler is None:  # of a stage of a pipeline that is not its last
        return
    if runner.sampler.__class__.__module__.startswith("vllm.v1.worker.gpu."):  # the V2 runner's
        return
    if type(runner.sampler) is not Sampler or "gather_specific_token_logprobs" not in vars(Sampler):
        raise RuntimeError(
            f"vLLM samples with {type(runner.sampler).__qualname__}, which this version does not know: install the "
            "vLLM that the lock file names"
        )
    runner.sampler.__class__ = PerRequestLogprobs  # in place: speculative decoding holds a reference to it


def _widened(rows: torch.Tensor, columns: int) -> torch.Tensor:
    """``rows`` with at least so many more columns, all of them the sampled token again."""
    return rows if columns <= 0 else torch.cat((rows, rows[:, :1].expand(-1, columns)), dim=1)
