"""The vLLM engine; the only place where serving touches vLLM.

What a response's logprobs mean: for each token, the log probability under the distribution it was sampled from, in
nats: log_softmax(logits / temperature) after min_p, top_k and top_p have cut the distribution (vLLM's
``processed_logprobs``). A trainer that computes log_softmax(logits / temperature) gets the same number for the same
weights where top_p = 1, top_k = 0 and min_p = 0; where they cut, it differs by the log of the mass that was kept. A
greedy response (temperature 0) has log_softmax(logits), the policy's own probability, since its sampling distribution
is a point.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from serve.config import EngineConfig
from serve.policies import Policy

if TYPE_CHECKING:
    from vllm.outputs import CompletionOutput, RequestOutput
    from vllm.v1.engine.async_llm import AsyncLLM

WORKER: Final = "serve.weights.MillraceWorker"
_CPU_KV_CACHE_BYTES: Final = 512 << 20
_CONTEXT_TOKENS: Final = 6  # prompt tokens that the first response tokens are decoded together with
_ABORT_TIMEOUT_S: Final = 10.0


class EngineError(RuntimeError):
    """The engine can't do what was asked; the text says why."""


class EngineDead(EngineError):
    """The engine's process has died. Nothing but a restart helps."""


class EngineRefused(EngineError):
    """vLLM takes the request for a bad one."""


@dataclass(frozen=True)
class Sampling:
    """How to sample. ``top_k`` 0: no limit; ``temperature`` 0: greedy; ``seed`` None: the engine's own."""

    n: int = 1
    max_tokens: int = 256
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    stop: tuple[str, ...] = ()
    seed: int | None = None


@dataclass(frozen=True)
class Generated:
    """One response. ``logprobs``: nats, one a token; ``policy_spans``: (first token, policy version), rising."""

    text: str
    token_ids: list[int]
    logprobs: list[float]
    policy_spans: list[tuple[int, int]]
    finish_reason: str  # stop, length, abort


@dataclass(frozen=True)
class Generation:
    """All responses to one prompt, and how long they took. ``policy_version`` made the last token."""

    responses: list[Generated]
    policy_version: int
    queue_ms: float | None
    first_token_ms: float | None
    total_ms: float


