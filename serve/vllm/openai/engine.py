"""What vLLM's OpenAI handlers take for the engine: ours, with every response recorded on its way to them.

A handler turns a body into prompts and ``SamplingParams``, calls ``generate`` once per prompt, and turns what comes out
into OpenAI's form. In between, ``serve.recorded_request`` samples and records.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import TYPE_CHECKING, Any, Final

from vllm.outputs import RequestOutput
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine.exceptions import EngineDeadError

from serve.engine import EngineDead, EngineError, EngineRefused
from serve.generation.request import Generation, GenerationProgress, nothing_was_left, sampled_logprobs
from serve.http import Problem, field_problem
from serve.recorded_request import RecordedPrompt
from serve.vllm.boot import request_errors, spans_of
from serve.vllm.engine import Answering, Engine, note_first_token
from serve.vllm.openai.request import Interrupted, OpenAIRequest, current

if TYPE_CHECKING:
    from vllm.v1.engine.output_processor import RequestOutputCollector

log = logging.getLogger(__name__)

_LIMITS: Final = ("allowed_token_ids", "bad_words", "logit_bias", "min_tokens")
_REFUSALS: Final = request_errors()


class CapturedEngine:
    """What the handlers use of vLLM's ``EngineClient``, and nothing that changes the engine's state."""

    def __init__(self, engine: Engine) -> None:
        llm = engine.llm
        self._engine = engine
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
        """Sample responses to a rendered prompt, recorded as part of the task's request.

        Of the options, those of a reasoning parser are passed on; LoRA, priorities and the like are not a client's.
        """
        request = current.get()
        reasoning = {name: options.get(name) for name in ("reasoning_ended", "reasoning_parser_kwargs")}
        row_request = request.for_prompt(request_id, prompt, params)  # before ``params`` are changed
        source = OpenAISource(self._engine, prompt, params, request_id, reasoning, row_request.version)
        response_ids = request.response_ids(len(request.active.prompts), params.n)
        engine_error = _ungenerable(params, request.structured_by)
        recorded = RecordedPrompt(request.active, row_request, source, response_ids, engine_error)
        return _outputs(request, recorded, source, streamed=params.output_kind == RequestOutputKind.DELTA)


def _ungenerable(params: SamplingParams, structured_by: str) -> Problem | None:
    """The problem of a request that leaves the engine no token to go on with; None if it leaves all of them."""
    limits = [name for name in _LIMITS if getattr(params, name)]
    field = structured_by if params.structured_outputs is not None else next(iter(limits), None)
    if field not in (structured_by, "allowed_token_ids") and len(limits) < 2:  # one alone leaves tokens
        return None
    assert field is not None
    return field_problem(400, field, "the engine can't generate what it asks for with the tokens that it may use")


async def _outputs(
    request: OpenAIRequest, recorded: RecordedPrompt, source: OpenAISource, *, streamed: bool
) -> AsyncGenerator[RequestOutput, None]:
    """A prompt's recorded outputs, and its errors as the handlers know them."""
    try:
        if streamed:
            async with aclosing(recorded.stream()) as outputs:
                async for output in outputs:
                    yield output
        else:
            await recorded.whole()
            assert source.final is not None
            yield source.final
    except EngineRefused as error:
        request.error = error.__cause__ if isinstance(error.__cause__, Exception) else error
        raise request.error from None
    except Problem as problem:
        request.error = Interrupted(problem)
        raise request.error from problem


