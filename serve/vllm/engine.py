"""A server's vLLM engine: requests, and weights that change under them.

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
import multiprocessing
import os
import shutil
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from serve.config import EngineConfig, SwapConfig
from serve.engine import EngineDead, EngineError, EngineRefused
from serve.generation.request import Generated as Generated
from serve.generation.request import Generation as Generation
from serve.generation.request import GenerationProgress, nothing_was_left
from serve.generation.request import Sampling as Sampling
from serve.generation.request import sampled_logprobs as sampled_logprobs
from serve.generation.tokenizer import Text
from serve.local_ray.cluster import environment
from serve.policies.store import Policy
from serve.standby_room import Room
from serve.vllm.adapters.slots import request_of
from serve.vllm.boot import EngineClient as EngineClient
from serve.vllm.boot import (
    FurtherClients,
    attached_engine,
    discard_outputs,
    prepare_server,
    sampling_params,
    server_engine,
    spans_of,
)
from serve.vllm.engine_process import WaitingProcess

if TYPE_CHECKING:
    from vllm.lora.request import LoRARequest
    from vllm.outputs import CompletionOutput, RequestOutput
    from vllm.sampling_params import SamplingParams
    from vllm.v1.engine.async_llm import AsyncLLM

# serve.vllm.response_collector.MARK, STREAM, OF_LOAD and UNLOADED; that module is for the engine's process.
_MARK: Final = "millrace_whole"
_STREAM: Final = "stream"
_OF_LOAD: Final = "millrace_of_load"
_UNLOADED: Final = "millrace_unloaded"
_ABORT_TIMEOUT_S: Final = 10.0
_GIVE_UP_POLL_S: Final = 0.1
_ALIVE_CHECK_S: Final = 0.25  # between two checks that the engine's process is alive, while a call waits for it
_UNUSED_POLL_S: Final = 0.05
_ROOM_S: Final = 60.0  # how long to wait for memory that others have before waking all the same
_ROOM_POLL_S: Final = 0.5
_ROOM_SHARE: Final = 0.98  # of what was given back: other processes' contexts come and go
_CALL_TIMEOUT_S: Final = 60.0  # a call is served between two steps, and a step may be a long prefill


@dataclass(frozen=True)
class Weights:
    """A policy whose files were verified. ``files``: name -> its ``sha256`` and ``fingerprint`` at that time."""

    policy: Policy
    files: dict[str, dict[str, Any]]

    @property
    def hashes(self) -> dict[str, str]:
        """sha256 by file."""
        return {name: file["sha256"] for name, file in self.files.items()}


@dataclass(frozen=True)
class Answering:
    """What answers a request: a policy, as whole weights or as an adapter beside those of another one.

    ``base``: whose weights the engine holds; ``label``: of that load of them; ``salt``: what prefixes are cached under;
    ``adapter``: its number, None for the base itself; ``folder``: where the adapter's files are. ``own``: the request
    is of a tenant with a policy of its own, and no other weights than ``label``'s may answer it.
    """

    version: int
    base: int
    label: str
    salt: str
    adapter: int | None = None
    folder: str = ""
    own: bool = False

    @property
    def lora_request(self) -> LoRARequest | None:
        """As vLLM has it."""
        return None if self.adapter is None else request_of(self.adapter, Path(self.folder))

    def spans(self, labels: list[tuple[int, str]]) -> list[tuple[int, int]]:
        """(first token, policy) from (first token, label) that the engine reports: its labels are of loads of weights.

        Under another load than its own, even of the same weights, a request goes on without its adapter.
        """
        found: list[tuple[int, int]] = []
        for start, label in labels:
            version = self.version if label == self.label else int(label.partition(".")[0])
            if not found or found[-1][1] != version:
                found.append((start, version))
        return found


@dataclass(frozen=True)
class Exchanged:
    """``ms``: how long it kept the engine from its next step; ``kept``: the old weights are there to go back to."""

    ms: float
    kept: bool


class Engine:
    """vLLM in a process of its own, with weights that can be changed while requests are in flight."""

    def __init__(
        self, config: EngineConfig, swap: SwapConfig | None = None, replicas: int = 1, *, sleeps: bool = False
    ) -> None:
        """``swap``: by which it leaves room for a second set of weights; ``replicas``: that share a CPU's memory.

        ``sleeps``: start it so that ``sleep`` gives a GPU's memory back.
        """
        self.config, self._swap, self._replicas = config, swap or SwapConfig(), replicas
        self.room = Room(bool(self._swap.in_place), "the engine has not started", config.gpu_memory_utilization)
        """What was decided of swaps before it started."""
        self._sleeps = sleeps
        self._given_back: list[int] = []  # bytes by worker, while it sleeps
        self.version = 0
        """The policy that serves."""
        self.base = 0
        """The policy whose weights the engine holds: that one, or what it is an adapter of."""
        self.label = ""
        """Of the load of these weights, "version.number": no two loads of an engine have the same."""
        self.loaded: dict[int, Answering] = {}
        """By version, what requests can be answered with: the weights, and adapters that have proved themselves."""
        self.trial: dict[int, Answering] = {}
        """Adapters that the engine has, and that answer nothing before ``admit`` or ``serve``."""
        self.kept: frozenset[int] = frozenset()
        """Versions whose adapters stay, beside that of the policy that serves."""
        self.making_way = False
        """Whether other weights are about to come, before which tenants' own policies answer nothing more."""
        self.requests: set[str] = set()
        """Ids of the requests that wait for their last token."""
        self.stats: dict[str, float] = {"running": 0, "waiting": 0, "kv_cache_usage": 0.0, "preemptions": 0}
        self._whole: set[str] = set()  # of these requests, those that the scheduler collects until they are whole
        self._text: Text | None = None
        self._llm: AsyncLLM | None = None
        self._waiting: WaitingProcess | None = None
        self._sockets: Path | None = None  # the folder of those between the engine's process and this one
        self._given_up = False
        self._loads = 0
        self._adapters = 0  # the number of the last one
        self._leaving: set[int] = set()  # numbers of those that answer nothing new, and may have requests at work
        self._placing = asyncio.Lock()
        self._own = frozenset(config.adapters.tenants.values()) if config.adapters is not None else frozenset[int]()
        self._probes = 0
        self._background: set[asyncio.Task[Any]] = set()
        self.processes: list[int] = []
        """Ids of the worker processes."""
        self.further: FurtherClients | None = None
        """Other processes that use the engine; set before ``prepare``."""
        self.on_load: Callable[[], None] = lambda: None
        """Called when another load of a policy serves."""

    # Start and stop

    def prepare(self, stopped: Callable[[], bool]) -> None:
        """Import vLLM and fork the process that ``start`` makes the engine, which saves it ten seconds.

        For the main thread, before there are others; returns soon when ``stopped``. Raises EngineError if vLLM can't
        be imported.
        """
        try:
            self._waiting = prepare_server(self.config, stopped, self.further)
        except Exception as error:
            raise EngineError(f"vLLM can't start: {error}") from error

    async def start(self, policy: Policy) -> None:
        """Start vLLM on a policy. Raises EngineError with vLLM's own reason when it can't, or once it is given up."""
        starting = asyncio.create_task(self._start(policy))
        while not starting.done():
            await asyncio.wait({starting}, timeout=_GIVE_UP_POLL_S)
            if self._given_up:
                self._kill_starting()
        await starting

    async def _start(self, policy: Policy) -> None:
        started = time.monotonic()
        try:
            # In a thread: it takes seconds, and signals should be noticed meanwhile.
            await asyncio.to_thread(self._boot, policy.path)
        except Exception as error:
            raise EngineError(f"vLLM can't start on policy {policy.version} ({policy.path}): {error}") from error
        remaining = max(1.0, self.config.start_timeout_s - (time.monotonic() - started))
        async with asyncio.timeout(remaining):
            hashes = {path.name: policy.files[path.name]["sha256"] for path in policy.weight_files}
            self.processes = await self.llm.collective_rpc("millrace_begin", args=(os.getpid(), hashes))
            label = self._next_label(policy.version)
            await self.llm.update_weight_version(label)
            self._exchanged(policy.version, label)
            # The first steps make kernels, which takes seconds; no user should wait for them.
            await self.generate("warm-up", [0, 0], Sampling(n=2, max_tokens=2, seed=0))

    def give_up(self) -> None:
        """Have ``start`` fail soon, as nothing waits for the engine any more. Safe in a signal handler."""
        self._given_up = True

    def _kill_starting(self) -> None:
        """Kill the engine's process, which has answered nobody yet; vLLM sees that, and raises."""
        for process in multiprocessing.active_children():
            if process.name.startswith("EngineCore"):
                process.kill()

    def _boot(self, path: Path) -> None:
        if self._given_up:
            raise EngineError("the server was stopped")
        self._sockets = Path(tempfile.mkdtemp(prefix="millrace-"))
        # Kept here, so that close() stops it if the start was cancelled.
        with environment({"VLLM_RPC_BASE_PATH": str(self._sockets)}):  # where vLLM would leave them for ever
            self._llm, self.room = server_engine(
                self.config,
                path,
                self.stats,
                self._waiting,
                self.further,
                swap=self._swap,
                replicas=self._replicas,
                sleeps=self._sleeps,
            )

    async def attach(self, client: EngineClient) -> None:
        """Use the engine of another process, which ``follow`` tells of. Raises EngineError."""

        def attach() -> None:
            self._llm = attached_engine(client, self.stats)

        try:
            await asyncio.to_thread(attach)
        except Exception as error:
            raise EngineError(f"API process {client.index} can't use the engine: {error}") from error

    def follow(self, version: int, loaded: dict[int, Answering], *, making_way: bool) -> None:
        """In a process that has attached itself: what serves from now on, of what is loaded."""
        self.loaded, self.making_way = loaded, making_way
        serving = loaded[version]
        self.version, self.base, self.label = version, serving.base, serving.label

    def give_up_requests(self) -> None:
        """In a process that has attached itself: the engine has died, and requests end with that error."""
        if self._llm is not None and (reading := self._llm.engine_core.resources.output_queue_task) is not None:
            self._llm.engine_core.resources.engine_dead = True
            reading.cancel()

    async def abandon(self, client: EngineClient) -> int:
        """End the requests of a process that has attached itself and died; how many there were. Raises EngineError."""
        async with self._within(_ABORT_TIMEOUT_S):
            ended = int(await self.llm.engine_core.call_utility_async("millrace_abandon", client.index))
        await asyncio.to_thread(discard_outputs, client)
        return ended

    async def close(self) -> None:
        """Stop the engine's process. Requests still in flight are lost; may be called twice.

        In a process that has attached itself: let go of it.
        """
        if self._waiting is not None:
            self._waiting.close()
        llm, self._llm = self._llm, None
        if llm is not None:
            if llm.output_handler is not None:  # else it reports the end of the process as a failure
                llm.output_handler.cancel()
            await asyncio.to_thread(llm.shutdown, self.config.stop_timeout_s)
            del llm
            gc.collect()  # AsyncLLM has cycles, and its __del__ fails when the interpreter itself is going
        if self._sockets is not None:
            shutil.rmtree(self._sockets, ignore_errors=True)

    @property
    def llm(self) -> AsyncLLM:
        """vLLM's client. Raises EngineError when it does not run."""
        if self._llm is None:
            raise EngineError("the engine is not running")
        if self._llm.errored:
            raise EngineDead("the engine's process has died")
        return self._llm

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
        return int(self.llm.model_config.max_model_len)

    @property
    def vocabulary(self) -> int:
        """Token ids are below this."""
        return int(self.llm.model_config.get_vocab_size())

    @property
    def dtype(self) -> str:
        """What the engine computes in: float32, bfloat16, float16."""
        return str(self.llm.model_config.dtype).removeprefix("torch.")

    @property
    def text(self) -> Text:
        """The policy's tokenizer."""
        if self._text is None:
            self._text = Text(self.llm.get_tokenizer())
        return self._text

    def answering(self, version: int | None = None) -> Answering:
        """What a request is answered with that begins now: that policy, if it is loaded; else the one that serves.

        Raises EngineError if it is a tenant's own, which no other stands in for.
        """
        if version in self._own:
            if not self.answers(version):
                raise EngineError(f"policy {version} is not loaded")
            return replace(self.loaded[version], own=True)
        return self.loaded.get(self.version if version is None else version) or self.loaded[self.version]

    def answers(self, version: int) -> bool:
        """Whether a policy answers requests that begin now: no tenant's own does while other weights are to come."""
        return version in self.loaded and not (self.making_way and version in self._own)

    # Generating

    async def generate(
        self, request_id: str, prompt_token_ids: list[int], sampling: Sampling, version: int | None = None
    ) -> Generation:
        """Sample ``sampling.n`` responses. Cut short by ``abort``, it returns what there is by then.

        ``version``: the policy, if it is loaded; by default the one that serves.

        Raises EngineDead when the process is gone, EngineRefused when vLLM refuses the request, EngineError when it
        fails.
        """
        started, answering = time.monotonic(), self.answering(version)
        params = _params(sampling)
        if sampling.n == 1 and not sampling.stop:  # vLLM looks for stop strings in the API process, token by token
            self.keep_whole(request_id, params)
        final: RequestOutput | None = None
        async for output in self._outputs(request_id, prompt_token_ids, params, answering):
            final = output
        if final is None:
            raise EngineError("vLLM ended the request without an answer")
        return self.read(final, prompt_token_ids, started, answering, decoded=bool(sampling.stop))

    async def stream(
        self,
        request_id: str,
        prompt_token_ids: list[int],
        sampling: Sampling,
        underway: GenerationProgress,
        version: int | None = None,
    ) -> AsyncIterator[list[tuple[int, str]]]:
        """The same, read while it is generated: at each turn the pieces of text, by the index of their response.

        ``underway`` has what there is, all of it at the end. Raises as ``generate`` does.
        """
        params, answering = _params(sampling, streaming=True), self.answering(version)
        marked = sampling.n == 1 and not sampling.stop
        if marked:
            params.extra_args = {_MARK: _STREAM}
            self._whole.add(request_id)
        async for output in self._outputs(request_id, prompt_token_ids, params, answering):
            note_first_token(output, underway)
            pieces = []
            for new in output.outputs:
                growing = underway.responses[new.index]
                note = output.kv_transfer_params or {}
                last = new.finish_reason is not None
                logprobs = new.logprobs if not marked else None if last else note.get("logprobs")
                growing.add(new.text, new.token_ids, logprobs, self.sampling_with(answering))
                if new.finish_reason is not None:
                    all_logprobs = np.frombuffer(note["logprobs"], "<f4") if marked and note else None
                    ending = sampled_logprobs(new.token_ids, logprobs) if all_logprobs is None else all_logprobs
                    reason = "error" if nothing_was_left(ending) else new.finish_reason
                    growing.end(reason, answering.spans(spans_of(new)), all_logprobs)
                    if marked and all_logprobs is None and new.finish_reason != "abort":
                        raise EngineError("vLLM ended a stream without its logprobs")
                if new.text:
                    pieces.append((new.index, new.text))
            yield pieces

    def sampling_with(self, answering: Answering) -> int:
        """The policy that samples at the moment for a request that began with this."""
        return answering.version if answering.label == self.label else self.base

    async def _outputs(
        self, request_id: str, prompt_token_ids: list[int], params: Any, answering: Answering
    ) -> AsyncIterator[RequestOutput]:
        from vllm.exceptions import VLLMClientError
        from vllm.inputs.engine import tokens_input
        from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

        self.requests.add(request_id)
        self.bind(params, answering)
        try:
            prompt = tokens_input(prompt_token_ids, cache_salt=answering.salt)
            lora_request = answering.lora_request
            async for output in self.llm.generate(prompt, params, request_id, lora_request=lora_request):
                self.require_answered(output, answering)
                yield output
        except EngineDeadError as error:
            raise EngineDead("the engine's process has died") from error
        except (VLLMClientError, ValueError) as error:
            raise EngineRefused(f"vLLM refuses the request: {error}") from error
        except EngineGenerateError as error:
            raise EngineError(f"vLLM failed: {error.__cause__ or error}") from error
        finally:
            self.forget(request_id)

    async def abort(self, request_id: str) -> None:
        """End a request; its ``generate`` returns the tokens so far with finish_reason "abort"."""
        if not self.healthy:
            return
        llm = self.llm
        async with asyncio.timeout(_ABORT_TIMEOUT_S):
            if request_id in self._whole:
                # By the engine alone, which has the tokens: vLLM's own abort would answer without them.
                await llm.engine_core.abort_requests_async(
                    list(llm.output_processor.external_req_ids.get(request_id, ()))
                )
            else:
                await llm.abort(request_id)

    # For requests that vLLM's own handlers make (serve.vllm.openai.engine)

    def keep_whole(self, request_id: str, params: SamplingParams) -> None:
        """Have the scheduler send the only response when it is whole; no one may read its tokens before."""
        params.extra_args = {_MARK: True}
        self._whole.add(request_id)

    def bind(self, params: SamplingParams, answering: Answering) -> None:
        """Have the engine answer the request with those weights or not at all, if it must; after ``keep_whole``."""
        if answering.own:
            params.extra_args = (params.extra_args or {}) | {_OF_LOAD: answering.label}

    def require_answered(self, output: RequestOutput, answering: Answering) -> None:
        """Raise EngineError if other weights came before a request that no others may answer."""
        if answering.own and any(each.stop_reason == _UNLOADED for each in output.outputs):
            raise EngineError(f"policy {answering.version} is not loaded any more")

    def forget(self, request_id: str) -> None:
        """The request has ended."""
        self.requests.discard(request_id)
        self._whole.discard(request_id)

    def read(
        self, final: RequestOutput, prompt_token_ids: list[int], started: float, answering: Answering, *, decoded: bool
    ) -> Generation:
        """Read the only output of a request. ``decoded``: vLLM has decoded the text; ``started``: time.monotonic()."""
        note, final.kv_transfer_params = final.kv_transfer_params, None  # the scheduler's, and not the client's
        responses = []
        for output in final.outputs:
            token_ids = list(output.token_ids)
            if note is None:
                logprobs: Any = sampled_logprobs(token_ids, output.logprobs)
                spans = spans_of(output)
            else:
                logprobs = np.frombuffer(note["logprobs"], "<f4")
                spans = note["spans"]
            if len(logprobs) != len(token_ids) or (token_ids and not spans):
                raise EngineError(
                    f"vLLM gave {len(logprobs)} logprobs and {len(spans)} spans for {len(token_ids)} tokens"
                )
            text = output.text if decoded and note is None else self._response_text(output, prompt_token_ids)
            finish_reason = "error" if nothing_was_left(logprobs) else output.finish_reason or "abort"
            responses.append(Generated(text, token_ids, logprobs, answering.spans(spans), finish_reason))
        metrics = final.metrics
        first_token_s = metrics.first_token_latency if metrics else None
        if note is not None and note["first_token_at"] is not None:
            first_token_s = note["first_token_at"] - started  # of one clock in all processes of the machine
        return Generation(
            responses=responses,
            queue_ms=_milliseconds(metrics.scheduled_ts - metrics.queued_ts) if metrics else None,
            first_token_ms=_milliseconds(first_token_s) if first_token_s is not None else None,
            total_ms=(time.monotonic() - started) * 1e3,
        )

    # Adapters beside the weights: put_adapter, serve

    async def put_adapter(self, weights: Weights, timeout_s: float) -> None:
        """Have an adapter of the weights that the engine holds in it, on ``trial`` if it has not been there.

        Raises EngineError if all places are taken by adapters that serve, are kept or have requests at work.
        """
        version = weights.policy.version
        async with self._within(timeout_s), self._placing:
            if self.holds(version):
                return
            await self._free_place()
            self._adapters += 1
            number, folder = self._adapters, str(weights.policy.path)
            try:
                await self.llm.collective_rpc("millrace_put_adapter", args=(number, folder, weights.files))
            except BaseException:  # it may be put later, when nobody waits for it: this comes behind it
                self._in_background(self.llm.collective_rpc("millrace_remove_adapter", args=(number,)))
                raise
        self.trial[version] = Answering(version, self.base, self.label, self._next_label(version), number, folder)

    def holds(self, version: int) -> bool:
        """Whether the engine has a policy, which answers or is on trial."""
        return version in self.loaded or version in self.trial

    def admit(self, version: int) -> None:
        """Have a policy answer that was on trial, and has proved itself."""
        if version in self.trial:
            self.loaded[version] = self.trial.pop(version)

    def discard(self, version: int) -> None:
        """Forget an adapter that is on trial; one that answers stays."""
        each = self.trial.pop(version, None)
        if each is not None and self.healthy:
            self._in_background(self.llm.collective_rpc("millrace_remove_adapter", args=(each.adapter,)))

    def reject(self, version: int) -> None:
        """Answer nothing more with an adapter that has failed its proof; what is at work with it ends first."""
        self.discard(version)
        each = self.loaded.get(version)
        if each is None or each.adapter is None or version == self.version:
            return
        del self.loaded[version]
        self._leaving.add(each.adapter)
        self._in_background(self._remove_unused(each.adapter))
        self.on_load()

    async def _remove_unused(self, adapter: int) -> None:
        """Free an adapter's place when no request names it any more."""
        used = True
        with suppress(EngineError):  # the engine has ended
            while used:
                await asyncio.sleep(_UNUSED_POLL_S)  # at first for those that are on their way
                used = adapter in await self.llm.engine_core.call_utility_async("millrace_adapters")
            if adapter in self._leaving:  # else other weights have come, which end all adapters
                await self.llm.collective_rpc("millrace_remove_adapter", args=(adapter,))
                self._leaving.discard(adapter)

    def _places_taken(self) -> int:
        loaded = sum(each.adapter is not None for each in self.loaded.values())
        return len(self.trial) + len(self._leaving) + loaded

    async def _free_place(self) -> None:
        assert self.config.adapters is not None
        while self._places_taken() >= self.config.adapters.count:
            used = set(await self.llm.engine_core.call_utility_async("millrace_adapters"))
            idle = [
                each
                for each in (*self.loaded.values(), *self.trial.values())
                if each.adapter is not None
                and each.adapter not in used
                and each.version not in (self.version, *self.kept)
            ]
            if not idle:
                raise EngineError(
                    f"all {self.config.adapters.count} adapters of the engine are in use "
                    f"({', '.join(map(str, sorted(self.loaded | self.trial)))} are loaded): wait, or raise "
                    "serve.engine.adapters.count"
                )
            oldest = min(idle, key=lambda each: each.adapter or 0)
            held = self.trial if oldest.version in self.trial else self.loaded
            del held[oldest.version]
            await self.llm.collective_rpc("millrace_remove_adapter", args=(oldest.adapter,))

    def serve(self, version: int) -> None:
        """Answer what comes from now on with this policy, which is loaded. What is at work ends with what it has."""
        self.admit(version)
        self.version = version
        self.on_load()

    async def end_adapters(self, timeout_s: float) -> None:
        """Before other weights come: let requests with adapters end, while new ones wait for those weights.

        Tenants' own policies answer nothing more, and their requests end first: none is answered by other weights.
        ``commit`` or ``resume`` lets the engine go on. Raises EngineError if they take longer; it goes on then, with
        all adapters.
        """
        if not self._places_taken() and not self._own & self.loaded.keys():
            return
        self.making_way = True
        self.on_load()
        try:
            await self._until_none_is_bound(timeout_s)
            if self._places_taken():
                await self._end_adapters(timeout_s)
        except BaseException:
            self.making_way = False
            self.on_load()
            raise

    async def _until_none_is_bound(self, timeout_s: float) -> None:
        """Wait until no request, waiting ones too, is one that no other weights may answer. Raises EngineError.

        One that comes later is refused by the engine once they are there.
        """
        try:
            async with self._within(timeout_s):
                bound = bool(self._own & self.loaded.keys())
                while bound:
                    await asyncio.sleep(_UNUSED_POLL_S)  # at first for those that are on their way
                    bound = await self.llm.engine_core.call_utility_async("millrace_bound") > 0
        except TimeoutError:
            raise EngineError(
                "requests of tenants with a policy of their own did not end within serve.swap.drain_timeout_s"
            ) from None

    async def _end_adapters(self, timeout_s: float) -> None:
        core = self.llm.engine_core
        try:
            async with self._within(timeout_s + _CALL_TIMEOUT_S):
                if await self.drain(timeout_s) and not await core.call_utility_async(
                    "millrace_end_adapters", self._adapters
                ):
                    return
                await self.llm.resume_generation()
        except TimeoutError:  # the engine gets to what it was asked later: these come behind it
            undo = core.call_utility_async("millrace_keep_adapters"), self.llm.resume_generation()
            await asyncio.wait([self._in_background(call) for call in undo], timeout=_CALL_TIMEOUT_S)
            raise
        raise EngineError(
            "requests with an adapter did not end within serve.swap.drain_timeout_s, and other weights than their own "
            "can't come under them"
        )

    # Changing the weights: prepare_standby, commit, release; or, in place: hold, load, resume

    async def unsupported_reason(self) -> str | None:
        """Why standby weights of this model can't be prepared and it must be loaded in place; None if they can."""
        async with self._within(_CALL_TIMEOUT_S):
            reasons = await self.llm.collective_rpc("millrace_unsupported_reason")
        return next((reason for reason in reasons if reason), None)

    async def prepare_standby(self, weights: Weights, *, spare_bytes: int, timeout_s: float) -> None:
        """Prepare standby weights in the engine's process, in the kernels' form, while it serves.

        ``spare_bytes``: memory that must stay free. Raises EngineError if that can't be; none are left then.
        """
        llm = self.llm
        try:
            async with self._within(timeout_s):
                arguments = (str(weights.policy.path), weights.files, spare_bytes)
                await llm.collective_rpc("millrace_prepare_standby", args=arguments)
                wait = 0.002
                while True:
                    states = await llm.collective_rpc("millrace_standby_state")
                    if failed := next((state["error"] for state in states if state["error"]), None):
                        raise EngineError(f"policy {weights.policy.version}: {failed}")
                    if all(state["done"] for state in states):
                        return
                    await asyncio.sleep(wait)
                    wait = min(0.1, wait * 2)
        except BaseException:
            await self.release()
            raise

    async def drain(self, timeout_s: float) -> bool:
        """Let requests in flight finish, new ones wait; whether all did. ``commit`` lets the engine go on."""
        waiting = self._in_background(self.llm.engine_core.pause_scheduler_async(mode="wait", clear_cache=False))
        done, _ = await asyncio.wait({waiting}, timeout=timeout_s)
        for task in done:
            task.result()
        return bool(done)

    async def commit(self, weights: Weights, *, recompute: bool, timeout_s: float) -> Exchanged:
        """Exchange serving and standby weights between two steps, requests in flight going on.

        Four calls are sent together: pause, exchange, label, resume. The engine serves them one after the other, so
        that no token is sampled between the exchange and its label, and none of them waits for this process, which is
        busy just then. ``recompute``: drop every KV cache, running requests' too.
        """
        llm, loop = self.llm, asyncio.get_running_loop()
        core = llm.engine_core
        async with self._within(timeout_s):
            # Of the background: that the engine has nothing left to tidy up, which is what the answer says, may be long
            # after it went on.
            pause = self._in_background(core.pause_scheduler_async(mode="keep", clear_cache=recompute))
            held = None
            if recompute or llm.vllm_config.max_concurrent_batches > 1:
                held = time.monotonic()
                await pause  # caches are cleared, and a step that is under way ends, before the pause is complete
            # Else it is between two steps and makes no other one.
            label = self._next_label(weights.policy.version)
            exchange = loop.create_task(llm.collective_rpc("millrace_commit", args=(weights.hashes,)))
            labelled = loop.create_task(core.set_weight_version_async(label))
            resume = loop.create_task(core.resume_scheduler_async())
            # Tasks start in the order of their creation, and send before they wait. So what is sent after this
            # call comes after the exchange, and what was sent before it before.
            loop.call_soon(self._exchanged, weights.policy.version, label)
            await asyncio.gather(exchange, labelled, resume)
        results = exchange.result()
        ms = max(result["ms"] for result in results) if held is None else _milliseconds(time.monotonic() - held)
        return Exchanged(ms=ms, kept=all(result["kept"] for result in results))

    async def release(self) -> None:
        """Free the standby weights, if there are any."""
        async with self._within(_CALL_TIMEOUT_S):
            await self.llm.collective_rpc("millrace_release")

    async def hold(self, *, recompute: bool, timeout_s: float) -> None:
        """Stop between two steps, keeping all requests. ``recompute``: drop every KV cache, running requests' too."""
        async with self._within(timeout_s):
            # AsyncLLM.pause_generation does the same and then sleeps 20 ms for the order of its log lines.
            await self.llm.engine_core.pause_scheduler_async(mode="keep", clear_cache=recompute)

    async def load(self, weights: Weights, timeout_s: float) -> None:
        """Load a policy into the held engine and label what follows with its version.

        After any failure the engine's weights are undefined: load another policy before it goes on.
        """
        llm, policy = self.llm, weights.policy
        async with self._within(timeout_s):
            await llm.collective_rpc("millrace_load", args=(str(policy.path), weights.files))
            label = self._next_label(policy.version)
            await llm.update_weight_version(label)
        self._exchanged(policy.version, label)

    async def resume(self, timeout_s: float) -> None:
        """Go on after ``hold``."""
        async with self._within(timeout_s):
            await self.llm.resume_generation()

    # Sleeping

    async def sleep(self, timeout_s: float) -> int:
        """Stop, and give a GPU's memory back: weights wait in the host's memory, the KV cache is dropped.

        On a CPU, which vLLM has no sleep for, it stops and keeps what it has. There must be no request in flight.
        Returns the bytes of all devices that are free now and were not. Raises EngineError, TimeoutError.
        """
        async with self._within(timeout_s):
            before = await self._free_bytes()
            try:
                await self.llm.sleep(level=1 if self._gives_back else 0, mode="keep")
            except Exception:
                if self._gives_back:  # vLLM takes an executor that failed half-way for one that is awake
                    await self.llm.collective_rpc("wake_up")
                raise
            after = await self._free_bytes()
        given = [now - then for then, now in zip(before, after, strict=True)]
        self._given_back = given if self._gives_back else []
        return sum(self._given_back)

    async def wake(self, timeout_s: float) -> None:
        """Go on after ``sleep``, with the same weights. Raises EngineError, TimeoutError.

        What a device is lacking, because whoever had it meanwhile is not quite gone, is waited for, for a minute.
        """
        until = time.monotonic() + _ROOM_S
        while self._given_back and time.monotonic() < until:
            free = await self._free_bytes()
            if all(now >= _ROOM_SHARE * given for now, given in zip(free, self._given_back, strict=True)):
                break
            await asyncio.sleep(_ROOM_POLL_S)
        async with self._within(timeout_s):
            if not await self.llm.wake_up(None if self._gives_back else ["scheduling"]):
                raise EngineError("vLLM has not got all of its memory again")
        self._given_back = []

    @property
    def unfinished(self) -> bool:
        """Whether the engine has a request that is not at its end."""
        return bool(self.llm.output_processor.has_unfinished_requests())

    @property
    def _gives_back(self) -> bool:
        return bool(self.llm.model_config.enable_sleep_mode)

    async def _free_bytes(self) -> list[int]:
        """Of each worker's device."""
        async with self._within(_CALL_TIMEOUT_S):
            return list(await self.llm.collective_rpc("millrace_free_bytes"))

    async def next_logprobs(
        self, prompt_token_ids: list[int], token_ids: list[int], timeout_s: float, version: int | None = None
    ) -> list[float]:
        """The logprob of each of ``token_ids`` as the next one after the prompt, in nats, at temperature 1.

        ``version``: a policy that is loaded; by default the one that serves. No request of a client: nothing counts or
        records it.
        """
        from vllm.inputs.engine import tokens_input

        params = sampling_params(
            max_tokens=1,
            temperature=0,
            logprob_token_ids=token_ids,
            logprobs=len(token_ids),
            flat_logprobs=False,
            detokenize=False,
        )
        self._probes += 1
        prompt = tokens_input(prompt_token_ids, cache_salt=f"own {self._probes}")
        on_trial = self.trial.get(self.version if version is None else version)
        lora_request = (on_trial or self.answering(version)).lora_request
        async with self._within(timeout_s):
            async for output in self.llm.generate(prompt, params, f"own {self._probes}", lora_request=lora_request):
                logprobs = output.outputs[0].logprobs
        if not logprobs or any(token not in logprobs[0] for token in token_ids):
            raise EngineError("vLLM did not return the requested logprobs")
        return [logprobs[0][token].logprob for token in token_ids]

    # Inside

    @asynccontextmanager
    async def _within(self, timeout_s: float) -> AsyncIterator[None]:
        """As ``asyncio.timeout``; an engine that dies meanwhile raises EngineDead: vLLM's calls would wait for ever."""
        llm = self.llm
        try:
            async with asyncio.timeout(timeout_s) as limit:
                watch = asyncio.create_task(_end_with(llm, limit))
                try:
                    yield
                finally:
                    watch.cancel()
        except TimeoutError:
            if llm.errored:
                raise EngineDead("the engine's process has died") from None
            raise

    def _next_label(self, version: int) -> str:
        self._loads += 1
        return f"{version}.{self._loads}"

    def _exchanged(self, version: int, label: str) -> None:
        """The engine holds this policy's weights, and no adapter of those before."""
        # Prefixes are cached under the load that made them, so that not even a rollback meets an older load's.
        self.base, self.label = version, label
        self.loaded, self.trial = {version: Answering(version, version, label, label)}, {}
        self._leaving.clear()
        self.making_way = False
        self.serve(version)

    def _in_background(self, call: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """A call that is sent, and goes on if nobody waits for it any more."""
        task = asyncio.create_task(call)
        self._background.add(task)
        task.add_done_callback(self._background.discard)
        return task

    def _response_text(self, output: CompletionOutput, prompt: list[int]) -> str:
        # The token that ended the response is part of it, but not of its text.
        ended = output.finish_reason == "stop" and not isinstance(output.stop_reason, str)
        return self.text.response(prompt, list(output.token_ids[:-1] if ended else output.token_ids))


async def _end_with(llm: AsyncLLM, limit: asyncio.Timeout) -> None:
    while not llm.errored:
        await asyncio.sleep(_ALIVE_CHECK_S)
    limit.reschedule(asyncio.get_running_loop().time())


def _params(sampling: Sampling, *, streaming: bool = False) -> SamplingParams:
    """As vLLM has it. Raises EngineRefused."""
    from vllm.exceptions import VLLMClientError
    from vllm.sampling_params import RequestOutputKind

    try:
        return sampling_params(
            n=sampling.n,
            max_tokens=sampling.max_tokens,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            min_p=sampling.min_p,
            stop=list(sampling.stop) or None,
            stop_token_ids=list(sampling.stop_token_ids) or None,
            seed=sampling.seed,
            # Without stop strings, a response that is not streamed is decoded once, at its end.
            detokenize=streaming or bool(sampling.stop),
            output_kind=RequestOutputKind.DELTA if streaming else RequestOutputKind.FINAL_ONLY,
            skip_clone=True,
        )
    except (VLLMClientError, ValueError) as error:
        raise EngineRefused(f"vLLM refuses the request: {error}") from error


def note_first_token(output: RequestOutput, progress: GenerationProgress) -> None:
    """Keep, from the first output, how long its request waited for a step and for its first token."""
    if progress.first_token_ms is None and (metrics := output.metrics) is not None:
        progress.queue_ms = _milliseconds(metrics.scheduled_ts - metrics.queued_ts)
        progress.first_token_ms = _milliseconds(metrics.first_token_latency)


def _milliseconds(seconds: float) -> float:
    return max(0.0, seconds * 1e3)
