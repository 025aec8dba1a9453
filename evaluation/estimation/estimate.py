"""What a candidate would earn on logged traffic: its log-probabilities by the engine, a baseline, the numbers."""

from __future__ import annotations

import json
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final

import numpy as np
import pyarrow as pa

from evaluation.config import EvaluationConfig
from evaluation.engine import OfflineEngine
from evaluation.estimation.logged_responses import TOO_LONG, LoggedResponse, LoggedTraffic
from evaluation.estimation.result import TrafficEstimate, interval
from evaluation.statistics import off_policy
from evaluation.statistics.intervals import Floats
from evaluation.statistics.off_policy import MIN_ESS
from feedback.config import ClassifierConfig
from feedback.scoring.sources.reward_model import RewardModel
from serve.policies.folder import TOKENIZER_FILES
from serve.policies.store import Policy

_TEMPLATE_FILES: Final = ("chat_template.jinja", "tokenizer_config.json")
_COSMETIC: Final = ("truncation", "padding")  # of tokenizer.json: leftovers of the last call before it was saved


class EstimateError(RuntimeError):
    """There can be no estimate; the text says why."""


@dataclass(frozen=True)
class Baseline:
    """The reward model of the doubly robust estimate. It must not have learned from the responses."""

    name: str
    model: ClassifierConfig


@dataclass(frozen=True)
class _Scored:
    """What the engine found. ``candidate`` [n]: log-probabilities of the responses; ``samples`` [n * samples] texts."""

    candidate: Floats
    samples: list[str]
    dtype: str


def estimate(
    candidate: Policy,
    incumbent: Policy,
    traffic: LoggedTraffic,
    config: EvaluationConfig,
    *,
    baseline: Baseline | str,
    bounds: tuple[float, float] = (0.0, 1.0),
    samples: int = 4,
    since: datetime | None = None,
    limit: int,
) -> TrafficEstimate:
    """The estimate from the responses of ``incumbent`` in ``traffic``. No engine starts where they can't be enough.

    ``baseline``: or why there is none. ``bounds``: what rewards lie between. ``samples``: how many responses of the
    candidate to each prompt the baseline reads; ``since`` and ``limit``: by which traffic was read. Raises
    EstimateError for a reward out of bounds and for policies whose tokenizers differ, what vLLM raises on a policy that
    it can't load, and RewardModelError.
    """
    _require_same_tokenizer(candidate, incumbent)
    _require_bounded(traffic.responses, bounds)
    started = time.monotonic()
    scored: _Scored | None = None
    if len(_clusters(traffic.responses)) >= MIN_ESS:
        with OfflineEngine(candidate.path, config.engine) as engine:
            room = engine.longest_scored
            traffic = traffic.without({r.response_id for r in traffic.responses if _tokens(r) > room}, TOO_LONG)
            if len(_clusters(traffic.responses)) >= MIN_ESS:
                scored = _score(engine, traffic.responses, samples if isinstance(baseline, Baseline) else 0, config)
    numbers: dict[str, Any]
    if scored is None:
        numbers = {"verdict": "can't tell", "reasons": (_too_few(traffic),)}
    else:
        numbers = _numbers(traffic.responses, scored, baseline, samples, bounds, config.gate.confidence)
    return TrafficEstimate(
        candidate=candidate.version,
        candidate_sha256=candidate.sha256,
        incumbent=incumbent.version,
        incumbent_sha256=incumbent.sha256,
        **numbers,
        responses=len(traffic.responses),
        clusters=len(clusters := _clusters(traffic.responses)),
        clustered_by=dict(Counter(kind for kind, _, _ in clusters)),
        considered=traffic.considered,
        left_out=traffic.left_out,
        since=None if since is None else since.isoformat(),
        limit=limit,
        bounds=bounds,
        confidence=config.gate.confidence,
        samples=samples,
        seed=config.seed,
        dtype=None if scored is None else scored.dtype,
        lake_versions=traffic.versions,
        created_at=datetime.now(UTC).isoformat(timespec="milliseconds"),
        seconds=round(time.monotonic() - started, 3),
    )


def _score(
    engine: OfflineEngine, responses: Sequence[LoggedResponse], samples: int, config: EvaluationConfig
) -> _Scored:
    at: dict[float, list[int]] = defaultdict(list)
    for i, response in enumerate(responses):
        at[response.temperature].append(i)
    candidate = np.full(len(responses), np.nan)
    for temperature, rows in at.items():
        pairs = [(responses[i].prompt_token_ids, responses[i].response_token_ids) for i in rows]
        log_probs = engine.score(pairs, temperature=temperature)
        candidate[rows] = [of_response.astype(np.float64).sum() for of_response in log_probs]
    repeated = [response for response in responses for _ in range(samples)]
    texts = engine.sample([r.prompt_token_ids for r in repeated], [r.sampling for r in repeated], seed=config.seed)
    return _Scored(candidate, texts, engine.dtype)


