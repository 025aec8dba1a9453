"""Fresh responses and episodes: vLLM inside the training processes, with the weights in training."""

from __future__ import annotations

import json
import logging
import math
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch

from evaluation.engine import Call, OfflineEngine
from feedback.datasets import Prompt
from feedback.tokenizers import load_tokenizer
from serve.generation.tokenizer import Text
from serve.policies.folder import fingerprint
from serve.policies.store import Policy
from serve.vllm.adapters.slots import adapter_arguments
from serve.vllm.boot import (
    OFFLINE_WORKER,
    launched_executor,
    offline_engine,
    policy_logprobs,
    sampling_params,
    spans_of,
)
from train import environments
from train.batch.packed import Sample
from train.checkpoint.random_state import seed_of
from train.config.context_length import rollout_cache
from train.config.sections import RolloutConfig
from train.config.training import TrainConfig
from train.controller.dispatch import Layout, Split, by_engine, dispatch, to_all, to_engines
from train.controller.worker import Worker
from train.environments.engine_loop import Player, Start
from train.environments.environment import EpisodePrompt
from train.environments.episode_loop import Limits
from train.host_memory.parking_worker import ParkingWorker
from train.model.hf_io import stored_in
from train.model.low_precision.float8 import require_fp8
from train.planner.engine_memory import engine_share
from train.rollouts.request import Request, requests_of
from train.rollouts.responses import Responses, Sampling, until_ended
from train.weight_sync.adapters import NUMBER, begin_adapters, sync_adapters
from train.weight_sync.gather import gather
from train.weight_sync.sync import WeightSync

log = logging.getLogger(__name__)


