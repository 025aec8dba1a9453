"""The offline engine of an evaluation: one of its own, or that of the resident workers, where it computes the same.

vLLM is imported when one of its own starts.
"""

from __future__ import annotations

import gc
import itertools
import logging
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, fields, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final, Literal, Self

import numpy as np
from numpy.typing import NDArray

from evaluation.config import EngineConfig
from feedback.processes.resident_socket import ask, connect, end_silent, end_workers, wait_until_gone
from serve.generation.request import nothing_was_left, sampled_logprobs
from serve.gpus import smallest_gpu
from serve.kv_cache import KVCache, available_memory, device_share, fit_batch_engine
from serve.policies.folder import PolicyError, compute_dtype, fingerprint
from serve.policies.store import Policy
from serve.policies.whole_policies import whole
from serve.standby_room import weight_bytes
from serve.swap.compatibility import IncompatiblePolicy, require_compatible
from serve.vllm.boot import OFFLINE_WORKER, engine_variables, offline_engine, request_errors, sampling_params

log = logging.getLogger(__name__)

TokenIds = list[int]

Where = Literal["own", "resident", "cache"]
"""What answered: an engine of the evaluation's own, the resident workers', or files that an earlier evaluation left."""

_PROCESS_BYTES: Final = 3 * 2**29  # of an evaluation's process without weights and KV cache, measured
_SILENT_S: Final = 120.0  # of workers that are at work and give no sign of it, as where they are stopped


class EngineError(RuntimeError):
    """The engine can't do what was requested; the text says why."""


@dataclass(frozen=True)
class Generation:
    """One response. ``logprobs`` [tokens] are the policy's own, in nats, at temperature 1 whatever the sampling."""

    text: str
    token_ids: TokenIds
    logprobs: NDArray[np.float32]
    finish_reason: str


@dataclass(frozen=True)
class Response:
    """One response to a request with parameters of its own.

    ``finish_reason``: stop, length; error if the policy computes no numbers, refused if vLLM doesn't take the request.
    """

    text: str
    token_ids: TokenIds
    finish_reason: str


@dataclass(frozen=True)
class Work:
    """What one pass of the engine does; all of it runs as one batch.

    ``greedy`` prompts are answered greedily, ``sampled`` ones, each with its seed, at temperature 1 with nothing cut
    off, ``requested`` ones by vLLM's parameters for each, such as temperature and seed. ``scored`` are (prompt,
    response) pairs whose response gets log-probabilities. All as token ids.
    """

    greedy: Sequence[TokenIds] = ()
    sampled: Sequence[tuple[TokenIds, int]] = ()
    requested: Sequence[tuple[TokenIds, Mapping[str, Any]]] = ()
    scored: Sequence[tuple[TokenIds, TokenIds]] = ()


@dataclass(frozen=True)
class Done:
    """The answers to a Work, in its order. ``scored`` [i] holds one log-probability per response token."""

    greedy: list[Generation]
    sampled: list[Generation]
    requested: list[Generation]
    scored: list[NDArray[np.float32]]


