"""How vLLM is to compute prompts."""

from __future__ import annotations

import logging
from typing import Any


def prefill_arguments() -> dict[str, Any]:
    """Arguments of vLLM's engine: on a CPU, each prompt in one step, whole.

    A prompt that is split over steps has a token sampled after each part and thrown away. Of a request with a seed
    vLLM then turns its generator back, which PyTorch's generators on a CPU cannot do: the engine would die of a few
    seeded requests whose prompts don't fit into a step together. A step holds the longest context then, unless
    ``max_num_batched_tokens`` says less, which vLLM refuses. Its warning of the setting, no user's, is dropped.
    """
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return {}
    logging.getLogger("vllm.engine.arg_utils").addFilter(_not_ours)
    return {"enable_chunked_prefill": False}


def _not_ours(record: logging.LogRecord) -> bool:
    return "disabling chunked prefill" not in record.getMessage()
