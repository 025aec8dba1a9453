"""The evaluation of one policy against another on a held-out suite."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from pydantic import ValidationError

from evaluation import best_of
from evaluation.config import JUDGING, EvaluationConfig
from evaluation.engine import OfflineEngines
from evaluation.judging import Judged, Judging, Scores, Sources, TrainingReward
from evaluation.results import BestOf, Evaluation, Greedy, Interval, KlEstimate, PolicyResult, Sample, Wins
from evaluation.statistics import intervals
from evaluation.statistics.pairwise import win_rate_in_both_orders
from evaluation.suites import answers, text_metrics
from evaluation.suites.decoding import GREEDY, Decoding
from evaluation.suites.held_out import prompt_key
from evaluation.suites.suite import Suite
from feedback.config import RuleConfig
from feedback.schema import INTERACTIONS
from feedback.scoring.sources.builtin import DEFAULT_REFERENCE
from feedback.scoring.sources.rules import COLUMNS, Rule, RuleError, configured, load_rule
from serve.policies.store import Policy

Scorer = Callable[[pa.Table], Sequence[float | None]]
"""Scores responses; takes a batch with columns prompt, messages, response, response_token_ids, metadata."""

Rate = Callable[[Suite, pa.Table], Scores]
"""Scores a policy's answers to a suite, each by itself."""


def evaluate(
    candidate: Policy,
    incumbent: Policy,
    suite: Suite,
    config: EvaluationConfig,
    folder: Path,
    sources: Sources | None = None,
    *,
    training_reward: TrainingReward | None = None,
    decoding: Decoding = GREEDY,
) -> Evaluation:
    """Answer the suite with both policies, score the answers, compare them item by item.

    ``folder`` is where evaluations are kept (answers are cached under it); ``sources`` a judge or a reward model for
    the scorers that need one; ``training_reward``: of best-of-n; ``decoding``: how items are answered, whatever the
    settings say. Raises EngineError, ValueError if no item has a score
    for both, and what the scorer raises.
    """
    scoring = Scoring(config, sources or Sources())
    with OfflineEngines(config.engine) as engines:
        before = answers.answer(incumbent, suite, config, folder, engines, decoding=decoding)
        after = answers.answer(candidate, suite, config, folder, engines, incumbent=incumbent, decoding=decoding)
    judged = scoring(suite, after.table, before.table)
    policies, answered = (candidate, incumbent), (after, before)
    return compare(
        policies, suite, answered, judged, scoring, config, training_reward=training_reward, decoding=decoding
    )


class Scoring:
    """What scores answers, as the settings say: a function, a built-in rule, a judge or a reward model.

    ``name`` identifies all that decides its scores, and ``details`` says it in words.
    """

    def __init__(self, config: EvaluationConfig, sources: Sources) -> None:
        """Raises RuleError, JudgingError and what a source raises that can't be loaded."""
        self.judging = Judging(config, sources) if config.scorer in JUDGING else None
        self.details: dict[str, Any] = {}
        self.rate: Rate | None
        if self.judging is not None:
            self.name, self.details, alone = self.judging.name, self.judging.details, self.judging.alone
            self.rate = None if alone is None else lambda items, table: alone(scorer_batch(items, table))
        else:
            scorer = load_scorer(config)
            self.name, self.rate = scorer_name(scorer), partial(score, scorer=scorer)

    def __call__(self, suite: Suite, after: pa.Table, before: pa.Table) -> Judged:
        """The scores of both policies' answers to a suite, the candidate's first."""
        if self.judging is not None:
            return self.judging(scorer_batch(suite, after), scorer_batch(suite, before))
        assert self.rate is not None
        return Judged(self.rate(suite, after), self.rate(suite, before))


