"""Everything that the report shows, gathered from a home: policies, verdicts, training, traffic, swaps, samples."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Literal

from deploy.config.root import Settings
from deploy.display.fates import fates
from deploy.display.live import experiments, shadows
from deploy.display.proxy_reward import ProxyReward
from deploy.display.runs import runs
from deploy.loop import records
from evaluation.config import EvaluationConfig
from evaluation.decisions.history import History, Ruling
from evaluation.decisions.ranking import rankings
from evaluation.evaluate import compare_samples
from evaluation.harness.results import load_all
from evaluation.report.evidence import Race, races, spending
from evaluation.report.page import GateRow, PolicyRow, ReportData, SuiteRow, SwapRow, traffic
from evaluation.results import Evaluation, Interval, PolicyResult, Sample, load_readable
from evaluation.shadow.kept import FOLDER
from evaluation.statistics.intervals import bootstrap_mean
from evaluation.suites.decoding import GREEDY, Decoding
from evaluation.suites.suite import Suite, SuiteError
from feedback.config import FeedbackConfig
from feedback.scoring.sources.human import opinions_sql
from serve.policies.folder import PolicyError
from serve.policies.store import PolicyStore


class ReportError(ValueError):
    """A file of the home can't be read; the text names it and the line."""


def gather(
    settings: Settings,
    *,
    title: str,
    totals: Mapping[str, Any] | None = None,
    proxy: ProxyReward | None = None,
) -> ReportData:
    """What ``evaluation.report.page.build`` needs.

    totals: counts by name, beside those that the lake gives.
    proxy: what the reward model says of the policies.
    Raises ReportError, and what reading the lake and the policy store raises. What there is none of stays empty.
    """
    resolved = settings.resolved()
    store, ledger = settings.policy_store(), settings.ledger()
    history, confidence = History.of(ledger.entries()), resolved.evaluation.gate.confidence
    on_all_suites, damaged = _evaluations(resolved.evaluation.folder)
    evaluations = [evaluation for evaluation in on_all_suites if evaluation.role == "success"]
    cycles = records.load_all(settings)
    samples, between, how = _samples(resolved, store, evaluations)
    journal = Path(resolved.feedback.journal.folder)
    with settings.lake().connect(journal) if _exists(resolved.feedback.lake.uri) else nullcontext() as connection:
        shown = traffic(connection) if connection else None
        counted = _totals(connection) if connection else {}
        opinions = _feedback(connection, resolved.feedback, confidence) if connection else {}
    raced = tuple(races(ledger, history, confidence=confidence))
    training = _training(resolved.train.runs)
    return ReportData(
        title=title,
        metric=resolved.evaluation.gate.metric,
        policies=tuple(_policies(store, evaluations, proxy.means if proxy else {}, resolved.evaluation.gate.metric)),
        reward_model=proxy and proxy.version,
        agreement=proxy and proxy.agreement,
        suites=tuple(_suites(store, on_all_suites)),
        harnesses=tuple(result for _, result in load_all(resolved.evaluation.harness_folder)),
        moves=tuple(fates(store.history(), store.outcomes())),
        spending=spending(history),
        races=raced,
        experiments=tuple(experiments(store.experiments)),
        shadows=tuple(shadows(resolved.evaluation.folder / FOLDER)),
        training=training,
        runs=tuple(runs(resolved.train.runs, training)),
        gates=tuple(_gates(store, cycles, history, raced, resolved.evaluation)),
        judged=tuple(evaluation for evaluation in evaluations if evaluation.wins or evaluation.wins_missing),
        rankings=tuple(scale.to_json(confidence) for scale in rankings(ledger, history)),
        best_of=tuple(evaluation for evaluation in evaluations if evaluation.best_of),
        samples=tuple(samples),
        samples_between=between,
        samples_by=how,
        first=_first(store, raced),
        feedback=opinions,
        traffic=shown,
        swaps=tuple(_swaps(Path(resolved.serve.replicas))),
        totals={**counted, **(totals or {})},
        stages=_stages(cycles),
        confidence=confidence,
        damaged=tuple(damaged),
    )


def _evaluations(folder: Path) -> tuple[list[Evaluation], list[str]]:
    """All evaluations that can be read, oldest first; and the names of the files that can't."""
    found, damaged = load_readable(sorted(folder.glob("*-vs-*.json")))
    return sorted(found, key=lambda evaluation: evaluation.created_at), damaged