class OfflineEngine:
    """One policy in vLLM, in this process. Use as a context manager: leaving it frees what vLLM holds."""

    where: Where = "own"

    @classmethod
    def around(cls, llm: Any, *, eager: bool) -> Self:
        """An engine that is there already, started with ``OFFLINE_WORKER``; whose it is, ends it."""
        engine = cls.__new__(cls)
        engine._llm, engine._eager = llm, eager
        return engine

    def __init__(self, path: Path, config: EngineConfig) -> None:
        one_process = config.tensor_parallel_size == 1
        variables = engine_variables(config.log_level, one_process=one_process, one_machine=True)
        os.environ.update(variables | {"VLLM_LOGGING_STREAM": "ext://sys.stderr"})  # stdout belongs to the caller
        gc.collect()  # an engine closed before this one leaves reference cycles that hold its weights
        self._eager = config.enforce_eager is not False
        cache = fit_batch_engine(config, path, section="evaluation.engine")
        if cut := cache.cut("evaluation.engine"):
            log.warning("%s", cut)
        self._llm: Any = offline_engine(
            path,
            extra=config.extra,
            dtype=compute_dtype(path, config.dtype),
            max_model_len=cache.max_model_len,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_batched_tokens,
            kv_cache_memory_bytes=cache.size,
            **_share_of_gpu(config, path, cache),
            tensor_parallel_size=config.tensor_parallel_size,
            distributed_executor_backend="uni" if one_process else "mp",
            worker_extension_cls=OFFLINE_WORKER,
            enforce_eager=self._eager,
            use_tqdm_on_load=False,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        """Free the weights, the KV cache and vLLM's process groups, so that another engine can start."""
        self._llm.llm_engine.engine_core.shutdown()
        self._llm = None

    def load(self, policy: Policy) -> None:
        """Take its weights for those that are there: the rest must be as ``require_compatible`` wants it.

        What vLLM raises is raised, and EngineError if it keeps what the weights before made of prompts; nothing can be
        asked of this engine then.
        """
        files = {
            path.name: {"sha256": policy.files[path.name]["sha256"], "fingerprint": fingerprint(path)}
            for path in policy.weight_files
        }
        self._llm.collective_rpc("millrace_load", args=(str(policy.path), files))
        if not self._llm.reset_prefix_cache():
            raise EngineError("vLLM kept its cache of prefixes, which holds what the weights before made of prompts")

    def _compile_mode(self) -> AbstractContextManager[Any]:
        """enforce_eager keeps vLLM from compiling the model, but not the sampler: that costs up to 8 s on two cores."""
        import torch

        return torch.compiler.set_stance("force_eager") if self._eager else nullcontext()

    @property
    def dtype(self) -> str:
        """What the engine computes in: float32, bfloat16, float16."""
        return str(self._llm.model_config.dtype).removeprefix("torch.")

    @property
    def max_model_len(self) -> int:
        """Longest prompt and response together, in tokens."""
        return self._llm.model_config.max_model_len

    def encode(self, prompts: Sequence[str | list[dict[str, Any]]]) -> list[TokenIds]:
        """Token ids of each prompt: text as the tokenizer takes it, chat messages through the policy's template.

        Raises EngineError if there are messages and the tokenizer has no chat template.
        """
        tokenizer = self._llm.get_tokenizer()
        if any(not isinstance(prompt, str) for prompt in prompts) and not getattr(tokenizer, "chat_template", None):
            raise EngineError("the suite has chat messages and the policy's tokenizer has no chat template")
        texts = [prompt for prompt in prompts if isinstance(prompt, str)]
        encoded = iter(tokenizer(texts)["input_ids"] if texts else [])
        return [
            next(encoded)
            if isinstance(prompt, str)
            else tokenizer.apply_chat_template(prompt, add_generation_prompt=True, tokenize=True, return_dict=False)
            for prompt in prompts
        ]

    def run(self, work: Work, *, max_tokens: int) -> Done:
        """Do all of ``work`` in one batch."""
        greedy = sampling_params(temperature=0.0, max_tokens=max_tokens)
        sampled = [sampling_params(temperature=1.0, seed=seed, max_tokens=max_tokens) for _, seed in work.sampled]
        requested = [sampling_params(max_tokens=max_tokens, **of) for _, of in work.requested]
        scored = [(prompt + response)[: self.longest_scored] for prompt, response in work.scored]
        prompts = [*work.greedy, *(prompt for prompt, _ in (*work.sampled, *work.requested)), *scored]
        params = [greedy] * len(work.greedy) + sampled + requested + [_score()] * len(scored)
        outputs = iter(self._generate(prompts, params))
        answered, generated, as_requested = (
            [_generation(output.outputs[0]) for output in itertools.islice(outputs, len(of))]
            for of in (work.greedy, work.sampled, work.requested)
        )
        return Done(answered, generated, as_requested, _responses_logprobs(list(outputs), work.scored))

    def time_token(self, prompts: Sequence[TokenIds], *, tokens: int) -> list[float]:
        """Seconds that a token takes of a response [prompts], each answered by itself.

        Every response has so many tokens, whatever the policy says, or as many as the context has room for: so its
        length is no part of it.
        """
        found = []
        for prompt in (*prompts[:1], *prompts):  # what an engine does at its first request is no part of it either
            n = min(tokens, self.max_model_len - len(prompt))
            self._llm.reset_prefix_cache()
            started = time.perf_counter()
            self._generate([prompt], [sampling_params(temperature=0.0, max_tokens=n, ignore_eos=True, logprobs=None)])
            found.append((time.perf_counter() - started) / n)
        return found[1:]

    def score(self, pairs: Sequence[tuple[TokenIds, TokenIds]], *, temperature: float) -> list[NDArray[np.float32]]:
        """Of each (prompt, response) the log-probabilities [response tokens] of sampling the response, in nats.

        At that temperature, above 0, with nothing cut off. Raises EngineError on a pair that is longer than
        ``longest_scored``.
        """
        prompts = [prompt + response for prompt, response in pairs]
        if (longest := max(map(len, prompts), default=0)) > self.longest_scored:
            raise EngineError(f"a prompt and its response have {longest} tokens, {self.longest_scored} can be scored")
        self._llm.collective_rpc("millrace_set_prompt_temperature", args=(temperature,))
        try:
            return _responses_logprobs(self._generate(prompts, [_score()] * len(prompts)), pairs)
        finally:
            self._llm.collective_rpc("millrace_set_prompt_temperature", args=(1.0,))

    def sample(self, prompts: Sequence[TokenIds], sampling: Sequence[Mapping[str, Any]], *, seed: int) -> list[str]:
        """The text of a response to each prompt, sampled by vLLM's parameters for it, such as temperature.

        ``seed``: of the first, the next one's is one more, where its parameters have none.
        """
        params = [sampling_params(**{"seed": seed + i, **of}, logprobs=None) for i, of in enumerate(sampling)]
        return [output.outputs[0].text or "" for output in self._generate(prompts, params)]

    def answer(self, prompts: Sequence[TokenIds], sampling: Sequence[Mapping[str, Any]]) -> list[Response]:
        """A response to each prompt, by vLLM's parameters for it.

        Raises what vLLM raises when it fails itself; a request that it does not take costs the others nothing.
        """
        try:
            params = [sampling_params(**of) for of in sampling]
            outputs = self._generate(prompts, params)
        except request_errors() as error:
            if len(prompts) == 1:
                log.info("vLLM refuses a request: %s: %s", type(error).__name__, error)
                return [Response("", [], "refused")]
            middle = len(prompts) // 2
            return [
                *self.answer(prompts[:middle], sampling[:middle]),
                *self.answer(prompts[middle:], sampling[middle:]),
            ]
        return [_response(output.outputs[0]) for output in outputs]

    @property
    def longest_scored(self) -> int:
        """Longest prompt and response together that can be scored, in tokens.

        vLLM scores a prompt's tokens on the way to a next one, which is thrown away: the pair must leave room for it.
        """
        return self.max_model_len - 1

    def _generate(self, prompts: Sequence[TokenIds], params: Sequence[Any]) -> list[Any]:
        if not prompts:
            return []
        with self._compile_mode():
            inputs = [{"prompt_token_ids": ids} for ids in prompts]
            found: list[Any] = self._llm.generate(inputs, list(params), use_tqdm=sys.stderr.isatty())
        return found


@dataclass(frozen=True)
class Call:
    """A method of ``OfflineEngine``, or a property, to be called where the engine is."""

    name: str
    arguments: tuple[Any, ...] = ()
    keywords: Mapping[str, Any] = field(default_factory=dict)

    def of(self, engine: OfflineEngine) -> Any:
        """What it returns. Raises EngineError if it is none that may be called from elsewhere."""
        if self.name not in _REMOTE:
            raise EngineError(f"{self.name!r} is not called from elsewhere; {', '.join(sorted(_REMOTE))} are")
        value = getattr(engine, self.name)
        return value(*self.arguments, **self.keywords) if callable(value) else value

    def dealt(self, engines: int) -> tuple[list[Call | None], Callable[[list[Any]], Any]]:
        """What to ask of each of so many engines with one policy, and what makes one answer of theirs.

        Requests are dealt out like cards. What any engine can answer, the first is asked alone.
        """
        if self.name not in _BY_REQUEST or not self.arguments:
            return [self, *[None] * (engines - 1)], lambda answers: answers[0]
        arguments = self.arguments
        if self.name == "sample":  # which seed a request has goes by its place
            prompts, sampling = arguments
            arguments = prompts, [{"seed": self.keywords["seed"] + i, **of} for i, of in enumerate(sampling)]
        hands = [tuple(_hand(argument, i, engines) for argument in arguments) for i in range(engines)]
        return [replace(self, arguments=hand) for hand in hands], _together


class LentEngine(OfflineEngine):
    """The rollout engines of the resident workers, which sleep between two trainings: every method is called there.

    Where they can't answer, as they have died, failed or hang, it goes on in an engine of its own from the same call
    on, which raises what is wrong with the call itself.
    """

    where: Where = "resident"

    @classmethod
    def borrow(cls, policy: Policy, config: EngineConfig) -> LentEngine | None:
        """The engine with this policy in it; None where there are no workers, or their engine computes otherwise.

        Then they end, if an engine of one's own does not fit into memory beside them.
        """
        if (connection := connect()) is None:
            return None
        try:
            word, *rest = ask(connection, "lend", config, policy, timeout_s=_SILENT_S)
            if word == "lent":
                return cls._of(connection, policy, config)
            why = rest[0] if rest else f"the resident workers are {word}"
            if word == "error":
                wait_until_gone(connection)  # whoever fails ends, and gives its memory back
            if word == "refused" and not _fits_beside(policy, config):
                why += "; they end, as another engine does not fit beside theirs"
                connection.close()
                end_workers()
        except EOFError:
            why = "the resident workers ended"
        except TimeoutError as error:
            why = str(error)
            end_silent(connection)
        log.warning("policy %s gets an engine of its own: %s", policy.version, why)
        connection.close()
        return None

    @classmethod
    def _of(cls, connection: Connection, policy: Policy, config: EngineConfig) -> LentEngine:
        engine = cls.__new__(cls)
        engine._connection, engine._policy, engine._config, engine._own = connection, policy, config, None
        return engine

    _connection: Connection
    _policy: Policy
    _config: EngineConfig
    _own: OfflineEngine | None

    def __exit__(self, *exc: object) -> None:
        self._connection.close()
        if self._own is not None:
            self._own.__exit__(*exc)

    def load(self, policy: Policy) -> None:
        self._policy = policy
        if self._own is not None:
            self._own.load(policy)
        else:
            self._ask("load", policy)  # an engine of its own begins with it

    @property
    def dtype(self) -> str:
        return str(self._call("dtype"))

    @property
    def max_model_len(self) -> int:
        return int(self._call("max_model_len"))

    @property
    def longest_scored(self) -> int:
        return int(self._call("longest_scored"))

    def encode(self, prompts: Sequence[str | list[dict[str, Any]]]) -> list[TokenIds]:
        found: list[TokenIds] = self._call("encode", prompts)
        return found

    def run(self, work: Work, *, max_tokens: int) -> Done:
        done: Done = self._call("run", work, max_tokens=max_tokens)
        return done

    def score(self, pairs: Sequence[tuple[TokenIds, TokenIds]], *, temperature: float) -> list[NDArray[np.float32]]:
        found: list[NDArray[np.float32]] = self._call("score", pairs, temperature=temperature)
        return found

    def sample(self, prompts: Sequence[TokenIds], sampling: Sequence[Mapping[str, Any]], *, seed: int) -> list[str]:
        texts: list[str] = self._call("sample", prompts, sampling, seed=seed)
        return texts

    def answer(self, prompts: Sequence[TokenIds], sampling: Sequence[Mapping[str, Any]]) -> list[Response]:
        responses: list[Response] = self._call("answer", prompts, sampling)
        return responses

    def _call(self, name: str, *arguments: Any, **keywords: Any) -> Any:
        call = Call(name, arguments, keywords)
        value = None if self._own is not None else self._ask("call", call)
        return call.of(self._own) if self._own is not None else value

    def _ask(self, *message: Any) -> Any:
        """What the workers answer; None where they can't, and there is an engine of its own from then on."""
        try:
            word, value = ask(self._connection, *message, timeout_s=_SILENT_S)
            if word == "value":
                return value
            wait_until_gone(self._connection)  # whoever fails ends, and gives its memory back
        except EOFError:
            value = "they have ended, or taken it back; see resident.log"
            if not _fits_beside(self._policy, self._config):
                end_workers()
        except TimeoutError as error:
            value = str(error)
            end_silent(self._connection)
        self._connection.close()
        log.warning("policy %s goes on in an engine of its own: %s", self._policy.version, value)
        self._own, self.where = OfflineEngine(self._policy.path, self._config), "own"
        return None


_BY_REQUEST: Final = frozenset({"run", "score", "sample", "answer"})
_REMOTE: Final = _BY_REQUEST | {"dtype", "max_model_len", "longest_scored", "encode"}


def _hand(requests: Work | Sequence[Any], i: int, engines: int) -> Any:
    """Those of them that engine ``i`` gets."""
    if isinstance(requests, Work):
        return Work(**{each.name: getattr(requests, each.name)[i::engines] for each in fields(Work)})
    return requests[i::engines]


def _together(answers: Sequence[Any]) -> Any:
    """Of each engine's answers, in the order of the requests that ``_hand`` has dealt out."""
    if isinstance(answers[0], Done):
        return Done(**{each.name: _together([getattr(of, each.name) for of in answers]) for each in fields(Done)})
    found = [None] * sum(map(len, answers))
    for i, of_engine in enumerate(answers):
        found[i :: len(answers)] = of_engine
    return found


class OfflineEngines:
    """The engine of one policy after another: the same one with other weights, where nothing but weights differs.

    Use as a context manager: leaving it closes the engine, if one was needed.

    borrow: the engine of the resident workers, where there are some and it computes the same.
    """

    def __init__(self, config: EngineConfig, *, borrow: bool = True) -> None:
        self._config, self._borrow = config, borrow
        self._engine: OfflineEngine | None = None
        self._policy: Policy | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self._close()

    def of(self, policy: Policy) -> OfflineEngine:
        """The engine with this policy in it, until the next call. Raises what vLLM raises on one that it can't load."""
        policy = whole(policy)
        if self._engine is not None and self._policy is not None:
            if self._policy.sha256 == policy.sha256 or _loaded(self._engine, self._policy, policy):
                self._policy = policy
                return self._engine
            self._close()
        lent = LentEngine.borrow(policy, self._config) if self._borrow else None
        self._engine, self._policy = lent or OfflineEngine(policy.path, self._config), policy
        return self._engine

    @property
    def where(self) -> Where:
        """Which engine has answered last."""
        return "own" if self._engine is None else self._engine.where

    @property
    def started(self) -> bool:
        """Whether there is an engine, and it is of the evaluation's own: another one would cost a start."""
        return self._engine is not None and self._engine.where == "own"

    def _close(self) -> None:
        engine, self._engine, self._policy = self._engine, None, None
        if engine is not None:
            engine.__exit__()


def _loaded(engine: OfflineEngine, before: Policy, policy: Policy) -> bool:
    """Whether the engine has the policy's weights now; if not, it is of no further use."""
    try:
        require_compatible(before, policy)
        engine.load(policy)
    except IncompatiblePolicy:
        return False
    except Exception as error:  # noqa: BLE001  what it is, an engine of its own will say
        log.warning("policy %s gets an engine of its own: %s: %s", policy.version, type(error).__name__, error)
        return False
    return True


def _fits_beside(policy: Policy, config: EngineConfig) -> bool:
    """Whether there is memory for another engine, as `millrace doctor` reckons. On a GPU nobody knows without a
    context there: what sleeps has given back most of it, and ends."""
    if any(Path("/proc/driver/nvidia/gpus").glob("*")):
        return False
    cache = fit_batch_engine(config, policy.path, section="evaluation.engine").size or 0
    needed = _PROCESS_BYTES + cache + sum(path.stat().st_size for path in policy.weight_files)
    return available_memory() >= needed


def _share_of_gpu(config: EngineConfig, path: Path, cache: KVCache) -> dict[str, float]:
    """vLLM's argument for the memory that must be free on a GPU; none without one, or where weights are not known."""
    if (gpu := smallest_gpu()) is None or "gpu_memory_utilization" in (config.extra or {}):
        return {}
    try:
        weights, _ = weight_bytes(path, config.dtype)
    except (PolicyError, ValueError):  # vLLM says what is wrong with them
        return {}
    share = device_share(weights // config.tensor_parallel_size, cache.size or 0, gpu.total_bytes)
    return {"gpu_memory_utilization": share}


def _score() -> Any:
    return sampling_params(temperature=0.0, max_tokens=1, logprobs=None, prompt_logprobs=0, detokenize=False)


def _responses_logprobs(
    outputs: Sequence[Any], pairs: Sequence[tuple[TokenIds, TokenIds]]
) -> list[NDArray[np.float32]]:
    return [
        _chosen(output.prompt_logprobs, output.prompt_token_ids)[len(prompt) :]
        for output, (prompt, _) in zip(outputs, pairs, strict=True)
    ]


def _generation(output: Any) -> Generation:
    token_ids = list(output.token_ids)
    return Generation(output.text or "", token_ids, _chosen(output.logprobs, token_ids), output.finish_reason)


def _response(output: Any) -> Response:
    token_ids = list(output.token_ids)
    if nothing_was_left(sampled_logprobs(token_ids, output.logprobs)):
        return Response("", [], "error")
    return Response(output.text or "", token_ids, output.finish_reason)


def _chosen(flat: Any, token_ids: TokenIds) -> NDArray[np.float32]:
    """The log-probability of each token given those before it; NaN where vLLM has none, at a prompt's first token.

    vLLM lists a position's token first and other candidates after it.
    """
    found = np.full(len(token_ids), np.nan, dtype=np.float32)
    for i, (start, end, token) in enumerate(zip(flat.start_indices, flat.end_indices, token_ids, strict=True)):
        if start < end:
            if flat.token_ids[start] != token:
                raise EngineError(f"vLLM gave the log-probability of token {flat.token_ids[start]} in place of {token}")
            found[i] = flat.logprobs[start]
    return found