class OpenAISource:
    """A prompt as vLLM's handlers rendered it. Its outputs are vLLM's own."""

    def __init__(
        self,
        engine: Engine,
        prompt: dict[str, Any],
        params: SamplingParams,
        request_id: str,
        reasoning: dict[str, Any],
        version: int | None,
    ) -> None:
        self.final: RequestOutput | None = None
        """After ``whole``: the only output, with its text."""
        self._engine = engine
        self._prompt = prompt
        self._params = params
        self._request_id = request_id
        self._reasoning = reasoning
        self._version = version
        self._answering: Answering  # from when it is sent on

    async def whole(self) -> Generation:
        """The responses at once. Raises EngineRefused, EngineError."""
        progress = GenerationProgress(self._params.n)  # for the time at which it started
        try:
            queue = await self._submit()
            final = await self._next(queue)
            token_ids, decoded = self._prompt["prompt_token_ids"], self._params.detokenize
            generation = self._engine.read(final, token_ids, progress.started, self._answering, decoded=decoded)
        finally:
            self._engine.forget(self._request_id)
        for output, response in zip(final.outputs, generation.responses, strict=True):
            output.text = response.text
        self.final = final
        return generation

    async def open(self, progress: GenerationProgress) -> AsyncGenerator[RequestOutput, None]:
        """The outputs as they are sampled. Raises EngineRefused, EngineError."""
        try:
            queue = await self._submit()
        except BaseException:
            self._engine.forget(self._request_id)
            raise
        return self._read(queue, progress)

    async def _read(
        self, queue: RequestOutputCollector, progress: GenerationProgress
    ) -> AsyncGenerator[RequestOutput, None]:
        finished, prompt_logprobs = False, None
        try:
            while not finished:
                output = await self._next(queue)
                finished = output.finished
                if self._add(output, progress):
                    await self._engine.abort(self._request_id)
                # They come once, and a handler that echoes the prompt wants them for each choice.
                output.prompt_logprobs = prompt_logprobs = output.prompt_logprobs or prompt_logprobs
                yield output
        finally:
            self._engine.forget(self._request_id)

    def _add(self, output: RequestOutput, progress: GenerationProgress) -> bool:
        """Whether a response is in error: what follows its last token is noise."""
        note_first_token(output, progress)
        fails = False
        for piece in output.outputs:
            response = progress.responses[piece.index]
            if response.finish_reason is not None:
                continue
            response.add(piece.text, piece.token_ids, piece.logprobs, self._engine.sampling_with(self._answering))
            if nothing_was_left(sampled_logprobs(piece.token_ids, piece.logprobs)):
                response.end("error", self._answering.spans(spans_of(piece)) or None)
                fails = True
            elif piece.finish_reason is not None:
                response.end(piece.finish_reason, self._answering.spans(spans_of(piece)))
        return fails

    async def _submit(self) -> RequestOutputCollector:
        engine, own_salt = self._engine, self._prompt.get("cache_salt")
        llm, answering = engine.llm, engine.answering(self._version)
        self._answering = answering
        self._request_logprobs()
        engine.bind(self._params, answering)
        self._prompt["cache_salt"] = answering.salt if own_salt is None else f"{answering.salt}.{own_salt}"
        engine.requests.add(self._request_id)
        try:
            return await llm.add_request(
                self._request_id,
                self._prompt,
                self._params,
                lora_request=answering.lora_request,
                **self._reasoning,
            )
        except EngineDeadError as error:
            raise EngineDead("the engine's process has died") from error
        except _REFUSALS as error:
            raise EngineRefused(str(error)) from error

    def _request_logprobs(self) -> None:
        params = self._params
        for_client = params.logprobs is not None or params.logprob_token_ids is not None
        if not for_client:
            params.logprobs = 0  # of the sampled token alone
            params.flat_logprobs = params.prompt_logprobs is None
        if params.output_kind == RequestOutputKind.DELTA or for_client or params.prompt_logprobs is not None:
            return
        if params.skip_special_tokens and not (params.stop or params.include_stop_str_in_output):
            params.detokenize = False  # one decode at the end does
            if params.n == 1:
                self._engine.keep_whole(self._request_id, params)

    async def _next(self, queue: RequestOutputCollector) -> RequestOutput:
        try:
            output = queue.get_nowait() or await queue.get()
        except EngineDeadError as error:
            raise EngineDead("the engine's process has died") from error
        except Exception as error:
            log.error("request %s failed", self._request_id, exc_info=error)
            raise EngineError(f"vLLM failed: {type(error).__name__}: {error}") from error
        self._engine.require_answered(output, self._answering)
        return output
