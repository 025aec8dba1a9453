"""Fresh responses: vLLM inside the training processes, with the weights in training."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from evaluation.engine import Call, OfflineEngine
from serve.generation.tokenizer import Text
from serve.policies.folder import fingerprint
from serve.policies.store import Policy
from serve.vllm.boot import OFFLINE_WORKER, launched_executor, offline_engine, policy_logprobs, sampling_params
from train.batch.packed import Sample
from train.checkpoint.random_state import seed_of
from train.config.context_length import rollout_cache
from train.config.training import TrainConfig
from train.controller.dispatch import by_engine, dispatch, to_all, to_first_engine
from train.controller.worker import Worker
from train.model.hf_io import stored_in
from train.weight_sync.gather import gather
from train.weight_sync.sync import WeightSync

log = logging.getLogger(__name__)


class RolloutWorker(Worker):
    """One rank of a generation engine; its weights come from the actor in the same process.

    Its engine outlives the run: the next one takes it over, and between them it answers for an evaluation.
    """

    llm: Any
    text: Text

    def __init__(self, *, policy: Path, config: TrainConfig, seed: int, **peers: Any) -> None:
        super().__init__(**peers)
        self.config = config
        self.weight_sync: WeightSync | None = None
        self.sleeps = torch.cuda.is_available() and config.placement.rollout == config.placement.actor
        self.asleep = False
        if isinstance(self.before, RolloutWorker):
            self.llm, self.text, self.asleep = self.before.llm, self.before.text, self.before.asleep
            with self._awake():
                load_files(self.llm, policy)
        else:
            self.llm = self._boot(policy, seed)
            self.text = Text(self.llm.get_tokenizer())

    def _boot(self, policy: Path, seed: int) -> Any:
        config, r = self.config, self.config.rollout
        if self.rank == 0 and not torch.cuda.is_available():
            log.warning("no sleep on a CPU: the engine keeps its weights and its KV cache while the policy is trained")
        cache = rollout_cache(config, policy)
        on_gpu: dict[str, Any] = {}
        if torch.cuda.is_available():
            device_bytes = torch.cuda.get_device_properties(0).total_memory
            on_gpu = {
                "gpu_memory_utilization": memory_share(policy, cache.size or 0, r.tensor_parallel_size, device_bytes),
                # It numbers the devices of all ranks as if each saw all of them, and each sees its own alone.
                "disable_custom_all_reduce": True,
            }
        job = [uuid.uuid4().hex]
        torch.distributed.broadcast_object_list(job, src=0)
        llm = offline_engine(
            policy,
            dtype=config.dtype,
            seed=seed + self.rank // r.tensor_parallel_size,
            tensor_parallel_size=r.tensor_parallel_size,
            distributed_executor_backend=launched_executor(job[0]),
            max_model_len=cache.max_model_len,
            max_num_seqs=r.max_num_seqs,
            kv_cache_memory_bytes=cache.size,
            **on_gpu,
            enforce_eager=r.enforce_eager,
            enable_prefix_caching=False,  # the weights change between any two calls
            enable_sleep_mode=self.sleeps,
            logprobs_mode="processed_logprobs",
            generation_config="vllm",
            worker_extension_cls=OFFLINE_WORKER,
            disable_log_stats=True,
        )
        torch.distributed.barrier()
        # Every rank has mapped its engine's shared memory; without a name it goes with the last process.
        for segment in Path("/dev/shm").glob(f"*{job[0]}*"):
            segment.unlink(missing_ok=True)
        return llm

    @dispatch(to_all)
    def sleep(self, _: None = None) -> None:
        """Leave the GPU's memory to training until ``load_actor_weights``: neither weights nor KV cache are kept."""
        if self.sleeps and not self.asleep:
            self.llm.sleep(level=2)
            self.asleep = True

    def rest(self) -> None:
        self.weight_sync = None  # it knows the model in training
        self.sleep()

    def close(self) -> None:
        """End the engine while its process groups are there: it leaves them, this process' own too."""
        self.llm.llm_engine.engine_core.shutdown()

    @dispatch(to_all)
    def load_actor_weights(self, _: None = None) -> None:
        """Take over the weights of the actor in this process, as they are; an engine that sleeps wakes."""
        with self._awake():
            self._take_weights(self.peers["actor"].model)  # type: ignore[attr-defined]

    @contextmanager
    def _awake(self) -> Iterator[None]:
        """The engine gets its weights within, and is awake from then on."""
        if self.asleep:
            torch.cuda.empty_cache()  # what training has freed is the engine's again
            self.llm.wake_up(["weights"])
        yield
        if self.asleep:  # only here, so that the KV cache and what resharding takes are not held at once
            self.llm.wake_up(["kv_cache"])
            self.asleep = False

    def _take_weights(self, model: torch.nn.Module) -> None:
        if self.config.rollout.reshard == "gather":
            gather(model, self.llm)
            return
        if self.weight_sync is None:
            self.weight_sync = WeightSync(model, self.llm, bucket_bytes=self.config.rollout.reshard_bucket_bytes)
        self.weight_sync.run()

    @dispatch(by_engine)
    def generate(
        self, prompts: list[list[int]], *, n: int, seed: int | None = None, greedy: bool = False
    ) -> list[list[Sample]]:
        """``n`` responses to each prompt (token ids), none for 0, and after them, if asked for, the greedy one.

        Args:
            seed: of all samples of the call; equal weights and prompts give equal samples, on any number of engines.
                None: the engine's own.
        """
        if self.asleep:
            raise RuntimeError("the engine sleeps: call load_actor_weights before it generates")
        r = self.config.rollout
        engine, engines = self.rank // r.tensor_parallel_size, self.world_size // r.tensor_parallel_size
        numbers = [engine + i * engines for i in range(len(prompts))]  # in the whole call: by_engine deals them out
        same = {"max_tokens": r.max_tokens, "detokenize": False}  # text is decoded once, when it is whole
        params = [
            # vLLM adds a sample's index to the seed.
            sampling_params(
                n=n, temperature=r.temperature, seed=None if seed is None else seed_of(seed, number), **same
            )
            for number in (numbers if n else ())
        ]
        if greedy:
            params += [sampling_params(temperature=0.0, **same)] * len(prompts)
        inputs = [{"prompt_token_ids": p} for p in prompts]
        outputs = self.llm.generate(inputs * (bool(n) + greedy), params, use_tqdm=False)
        samples = [[to_sample(c, output.prompt_token_ids, self.text) for c in output.outputs] for output in outputs]
        return [[sample for of in samples[i :: len(prompts)] for sample in of] for i in range(len(prompts))]

    @dispatch(to_first_engine)
    def lend_load(self, policy: Policy) -> None:
        """Have the first engine answer for this policy, by ``lend``, until the next run."""
        with self._awake():
            load_files(self.llm, policy.path)

    @dispatch(to_first_engine)
    def lend(self, call: Call) -> Any:
        """What a method, or a property, of an evaluation's engine returns, called on the first engine."""
        with policy_logprobs(self.llm):
            return call.of(OfflineEngine.around(self.llm, eager=self.config.rollout.enforce_eager))


