"""One evaluation: fresh items, both policies' answers, scores, look by look to a verdict, and into the ledger.

Both policies answer the items that the candidate may still use, in one batch each, and no others of the suite (unless
``evaluation.score_unused``); a block of them at a time is scored, until the verdict is final. What is answered and not
looked at stays fresh: nothing of it is scored, kept or shown.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Final, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict

from evaluation.best_of import Chooser
from evaluation.config import EvaluationConfig
from evaluation.decisions import bank, gate
from evaluation.decisions.bank import Voice
from evaluation.decisions.gate import State
from evaluation.decisions.history import History, Party, Ruling, hypothesis, looks_of
from evaluation.decisions.ledger import Entry, Ledger
from evaluation.decisions.observations import Look, Observation, observe
from evaluation.decisions.plan import Plan, plan
from evaluation.evaluate import Scoring, compare
from evaluation.judging import Judged, Sources
from evaluation.results import Evaluation
from evaluation.statistics import intervals
from evaluation.statistics.error_budget import ErrorBudget
from evaluation.suites import answers, text_metrics
from evaluation.suites.held_out import prompt_key
from evaluation.suites.suite import Item, Suite
from serve.policies.store import Policy

SCORER_DOWN: Final = 0.1
"""The share of a look's items that may lack the incumbent's score; more say that the scorer is at fault, not anybody's
answers. Nothing is then decided or used up."""
FEW_MISSING: Final = 5
"""So many may lack it in any look: of few items, or in one that some of them can never be scored."""


class NotJudged(RuntimeError):
    """No verdict could be come to, none is on record, and nothing was used up; the text says why and what to do."""


class Verdict(BaseModel):
    """The gate's verdict as people and the loop read it; the ledger's entry ``entry`` has what it rests on.

    ``reasons`` says why: each requirement that was missed, or, for a pass, what was shown. ``n`` voices have decided,
    of ``items`` that were looked at; ``difference`` is their mean gain, with a bootstrap interval as a picture of it.
    ``e_value`` of 1 / ``level`` and more shows the gain. ``needs``, of an undecided candidate: about how many more
    items; ``fresh`` how many there are. ``kl`` is that of what was looked at now, if it was measured. ``entry`` is None
    while nothing of it is on record.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    verdict: Literal["pass", "refuse", "undecided"]
    reasons: tuple[str, ...]
    candidate: int
    incumbent: int
    metric: str
    difference: float | None
    ci_low: float | None
    ci_high: float | None
    confidence: float
    min_difference: float
    n: int
    items: int
    max_items: int
    level: float
    e_value: float
    needs: int | None
    fresh: int
    kl: float | None
    entry: int | None
    entry_sha256: str | None
    budget: str
    budget_spent: float


@dataclass(frozen=True)
class Judgement:
    """``evaluation`` is of the items that were looked at now (of the whole suite with ``score_unused``), if any."""

    verdict: Verdict
    evaluation: Evaluation | None


@dataclass(frozen=True)
class _Race:
    """A candidate before this evaluation: its plan, the evidence so far, and what is fresh."""

    plan: Plan
    state: State
    earlier: tuple[Look, ...]
    last: tuple[Entry, Ruling] | None
    fresh: tuple[Voice, ...]
    regression: tuple[Voice, ...]