def compare(
    policies: tuple[Policy, Policy],
    suite: Suite,
    answered: tuple[answers.Answers, answers.Answers],
    judged: Judged,
    scoring: Scoring,
    config: EvaluationConfig,
    *,
    training_reward: TrainingReward | None = None,
    decoding: Decoding = GREEDY,
) -> Evaluation:
    """The evaluation that scored answers make; the candidate's come first. Raises ValueError if no item has scores."""
    (candidate, _), (after, before) = policies, answered
    started = time.monotonic()
    kl, kl_missing = _kl(after, len(suite.items), config)
    best, best_missing = _best_of(suite, before.table, scoring.rate, config, training_reward)
    wins, wins_missing = _wins(suite, (after.table, before.table), judged, config)
    greedy, greedy_missing = _greedy(policies, suite, answered, scoring, config)
    return Evaluation(
        **_results(policies, suite, (after.table, before.table), judged, scoring, config),
        kl=kl,
        kl_missing=kl_missing,
        best_of=best,
        best_of_missing=best_missing,
        confidence=config.gate.confidence,
        resamples=config.resamples,
        seed=config.seed,
        suite=suite.path.name,
        suite_sha256=suite.sha256,
        suite_items=len(suite.items),
        scorer=scoring.name,
        scorer_details=scoring.details,
        missing_reasons=judged.missing,
        position_consistency=judged.consistency,
        wins=wins,
        wins_missing=wins_missing,
        sampling=decoding,
        greedy=greedy,
        greedy_missing=greedy_missing,
        settings=answers.settings_hash(candidate, config, decoding),
        created_at=datetime.now(UTC).isoformat(timespec="milliseconds"),
        seconds={
            "start": round(before.start_seconds + after.start_seconds, 3),
            "incumbent": round(before.seconds, 3),
            "candidate": round(after.seconds, 3),
            "compare": round(time.monotonic() - started, 3),
        },
        engines={"incumbent": before.engine, "candidate": after.engine},
        samples=tuple(_samples(suite, after.table, before.table, judged.candidate, judged.incumbent)[: config.samples]),
    )


def compare_samples(
    candidate: Policy, incumbent: Policy, suite: Suite, config: EvaluationConfig, folder: Path
) -> list[Sample]:
    """Every item with both policies' greedy answers, in the suite's order; empty unless both were answered before.

    And where a judge or a reward model scores: it is asked by an evaluation alone.
    """
    if config.scorer in JUDGING:
        return []
    after, before = (answers.cached(policy, suite, config, folder) for policy in (candidate, incumbent))
    if after is None or before is None:
        return []
    scorer = load_scorer(config)
    return _samples(suite, after, before, score(suite, after, scorer), score(suite, before, scorer))


def load_scorer(config: EvaluationConfig) -> Scorer:
    """The function or built-in rule named by ``config.scorer``. Raises RuleError for none, or one with settings."""
    if ":" in config.scorer:
        return load_rule(config.scorer)
    try:
        return configured(config.scorer, RuleConfig(ready=config.scorer))
    except ValidationError as error:
        raise RuleError(
            f"scorer {config.scorer!r} is neither module:name nor a built-in rule that works without settings "
            "(exact_match, numeric_equality, repetition_penalty)"
        ) from error


def scorer_name(scorer: Scorer) -> str:
    """How an evaluation names its scorer: a rule by name and content hash, a function by its name."""
    if isinstance(scorer, Rule):
        return f"{scorer.name}@{scorer.digest[:12]}"
    return str(getattr(scorer, "__qualname__", type(scorer).__name__))


def score(suite: Suite, table: pa.Table, scorer: Scorer) -> Scores:
    """One score an item, NaN where the scorer returns None.

    Raises ValueError naming the scorer if it returns another number of scores, or one that is not finite.
    """
    batch = scorer_batch(suite, table)
    scores = list(scorer(batch))
    if len(scores) != len(batch):
        raise ValueError(f"{scorer_name(scorer)} returned {len(scores)} scores for {len(batch)} responses")
    for item, value in zip(suite.items, scores, strict=True):
        if value is not None and not np.isfinite(value):
            raise ValueError(f"{scorer_name(scorer)} scored item {item.id!r} {value}; a missing score is None")
    return np.array([np.nan if value is None else value for value in scores], dtype=np.float64)