class Engine:
    """vLLM in a process of its own, with weights that can be changed while requests are in flight."""

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self.version = 0
        """The policy whose weights the engine holds."""
        self.requests: set[str] = set()
        """Ids of the requests that wait for their last token."""
        self.stats: dict[str, float] = {"running": 0, "waiting": 0, "kv_cache_usage": 0.0, "preemptions": 0}
        self._llm: AsyncLLM | None = None
        self._salt = ""
        self._loads = 0
        self.processes: list[int] = []
        """Ids of the worker processes."""

    # Life

    async def start(self, policy: Policy) -> None:
        """Start vLLM on a policy. Raises EngineError with vLLM's own reason when it can't."""
        started = time.monotonic()
        try:
            # In a thread: it takes seconds, and signals should be noticed meanwhile.
            await asyncio.to_thread(self._build, policy.path)
        except Exception as error:
            raise EngineError(f"vLLM can't start on policy {policy.version} ({policy.path}): {error}") from error
        remaining = max(1.0, self.config.start_timeout_s - (time.monotonic() - started))
        async with asyncio.timeout(remaining):
            self.processes = await self._running.collective_rpc("millrace_adopt", args=(os.getpid(),))
            await self._running.update_weight_version(str(policy.version))
            self._set_version(policy.version)
            # The first steps make kernels, which takes seconds; no user should wait for them.
            await self.generate("warm-up", [0, 0], Sampling(n=2, max_tokens=2, seed=0))

    async def close(self) -> None:
        """Stop the engine's process. Requests still in flight are lost; may be called twice."""
        llm, self._llm = self._llm, None
        if llm is not None:
            if llm.output_handler is not None:  # else it reports the end of the process as a failure
                llm.output_handler.cancel()
            await asyncio.to_thread(llm.shutdown, self.config.stop_timeout_s)
            del llm
            gc.collect()  # AsyncLLM has cycles, and its __del__ fails when the interpreter itself is going

    @property
    def healthy(self) -> bool:
        """Whether the engine's process lives and its outputs are read."""
        return self._llm is not None and not self._llm.errored

    @property
    def in_flight(self) -> int:
        """Requests that wait for their last token."""
        return len(self.requests)

    @property
    def max_model_len(self) -> int:
        """Most tokens that a prompt and its response can have together."""
        return int(self._running.model_config.max_model_len)

    @property
    def vocabulary(self) -> int:
        """Token ids are below this."""
        return int(self._running.model_config.get_vocab_size())

    @property
    def tokenizer(self) -> Any:
        """The policy's tokenizer, a Hugging Face one."""
        return self._running.get_tokenizer()

    # Generating

    async def generate(self, request_id: str, prompt_token_ids: list[int], sampling: Sampling) -> Generation:
        """Sample ``sampling.n`` responses. Cut short by ``abort``, it returns what there is by then.

        Raises EngineDead when the process is gone, EngineRefused when vLLM refuses the request, EngineError when it
        fails.
        """
        started = time.monotonic()
        final: RequestOutput | None = None
        async for output in self._outputs(request_id, prompt_token_ids, _sampling_params(sampling)):
            final = output
        if final is None:
            raise EngineError("vLLM ended the request without an answer")
        responses = [
            self._read(output, output.text if sampling.stop else self._text(output, prompt_token_ids))
            for output in final.outputs
        ]
        return self._generation(responses, final, started)

    async def stream(
        self, request_id: str, prompt_token_ids: list[int], sampling: Sampling
    ) -> AsyncIterator[Generation]:
        """The same, with what there is by then at every turn; a response that goes on has finish_reason "abort".

        vLLM tells which policy made which token at a response's end. Until then the spans are those of the versions
        that served when its tokens came, which around a swap can be a step off.
        """
        started = time.monotonic()
        responses = [Generated("", [], [], [], "abort")] * sampling.n
        async for output in self._outputs(request_id, prompt_token_ids, _sampling_params(sampling, streaming=True)):
            for made in output.outputs:
                before = responses[made.index]
                spans = before.policy_spans
                if made.token_ids and (not spans or spans[-1][1] != self.version):
                    spans = [*spans, (len(before.token_ids), self.version)]
                responses[made.index] = self._read(made, made.text, spans)
            yield self._generation(list(responses), output, started)

    async def _outputs(self, request_id: str, prompt_token_ids: list[int], params: Any) -> AsyncIterator[RequestOutput]:
        from vllm.exceptions import VLLMClientError
        from vllm.inputs.engine import tokens_input
        from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

        self.requests.add(request_id)
        try:
            prompt = tokens_input(prompt_token_ids, cache_salt=self._salt)
            async for output in self._running.generate(prompt, params, request_id):
                yield output
        except EngineDeadError as error:
            raise EngineDead("the engine's process has died") from error
        except (VLLMClientError, ValueError) as error:
            raise EngineRefused(f"vLLM refuses the request: {error}") from error
        except EngineGenerateError as error:
            raise EngineError(f"vLLM failed: {error.__cause__ or error}") from error
        finally:
            self.requests.discard(request_id)

    def _generation(self, responses: list[Generated], output: RequestOutput, started: float) -> Generation:
        metrics = output.metrics
        return Generation(
            responses=responses,
            policy_version=max((r.policy_spans[-1][1] for r in responses if r.policy_spans), default=self.version),
            queue_ms=_milliseconds(metrics.scheduled_ts - metrics.queued_ts) if metrics else None,
            first_token_ms=_milliseconds(metrics.first_token_latency) if metrics else None,
            total_ms=(time.monotonic() - started) * 1e3,
        )

    async def abort(self, request_id: str) -> None:
        """End a request; its ``generate`` returns the tokens so far with finish_reason "abort"."""
        if self.healthy:
            async with asyncio.timeout(_ABORT_TIMEOUT_S):
                await self._running.abort(request_id)

    # Changing the weights; the order is prefetch, hold, load, resume

    async def prefetch(self, policy: Policy, timeout_s: float) -> None:
        """Bring a policy's weights into the engine process's memory and check their hashes, while it serves.

        Raises EngineError, naming the file, when one is not what the manifest says.
        """
        llm = self._running
        files = {path.name: policy.files[path.name]["sha256"] for path in policy.weight_files}
        async with asyncio.timeout(timeout_s):
            await llm.collective_rpc("millrace_prefetch", args=(str(policy.path), files))
            wait = 0.002
            while True:
                states = await llm.collective_rpc("millrace_prefetched")
                if failed := next((state["error"] for state in states if state["error"]), None):
                    raise EngineError(f"policy {policy.version}: {failed}")
                if all(state["done"] for state in states):
                    return
                await asyncio.sleep(wait)
                wait = min(0.25, wait * 2)

    async def hold(self, *, recompute: bool, timeout_s: float) -> None:
        """Stop between two steps, keeping all requests. ``recompute``: drop every KV cache, running requests' too."""
        async with asyncio.timeout(timeout_s):
            # AsyncLLM.pause_generation does the same and then sleeps 20 ms for the order of its log lines.
            await self._running.engine_core.pause_scheduler_async(mode="keep", clear_cache=recompute)

    async def load(self, policy: Policy, timeout_s: float) -> None:
        """Load the prefetched policy into the held engine and label what follows with its version.

        Raises EngineError when what was loaded is not what the manifest names. After any failure the engine's weights
        are undefined: load another policy before it goes on.
        """
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        llm = self._running
        expected = {path.name: policy.files[path.name]["sha256"] for path in policy.weight_files}
        try:
            async with asyncio.timeout(timeout_s):
                await llm.start_weight_update()
                await llm.update_weights(WeightTransferUpdateRequest(update_info={"folder": str(policy.path)}))
                await llm.finish_weight_update()
                for loaded in await llm.collective_rpc("millrace_loaded"):
                    if loaded != expected:
                        raise EngineError(f"the engine loaded {loaded}, policy {policy.version} is {expected}")
                await llm.update_weight_version(str(policy.version))
        except BaseException:
            async with asyncio.timeout(timeout_s):
                await llm.collective_rpc("millrace_abandon")
            raise
        self._set_version(policy.version)

    async def resume(self, timeout_s: float) -> None:
        """Go on after ``hold``."""
        async with asyncio.timeout(timeout_s):
            await self._running.resume_generation()

    # Inside

    @property
    def _running(self) -> AsyncLLM:
        if self._llm is None:
            raise EngineError("the engine is not running")
        if self._llm.errored:
            raise EngineDead("the engine's process has died")
        return self._llm

    def _set_version(self, version: int) -> None:
        # Prefixes are cached under the load that made them, so that not even a rollback meets an older load's.
        self.version = version
        self._loads += 1
        self._salt = f"{version}.{self._loads}"

    def _build(self, path: Path) -> None:
        config = self.config
        with _environment(config):
            from vllm.engine.arg_utils import AsyncEngineArgs
            from vllm.platforms import current_platform
            from vllm.usage.usage_lib import UsageContext
            from vllm.v1.engine.async_llm import AsyncLLM

            on_cpu = current_platform.is_cpu()
            arguments: dict[str, Any] = {
                "model": str(path),
                "dtype": _dtype(path) if config.dtype == "auto" else config.dtype,
                "max_model_len": config.max_model_len,
                "max_num_seqs": config.max_num_seqs,
                "kv_cache_memory_bytes": config.kv_cache_bytes or (_CPU_KV_CACHE_BYTES if on_cpu else None),
                "gpu_memory_utilization": config.gpu_memory_utilization,
                "enforce_eager": config.enforce_eager,
                "enable_prefix_caching": config.enable_prefix_caching,
                "tensor_parallel_size": config.tensor_parallel_size,
                "seed": config.seed,
                "logprobs_mode": "processed_logprobs",
                "generation_config": "auto",
                "worker_extension_cls": WORKER,
                "weight_transfer_config": {"backend": "millrace_mapped"},
                "disable_log_stats": True,
            }
            if config.tensor_parallel_size == 1:
                arguments["distributed_executor_backend"] = "uni"
            self._llm = AsyncLLM.from_engine_args(
                AsyncEngineArgs(**(arguments | config.extra)),
                usage_context=UsageContext.ENGINE_CONTEXT,
                stat_loggers=[self._stat_logger],
            )

    def _stat_logger(self, vllm_config: Any, engine_index: int = 0) -> Any:
        """A vLLM stat logger that keeps the newest numbers in ``stats``; it also makes vLLM time each request."""
        from vllm.v1.metrics.loggers import StatLoggerBase

        stats = self.stats

        class Newest(StatLoggerBase):
            def __init__(self, vllm_config: Any, engine_index: int = 0) -> None: ...

            def record(
                self, scheduler_stats: Any, iteration_stats: Any, mm_cache_stats: Any = None, engine_idx: int = 0
            ) -> None:
                if scheduler_stats is not None:
                    stats["running"] = scheduler_stats.num_running_reqs
                    stats["waiting"] = scheduler_stats.num_waiting_reqs
                    stats["kv_cache_usage"] = scheduler_stats.kv_cache_usage
                if iteration_stats is not None:
                    stats["preemptions"] += iteration_stats.num_preempted_reqs

            def log_engine_initialized(self) -> None: ...

        return Newest(vllm_config, engine_index)

    def _read(self, output: CompletionOutput, text: str, so_far: list[tuple[int, int]] | None = None) -> Generated:
        """A response; ``so_far``: its policy spans if it goes on, which vLLM does not tell then."""
        token_ids = list(output.token_ids)
        logprobs = list(output.logprobs.logprobs) if output.logprobs is not None else []
        spans = [(span.start, int(span.version)) for span in output.weight_versions or []]
        if so_far is not None and output.finish_reason is None:
            spans = so_far
        if len(logprobs) != len(token_ids) or (token_ids and not spans):
            raise EngineError(f"vLLM gave {len(logprobs)} logprobs and {len(spans)} spans for {len(token_ids)} tokens")
        return Generated(text, token_ids, logprobs, spans, output.finish_reason or "abort")

    def _text(self, output: CompletionOutput, prompt: list[int]) -> str:
        # The token that ended the response is part of it, but not of its text.
        ended = output.finish_reason == "stop" and not isinstance(output.stop_reason, str)
        return self._decode(prompt, list(output.token_ids[:-1] if ended else output.token_ids))

    def _decode(self, prompt: list[int], token_ids: list[int]) -> str:
        """Text of a response, decoded once and with the end of its prompt, since some tokenizers join over the seam."""
        if not token_ids:
            return ""
        tokenizer, context = self.tokenizer, prompt[-_CONTEXT_TOKENS:]
        before = tokenizer.decode(context, skip_special_tokens=True)
        both = tokenizer.decode(context + token_ids, skip_special_tokens=True)
        if both.startswith(before):
            return str(both[len(before) :])
        return str(tokenizer.decode(token_ids, skip_special_tokens=True))