def judge(
    candidate: Policy,
    incumbent: Policy,
    suite: Suite,
    config: EvaluationConfig,
    folder: Path,
    ledger: Ledger,
    *,
    who: str,
    sources: Sources | None = None,
    chooser: Chooser | None = None,
) -> Judgement:
    """The verdict on a candidate, from as many fresh items as it takes, and on record when this returns.

    One that is final stands, whatever the settings are now. An undecided one is gone on with from its evidence so far,
    by the settings of its first look.

    Args:
        suite: the item bank.
        folder: where evaluations are kept, with answers.
        who: for the record.
        sources, chooser: as of ``evaluation.evaluate.evaluate``.

    Raises:
        NotJudged: the scorer gives no scores, or is another one than at earlier looks.
        OutOfBounds: a reward lies outside ``gate.reward_bounds``; its item is named.
        EvaluationBusy, LedgerDamaged, EngineError, and what the scorer raises.
    """
    with ledger.evaluating():
        history = History.of(ledger.entries())
        last = history.last(candidate.sha256, incumbent.sha256)
        if last is not None and last[1].final and not config.score_unused:
            looked = looks_of_race(ledger, history, last[1])
            return Judgement(_verdict(history, last, looked, candidate, incumbent, config, 0), None)
        scoring = Scoring(config, sources or Sources())
        whole = _Answered(candidate, incumbent, suite, config, folder, scoring) if config.score_unused else None
        if last is not None and last[1].final:
            evaluation = whole.evaluation(range(len(suite.items)), chooser) if whole else None
            looked = looks_of_race(ledger, history, last[1])
            return Judgement(_verdict(history, last, looked, candidate, incumbent, config, 0), evaluation)
        race = _race(ledger, history, candidate, incumbent, suite, config, scoring.name, last)
        if race.plan.level <= 0:
            entry = _record(ledger, race, candidate, incumbent, suite, race.state, (), who)
            history.add(entry[0])
            return Judgement(_verdict(history, entry, (), candidate, incumbent, config, _count(race.fresh)), None)
        wanted = bank.take(race.fresh, race.plan.max_items - race.state.items)
        if not wanted:
            evaluation = whole.evaluation(range(len(suite.items)), chooser) if whole else None
            return Judgement(_exhausted(history, race, candidate, incumbent, config), evaluation)
        of_regression = bank.take(race.regression, _count(wanted))
        answered = whole
        if answered is None:
            items = [item for voice in (*wanted, *of_regression) for item in voice]
            answered = _Answered(candidate, incumbent, _part(suite, items), config, folder, scoring)
        looks, seen = _look(race, wanted, of_regression, answered, config)
        state, _, _ = gate.replay(race.plan, looks, race.state)
        entry = _record(ledger, race, candidate, incumbent, suite, state, looks, who)
        history.add(entry[0])
        items_seen = range(len(suite.items)) if whole is not None else seen
        evaluation = answered.evaluation(items_seen, chooser)
        left = _count(race.fresh) - sum(len(look.fresh) for look in looks)
        verdict = _verdict(history, entry, (*race.earlier, *looks), candidate, incumbent, config, left)
        if evaluation is not None and evaluation.kl is not None:
            verdict = verdict.model_copy(update={"kl": evaluation.kl.incumbent_candidate.value})
        return Judgement(verdict, evaluation)


def looks_of_race(ledger: Ledger, history: History, found: Ruling) -> tuple[Look, ...]:
    """All looks at a candidate, from the evidence that the ledger has kept."""
    return tuple(look for _, ruling in history.races[found.hypothesis] for look in looks_of(ledger, ruling))


def _race(
    ledger: Ledger,
    history: History,
    candidate: Policy,
    incumbent: Policy,
    suite: Suite,
    config: EvaluationConfig,
    scorer: str,
    last: tuple[Entry, Ruling] | None,
) -> _Race:
    fresh = bank.fresh(suite.items, history.used)
    if last is None:
        before = bank.decided(suite.items, history.used, candidate.sha256)
        segments = [{item.segment for item in voice if item.segment is not None} for voice in fresh]
        budget = ErrorBudget(config.gate.budget.alpha, config.gate.budget.rule, config.gate.budget.horizon)
        made = plan(
            config,
            scorer=scorer,
            level=history.level(budget, hypothesis(candidate.sha256, incumbent.sha256)),
            fresh_segments={
                name: sum(name in of for of in segments) for name in sorted({name for of in segments for name in of})
            },
            fresh=len(fresh),
            decided=len(before),
        )
        return _Race(made, State(), (), None, tuple(fresh), tuple(before) if made.regression else ())
    made = last[1].plan
    if made.scorer != scorer:
        raise NotJudged(
            f"policy {candidate.version} is undecided by the scores of {made.scorer}, and evaluation.scorer is "
            f"{scorer} now: set it back, or train another candidate"
        )
    earlier = looks_of_race(ledger, history, last[1])
    state, _, _ = gate.replay(made, earlier)
    mine = {one.prompt for look in earlier for one in (*look.fresh, *look.regression)}
    before = [
        voice
        for voice in bank.decided(suite.items, history.used, candidate.sha256)
        if not any(prompt_key(item) in mine for item in voice)
    ]
    return _Race(made, state, earlier, last, tuple(fresh), tuple(before) if made.regression else ())