def _numbers(
    responses: Sequence[LoggedResponse],
    scored: _Scored,
    baseline: Baseline | str,
    samples: int,
    bounds: tuple[float, float],
    confidence: float,
) -> dict[str, Any]:
    """The fields of the result that the statistics decide."""
    predicted, expected, name, missing = _predictions(responses, scored.samples, baseline, samples)
    codes = {cluster: i for i, cluster in enumerate(_clusters(responses))}
    found = off_policy.estimate(
        [response.reward for response in responses],
        [response.log_prob for response in responses],
        scored.candidate,
        bounds=bounds,
        confidence=confidence,
        clusters=[codes[response.cluster] for response in responses],
        predicted=predicted,
        expected=expected,
    )
    return {
        "verdict": found.verdict,
        "reasons": found.reasons,
        "estimate": interval(found.estimate),
        "incumbent_reward": interval(found.logged),
        "gain": interval(found.gain),
        "ips": interval(found.ips),
        "snips": interval(found.snips),
        "doubly_robust": found.doubly_robust and interval(found.doubly_robust),
        "doubly_robust_missing": missing,
        "lower": found.lower,
        "clip": found.clip,
        "ess": found.ess,
        "mean_weight": interval(found.mean_weight),
        "largest_share": found.largest_share,
        "baseline": name,
    }


def _predictions(
    responses: Sequence[LoggedResponse], texts: Sequence[str], baseline: Baseline | str, samples: int
) -> tuple[Floats | None, Floats | None, str | None, str | None]:
    """(reward predicted of each logged response [n], its mean over the candidate's [n], by which model, why none).

    What the model can't read counts as the mean of what it can: the estimate stays without bias for any fixed rule.
    """
    if isinstance(baseline, str):
        return None, None, None, baseline
    if not samples:
        return None, None, None, "no responses of the candidate were sampled"
    model = RewardModel(baseline.model)
    logged, whys = model.by_row(_rows(responses, [response.response for response in responses]))
    readable = [value for value in logged if value is not None]
    if not readable:
        why = Counter(filter(None, whys)).most_common(1)[0][0]
        return None, None, None, f"{baseline.name} can read none of the responses ({why})"
    fresh, _ = model.by_row(_rows([r for r in responses for _ in range(samples)], texts))
    filler = float(np.mean(readable))
    predicted, of_samples = (
        np.array([filler if value is None else value for value in values], np.float64) for values in (logged, fresh)
    )
    return predicted, of_samples.reshape(-1, samples).mean(axis=1), baseline.name, None


def _rows(responses: Sequence[LoggedResponse], texts: Sequence[str]) -> pa.Table:
    """What a reward model reads."""
    return pa.table(
        {
            "prompt": pa.array([response.prompt for response in responses], pa.string()),
            "messages": pa.array([response.messages for response in responses], pa.string()),
            "response": pa.array(texts, pa.string()),
        }
    )


def _clusters(responses: Sequence[LoggedResponse]) -> list[tuple[str, str, str]]:
    return list(dict.fromkeys(response.cluster for response in responses))


def _tokens(response: LoggedResponse) -> int:
    return len(response.prompt_token_ids) + len(response.response_token_ids)


def _too_few(traffic: LoggedTraffic) -> str:
    if not traffic.considered:
        return "there is no traffic"
    if not traffic.rewarded:
        return f"none of {traffic.considered} responses of traffic has a reward: run `millrace score`"
    return (
        f"{len(traffic.responses)} of {traffic.considered} responses of traffic can be used, of "
        f"{len(_clusters(traffic.responses))} users, sessions or requests: their effective number would be below "
        f"{MIN_ESS:g}"
    )


def _require_bounded(responses: Sequence[LoggedResponse], bounds: tuple[float, float]) -> None:
    low, high = bounds
    for response in responses:
        if not low <= response.reward <= high:
            raise EstimateError(
                f"response {response.response_id} has the reward {response.reward:g}, outside [{low:g}, {high:g}]: say "
                "what rewards lie between, with --bounds LOW HIGH"
            )


def _require_same_tokenizer(candidate: Policy, incumbent: Policy) -> None:
    """Logged token ids, prompts included, must be what the candidate would have got and given."""
    for name in (*TOKENIZER_FILES, *_TEMPLATE_FILES):
        if _content(candidate, name) != _content(incumbent, name):
            what = "chat template" if name in _TEMPLATE_FILES else "tokenizer"
            raise EstimateError(
                f"policy {candidate.version} has another {what} than policy {incumbent.version} ({name} differs): the "
                "logged token ids are not what it would read and write"
            )


def _content(policy: Policy, name: str) -> Any:
    """What decides token ids in a file of the policy; None if it has no such file."""
    if name not in policy.files:
        return None
    content = (policy.path / name).read_bytes()
    if not name.endswith(".json"):
        return content
    values = json.loads(content)
    if name in _TEMPLATE_FILES:
        return values.get("chat_template")
    return {key: value for key, value in values.items() if key not in _COSMETIC}
