"""What vLLM's OpenAI handlers take for the engine: ours, with every response recorded on its way to them.

A handler turns a body into prompts and ``SamplingParams``, calls ``generate`` once a prompt, and turns what comes out
into OpenAI's form. In between, here, the rows are made and made durable: a whole response is handed on when its rows
are on disk; one that is streamed has its start on disk before its first tokens go on, and its end before its last.
Whatever ends a request early (its client, its deadline, the server), the rows say aborted, with the tokens so far.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from vllm.exceptions import GracefulHTTPError, VLLMClientError
from vllm.outputs import RequestOutput
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine.exceptions import EngineDeadError

from serve.generation import interaction_rows
from serve.generation.request import Underway
from serve.http import Problem, field_problem
from serve.vllm.engine import EngineError
from serve.vllm.openai_exchange import Exchange, Interrupted, asked_of, current

if TYPE_CHECKING:
    from vllm.v1.engine.output_processor import RequestOutputCollector

    from feedback.journal.streams import Stream
    from serve.app import Server

log = logging.getLogger(__name__)

_ABORT_TIMEOUT_S: Final = 15.0
_REFUSALS: Final = (VLLMClientError, GracefulHTTPError, ValueError, TypeError, OverflowError)


class CapturedEngine:
    """What the handlers use of vLLM's ``EngineClient``, and nothing that changes the engine's state."""

    def __init__(self, server: Server) -> None:
        llm = server.engine.llm
        self._engine = server.engine
        self.vllm_config = llm.vllm_config
        self.model_config = llm.model_config
        self.renderer = llm.renderer
        self.input_processor = llm.input_processor

    @property
    def errored(self) -> bool:
        """Whether the engine's process is dead."""
        return not self._engine.healthy

    @property
    def dead_error(self) -> BaseException:
        """What to raise then."""
        return EngineDeadError()

    def check_admission(self, n: int = 1, request_id: str | None = None) -> None:
        """As vLLM's. Raises GracefulHTTPError."""
        self._engine.llm.check_admission(n, request_id)

    def generate(
        self, prompt: dict[str, Any], params: SamplingParams, request_id: str, **options: Any
    ) -> AsyncGenerator[RequestOutput, None]:
        """Sample responses to a rendered prompt, recorded as part of the task's exchange.

        Of the options, those of a reasoning parser are passed on; LoRA, priorities and the like are not a client's.
        """
        exchange = current.get()
        reasoning = {name: options.get(name) for name in ("reasoning_ended", "reasoning_parser_kwargs")}
        part = Part(exchange, prompt, params, request_id, reasoning)
        exchange.parts.append(part)
        return part.deltas() if params.output_kind == RequestOutputKind.DELTA else part.whole()