def scorer_batch(suite: Suite, table: pa.Table) -> pa.Table:
    """The input of a scorer: the same columns that the rule reward sees of served traffic."""
    columns: Mapping[str, Any] = {
        "prompt": [item.prompt for item in suite.items],
        "messages": [None if item.messages is None else json.dumps(item.messages) for item in suite.items],
        "response": table.column("response").combine_chunks(),
        "response_token_ids": table.column("response_token_ids").combine_chunks(),
        "metadata": [list(item.scorer_metadata().items()) for item in suite.items],
    }
    return pa.table(columns, schema=pa.schema([(name, INTERACTIONS.field(name).type) for name in COLUMNS]))


def _results(
    policies: tuple[Policy, Policy],
    suite: Suite,
    tables: tuple[pa.Table, pa.Table],
    judged: Judged,
    scoring: Scoring,
    config: EvaluationConfig,
) -> dict[str, Any]:
    """What scored answers come to, policy by policy and compared. Raises ValueError if no item has scores for both."""
    judging = scoring.judging
    new, old = judged.candidate, judged.incumbent
    both = ~np.isnan(old) & ~np.isnan(new)
    # Of a judge's scores none is left out: a candidate must not gain by answers that it can't score, or not in time.
    judged_all = np.nan_to_num(new, nan=0.0), np.nan_to_num(old, nan=1.0)
    paired = (new[both], old[both]) if judging is None else judged_all
    if not both.any():
        whys = "".join(f"; {count} × {why}" for why, count in judged.missing.items())
        raise ValueError(f"{scoring.name} scored no item of {suite.path} for both policies: nothing to compare{whys}")
    return {
        "candidate": _policy_result(policies[0], tables[0], new, config),
        "incumbent": _policy_result(policies[1], tables[1], old, config),
        "n": int(both.sum()),
        "missing": int((~both).sum()),
        "reward": Interval.of(intervals.paired_bootstrap(*paired, **_bootstrap(config))),
        "accuracy": None
        if judging is not None
        else Interval.of(intervals.paired_bootstrap(new[both] == 1, old[both] == 1, **_bootstrap(config))),
    }


def _greedy(
    policies: tuple[Policy, Policy],
    suite: Suite,
    answered: tuple[answers.Answers, answers.Answers],
    scoring: Scoring,
    config: EvaluationConfig,
) -> tuple[Greedy | None, str | None]:
    """The greedy answers beside sampled ones, or None and why: what decides nothing stops nothing."""
    after, before = answered[0].greedy, answered[1].greedy
    if after is None or before is None:
        return None, None
    try:
        judged = scoring(suite, after, before)
        return Greedy(**_results(policies, suite, (after, before), judged, scoring, config)), None
    except (RuntimeError, ValueError) as error:
        return None, str(error)


def _policy_result(policy: Policy, table: pa.Table, scores: Scores, config: EvaluationConfig) -> PolicyResult:
    scored = scores[~np.isnan(scores)]
    if not len(scored):
        raise ValueError(f"no response of policy {policy.version} has a score")
    tokens = table.column("response_token_ids").to_pylist()
    lengths = np.array([len(ids) for ids in tokens])
    right = int((scored == 1).sum())
    return PolicyResult(
        version=policy.version,
        sha256=policy.sha256,
        n=len(scored),
        missing=len(scores) - len(scored),
        reward=Interval.of(intervals.bootstrap_mean(scored, **_bootstrap(config))),
        accuracy=None
        if config.scorer in JUDGING
        else Interval.of(intervals.wilson(right, len(scored), confidence=config.gate.confidence)),
        distinct_1=text_metrics.distinct_n(tokens, 1),
        distinct_2=text_metrics.distinct_n(tokens, 2),
        length_mean=float(lengths.mean()),
        length_p95=float(np.quantile(lengths, 0.95)),
        truncated=table.column("finish_reason").to_pylist().count("length") / len(lengths),
    )


