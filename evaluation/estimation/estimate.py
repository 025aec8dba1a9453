"""What a candidate would earn on logged traffic: its log-probabilities by the engine, a baseline, the numbers."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import pyarrow as pa
from pydantic import TypeAdapter

from evaluation.config import EvaluationConfig
from evaluation.engine import OfflineEngine
from evaluation.estimation.logged_responses import TOO_LONG, LoggedResponse, LoggedTraffic
from evaluation.estimation.same_tokens import other_tokens
from evaluation.statistics import off_policy
from evaluation.statistics.intervals import Floats
from evaluation.statistics.off_policy import MIN_ESS, OffPolicy
from feedback.config import ClassifierConfig
from feedback.scoring.sources.reward_model import RewardModel
from serve.policies.store import Policy
from serve.policies.whole_policies import whole


class EstimateError(RuntimeError):
    """There can be no estimate; the text says why."""


@dataclass(frozen=True)
class Baseline:
    """The reward model of the doubly robust estimate. It must not have learned from the responses."""

    name: str
    model: ClassifierConfig


@dataclass(frozen=True)
class TrafficEstimate:
    """What policy ``candidate`` would earn on traffic that policy ``incumbent`` answered.

    ``reasons``: why the verdict is "can't tell". ``numbers``: None where too few responses could be used. ``responses``
    were used, in ``clusters``: the users, sessions and requests that ``clustered_by`` counts. ``considered`` responses
    of traffic were looked at; ``left_out`` says how many of them were not used, by reason. ``baseline`` names the
    reward model of the doubly robust estimate; ``no_baseline`` says why there is none.
    """

    candidate: int
    incumbent: int
    verdict: Literal["estimated", "can't tell"]
    reasons: tuple[str, ...]
    considered: int
    responses: int
    clusters: int
    clustered_by: dict[str, int]
    left_out: dict[str, int]
    confidence: float
    baseline: str | None = None
    no_baseline: str | None = None
    numbers: OffPolicy | None = None

    def to_json(self) -> str:
        """As JSON; the end of an interval that has none is null."""
        return TypeAdapter(TrafficEstimate).dump_json(self, indent=2).decode()


def estimate(
    candidate: Policy,
    incumbent: Policy,
    traffic: LoggedTraffic,
    config: EvaluationConfig,
    *,
    baseline: Baseline | str,
    bounds: tuple[float, float] = (0.0, 1.0),
    samples: int = 4,
) -> TrafficEstimate:
    """The estimate from the responses of ``incumbent`` in ``traffic``. No engine starts where they can't be enough.

    ``baseline``: or why there is none. ``bounds``: what rewards lie between. ``samples``: how many responses of the
    candidate to each prompt the baseline reads. Raises EstimateError for a reward out of bounds and for policies whose
    tokenizers differ, what vLLM raises on a policy that it can't load, and RewardModelError.
    """
    _require_same_tokenizer(candidate, incumbent)
    _require_bounded(traffic.responses, bounds)
    numbers, name, missing = None, None, None
    if _enough(traffic):
        with OfflineEngine(whole(candidate).path, config.engine) as engine:
            long = {r.response_id for r in traffic.responses if _tokens(r) > engine.longest_scored}
            traffic = traffic.without(long, TOO_LONG)
            scored = _enough(traffic)
            if scored:
                log_probs = _log_probs(engine, traffic.responses)
                texts = _sample(engine, traffic.responses, 0 if isinstance(baseline, str) else samples, config.seed)
        if scored:  # the engine's memory is free for the reward model
            predicted, expected, name, missing = _predictions(traffic.responses, texts, baseline, samples)
            numbers = off_policy.estimate(
                [response.reward for response in traffic.responses],
                [response.log_prob for response in traffic.responses],
                log_probs,
                bounds=bounds,
                confidence=config.gate.confidence,
                clusters=_codes(traffic.responses),
                predicted=predicted,
                expected=expected,
            )
    clusters = _clusters(traffic.responses)
    return TrafficEstimate(
        candidate=candidate.version,
        incumbent=incumbent.version,
        verdict="can't tell" if numbers is None else numbers.verdict,
        reasons=(_too_few(traffic),) if numbers is None else numbers.reasons,
        considered=traffic.considered,
        responses=len(traffic.responses),
        clusters=len(clusters),
        clustered_by=dict(Counter(kind for kind, _, _ in clusters)),
        left_out=traffic.left_out,
        confidence=config.gate.confidence,
        baseline=name,
        no_baseline=missing,
        numbers=numbers,
    )


def _log_probs(engine: OfflineEngine, responses: Sequence[LoggedResponse]) -> Floats:
    """Of each response [n] the candidate's log-probability, at the temperature that it was sampled at, in nats."""
    at: dict[float, list[int]] = defaultdict(list)
    for i, response in enumerate(responses):
        at[response.temperature].append(i)
    found = np.full(len(responses), np.nan)
    for temperature, rows in at.items():
        pairs = [(responses[i].prompt_token_ids, responses[i].response_token_ids) for i in rows]
        scored = engine.score(pairs, temperature=temperature)
        found[rows] = [of_response.astype(np.float64).sum() for of_response in scored]
    return found


def _sample(engine: OfflineEngine, responses: Sequence[LoggedResponse], samples: int, seed: int) -> list[str]:
    """Texts [n * samples] of the candidate, sampled as the logged responses were."""
    repeated = [response for response in responses for _ in range(samples)]
    return engine.sample([r.prompt_token_ids for r in repeated], [r.sampling for r in repeated], seed=seed)


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


def _codes(responses: Sequence[LoggedResponse]) -> list[int]:
    """The number of each response's cluster."""
    codes = {cluster: i for i, cluster in enumerate(_clusters(responses))}
    return [codes[response.cluster] for response in responses]


def _enough(traffic: LoggedTraffic) -> bool:
    return len(_clusters(traffic.responses)) >= MIN_ESS


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
    if why := other_tokens(candidate, incumbent):
        raise EstimateError(why)