class _Answered:
    """Both policies' answers to a suite, scored where they are looked at."""

    def __init__(
        self,
        candidate: Policy,
        incumbent: Policy,
        suite: Suite,
        config: EvaluationConfig,
        folder: Path,
        scoring: Scoring,
    ) -> None:
        self.policies, self.suite, self.config, self.scoring = (candidate, incumbent), suite, config, scoring
        before = answers.answer(incumbent, suite, config, folder)
        self.answers = answers.answer(candidate, suite, config, folder, incumbent=incumbent), before
        self.places = {item.id: i for i, item in enumerate(suite.items)}
        self.kl = _kl_by_item(self.answers[0], len(suite.items))
        n = len(suite.items)
        self.scored = np.zeros(n, bool)
        self.judged = Judged(np.full(n, np.nan), np.full(n, np.nan))

    def observe(self, voices: Iterable[Voice]) -> tuple[Observation, ...]:
        """The observations of these voices, scored if they are not yet."""
        at = [self.places[item.id] for voice in voices for item in voice]
        if not at:
            return ()
        self._score([i for i in at if not self.scored[i]])
        tables = (self.answers[0].table.take(at), self.answers[1].table.take(at))
        scores = (self.judged.candidate[at], self.judged.incumbent[at])
        return observe([self.suite.items[i] for i in at], tables, scores, [self.kl[i] for i in at])

    def evaluation(self, at: Sequence[int], chooser: Chooser | None) -> Evaluation | None:
        """The evaluation of some items; None if none of them has a score for both policies."""
        at = list(at)
        self._score([i for i in at if not self.scored[i]])
        judged = replace(self.judged, candidate=self.judged.candidate[at], incumbent=self.judged.incumbent[at])
        if np.isnan(judged.candidate + judged.incumbent).all():
            return None
        answered = (self.answers[0].take(at), self.answers[1].take(at))
        part = replace(self.suite, items=tuple(self.suite.items[i] for i in at))
        return compare(self.policies, part, answered, judged, self.scoring, self.config, chooser=chooser)

    def _score(self, at: list[int]) -> None:
        if not at:
            return
        part = replace(self.suite, items=tuple(self.suite.items[i] for i in at))
        found = self.scoring(part, self.answers[0].table.take(at), self.answers[1].table.take(at))
        self.judged.candidate[at], self.judged.incumbent[at] = found.candidate, found.incumbent
        missing = {
            why: self.judged.missing.get(why, 0) + found.missing.get(why, 0)
            for why in (*self.judged.missing, *found.missing)
        }
        before, now = int(self.scored.sum()), len(at)
        consistency = found.consistency
        if consistency is not None and self.judged.consistency is not None:
            consistency = (self.judged.consistency * before + consistency * now) / (before + now)
        self.judged = replace(self.judged, missing=missing, consistency=consistency)
        self.scored[at] = True


def _look(
    race: _Race, wanted: Sequence[Voice], regression: Sequence[Voice], answered: _Answered, config: EvaluationConfig
) -> tuple[tuple[Look, ...], list[int]]:
    """The looks up to a final verdict, or until no item is left; and the places of the fresh items that were used.

    Raises NotJudged if the scorer is down.
    """
    looks, state, seen = list[Look](), race.state, list[int]()
    rest = list(regression)
    for block in _blocks(wanted, race, config):
        fresh = answered.observe(block)
        _check_scorer(fresh, answered)
        mine = bank.take(rest, len(fresh))
        rest = rest[len(mine) :]
        look = Look(fresh=fresh, regression=answered.observe(mine))
        looks.append(look)
        seen += [answered.places[one.item] for one in fresh]
        state = gate.advance(race.plan, state, look)
        if gate.decide(race.plan, state).verdict != "undecided":
            break
    return tuple(looks), seen


def _blocks(wanted: Sequence[Voice], race: _Race, config: EvaluationConfig) -> list[Sequence[Voice]]:
    """The voices of each look; the first look has as many items as a pass rests on."""
    first = 0 if race.state.items else max(race.plan.min_items, config.gate.look_items)
    head = bank.take(wanted, first)
    rest = wanted[len(head) :]
    return [*([head] if head else []), *(rest[at] for at in gate.blocks(list(map(len, rest)), config.gate.look_items))]


def _check_scorer(fresh: Sequence[Observation], answered: _Answered) -> None:
    missing = sum(one.incumbent is None for one in fresh)
    if missing == len(fresh) or missing > max(FEW_MISSING, SCORER_DOWN * len(fresh)):
        whys = "".join(f"; {count} × {why}" for why, count in answered.judged.missing.items())
        raise NotJudged(
            f"{answered.scoring.name} gave no score to {missing} of {len(fresh)} answers of policy "
            f"{answered.policies[1].version}, which serves: nothing was decided or used up{whys}; evaluate again when "
            "it scores"
        )


def _record(
    ledger: Ledger,
    race: _Race,
    candidate: Policy,
    incumbent: Policy,
    suite: Suite,
    state: State,
    looks: Sequence[Look],
    who: str,
) -> tuple[Entry, Ruling]:
    decision = gate.decide(race.plan, state)
    found = Ruling(
        candidate=Party(version=candidate.version, sha256=candidate.sha256),
        incumbent=Party(version=incumbent.version, sha256=incumbent.sha256),
        suite=suite.path.name,
        suite_sha256=suite.sha256,
        plan=race.plan,
        evidence=ledger.keep({"looks": [look.model_dump(mode="json") for look in looks]}),
        prompts=tuple(dict.fromkeys(one.prompt for look in looks for one in look.fresh)),
        verdict=decision.verdict,
        reasons=decision.reasons,
        items=state.items,
        missing=state.missing,
        difference=float(state.gains.mean()) if len(state.gains) else None,
        e_value=decision.e_value,
        standings=standings(decision.standings),
        needs=gate.needs(race.plan, state, decision) if decision.verdict == "undecided" else None,
    )
    last = race.last and race.last[0].number

    def decided_meanwhile(entries: list[Entry]) -> str | None:
        now = History.of(entries[last or 0 :]).races.get(found.hypothesis)
        return f"policy {candidate.version} was judged meanwhile (entry {now[-1][0].number})" if now else None

    body = found.model_dump(mode="json")
    return ledger.append("verdict", body, who=who, unless=decided_meanwhile), found