def _over_engines(layout: Layout, call: Call) -> Split:
    calls, together = call.dealt(layout.ranks // layout.tensor_parallel_size)
    parts, join = to_engines(layout, calls)
    return parts, lambda answers: together(join(answers))


class RolloutWorker(Worker):
    """One rank of a generation engine; its weights come from the actor in the same process.

    Its engine outlives the run: the next one takes it over, and between them it answers for an evaluation.
    """

    llm: Any
    text: Text

    def __init__(self, *, policy: Path, config: TrainConfig, seed: int, **peers: Any) -> None:
        super().__init__(**peers)
        self.config = config
        self.adapter = NUMBER if config.generates_beside_adapters else None
        self.weight_sync: WeightSync | None = None
        self.ended: dict[str, Any] = {}
        self.sleeps = torch.cuda.is_available() and config.placement.rollout == config.placement.actor
        self.asleep = False
        self.dozes = False
        """Whether the weights that it had when it fell asleep are kept, and it goes on with them."""
        self.parks = bool(config.fsdp.offload_while_generating)
        self._park()
        if isinstance(self.before, RolloutWorker):
            self.llm, self.asleep = self.before.llm, self.before.asleep
            self.before.sampling.abort()  # of a run that has failed
            self.text = Text(load_tokenizer(policy))  # it may have another chat template
            with self._awake():
                load_files(self.llm, policy)
        else:
            self.llm = self._boot(policy, seed)
            self.text = Text(self.llm.get_tokenizer())
        if self.adapter is not None:
            begin_adapters(self.llm)
        self.prefixes = 0
        """How often vLLM's cache of prefixes has begun anew."""
        self.sampling: Sampling = self._player() if config.environment is not None else self._responses()
        self._begin(0)

    def _boot(self, policy: Path, seed: int) -> Any:
        config, r = self.config, self.config.rollout
        if config.fp8 is not None and config.fp8.rollout is not None:
            require_fp8(config.fp8, "rollout")
        if self.rank == 0 and not torch.cuda.is_available():
            log.warning("no sleep on a CPU: the engine keeps its weights and its KV cache while the policy is trained")
        cache = rollout_cache(config, policy)
        adapters = {} if self.adapter is None else room_for_adapter(config, policy)
        on_gpu: dict[str, Any] = {}
        if torch.cuda.is_available():
            device = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
            visible = torch.cuda.device_count()
            on_gpu = {
                "gpu_memory_utilization": engine_share(config, policy, kv_cache=cache.size or 0, device=device),
                "disable_custom_all_reduce": all_reduce_off(config.launcher, r.tensor_parallel_size, visible),
            }
        job = [uuid.uuid4().hex]
        torch.distributed.broadcast_object_list(job, src=0)
        threads = torch.get_num_threads()
        llm = offline_engine(
            policy,
            dtype=config.dtype,
            quantization=None if config.fp8 is None else config.fp8.rollout,
            seed=seed + self.rank // r.tensor_parallel_size,
            tensor_parallel_size=r.tensor_parallel_size,
            distributed_executor_backend=launched_executor(job[0]),
            max_model_len=cache.max_model_len,
            max_num_seqs=r.max_num_seqs,
            kv_cache_memory_bytes=cache.size,
            **on_gpu,
            enforce_eager=r.is_eager,
            enable_prefix_caching=r.enable_prefix_caching,
            # A step that runs ahead of its output would be labelled by the weights that came after it.
            async_scheduling=False if r.staleness > 0 else None,
            enable_sleep_mode=self.sleeps,
            logprobs_mode="processed_logprobs",
            generation_config="vllm",
            worker_extension_cls=OFFLINE_WORKER,
            disable_log_stats=True,
            **adapters,
        )
        if torch.cuda.is_available():
            torch.set_num_threads(threads)  # vLLM leaves one, and an optimizer in the host's memory needs all
        torch.distributed.barrier()
        # Every rank has mapped its engine's shared memory; without a name it goes with the last process.
        for segment in Path("/dev/shm").glob(f"*{job[0]}*"):
            segment.unlink(missing_ok=True)
        return llm

    @dispatch(to_all)
    def sleep(self, _: None = None) -> None:
        """Leave the GPU's memory to training until ``load_actor_weights``: neither weights nor KV cache are kept.

        What is under way computes its tokens so far once more when the engine wakes. Weights that training doesn't have
        to give, as only adapters change, wait in the host's memory.
        """
        if self.sleeps and not self.asleep:
            self.llm.sleep(level=2 if self.adapter is None else 1, mode="keep")
            self.asleep = True

    def make_room(self) -> None:
        """Leave the GPU's memory to a model that was away, until responses are sampled again: its weights are kept in
        the host's."""
        if self.sleeps and not self.asleep:
            self.llm.sleep(level=1, mode="keep")
            self.asleep = self.dozes = True

    def rest(self) -> None:
        self.weight_sync = None  # it knows the model in training
        self.sampling.abort()
        self.ended.clear()
        self.sleep()

    def close(self) -> None:
        """End the engine while its process groups are there: it leaves them, this process' own too."""
        self.llm.llm_engine.engine_core.shutdown()

    @dispatch(to_all)
    def load_actor_weights(self, version: int) -> None:
        """Take over the weights of the actor in this process, as they are; an engine that sleeps wakes.

        ``version``: what the tokens are labelled with that they sample; responses that are under way go on.
        """
        actor: Any = self.peers["actor"]
        if self.parks:
            self.sleep()
            self._park(actors_weights=False)
            actor.restore(state=False)
        with self._awake():
            self._take_weights(actor.model)
            self._park()
        self._begin(version)

    def _park(self, *, actors_weights: bool = True) -> None:
        """Where it is to be so, have the models in training, and their optimizers' state, wait in the host's memory."""
        if not self.parks:
            return
        for role, worker in self.peers.items():
            if isinstance(worker, ParkingWorker):
                worker.park(weights=actors_weights or role != "actor")
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def _begin(self, version: int) -> None:
        """Have what begins from here on be of the weights that are there now, and of no others."""
        self.llm.llm_engine.set_weight_version(str(version))
        self._forget_prefixes()

    def _forget_prefixes(self) -> None:
        """Have nothing that was computed before be read by a request that begins from here on.

        A request reads prefixes of its own salt alone. So it holds where others are under way, too, which keep vLLM
        from emptying its cache; those go on with what they have.
        """
        self.prefixes += 1
        if not self.sampling.busy:
            self.llm.reset_prefix_cache()

    def _salt(self) -> str:
        return str(self.prefixes)

    @contextmanager
    def _awake(self) -> Iterator[None]:
        """The engine gets its weights within, and is awake from then on."""
        if self.asleep:
            torch.cuda.empty_cache()  # what training has freed is the engine's again
            self.llm.wake_up(["weights"])
        yield
        if self.asleep:  # only here, so that the KV cache and what resharding takes are not held at once
            self.llm.wake_up(["kv_cache"])
            self.asleep = self.dozes = False

    def _take_weights(self, model: torch.nn.Module) -> None:
        if self.adapter is not None:
            sync_adapters(model, self.llm)
            return
        if self.config.rollout.reshard == "gather":
            gather(model, self.llm)
            return
        if self.weight_sync is None:
            self.weight_sync = WeightSync(model, self.llm, bucket_bytes=self.config.rollout.reshard_bucket_bytes)
        self.weight_sync.run()

    @dispatch(by_engine)
    def generate(self, prompts: list[Any], *, n: int, seed: int | None = None, greedy: bool = False) -> list[list[Any]]:
        """``n`` responses to each prompt (token ids), none for 0, and after them, if asked for, the greedy one.

        With ``train.environment`` they are episodes, and a prompt is all that there is of it. What is under way goes on
        meanwhile.

        Args:
            seed: of all samples of the call; equal weights and prompts give equal samples, on any number of engines.
                None: the engine's own.

        Returns:
            Those of the engine's prompts; of the ranks that share an engine the first alone has them.
        """
        self._require_awake()
        self._forget_prefixes()  # what a call samples must not depend on the calls before it
        engines = self.world_size // self.config.rollout.tensor_parallel_size
        engine = self.rank // self.config.rollout.tensor_parallel_size
        numbers = [engine + i * engines for i in range(len(prompts))]  # in the whole call: by_engine deals them out
        episodes = self.config.environment is not None
        requests = requests_of("call", prompts, numbers, n=n, greedy=greedy, seed=seed, episodes=episodes)
        found = until_ended(self.sampling, requests, self.ended)
        if not self._answers:
            return []
        sampled = [found[i * n : (i + 1) * n] for i in range(len(prompts))]
        return [of + found[len(prompts) * n + i :][:1] for i, of in enumerate(sampled)]

    @dispatch(to_engines)
    def advance(self, requests: list[Request], *, steps: int) -> list[tuple[str, Any]]:
        """Begin what is asked for, and go on with all that is under way.

        Args:
            requests: of this engine.
            steps: of the engine; fewer where nothing is left to do, or an environment is waited for.

        Returns:
            The key, and the response or episode, of each that has ended since the last call; as in ``generate``, of
            the first rank of an engine.
        """
        self._require_awake()
        for request in requests:
            self.sampling.start(request)
        for _ in range(steps):
            if not self.sampling.busy:
                break
            self.ended |= self.sampling.step()
            if not self.sampling.samples:
                break
        ended, self.ended = self.ended, {}
        return list(ended.items()) if self._answers else []

    @property
    def _answers(self) -> bool:
        """Whether this rank is the one of its engine whose answers are read: all of them have the same."""
        return self.rank % self.config.rollout.tensor_parallel_size == 0

    def _require_awake(self) -> None:
        if self.dozes:
            self._park()
            with self._awake():
                pass
        if self.asleep:
            raise RuntimeError("the engine sleeps: call load_actor_weights before it generates")

    def _responses(self) -> Responses:
        r = self.config.rollout

        def params(request: Request) -> Any:
            drawn = {"temperature": 0.0} if request.greedy else drawn_from(r) | {"seed": request.seed}
            return sampling_params(max_tokens=r.max_tokens, detokenize=False, **drawn)  # text is decoded once, whole

        return Responses(self.llm.llm_engine, params, self._sample, self._salt, self.adapter)

    def _player(self) -> Player:
        assert self.config.environment is not None
        r, model = self.config.rollout, self.llm.model_config

        def start(request: Request) -> Start:
            assert request.seed is not None
            drawn = partial(turn_sampling, drawn_from(r), None if request.greedy else request.seed)
            return Start(episode_prompt(request.prompt, request.seed), drawn)

        return Player(
            self.llm.llm_engine,
            self.text,
            self.config.environment,
            Limits(r.max_tokens, self.config.longest_response, model.max_model_len, model.get_vocab_size()),
            environments.maker(self.config.environment),
            sampling_params,
            self._sample,
            start,
            self._salt,
            self.adapter,
        )

    def _sample(self, completion: Any, context: list[int]) -> Sample:
        return to_sample(completion, context, self.text)

    @dispatch(to_all)
    def lend_load(self, policy: Policy) -> None:
        """Have the engine answer for this policy, by ``lend``, until the next run."""
        with self._awake():
            load_files(self.llm, policy.path)

    @dispatch(_over_engines)
    def lend(self, call: Call | None) -> Any:
        """What a method, or a property, of an evaluation's engine returns; None where this one is not asked."""
        if call is None:
            return None
        with policy_logprobs(self.llm):
            return call.of(OfflineEngine.around(self.llm, eager=self.config.rollout.is_eager))


def room_for_adapter(config: TrainConfig, policy: Path) -> dict[str, Any]:
    """vLLM's arguments of an engine that generates beside the adapters in training."""
    lora = config.lora
    assert lora is not None
    modules = None if lora.target_modules == "all-linear" else lora.target_modules
    return adapter_arguments(policy, count=1, rank=lora.rank, modules=modules, setting="train.lora.rank")


def load_files(llm: Any, policy: Path) -> None:
    """The weights in a policy's folder for those that are in the engine of this process; nothing but them differs."""
    files = {path.name: {"sha256": "", "fingerprint": fingerprint(path)} for path in set(stored_in(policy).values())}
    llm.collective_rpc("millrace_load", args=(str(policy), files))
    if not llm.reset_prefix_cache():
        raise RuntimeError("vLLM kept its cache of prefixes, which holds what the weights before made of prompts")


def to_sample(completion: Any, prompt: list[int], text: Text) -> Sample:
    """A sample from vLLM's output, which has one logprob per token and no text."""
    token_ids, log_probs = list(completion.token_ids), list(completion.logprobs.logprobs)
    if completion.logprobs.token_ids != token_ids:
        raise ValueError(f"generation gave logprobs of {completion.logprobs.token_ids} for the tokens {token_ids}")
    if not all(map(math.isfinite, log_probs)):
        raise FloatingPointError(f"generation gave logprobs that are not finite: {log_probs}")
    # The token that ended a response is part of it, but not of its text.
    spoken = token_ids[:-1] if completion.finish_reason == "stop" else token_ids
    reason, policies = completion.finish_reason, [(start, int(version)) for start, version in spans_of(completion)]
    return Sample(token_ids, text.response(prompt, spoken), log_probs, reason, policies)


def drawn_from(config: RolloutConfig) -> dict[str, Any]:
    """vLLM's parameters of what responses are drawn from."""
    return {"temperature": config.temperature, "top_p": config.top_p, "top_k": config.top_k}


def episode_prompt(prompt: Prompt, seed: int) -> EpisodePrompt:
    messages = None if prompt.messages is None else json.loads(prompt.messages)
    return EpisodePrompt(prompt.prompt, messages, dict(prompt.metadata), seed)


def turn_sampling(drawn: dict[str, Any], seed: int | None, turn: int) -> dict[str, Any]:
    """vLLM's parameters of an episode's turn; greedy without a seed."""
    return {"temperature": 0.0} if seed is None else drawn | {"seed": seed_of(seed, turn)}


def all_reduce_off(launcher: Literal["ray", "torchrun"], tensor_parallel_size: int, visible_devices: int) -> bool:
    """Whether an engine on GPUs must do without vLLM's custom all-reduce, and sums by NCCL.

    vLLM numbers the devices of an engine's ranks from 0 on, and looks for each of them in each rank's own process
    (``gpu_p2p_access_check``). Ray shows a rank its own device alone, which is number 0 to it; torchrun's ranks see
    all of the machine's, unless whoever started them hid some.
    """
    return tensor_parallel_size > 1 and (launcher == "ray" or visible_devices < tensor_parallel_size)