def _policies(
    store: PolicyStore,
    evaluations: list[Evaluation],
    proxy: Mapping[int, float],
    metric: Literal["reward", "accuracy"],
) -> list[PolicyRow]:
    """Each policy with what the newest evaluation says of it."""
    results: dict[int, tuple[PolicyResult, PolicyResult | None]] = {}
    for evaluation in evaluations:
        beside = evaluation.greedy
        results[evaluation.incumbent.version] = evaluation.incumbent, None if beside is None else beside.incumbent
        results[evaluation.candidate.version] = evaluation.candidate, None if beside is None else beside.candidate
    rows = []
    for policy in map(store.get, store.versions()):
        found, greedy = results.get(policy.version, (None, None))
        known: dict[str, Any] = {}
        if found is not None and found.sha256 == policy.sha256:
            known = found.model_dump() | {"greedy": greedy and getattr(greedy, metric)}
        own = {"version": policy.version, "parent": policy.parent, "proxy": proxy.get(policy.version)}
        rows.append(PolicyRow.model_validate({**known, **own}))
    return rows


def _suites(store: PolicyStore, evaluations: list[Evaluation]) -> list[SuiteRow]:
    """The policies that answered the same items, by the same scorer and settings, with their newest results."""
    hashes = {policy.version: policy.sha256 for policy in map(store.get, store.versions())}
    found: dict[tuple[str, str, str], dict[int, PolicyResult]] = {}
    roles: dict[tuple[str, str, str], Literal["success", "guardrail", "watch"]] = {}
    names: dict[tuple[str, str, str], tuple[str, int]] = {}
    for evaluation in evaluations:
        same = evaluation.suite_sha256, evaluation.scorer, evaluation.settings
        results = found.pop(same, {})  # a suite is as new as its newest evaluation
        for result in (evaluation.incumbent, evaluation.candidate):
            if hashes.get(result.version) == result.sha256:
                results[result.version] = result
        name = evaluation.suite if evaluation.name is None else f"{evaluation.name} ({evaluation.role})"
        found[same], names[same] = results, (Path(name).name, evaluation.suite_items)
        roles[same] = evaluation.role
    return [
        SuiteRow(
            name=names[same][0],
            items=names[same][1],
            role=roles[same],
            policies=tuple(PolicyRow.model_validate(results[version].model_dump()) for version in sorted(results)),
        )
        for same, results in found.items()
        if results
    ]


def _gates(
    store: PolicyStore,
    cycles: list[records.CycleRecord],
    history: History,
    raced: Sequence[Race],
    config: EvaluationConfig,
) -> list[GateRow]:
    """The ledger's verdicts, with what evaluations and cycles have kept of the same ones; by candidate."""
    verdicts: dict[tuple[int, int], dict[str, Any]] = {}
    entries: dict[tuple[int, int], int] = {}
    for entry, found in (race[-1] for race in history.races.values()):
        pair = found.candidate.version, found.incumbent.version
        verdicts[pair], entries[pair] = _of_ruling(found), entry.number
    kept = [policy.gate for policy in map(store.get, store.versions()) if policy.gate]
    kept += [record.verdict for record in cycles if record.candidate and record.verdict]
    for verdict in kept:
        pair = verdict["candidate"], verdict["incumbent"]
        if pair not in entries or verdict.get("entry", entries[pair]) == entries[pair]:
            verdicts[pair] = verdicts.get(pair, {}) | verdict
    for race in raced:
        verdict = verdicts[race.candidate, race.incumbent]
        if verdict.get("ci_low") is None and len(race.gains):
            confidence = config.gate.confidence
            shown = bootstrap_mean(race.gains, confidence=confidence, resamples=config.resamples, seed=config.seed)
            verdict |= dict(zip(("difference", "ci_low", "ci_high"), shown, strict=True))
    return [GateRow.model_validate(verdicts[pair]) for pair in sorted(verdicts)]


def _of_ruling(found: Ruling) -> dict[str, Any]:
    """A verdict of which the ledger alone may know."""
    return {
        "candidate": found.candidate.version,
        "incumbent": found.incumbent.version,
        "difference": found.difference,
        "ci_low": None,
        "ci_high": None,
        "verdict": found.verdict,
        "items": found.items,
        "level": found.plan.level,
        "e_value": found.e_value,
        "metric": found.plan.metric,
        "min_difference": found.plan.min_difference,
        "reasons": found.reasons,
        "learned": found.learned,
        "sampling": found.plan.decoding,
    }