def standings(found: Iterable[object]) -> tuple[dict[str, object], ...]:
    """Where each metric stands, as an entry has it: a mean of nothing is null."""
    rows = [asdict(one) for one in found]  # type: ignore[call-overload]
    return tuple({key: None if value != value else value for key, value in row.items()} for row in rows)


def _verdict(
    history: History,
    on_record: tuple[Entry, Ruling],
    looks: Sequence[Look],
    candidate: Policy,
    incumbent: Policy,
    config: EvaluationConfig,
    fresh: int,
) -> Verdict:
    """What is on record, of these policies: the entry may have named others with the same files."""
    entry, found = on_record
    state, _, _ = gate.replay(found.plan, looks)
    reasons = found.reasons
    if found.verdict == "undecided":
        reasons = (*reasons, _wants(found.needs, fresh))
    return _shown(
        history, found.plan, state, config,
        verdict=found.verdict, reasons=reasons, candidate=candidate.version, incumbent=incumbent.version,
        e_value=found.e_value, needs=found.needs, fresh=fresh, entry=entry.number, entry_sha256=entry.sha256,
    )  # fmt: skip


def _exhausted(
    history: History, race: _Race, candidate: Policy, incumbent: Policy, config: EvaluationConfig
) -> Verdict:
    """No item is fresh: undecided, which needs no entry, as nothing was looked at."""
    decision = gate.decide(race.plan, race.state)
    needs = gate.needs(race.plan, race.state, decision)
    entry = race.last and race.last[0]
    return _shown(
        history, race.plan, race.state, config,
        verdict="undecided", reasons=(*decision.reasons, _wants(needs, 0)), candidate=candidate.version,
        incumbent=incumbent.version, e_value=decision.e_value, needs=needs, fresh=0,
        entry=entry and entry.number, entry_sha256=entry and entry.sha256,
    )  # fmt: skip


def _shown(history: History, of: Plan, state: State, config: EvaluationConfig, **fields: object) -> Verdict:
    gains, confidence = state.gains, config.gate.confidence
    interval: tuple[float | None, float | None, float | None] = (None, None, None)
    if len(gains):
        interval = intervals.bootstrap_mean(gains, confidence=confidence, resamples=config.resamples, seed=config.seed)
    kl = state.evidence.get("kl")
    return Verdict.model_validate(
        {
            "metric": of.metric,
            "difference": interval[0],
            "ci_low": interval[1],
            "ci_high": interval[2],
            "confidence": confidence,
            "min_difference": of.min_difference,
            "n": len(gains),
            "items": state.items,
            "max_items": of.max_items,
            "level": of.level,
            "kl": None if kl is None or kl.shown.n == 0 else float(kl.shown.mean),
            "budget": f"{of.rule} {of.alpha:g}",
            "budget_spent": history.spent(),
            **fields,
        }
    )


def _wants(needs: int | None, fresh: int) -> str:
    wanted = f"more than {gate.MOST_FORESEEN} more" if needs is None else f"about {needs} more"
    return f"needs {wanted} items; {fresh} fresh ones are left in the suite"


def _kl_by_item(found: answers.Answers, items: int) -> list[float | None]:
    """KL(incumbent || candidate) of each item's samples, nats per token; None where there is none."""
    if found.kl is None:
        return [None] * items
    sums, tokens = np.zeros(items), np.zeros(items)
    for item, p, q in zip(found.kl.item, found.kl.incumbent, found.kl.candidate, strict=True):
        terms, _ = text_metrics.kl_terms(p, q)
        sums[item] += terms.sum()
        tokens[item] += len(terms)
    with np.errstate(invalid="ignore", divide="ignore"):
        means = sums / tokens
    # Beyond all measure is as good as the most that counts, and JSON holds it.
    return [None if np.isnan(mean) else float(min(mean, 1e6)) for mean in means]


def _part(suite: Suite, items: Sequence[Item]) -> Suite:
    """Some items as a suite of their own."""
    content = "".join(item.model_dump_json() + "\n" for item in items).encode()
    return Suite(suite.path, tuple(items), hashlib.sha256(content).hexdigest())


def _count(voices: Sequence[Voice]) -> int:
    return sum(map(len, voices))
