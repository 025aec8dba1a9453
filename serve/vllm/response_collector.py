"""vLLM's scheduler, which sends a response that is not streamed to the API process when it is whole.

vLLM's engine sends the API process each token: a message, a decoding and a turn of the event loop per step, which a
response that is not streamed doesn't need. A request that is marked (``MARK`` in its ``extra_args``) has its tokens
collected here, in the engine's process, and sent as one message, with a note (in ``kv_transfer_params``, see
``serve.vllm.compat``) of what the single messages would tell: the time of the first token, the logprobs, and which
policy sampled which token. One that is marked as a stream has its tokens sent at once, each with its logprob as a plain
number in the note: the arrays that vLLM would send take a third of a stream's time. Statistics for the metrics are sent
a few times per second.

The engine's process imports this module by name (``scheduler_cls``).
"""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from vllm.platforms import current_platform
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason
from vllm.v1.engine.core import EngineCore
from vllm.v1.request import RequestStatus

from feedback.processes.signals import handle_parent_signals

if TYPE_CHECKING:
    from collections.abc import Iterable

    from vllm.lora.request import LoRARequest
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.metrics.stats import SchedulerStats
    from vllm.v1.outputs import ModelRunnerOutput
    from vllm.v1.request import Request

MARK: Final = "millrace_whole"
STREAM: Final = "stream"
"""The mark's value for a request whose tokens go out at once."""
OF_LOAD: Final = "millrace_of_load"
"""In ``extra_args``, the label of the weights that alone may answer: a tenant's own policy's."""
UNLOADED: Final = "millrace_unloaded"
"""The stop reason of such a request that other weights came before. No token is sampled for it by those."""
_STATS_EVERY_S: Final = 0.2

# As vLLM itself chooses: a CPU engine does not schedule ahead of its outputs.
_Base: Any = Scheduler if current_platform.is_cpu() else AsyncScheduler