def _training(runs: Path) -> dict[str, list[dict[str, Any]]]:
    """Run -> its metrics by step; runs in the order in which they began."""
    found = {path.parent.name: _json_lines(path) for path in sorted(runs.glob("*/metrics.jsonl"))}
    return dict(sorted(found.items(), key=lambda item: item[1][0].get("time", 0.0) if item[1] else 0.0))


def _samples(
    settings: Settings, store: PolicyStore, evaluations: list[Evaluation]
) -> tuple[Sequence[Sample], tuple[int, int] | None, Decoding]:
    """Held-out prompts as the first policy and the one that serves answer them; else those of the last evaluation.

    With the versions of both, and how they answered.
    """
    pointer, versions, config = store.serving(), store.versions(), settings.evaluation
    if pointer and versions and pointer.version != versions[0]:
        first, last = store.get(versions[0]), store.get(pointer.version)
        try:
            both = compare_samples(last, first, Suite.load(config.suite), config, config.folder)
        except SuiteError:  # the suite has been moved since: the evaluations have kept some of it
            both = []
        if both:
            return both[: config.samples], (first.version, last.version), GREEDY
    if evaluations:
        newest = evaluations[-1]
        return newest.samples, (newest.incumbent.version, newest.candidate.version), newest.sampling
    return [], None, GREEDY


def _swaps(folder: Path) -> list[SwapRow]:
    rows = (row for path in folder.glob("*.jsonl") for row in _json_lines(path))
    return sorted(map(SwapRow.model_validate, rows), key=lambda swap: swap.time)


def _stages(cycles: list[records.CycleRecord]) -> dict[str, float]:
    """Seconds of each stage, summed over the cycles that did more than look whether there is something new."""
    seconds: dict[str, float] = defaultdict(float)
    for record in cycles:
        if record.status != "skipped":
            for name, value in record.seconds.items():
                seconds[name] += value
    return dict(seconds)


def _feedback(connection: Any, config: FeedbackConfig, confidence: float) -> dict[int, Interval]:
    """What people said of each policy's responses, from 0 to 1: the mean over responses that one policy sampled."""
    rows = connection.execute(
        f"""
        WITH opinions AS ({opinions_sql("feedback", config.scoring.human, config.kinds)}),
             means AS (
                 SELECT tenant, response_id, sum(weight * opinion) / sum(weight) AS mean
                 FROM opinions GROUP BY tenant, response_id
             )
        SELECT policy_spans[1].policy_version, list(mean ORDER BY response_id)
        FROM means JOIN interactions USING (tenant, response_id)
        WHERE status = 'complete' AND len(policy_spans) = 1
        GROUP BY 1
        """
    ).fetchall()
    return {
        version: Interval.of(bootstrap_mean(means, confidence=confidence, resamples=1000, seed=0))
        for version, means in rows
    }


def _first(store: PolicyStore, raced: Sequence[Race]) -> int | None:
    """The policy that the last candidate's lineage began with; None if that is not known any more."""
    try:
        return store.first_of(raced[-1].candidate).version if raced else None
    except PolicyError:
        return None


def _totals(connection: Any) -> dict[str, Any]:
    """Counts from the lake."""
    requests, responses, tokens = connection.execute(
        "SELECT count(DISTINCT request_id), count(*), coalesce(sum(len(response_token_ids)), 0) FROM interactions"
    ).fetchone()
    (feedback,) = connection.execute("SELECT count(*) FROM feedback").fetchone()
    (rewarded,) = connection.execute("SELECT count(*) FROM current_rewards WHERE reward IS NOT NULL").fetchone()
    return {
        "requests": requests,
        "responses": responses,
        "response_tokens": int(tokens),
        "feedback": feedback,
        "responses_with_reward": rewarded,
    }


def _json_lines(path: Path) -> list[dict[str, Any]]:
    """The rows of a JSONL file; a last line without its end is an append that a crash tore, and is left out."""
    rows = []
    *lines, _torn = path.read_bytes().split(b"\n")
    for number, line in enumerate(lines, start=1):
        try:
            row = json.loads(line)
        except ValueError as error:
            raise ReportError(f"{path}, line {number} is not JSON: {error}") from error
        if not isinstance(row, dict):
            raise ReportError(f"{path}, line {number} is no JSON object")
        rows.append(row)
    return rows


def _exists(uri: str) -> bool:
    """Whether a lake may be there; a home before its first server has none."""
    return "://" in uri or Path(uri).is_dir()