class Part:
    """One prompt of an exchange, and its responses."""

    def __init__(
        self,
        exchange: Exchange,
        prompt: dict[str, Any],
        params: SamplingParams,
        request_id: str,
        reasoning: dict[str, Any],
    ) -> None:
        self.exchange = exchange
        self.server = exchange.server
        self.engine = exchange.server.engine
        self.request_id = request_id
        self.prompt = prompt
        self.params = params
        self.reasoning = reasoning
        first = len(exchange.parts) * params.n
        self.response_ids = [_response_id(exchange.response_id, first + index) for index in range(params.n)]
        self.asked = asked_of(exchange, prompt, params)
        self.queue: RequestOutputCollector | None = None
        self.underway = Underway(params.n)
        self.begun: asyncio.Task[None] | None = None
        self.streams: dict[int, Stream] = {}  # those that are open
        self.counted = False
        self.asking = False
        self.made = 0
        self.finished = False  # the engine has nothing more to tell
        self.done = False  # and all of it is recorded
        self.alone = False  # nobody reads any more

    # Main paths

    async def whole(self) -> AsyncGenerator[RequestOutput, None]:
        """The responses at once, when they are on disk."""
        try:
            self._ask_for_logprobs()
            queue = await self._add()
            output = queue.get_nowait() or await queue.get()
            await self._record_whole(output)
            if broken := self._broken(output):
                raise broken
        except (asyncio.CancelledError, GeneratorExit):
            self.leave()
            raise
        except Exception as error:
            told = await self._failed(error)
            if told is error:
                raise
            raise told from error
        finally:
            if not self.alone:
                self.engine.forget(self.request_id)
        yield output

    async def deltas(self) -> AsyncGenerator[RequestOutput, None]:
        """The responses as they are made."""
        try:
            self._ask_for_logprobs()
            queue = await self._add()
            self.begun = asyncio.create_task(self._begin())  # while the engine reads the prompt
            waiting, broken, of_prompt = True, None, None
            while not self.finished:
                output = queue.get_nowait() or await queue.get()
                ended = self._take(output)
                # They come once, and a handler that echoes the prompt wants them for each choice.
                output.prompt_logprobs = of_prompt = output.prompt_logprobs or of_prompt
                if waiting:
                    await asyncio.shield(self.begun)
                    waiting = False
                if ended:
                    broken = broken or self._broken(output)
                    await asyncio.shield(asyncio.create_task(self._end(ended)))
                if broken is None:
                    yield output
            self.done = True
            self._abandon()
            if broken is not None:
                raise broken
        except (asyncio.CancelledError, GeneratorExit):
            self.leave()
            raise
        except Exception as error:
            told = await self._failed(error)
            if told is error:
                raise
            raise told from error
        finally:
            if not self.alone:
                self.engine.forget(self.request_id)

    def used(self) -> int:
        """Tokens of the prompt and the responses, by now."""
        if not self.asking:
            return 0
        made = self.made or sum(len(response.token_ids) for response in self.underway.generation().responses)
        return len(self.asked.prompt_token_ids) + made

    # The engine

    def _ask_for_logprobs(self) -> None:
        params = self.params
        told = params.logprobs is not None or params.logprob_token_ids is not None  # to the client
        if not told:
            params.logprobs = 0  # of the sampled token alone
            params.flat_logprobs = params.prompt_logprobs is None
        if params.output_kind == RequestOutputKind.DELTA:
            return
        if told or params.prompt_logprobs is not None or params.stop or params.include_stop_str_in_output:
            return
        if params.skip_special_tokens:
            params.detokenize = False  # one decode at the end does
            if params.n == 1:
                self.engine.keep_whole(self.request_id, params)

    async def _add(self) -> RequestOutputCollector:
        if self.exchange.ending is not None:
            raise self.exchange.cut_off()
        self.asking = True
        own = self.prompt.get("cache_salt")
        salt = self.engine.cache_salt
        self.prompt["cache_salt"] = salt if own is None else f"{salt}.{own}"
        self.engine.requests.add(self.request_id)
        self.queue = await self.engine.llm.add_request(self.request_id, self.prompt, self.params, **self.reasoning)
        if self.exchange.ending is not None:  # meanwhile
            self.abort_later()
        return self.queue

    def abort_later(self) -> None:
        """End it in the engine, in a task of its own: whoever calls this may be cancelled at its next await."""
        if self.queue is not None and not self.done:
            self._spawn(self._abort())

    def put(self, error: Exception) -> None:
        """Wake whoever waits for the engine."""
        if self.queue is not None and not self.done:
            self.queue.put(error)

    async def _abort(self) -> None:
        try:
            await self.engine.abort(self.request_id)
        except (EngineError, TimeoutError) as error:
            log.warning("request %s could not be aborted: %s", self.request_id, error)

    def _spawn(self, work: Any) -> None:
        task = asyncio.create_task(work, name=f"{self.exchange.endpoint} {self.request_id}")
        self.server.work.add(task)
        task.add_done_callback(self.server.work.discard)

    def _broken(self, output: RequestOutput) -> Interrupted | None:
        """What the client is told instead of responses that were cut off, or that the engine gave up."""
        reasons = {made.finish_reason for made in output.outputs}
        if "error" in reasons and self.params.structured_outputs is not None:
            reason = "the engine can't make what it asks for with the tokens that it may use"
            return Interrupted(field_problem(400, self.exchange.structured_by, reason))
        if "error" in reasons:
            return Interrupted(Problem(503, "the engine gave the response up", retry_after=1))
        return self.exchange.cut_off() if "abort" in reasons else None

    # The rows

    async def _record_whole(self, output: RequestOutput) -> None:
        self.finished = True
        started, decoded = self.underway.started, self.params.detokenize
        generation = self.engine.read(output, self.asked.prompt_token_ids, started, decoded=decoded)
        self.done = True
        self.made = sum(len(response.token_ids) for response in generation.responses)
        for made, response in zip(output.outputs, generation.responses, strict=True):
            made.text = response.text
        output.kv_transfer_params = None  # the scheduler's note is not the client's
        await self.server.record(
            [_settled(row) for row in interaction_rows.answered(self.asked, generation, self.response_ids)]
        )

    async def _begin(self) -> None:
        begun = await asyncio.gather(
            *(
                self.server.begin(self._row(index), partial(self._row, index))
                for index in range(len(self.response_ids))
            ),
            return_exceptions=True,
        )
        self.streams = {index: stream for index, stream in enumerate(begun) if not isinstance(stream, BaseException)}
        for stream in begun:
            if isinstance(stream, BaseException):
                raise stream

    def _take(self, output: RequestOutput) -> list[int]:
        """Keep what came; returns the choices that ended with it."""
        self.finished = output.finished
        underway, version = self.underway, self.engine.version
        if underway.first_token_ms is None and (metrics := output.metrics) is not None:
            underway.queue_ms = max(0.0, metrics.scheduled_ts - metrics.queued_ts) * 1e3
            underway.first_token_ms = max(0.0, metrics.first_token_latency) * 1e3
        ended = []
        for made in output.outputs:
            response = underway.responses[made.index]
            response.add(made.text, made.token_ids, made.logprobs, version)
            if made.finish_reason is not None:
                spans = [(span.start, int(span.version)) for span in made.weight_versions or []]
                response.end(made.finish_reason, spans)
                ended.append(made.index)
        return ended

    async def _end(self, indices: list[int], status: str | None = None) -> None:
        rows = [_settled(self._row(index)) for index in indices]
        for row in rows:
            if status is not None:
                row |= {"status": status, "finish_reason": None}
            elif (made := len(row["response_token_ids"])) != len(row["logprobs"]):
                raise EngineError(f"vLLM gave {len(row['logprobs'])} logprobs for {made} tokens")
        counted, self.counted = self.counted, True
        await self.server.end([self.streams.pop(index) for index in indices], rows, again=counted)

    def _row(self, index: int) -> dict[str, Any]:
        """A choice's row as it is; called in the journal's thread too."""
        generation = self.underway.generation()
        one = replace(generation, responses=[generation.responses[index]])
        return interaction_rows.answered(self.asked, one, [self.response_ids[index]])[0]

    # Other ends

    async def _failed(self, error: Exception) -> Exception:
        """Record what there is; returns what the handler, and through it the client, is told."""
        told: Exception = error
        status = "error"
        if isinstance(error, Problem):  # the journal can't record
            told = Interrupted(error)
            await self._abort()
        elif isinstance(error, Interrupted):
            status = "aborted"
        elif self.queue is None and isinstance(error, _REFUSALS):
            self.done = True  # refused, so there is nothing to record
        else:
            reason = str(error) if isinstance(error, EngineError) else f"vLLM failed: {type(error).__name__}: {error}"
            if isinstance(error, EngineDeadError):
                reason = "the engine's process has died"
            else:
                await self._abort()
                log.error("request %s failed", self.request_id, exc_info=error)
            told = Interrupted(Problem(503, reason, retry_after=5))
        try:
            await self._close(status)
        except Problem as problem:
            told = Interrupted(problem)
        self.exchange.error = told
        return told

    async def _close(self, status: str) -> None:
        """Record what has no end yet as ``status``."""
        if self.begun is not None:
            await asyncio.gather(self.begun, return_exceptions=True)
            try:
                if self.streams:
                    await self._end(list(self.streams), status if status != "aborted" else None)
            finally:
                self._abandon()
        elif not self.done:
            self.done = True
            await self.server.record(interaction_rows.failed(self.asked, self.response_ids, status))

    def _abandon(self) -> None:
        """Leave no choice open that has no end."""
        while self.streams:
            self.server.abandon(self.streams.popitem()[1])

    def leave(self) -> None:
        """Nobody reads any more: if it has not ended, end it in the engine and record what there is."""
        if self.asking and not (self.alone or self.done):
            self.alone = True
            self._spawn(self._end_alone())

    async def _end_alone(self) -> None:
        try:
            await self._abort()
            queue = self.queue
            async with asyncio.timeout(_ABORT_TIMEOUT_S):
                while queue is not None and not self.finished:
                    output = queue.get_nowait() or await queue.get()
                    if self.begun is None:
                        await self._record_whole(output)
                    else:
                        ended = self._take(output)
                        await asyncio.gather(self.begun, return_exceptions=True)
                        if ended := [index for index in ended if index in self.streams]:
                            await self._end(ended)
        except Exception as error:
            log.warning("request %s, whose client has gone, did not end well", self.request_id, exc_info=error)
        finally:
            self.engine.forget(self.request_id)
            await self._close("aborted")


def _settled(row: dict[str, Any]) -> dict[str, Any]:
    return row | {"status": "error", "finish_reason": None} if row["finish_reason"] == "error" else row


def _response_id(first: str, index: int) -> str:
    return first if index == 0 else f"{first}:{index}"