def _sampling_params(sampling: Sampling, *, streaming: bool = False) -> Any:
    from vllm.sampling_params import RequestOutputKind, SamplingParams

    return SamplingParams(
        n=sampling.n,
        max_tokens=sampling.max_tokens,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        stop=list(sampling.stop) or None,
        seed=sampling.seed,
        logprobs=0,  # of the sampled token alone
        flat_logprobs=True,
        # Without stop strings, one decode at the end does for a response that is not streamed, instead of one a token.
        detokenize=streaming or bool(sampling.stop),
        output_kind=RequestOutputKind.CUMULATIVE if streaming else RequestOutputKind.FINAL_ONLY,
        skip_clone=True,
    )


@contextmanager
def _environment(config: EngineConfig) -> Iterator[None]:
    """What vLLM and its process take from the environment; put back afterwards."""
    wanted = {
        "VLLM_LOGGING_LEVEL": config.log_level,
        "VLLM_NO_USAGE_STATS": "1",
        "TORCH_CPP_LOG_LEVEL": "ERROR",
        "PYTHONWARNINGS": "ignore::FutureWarning",
        "VLLM_ENGINE_READY_TIMEOUT_S": str(int(config.start_timeout_s)),
        "OMP_WAIT_POLICY": "PASSIVE",  # OpenMP threads that have no work sleep, the cores are shared with training
    }
    if config.tensor_parallel_size == 1:
        # On a CPU, vLLM runs one rank inside the engine's process only with this; else it starts a third process.
        wanted["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        wanted["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
    if config.enforce_eager:
        # Eager engines still compile a few helpers, which takes seconds and a C++ compiler.
        wanted["TORCHDYNAMO_DISABLE"] = "1"
    if config.threads is not None:
        wanted["OMP_NUM_THREADS"] = str(config.threads)
    before = {name: os.environ.get(name) for name in wanted}
    os.environ.update(wanted)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _dtype(path: Path) -> str:
    """The type a policy was saved in; vLLM's own "auto" would take a float32 policy down to 16 bits."""
    config = json.loads((path / "config.json").read_bytes())
    return config.get("dtype") or config.get("torch_dtype") or "auto"


def _milliseconds(seconds: float) -> float:
    return max(0.0, seconds * 1e3)