def _bootstrap(config: EvaluationConfig) -> dict[str, Any]:
    return {"confidence": config.gate.confidence, "resamples": config.resamples, "seed": config.seed}


def _kl(found: answers.Answers, items: int, config: EvaluationConfig) -> tuple[KlEstimate | None, str | None]:
    """The estimate, or None and why."""
    if found.kl is None:
        return None, found.kl_missing
    pairs = list(zip(found.kl.incumbent, found.kl.candidate, strict=True))
    if not all(np.isfinite(logprobs).all() for pair in pairs for logprobs in pair):
        return None, "a policy gives log-probabilities that are not finite"
    terms = [text_metrics.kl_terms(p, q) for p, q in pairs]
    # Samples of one prompt are alike, so prompts are what is resampled.
    tokens = np.bincount(found.kl.item, [len(forward) for forward, _ in terms], items)
    forward = np.bincount(found.kl.item, [forward.sum() for forward, _ in terms], items)
    reverse = np.bincount(found.kl.item, [reverse.sum() for _, reverse in terms], items)
    there = tokens > 0
    if not there.any():
        return None, "no prompt leaves room in the context for a scored response"
    ratios = [
        Interval.of(intervals.bootstrap_ratio(sums[there], tokens[there], **_bootstrap(config)))
        for sums in (forward, reverse)
    ]
    estimate = KlEstimate(
        incumbent_candidate=ratios[0],
        candidate_incumbent=ratios[1],
        samples=len(terms),
        tokens=int(tokens.sum()),
    )
    return estimate, None


def _best_of(
    suite: Suite, table: pa.Table, rate: Rate | None, config: EvaluationConfig, training_reward: TrainingReward | None
) -> tuple[BestOf | None, str | None]:
    """The incumbent's best of n, or None and why: a baseline that can't be had is no reason to judge nothing."""
    if not config.best_of:
        return None, None
    if training_reward is None:
        return None, "nothing rewards responses, so none is the best"
    if rate is None:
        return None, f"evaluation.scorer={config.scorer} has no score of an answer by itself"
    repeated, samples = best_of.sampled(suite, table, config.best_of)
    try:
        rewards = training_reward.rewards(scorer_batch(repeated, samples))
    except RuntimeError as error:
        return None, str(error)
    return best_of.estimate(rewards, rate(repeated, samples), config, training_reward)


def _wins(
    suite: Suite, tables: tuple[pa.Table, pa.Table], judged: Judged, config: EvaluationConfig
) -> tuple[Wins | None, str | None]:
    """The win rate where answers were compared, or None and why."""
    if judged.verdicts is None:
        return None, None
    lengths = [[len(ids) for ids in table.column("response_token_ids").to_pylist()] for table in tables]
    try:
        found = win_rate_in_both_orders(
            np.nan_to_num(judged.candidate, nan=0.0),
            judged.verdicts,
            np.transpose(lengths),
            items=[prompt_key(item) for item in suite.items],
            confidence=config.gate.confidence,
        )
    except ValueError as error:
        return None, str(error)
    return Wins.of(found), None


def _samples(suite: Suite, after: pa.Table, before: pa.Table, new: Scores, old: Scores) -> list[Sample]:
    candidate, incumbent = (table.column("response").to_pylist() for table in (after, before))
    candidate_score, incumbent_score = (
        [None if np.isnan(value) else float(value) for value in scores] for scores in (new, old)
    )
    return [
        Sample(
            id=item.id,
            prompt=item.shown,
            answer=item.scorer_metadata().get(DEFAULT_REFERENCE),
            candidate=candidate[i],
            incumbent=incumbent[i],
            candidate_score=candidate_score[i],
            incumbent_score=incumbent_score[i],
        )
        for i, item in enumerate(suite.items)
    ]