@dataclass(slots=True)
class _Collected:
    """The tokens of a marked request so far. ``spans``: [first token, label of the weights], rising."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[np.ndarray] = field(default_factory=list)
    spans: list[tuple[int, str]] = field(default_factory=list)
    events: list[Any] = field(default_factory=list)
    prefill_stats: Any = None
    first_token_at: float | None = None
    streams: bool = False

    def add(self, output: EngineCoreOutput, version: str) -> None:
        if output.new_token_ids:
            if self.first_token_at is None:
                self.first_token_at = time.monotonic()
            if not self.spans or self.spans[-1][1] != version:
                self.spans.append((len(self.tokens), version))
            self.tokens += output.new_token_ids
            if output.new_logprobs is not None:
                self.logprobs.append(output.new_logprobs.logprobs[:, 0])
        if output.events:
            self.events += output.events
        if output.prefill_stats is not None:
            self.prefill_stats = output.prefill_stats

    def attach_to(self, output: EngineCoreOutput) -> None:
        """Make the last output the only one, or of a stream the one that has all logprobs."""
        if not self.streams:
            output.new_token_ids = self.tokens
            output.events = self.events or None
            output.prefill_stats = self.prefill_stats
        output.new_logprobs = None
        output.kv_transfer_params = {
            "first_token_at": self.first_token_at,
            "logprobs": np.concatenate(self.logprobs, dtype="<f4").tobytes() if self.logprobs else b"",
            "spans": self.spans,
        }


class ResponseCollector(_Base):
    """The scheduler that ``serve.vllm.boot`` names to vLLM."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._collected: dict[str, _Collected] = {}
        self._cut_off: list[Request] = []
        self._core = _constructing_core()
        self._core.millrace_abandon = self.abandon  # clients call methods of the core, by name
        self._core.millrace_adapters = self.adapters
        self._core.millrace_bound = self.bound
        self._core.millrace_end_adapters = self.end_adapters
        self._core.millrace_keep_adapters = self.keep_adapters
        self._past_adapters = self._past_before = 0
        self._without_adapter: dict[str, LoRARequest] = {}  # what named one that is past, since the last swap
        self._stats_due = 0.0
        self._seen_version = ""
        self._loads: set[str] = set()  # of the version that serves, as the requests since have named them
        self._past_loads: set[str] = set()
        handle_parent_signals()

    def schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        """As vLLM's.

        Requests that have waited since before a swap compute their prompt under the new policy; what they would find
        cached under their salt is of the old one.
        """
        self._note_swap()
        return super().schedule(*args, **kwargs)

    def add_request(self, request: Request) -> None:
        """As vLLM's. One that was sent by a process which had not heard of a swap yet is as one that waited."""
        self._note_swap()
        if request.lora_request is not None and request.lora_request.lora_int_id <= self._past_adapters:
            self._take_adapter(request)
        if request.cache_salt is not None:
            load = ".".join(request.cache_salt.split(".", 2)[:2])  # behind it, a client's own salt
            if load in self._past_loads:
                request.skip_reading_prefix_cache = True
            else:
                self._loads.add(load)
        super().add_request(request)
        parameters = request.sampling_params
        if parameters is not None and parameters.extra_args and MARK in parameters.extra_args:
            self._collected[request.request_id] = _Collected(streams=parameters.extra_args[MARK] == STREAM)
        if (label := _load_of(request)) is not None and label != self._seen_version:
            self._end_unloaded(request)

    def bound(self) -> int:
        """How many requests are there that no other weights may answer than those that they name."""
        return sum(_load_of(request) is not None for request in self.requests.values())

    def adapters(self) -> list[int]:
        """The numbers of the adapters that requests are answered with."""
        return list({of.lora_request.lora_int_id for of in self.requests.values() if of.lora_request is not None})

    def end_adapters(self, last: int) -> int:
        """Before other weights come: what waits is answered by them alone, and what comes and names an adapter up to
        ``last``. How many requests are at work with one: if there are some, nothing is done.
        """
        self._past_before = self._past_adapters
        with_adapters = [request for request in self.requests.values() if request.lora_request is not None]
        at_work = sum(request.num_computed_tokens > 0 for request in with_adapters)
        if at_work:
            return at_work
        self._past_adapters = last
        for request in with_adapters:
            self._take_adapter(request)
        return 0

    def keep_adapters(self) -> None:
        """Undo ``end_adapters``, whose other weights did not come."""
        self._past_adapters = self._past_before
        for name, adapter in self._without_adapter.items():
            if (request := self.requests.get(name)) is not None and request.num_computed_tokens == 0:
                request.lora_request = adapter
        self._without_adapter.clear()

    def _take_adapter(self, request: Request) -> None:
        assert request.lora_request is not None
        self._without_adapter[request.request_id], request.lora_request = request.lora_request, None

    def finish_requests(self, request_ids: str | Iterable[str] | None, finished_status: RequestStatus) -> list[Request]:
        """As vLLM's; a marked request that is aborted hands over what it has, with the next step."""
        finished: list[Request] = super().finish_requests(request_ids, finished_status)
        if finished_status == RequestStatus.FINISHED_ABORTED:
            self._cut_off += [
                request
                for request in finished
                if request.request_id in self._collected or request.stop_reason == UNLOADED
            ]
        return finished

    def _end_unloaded(self, request: Request) -> None:
        """End a request whose weights are gone; its process hears of it with the next step."""
        request.stop_reason = UNLOADED
        self.finish_requests(request.request_id, RequestStatus.FINISHED_ABORTED)

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        """As vLLM's, without the outputs that are collected."""
        by_client: dict[int, EngineCoreOutputs] = super().update_from_output(scheduler_output, model_runner_output)
        for client, outputs in list(by_client.items()):
            if client != 0 and outputs.scheduler_stats is not None:  # the first process hands them on
                by_client.setdefault(0, EngineCoreOutputs()).scheduler_stats = outputs.scheduler_stats
                outputs.scheduler_stats = None
        if self._collected:
            version = self._version()
            for outputs in by_client.values():
                outputs.outputs = [output for output in outputs.outputs if self._passes(output, version)]
        for request in self._cut_off:
            collected = self._collected.pop(request.request_id, None)
            if collected is not None or request.stop_reason == UNLOADED:
                output = EngineCoreOutput(
                    request.request_id, [], finish_reason=FinishReason.ABORT, stop_reason=request.stop_reason
                )
                if collected is not None:
                    collected.attach_to(output)
                by_client.setdefault(request.client_index, EngineCoreOutputs()).outputs.append(output)
        self._cut_off.clear()
        return {
            client: outputs
            for client, outputs in by_client.items()
            if outputs.outputs or outputs.scheduler_stats is not None or outputs.finished_requests
        }

    def make_stats(self, *args: Any, **kwargs: Any) -> SchedulerStats | None:
        """As vLLM's, some times a second and when nothing is left to do; counters go on counting meanwhile."""
        now = time.monotonic()
        if now < self._stats_due and (self.running or self.waiting):
            return None
        self._stats_due = now + _STATS_EVERY_S
        stats: SchedulerStats | None = super().make_stats(*args, **kwargs)
        return stats

    def abandon(self, client: int) -> int:
        """End all requests of a client that has died, and say nothing to it; how many there were."""
        request_ids = [request.request_id for request in self.requests.values() if request.client_index == client]
        self._core.abort_requests(request_ids)
        self._cut_off = [request for request in self._cut_off if request.client_index != client]
        for request_id in request_ids:
            self._collected.pop(request_id, None)
        return len(request_ids)

    def _note_swap(self) -> None:
        if (version := self._version()) != self._seen_version:
            self._seen_version = version
            self._without_adapter.clear()
            self._past_loads |= self._loads
            self._loads.clear()
            for request in list(self.requests.values()):
                if request.status != RequestStatus.RUNNING:
                    request.skip_reading_prefix_cache = True
                if (label := _load_of(request)) is not None and label != version:
                    self._end_unloaded(request)

    def _passes(self, output: EngineCoreOutput, version: str) -> bool:
        collected = self._collected.get(output.request_id)
        if collected is None:
            return True
        collected.add(output, version)
        if output.finish_reason is None:
            if collected.streams and output.new_logprobs is not None:
                output.kv_transfer_params = {"logprobs": output.new_logprobs.logprobs[:, 0].tolist()}
                output.new_logprobs = None
            return collected.streams
        collected.attach_to(output)
        del self._collected[output.request_id]
        return True

    def _version(self) -> str:
        """The label that the engine gives to this step's tokens."""
        return str(self._core.get_weight_version())


def _load_of(request: Request) -> str | None:
    """The label of the weights that alone may answer a request, if there is one."""
    parameters = request.sampling_params
    if parameters is None or not parameters.extra_args:
        return None
    label: str | None = parameters.extra_args.get(OF_LOAD)
    return label


def _constructing_core() -> EngineCore:
    """The engine core whose ``__init__`` constructs the scheduler, to which it hands no reference to itself."""
    frame = sys._getframe()
    while frame.f_back is not None:
        frame = frame.f_back
        if isinstance(core := frame.f_locals.get("self"), EngineCore):
            return core
    raise RuntimeError("this scheduler is for vLLM's engine core only")