def load_files(llm: Any, policy: Path) -> None:
    """The weights in a policy's folder for those that are in the engine of this process; nothing but them differs."""
    files = {path.name: {"sha256": "", "fingerprint": fingerprint(path)} for path in set(stored_in(policy).values())}
    llm.collective_rpc("millrace_load", args=(str(policy), files))


def to_sample(completion: Any, prompt: list[int], text: Text) -> Sample:
    """A sample from vLLM's output, which has one logprob per token and no text."""
    token_ids, log_probs = list(completion.token_ids), list(completion.logprobs.logprobs)
    if completion.logprobs.token_ids != token_ids:
        raise ValueError(f"generation gave logprobs of {completion.logprobs.token_ids} for the tokens {token_ids}")
    if not torch.tensor(log_probs).isfinite().all():
        raise FloatingPointError(f"generation gave logprobs that are not finite: {log_probs}")
    # The token that ended a response is part of it, but not of its text.
    spoken = token_ids[:-1] if completion.finish_reason == "stop" else token_ids
    return Sample(token_ids, text.response(prompt, spoken), log_probs, completion.finish_reason)


def memory_share(policy: Path, kv_cache_bytes: int, tensor_parallel_size: int, device_bytes: int) -> float:
    """The share of a device's memory that must be free for an engine on it, beside what training holds there.

    vLLM refuses to start if less is, and its default is 92 %, however small the KV cache. A tenth is for buffers.
    """
    weights = sum(file.stat().st_size for file in policy.glob("*.safetensors"))
    return min(1.0, 1.1 * (weights / tensor_parallel_size + kv_cache_bytes) / device_bytes)
