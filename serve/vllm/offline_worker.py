"""What an offline engine's worker has beside vLLM's: other weights, and the log-probabilities of a prompt's tokens at
another temperature than 1.

vLLM scores a prompt by the model's plain logits ("prompt tokens skip sampling processors",
``GPUModelRunner._get_prompt_logprobs_dict``), while a response's logprobs are those at its temperature. So the logits
are divided where the model computes them, in float32, as vLLM's sampler divides them.

vLLM's worker imports this module because ``worker_extension_cls`` names ``OfflineWorker``.
"""

from __future__ import annotations

from typing import Any

from serve.vllm.weight_update import LoadsWeights


class OfflineWorker(LoadsWeights):
    """What is added to vLLM's worker; called through ``collective_rpc``."""

    def millrace_set_prompt_temperature(self, temperature: float) -> None:
        """Divide all logits by it from now on, what is sampled by included. 1: as the model has them.

        Raises RuntimeError if the model computes no logits.
        """
        model = self.model_runner.get_model()
        vars(model).pop("compute_logits", None)  # the one that was set before, which hides the class's own
        compute_logits = getattr(model, "compute_logits", None)
        if compute_logits is None:
            raise RuntimeError(f"{type(model).__name__} has no compute_logits: it can't score at a temperature")
        if temperature == 1:
            return

        def tempered(*args: Any, **kwargs: Any) -> Any:
            logits = compute_logits(*args, **kwargs)
            return None if logits is None else logits.float() / temperature  # None: of ranks that gather nothing

        model.compute_logits = tempered
