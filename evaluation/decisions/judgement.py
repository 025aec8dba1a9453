"""One evaluation: fresh items, both policies' answers, scores, look by look to a verdict, and into the ledger.

Both policies answer the items that the candidate may still use, and no others of the suite (unless
``evaluation.score_unused``): those of the first look, then as many again as there are answers, and so on, since the
first looks decide most candidates; or all parts of this one after the other, where an engine was started for it. Each
part is kept by itself, so that an evaluation which goes on answers nothing again. A block at a time is scored, until
the verdict is final. What is answered and not looked at stays fresh: nothing of it is scored or shown.

Before a block is scored it is on record which items they are, of whose race, by which plan (an intent). So an
evaluation that was killed, or failed, has its candidate's level and those items; when the candidate is evaluated again,
it goes on with the same blocks, and nobody else can use them.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
from pydantic import BaseModel, ConfigDict

from evaluation.compared_rewards import ComparedRewards
from evaluation.config import FEW_MISSING, SCORER_DOWN, EvaluationConfig
from evaluation.decisions import bank, gate
from evaluation.decisions.bank import Voice
from evaluation.decisions.gate import State
from evaluation.decisions.history import Declaration, History, Intent, Party, Ruling, hypothesis, looks_of
from evaluation.decisions.ledger import Entry, Ledger, canonical
from evaluation.decisions.observations import Look, Observation, observe
from evaluation.decisions.over_optimisation import OverOptimisation, measured
from evaluation.decisions.plan import HOLDOUT, LATENCY, Compared, GuardedSuite, Plan, declared, items_to_show, plan
from evaluation.engine import OfflineEngines
from evaluation.evaluate import Scoring, compare
from evaluation.judging import Judged, JudgingError, Scores, Sources, TrainingReward
from evaluation.results import Evaluation
from evaluation.statistics import intervals
from evaluation.statistics.error_budget import promise
from evaluation.suites import answers, latency, text_metrics
from evaluation.suites.decoding import GREEDY, Decoding, Traffic, settled
from evaluation.suites.held_out import prompt_key
from evaluation.suites.suite import Item, Suite, SuiteError
from feedback.scoring.sources.rules import RuleError
from serve.kv_cache import fit_batch_engine
from serve.policies.folder import compute_dtype
from serve.policies.store import Policy
from serve.policies.whole_policies import whole
from serve.swap.compatibility import computes_alike


class NotJudged(RuntimeError):
    """No verdict could be come to, none is on record, and nothing was used up; the text says why and what to do."""


class Verdict(BaseModel):
    """The gate's verdict as people and the loop read it; the ledger's entry ``entry`` has what it rests on.

    ``reasons`` says why: each requirement that was missed, or, for a pass, what was shown. ``n`` voices have decided,
    of ``items`` that were looked at; ``difference`` is their mean gain, with a bootstrap interval as a picture of it.
    ``e_value`` of 1 / ``level`` and more shows the gain. ``needs``, of an undecided candidate: about how many more
    items; ``fresh`` how many there are. ``kl`` is that of what was looked at now, if it was measured. ``entry`` is None
    while there is no verdict on record. ``levels_given`` sums the levels of all candidates so far; what that means for
    errors ``budget`` says. ``learned``: ids of fresh items that were refused, since its training has read them.
    ``over_optimisation``: the reward that training saw and one that it did not see, where both were there;
    ``not_compared``: why the guardrail ``holdout_reward`` did not decide, if it is set. ``sampling``: how the items
    were answered.
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
    levels_given: float
    learned: tuple[str, ...]
    over_optimisation: OverOptimisation | None = None
    not_compared: str | None = None
    sampling: Decoding = GREEDY


@dataclass(frozen=True)
class Judgement:
    """``evaluation`` is of the items that were looked at now (of the whole suite with ``score_unused``), if any."""

    verdict: Verdict
    evaluation: Evaluation | None


@dataclass(frozen=True)
class Block:
    """The items of one look: fresh ones, those that have decided before, and those of guardrail suites by name."""

    fresh: tuple[Item, ...]
    regression: tuple[Item, ...] = ()
    suites: dict[str, tuple[Item, ...]] = field(default_factory=dict)

    @property
    def items(self) -> tuple[Item, ...]:
        """Those of the suite."""
        return (*self.fresh, *self.regression)

    @property
    def content(self) -> str:
        """The sha256 of all that their suites say of them."""
        others = (item for items in self.suites.values() for item in items)
        lines = [item.model_dump_json() for item in (*self.items, *others)]
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()


@dataclass(frozen=True)
class _Race:
    """A candidate before this evaluation: its plan, the evidence so far, and what is fresh.

    ``begun``: the blocks that were about to be looked at, and have no verdict; their items are in neither ``fresh`` nor
    ``regression``. ``learned``: ids of items that are refused, since the candidate has learned from them.
    """

    plan: Plan
    state: State
    earlier: tuple[Look, ...]
    last: tuple[Entry, Ruling] | None
    begun: tuple[Block, ...]
    fresh: tuple[Voice, ...]
    regression: tuple[Voice, ...]
    learned: tuple[str, ...]


class _Guard:
    """A guardrail suite as it is now: its items that the candidate has not learned from, and what scores them."""

    def __init__(self, name: str, config: EvaluationConfig, sources: Sources, learned: Collection[str]) -> None:
        of = config.suites[name]
        self.name, self.config = name, config.of_suite(name)
        self.suite = Suite.load(of.path)
        voices, _ = bank.unlearned(bank.fresh(self.suite.items, ()), learned)
        self.items = tuple(item for voice in voices for item in voice)
        try:
            self.scoring = Scoring(self.config, sources)
        except (RuleError, JudgingError) as error:
            raise NotJudged(f"evaluation.suites.{name}: {error}") from error
        low, high = of.reward_bounds
        width = high - low
        self.plan = GuardedSuite(
            sha256=self.suite.sha256, scorer=self.scoring.name, low=low, high=high, margin=of.margin * width
        )
        needed = items_to_show(self.plan.margin, width, gate.MOST_FORESEEN)
        if needed is None or len(voices) < needed:
            least = f"more than {gate.MOST_FORESEEN}" if needed is None else f"about {needed}"
            raise NotJudged(
                f"evaluation.suites.{name}: {len(voices)} items of {of.path} can be looked at, and to show that no "
                f"more than a margin of {of.margin:g} is lost takes {least}: add items, raise its margin, or set its "
                "role to watch"
            )


def check_suites(suite: Suite, config: EvaluationConfig) -> None:
    """Raises SuiteError naming a further suite that can't be read, or that has a prompt of ``suite``."""
    own = {prompt_key(item): item.id for item in suite.items}
    for name, of in config.suites.items():
        try:
            items = Suite.load(of.path).items
        except SuiteError as error:
            raise SuiteError(f"evaluation.suites.{name}: {error}") from error
        if both := next((item for item in items if prompt_key(item) in own), None):
            raise SuiteError(
                f"evaluation.suites.{name}: item {both.id!r} of {of.path} has the prompt of item "
                f"{own[prompt_key(both)]!r} of {suite.path}, which must not be answered before it decides: take it out "
                "of one of them"
            )


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
    training_reward: TrainingReward | None = None,
    learned: Collection[str] = (),
    first: Policy | None = None,
    traffic: Traffic | None = None,
) -> Judgement:
    """The verdict on a candidate, from as many fresh items as it takes, and on record when this returns.

    One that is final stands, whatever the settings are now. An undecided one is gone on with from its evidence so far,
    by the settings of its first look, and one whose evaluation was killed with the items that it was about to look at.

    Args:
        suite: the item bank.
        folder: where evaluations are kept, with answers.
        who: for the record.
        sources: as of ``evaluation.evaluate.evaluate``.
        training_reward: what training optimises; None if nothing rewards it.
        learned: hashes of prompts (``prompt_key``) that the candidate, or a policy that it descends from, has learned
            from: items with them are refused before they are looked at.
        first: the policy that the candidate's lineage began with, to which KL is measured if ``guardrails.kl_v1`` is
            set, or if it is the incumbent; None: to none.
        traffic: counts the sampling parameters of users' requests, for ``evaluation.sampling.source: traffic``; None:
            there are none.

    Raises:
        SuiteError: a further suite can't be used.
        NotJudged: the scorer gives no scores, or is another one than at earlier looks; so the reward model of held-out
            feedback, if it gives none, is gone or is another one; or what was about to be looked at is no longer there,
            or would be answered otherwise; or a guardrail suite is too small to show anything.
        OutOfBounds: a reward lies outside ``gate.reward_bounds``; its item is named.
        EvaluationBusy, LedgerDamaged, EngineError, and what the scorer raises.
    """
    with ledger.evaluating():
        history = History.of(ledger.entries())
        last = history.last(candidate.sha256, incumbent.sha256)
        if last is not None and last[1].final and not config.score_unused:
            looked = looks_of_race(ledger, history, last[1])
            return Judgement(_verdict(history, last, looked, candidate, incumbent, config, 0), None)
        check_suites(suite, config)
        scoring = Scoring(config, sources or Sources())
        rewards = ComparedRewards(config, sources or Sources(), scoring, training_reward)
        name = hypothesis(candidate.sha256, incumbent.sha256)
        planned = history.plan(name)
        decoding = settled(config.sampling, traffic) if planned is None else planned[1].decoding
        answer = partial(_Answered, candidate, incumbent, config, folder, decoding, scoring, rewards, first)
        whole = answer(suite, ends=[len(suite.items)]) if config.score_unused else None
        if whole is not None:
            whole.answer(range(len(suite.items)))
        if last is not None and last[1].final:
            evaluation = whole.evaluation(range(len(suite.items)), training_reward) if whole else None
            looked = looks_of_race(ledger, history, last[1])
            return Judgement(_verdict(history, last, looked, candidate, incumbent, config, 0), evaluation)
        guards = _guards(history, name, config, sources, learned)
        race = _race(
            ledger, history, candidate, incumbent, suite, config, scoring.name, rewards, last, learned, guards, decoding
        )
        intend = partial(_intend, ledger, history, race, candidate, incumbent, suite, config, who)
        if race.plan.level <= 0:
            _declare(ledger, history, config, who)
            entry = _record(ledger, race, candidate, incumbent, suite, race.state, (), who)
            history.add(entry[0])
            return Judgement(_verdict(history, entry, (), candidate, incumbent, config, _count(race.fresh)), None)
        begun = sum(len(block.fresh) for block in race.begun)
        wanted = bank.take(race.fresh, race.plan.max_items - race.state.items - begun)
        if not wanted and not begun:
            evaluation = whole.evaluation(range(len(suite.items)), training_reward) if whole else None
            return Judgement(_exhausted(history, race, candidate, incumbent, config), evaluation)
        blocks = [*race.begun, *_blocks(race, wanted, config)]
        if guards and not race.begun and last is None:
            blocks[0] = replace(blocks[0], suites={guard.name: guard.items for guard in guards})
        answered = whole
        if answered is None:
            part = _part(suite, [item for block in blocks for item in block.items])
            answered = answer(part, ends=_ends([len(block.items) for block in blocks]))
        beside = {
            guard.name: _Answered(
                candidate,
                incumbent,
                guard.config,
                folder,
                decoding,
                guard.scoring,
                None,
                None,
                _part(guard.suite, items),
                ends=[len(items)],
            )
            for guard in guards
            if (items := [item for block in blocks for item in block.suites.get(guard.name, ())])
        }
        if LATENCY in race.plan.margins:
            answered.answer(answered.places_of(blocks[0].items))  # what can't be answered has been named then
            timed = _part(suite, blocks[0].fresh[: latency.ITEMS])
            answered.latency = latency.token_seconds(candidate, incumbent, timed, config, folder)
        looks, seen, failure = _look(race, blocks, answered, beside, intend)
        state, _, _ = gate.replay(race.plan, looks, race.state)
        entry = _record(ledger, race, candidate, incumbent, suite, state, looks, who)
        history.add(entry[0])
        if failure is not None:
            raise failure
        items_seen = range(len(suite.items)) if whole is not None else seen
        evaluation = answered.evaluation(items_seen, training_reward)
        left = _count(race.fresh) - max(0, sum(len(look.fresh) for look in looks) - begun)
        verdict = _verdict(history, entry, (*race.earlier, *looks), candidate, incumbent, config, left)
        if evaluation is not None and evaluation.kl is not None:
            verdict = verdict.model_copy(update={"kl": evaluation.kl.incumbent_candidate.value})
        return Judgement(verdict, evaluation)


def looks_of_race(ledger: Ledger, history: History, found: Ruling) -> tuple[Look, ...]:
    """All looks at a candidate, from the evidence that the ledger has kept."""
    return tuple(look for _, ruling in history.races[found.hypothesis] for look in looks_of(ledger, ruling))


def _guards(
    history: History, name: str, config: EvaluationConfig, sources: Sources | None, learned: Collection[str]
) -> list[_Guard]:
    """The guardrail suites that a candidate is still to be looked at with: none after its first verdict.

    Raises NotJudged if they are others than at its first look.
    """
    if history.races.get(name):
        return []
    named = [one for one, of in config.suites.items() if of.role == "guardrail"]
    if (first := history.plan(name)) is not None:
        named = list(first[1].suites)
        if gone := [one for one in named if one not in config.suites]:
            raise NotJudged(
                f"evaluation.suites.{gone[0]} was about to be looked at (entry {first[0].number}), and there is none "
                "now: set it back, or train another candidate"
            )
    guards = [_Guard(one, config, sources or Sources(), learned) for one in named]
    for guard in guards if first is not None else ():
        if first is not None and first[1].suites[guard.name] != guard.plan:
            raise NotJudged(
                f"evaluation.suites.{guard.name} has another file, scorer, bounds or margin than when it was about to "
                f"be looked at (entry {first[0].number}): set it back, or train another candidate"
            )
    return guards


def _race(
    ledger: Ledger,
    history: History,
    candidate: Policy,
    incumbent: Policy,
    suite: Suite,
    config: EvaluationConfig,
    scorer: str,
    rewards: ComparedRewards,
    last: tuple[Entry, Ruling] | None,
    learned: Collection[str],
    guards: Sequence[_Guard],
    decoding: Decoding,
) -> _Race:
    name = hypothesis(candidate.sha256, incumbent.sha256)
    used, begun = history.used_but_for(name), history.begun(name)
    fresh, refused = bank.unlearned(bank.fresh(suite.items, used), learned)
    before, _ = bank.unlearned(bank.decided(suite.items, used, candidate.sha256), learned)
    first = history.plan(name)
    if first is None:
        segments = [{item.segment for item in voice if item.segment is not None} for voice in fresh]
        made = plan(
            config,
            scorer=scorer,
            level=history.level(declared(config.gate), name),
            fresh_segments={
                name: sum(name in of for of in segments) for name in sorted({name for of in segments for name in of})
            },
            fresh=len(fresh),
            decided=len(before),
            rewards=Compared(rewards.proxy, rewards.holdout, rewards.bounds, rewards.missing),
            suites={guard.name: guard.plan for guard in guards},
            decoding=decoding,
            timed=config.gate.guardrails.latency is not None and not computes_alike(whole(candidate), whole(incumbent)),
        )
        regression = tuple(before) if made.regression else ()
        return _Race(made, State(), (), None, (), tuple(fresh), regression, tuple(refused))
    at, made = first
    if made.scorer != scorer:
        raise NotJudged(
            f"policy {candidate.version} is undecided by the scores of {made.scorer} (entry {at.number}), and "
            f"evaluation.scorer is {scorer} now: set it back, or train another candidate"
        )
    if HOLDOUT in made.margins:
        judged = f"policy {candidate.version} is judged by {HOLDOUT} too (entry {at.number})"
        if rewards.missing:
            raise NotJudged(f"{judged}, and {rewards.missing}: nothing was looked at")
        by_both = (made.holdout, made.holdout_bounds), (rewards.holdout, rewards.bounds)
        if by_both[0] != by_both[1]:
            was, is_now = (f"{name} from {low:g} to {high:g}" for name, (low, high) in by_both)
            raise NotJudged(
                f"{judged} by the scores of {was}, and the reward that training did not see is {is_now} now: set it "
                "back, or train another candidate"
            )
    earlier = () if last is None else looks_of_race(ledger, history, last[1])
    state, _, _ = gate.replay(made, earlier)
    others = {guard.name: guard.suite for guard in guards}
    blocks = tuple(_begun(*one, candidate, suite, others, config) for one in begun)
    mine = {one.prompt for look in earlier for one in (*look.fresh, *look.regression)}
    ids = {item.id for block in blocks for item in (*block.fresh, *block.regression)}
    fresh = [voice for voice in fresh if not any(item.id in ids for item in voice)]
    before = [voice for voice in before if not any(prompt_key(item) in mine or item.id in ids for item in voice)]
    regression = tuple(before) if made.regression else ()
    return _Race(made, state, earlier, last, blocks, tuple(fresh), regression, tuple(refused))


def _begun(
    entry: Entry,
    meant: Intent,
    candidate: Policy,
    suite: Suite,
    others: dict[str, Suite],
    config: EvaluationConfig,
) -> Block:
    """What an intent was about to look at. Raises NotJudged naming what changed, if that can't be looked at now."""
    what = f"policy {candidate.version} was about to be looked at (entry {entry.number})"
    now, then = _answering(candidate, config), meant.answers
    # An earlier release may have put less on record.
    if changed := [name for name in now if name in then and then[name] != now[name]]:
        settings = ", ".join(f"{name} {then[name]!r}" for name in changed)
        raise NotJudged(f"{what} with evaluation's {settings}: set that back, or train another candidate")
    items = {item.id: item for item in suite.items}
    if missing := next((name for name in (*meant.fresh, *meant.regression) if name not in items), None):
        raise NotJudged(
            f"{what} on item {missing!r}, which {suite.path} does not have now: put it back, or train another candidate"
        )
    by_id = {name: {item.id: item for item in others[name].items} for name in meant.suites}
    block = Block(
        tuple(items[name] for name in meant.fresh),
        tuple(items[name] for name in meant.regression),
        {name: tuple(by_id[name][one] for one in ids) for name, ids in meant.suites.items()},
    )
    if block.content != meant.content:
        raise NotJudged(
            f"{what} on {len(meant.fresh)} items from {meant.fresh[0]!r} on, which {suite.path} has otherwise now: put "
            "them back as they were, or train another candidate"
        )
    return block


def _answering(candidate: Policy, config: EvaluationConfig) -> dict[str, Any]:
    """The settings that decide what is looked at of answers, as JSON has them."""
    named = {"max_tokens": config.max_tokens, "kl_samples": config.kl_samples, "seed": config.seed}
    computed = {"dtype": compute_dtype(candidate.path, config.engine.dtype), "extra": config.engine.extra}
    context = fit_batch_engine(config.engine, candidate.path, section="evaluation.engine").context
    answering: dict[str, Any] = json.loads(canonical(named | computed | context))
    return answering


def _ends(blocks: Sequence[int]) -> list[int]:
    """Where the parts end that are answered at once, of blocks with so many items: the first block is one, and each
    further part has as many items as all before it, or a few more. They follow from the blocks alone, so that the
    parts of an evaluation which goes on are on disk."""
    ends, count = list[int](), 0
    for items in blocks:
        count += items
        if not ends or count >= 2 * ends[-1]:
            ends.append(count)
    return ends if ends[-1] == count else [*ends, count]


class _Answered:
    """Both policies' answers to a suite, part by part as they are wanted; scored where they are looked at."""

    def __init__(
        self,
        candidate: Policy,
        incumbent: Policy,
        config: EvaluationConfig,
        folder: Path,
        decoding: Decoding,
        scoring: Scoring,
        rewards: ComparedRewards | None,
        first: Policy | None,
        suite: Suite,
        *,
        ends: Sequence[int],
    ) -> None:
        self.policies, self.suite, self.config, self.scoring = (candidate, incumbent), suite, config, scoring
        self.rewards, self.decoding, self.folder, self.first = rewards, decoding, folder, first
        self.latency: dict[str, tuple[float, float]] = {}
        self.places = {item.id: i for i, item in enumerate(suite.items)}
        self.parts = [
            suite if end - start == len(suite.items) else _part(suite, suite.items[start:end])
            for start, end in itertools.pairwise([0, *ends])
        ]
        self.answers: tuple[answers.Answers, answers.Answers] | None = None
        self.kl, self.kl_v1 = list[float | None](), list[float | None]()
        n = len(suite.items)
        self.scored = np.zeros(n, bool)
        verdicts = np.full((n, 2), np.nan) if config.scorer == "pairwise" else None
        self.judged = Judged(np.full(n, np.nan), np.full(n, np.nan), verdicts=verdicts)

    def answer(self, at: Collection[int]) -> tuple[answers.Answers, answers.Answers]:
        """The answers so far, those to the items at these places among them; the candidate's first.

        Raises EngineError on an item that a policy can't take, of all those that are not answered.
        """
        wanted = max(at, default=-1) + 1
        if wanted > len(self.kl):
            with OfflineEngines(self.config.engine) as engines:
                # Once an engine was started, all that is left: for another look it would have to be started again.
                while self.parts and (len(self.kl) < wanted or engines.started):
                    self._answer_more(wanted, engines)
        assert self.answers is not None
        return self.answers

    def _answer_more(self, wanted: int, engines: OfflineEngines) -> None:
        """Have both policies answer the parts up to so many items, or all if that starts an engine."""
        (candidate, incumbent), first, config = self.policies, self.first, self.config
        ahead = _part(self.suite, [item for part in self.parts for item in part.items])
        answer = partial(answers.answer, config=config, folder=self.folder, engines=engines, ahead=ahead)
        count, parts, before = len(self.kl), list[Suite](), list[answers.Answers]()
        for part in self.parts:
            if count >= wanted and not engines.started:
                break
            parts.append(part)
            before.append(answer(incumbent, part, decoding=self.decoding))
            count += len(part.items)
        other = first if config.gate.guardrails.kl_v1 is not None and first is not None else None
        if other is not None and other.sha256 != incumbent.sha256:
            for part in parts:
                answer(other, part)
        after = [answer(candidate, part, incumbent=incumbent, decoding=self.decoding) for part in parts]
        kl = [_kl_by_item(one, len(part.items)) for one, part in zip(after, parts, strict=True)]
        kl_v1 = [_kl_by_item(None, len(part.items)) for part in parts]
        if first is not None and first.sha256 == incumbent.sha256:
            kl_v1 = kl
        elif other is not None:
            kl_v1 = [_kl_by_item(answer(candidate, part, incumbent=other), len(part.items)) for part in parts]
        for pair in zip(after, before, strict=True):
            self.answers = pair if self.answers is None else (self.answers[0] + pair[0], self.answers[1] + pair[1])
        self.kl += itertools.chain.from_iterable(kl)
        self.kl_v1 += itertools.chain.from_iterable(kl_v1)
        del self.parts[: len(parts)]

    def places_of(self, items: Iterable[Item]) -> list[int]:
        return [self.places[item.id] for item in items]

    def observe(self, items: Iterable[Item], *, compare_rewards: bool = False) -> tuple[Observation, ...]:
        """The observations of these items, scored if they are not yet; with the two compared rewards if so wanted."""
        at = self.places_of(items)
        if not at:
            return ()
        self._score([i for i in at if not self.scored[i]])
        after, before = self.answer(at)
        tables = (after.table.take(at), before.table.take(at))
        scores = (self.judged.candidate[at], self.judged.incumbent[at])
        kl, kl_v1 = ([of[i] for i in at] for of in (self.kl, self.kl_v1))
        verdicts = None if self.judged.verdicts is None else self.judged.verdicts[at]
        proxy, holdout = self._compared(at, tables, scores) if compare_rewards else (None, None)
        items = [self.suite.items[i] for i in at]
        drawn = [self.decoding.drawn(item.id) for item in items]
        timed = [self.latency.get(item.id) for item in items]
        return observe(items, tables, scores, verdicts, kl, kl_v1, proxy, holdout, drawn, timed)

    def _compared(
        self, at: list[int], tables: tuple[pa.Table, pa.Table], scores: tuple[Scores, Scores]
    ) -> tuple[tuple[Scores, Scores], tuple[Scores, Scores]]:
        """What training's reward and the one that it did not see give both policies' answers to some items."""
        assert self.rewards is not None
        part = replace(self.suite, items=tuple(self.suite.items[i] for i in at))
        proxy = self.rewards.of_proxy(part, tables[0]), self.rewards.of_proxy(part, tables[1])
        if self.rewards.is_scorer:
            return proxy, scores
        return proxy, (self.rewards.of_holdout(part, tables[0]), self.rewards.of_holdout(part, tables[1]))

    def evaluation(self, at: Sequence[int], training_reward: TrainingReward | None) -> Evaluation | None:
        """The evaluation of some items; None if none of them has a score for both policies."""
        at = list(at)
        self._score([i for i in at if not self.scored[i]])
        judged = self.judged.take(at)
        if np.isnan(judged.candidate + judged.incumbent).all():
            return None
        after, before = self.answer(at)
        answered = (after.take(at), before.take(at))
        part = replace(self.suite, items=tuple(self.suite.items[i] for i in at))
        compared = partial(compare, training_reward=training_reward, decoding=self.decoding)
        return compared(self.policies, part, answered, judged, self.scoring, self.config)

    def _score(self, at: list[int]) -> None:
        if not at:
            return
        part = replace(self.suite, items=tuple(self.suite.items[i] for i in at))
        after, before = self.answer(at)
        found = self.scoring(part, after.table.take(at), before.table.take(at))
        self.judged.candidate[at], self.judged.incumbent[at] = found.candidate, found.incumbent
        missing = {
            why: self.judged.missing.get(why, 0) + found.missing.get(why, 0)
            for why in (*self.judged.missing, *found.missing)
        }
        self.judged = replace(self.judged, missing=missing)
        if self.judged.verdicts is not None and found.verdicts is not None:
            self.judged.verdicts[at] = found.verdicts
        self.scored[at] = True


def _look(
    race: _Race,
    blocks: Sequence[Block],
    answered: _Answered,
    beside: dict[str, _Answered],
    intend: Callable[[Block], None],
) -> tuple[tuple[Look, ...], list[int], Exception | None]:
    """The looks up to a final verdict, or until no item is left; the places of the fresh items that were used; and what
    has kept it from answering more, if anything has: the looks before that count.

    Each is put on record by ``intend`` before it is scored, if it was not begun before. Raises NotJudged if the scorer
    is down.
    """
    looks, state, seen = list[Look](), race.state, list[int]()
    for number, block in enumerate(blocks):
        try:
            answered.answer(answered.places_of(block.items))
            for name, items in block.suites.items():
                beside[name].answer(beside[name].places_of(items))
        except Exception as failure:
            if not looks or number < len(race.begun):  # what is begun is looked at before there is a verdict
                raise
            return tuple(looks), seen, failure
        if number >= len(race.begun):
            intend(block)
        fresh = answered.observe(block.fresh, compare_rewards=HOLDOUT in race.plan.margins)
        _check_scorer(fresh, answered)
        _check_holdout(fresh, race.plan)
        suites = {name: beside[name].observe(items) for name, items in block.suites.items()}
        for name, seen_beside in suites.items():
            _check_scorer(seen_beside, beside[name], f"evaluation.suites.{name}: ")
        look = Look(fresh=fresh, regression=answered.observe(block.regression), suites=suites)
        looks.append(look)
        seen += [answered.places[one.item] for one in fresh]
        state = gate.advance(race.plan, state, look)
        if gate.decide(race.plan, state).verdict != "undecided":
            break
    return tuple(looks), seen, None


def _blocks(race: _Race, wanted: Sequence[Voice], config: EvaluationConfig) -> list[Block]:
    """The items of each look that is not begun; the first look of all has as many as a pass rests on."""
    first = 0 if race.state.items or race.begun else max(race.plan.min_items, config.gate.look_items)
    head = bank.take(wanted, first)
    rest = wanted[len(head) :]
    parts = [*([head] if head else []), *(rest[at] for at in gate.blocks(list(map(len, rest)), config.gate.look_items))]
    regression, blocks = race.regression, list[Block]()
    for part in parts:
        beside = bank.take(regression, _count(part))
        regression = regression[len(beside) :]
        own, others = (tuple(item for voice in voices for item in voice) for voices in (part, beside))
        blocks.append(Block(own, others))
    return blocks


def _intend(
    ledger: Ledger,
    history: History,
    race: _Race,
    candidate: Policy,
    incumbent: Policy,
    suite: Suite,
    config: EvaluationConfig,
    who: str,
    block: Block,
) -> None:
    """Put on record what is about to be looked at, and before a candidate's first look the budget that it is under."""
    meant = Intent(
        candidate=_party(candidate),
        incumbent=_party(incumbent),
        suite=suite.path.name,
        suite_sha256=suite.sha256,
        plan=race.plan,
        answers=_answering(candidate, config),
        fresh=tuple(item.id for item in block.fresh),
        regression=tuple(item.id for item in block.regression),
        suites={name: tuple(item.id for item in items) for name, items in block.suites.items()},
        prompts=tuple(dict.fromkeys(map(prompt_key, block.fresh))),
        content=block.content,
    )
    if history.plan(meant.hypothesis) is None:
        _declare(ledger, history, config, who)
    history.add(ledger.append("intent", meant.model_dump(mode="json"), who=who))


def _declare(ledger: Ledger, history: History, config: EvaluationConfig, who: str) -> None:
    """Put the error budget of the settings on record, if another one is in force."""
    if history.budget != (budget := declared(config.gate)):
        body = Declaration(rule=budget.rule, alpha=budget.alpha, horizon=budget.horizon).model_dump()
        history.add(ledger.append("budget", body, who=who))


def _party(policy: Policy) -> Party:
    return Party(version=policy.version, sha256=policy.sha256)


def _check_scorer(fresh: Sequence[Observation], answered: _Answered, where: str = "") -> None:
    missing = sum(one.incumbent is None for one in fresh)
    if missing == len(fresh) or missing > max(FEW_MISSING, SCORER_DOWN * len(fresh)):
        whys = "".join(f"; {count} × {why}" for why, count in answered.judged.missing.items())
        raise NotJudged(
            f"{where}{answered.scoring.name} gave no score to {missing} of {len(fresh)} answers of policy "
            f"{answered.policies[1].version}, which serves: nothing was decided{whys}; evaluate again when it scores: "
            "the same items are looked at, at the same level"
        )


def _check_holdout(fresh: Sequence[Observation], of: Plan) -> None:
    missing = sum((one.holdout or (None, None))[1] is None for one in fresh)
    if HOLDOUT in of.margins and (missing == len(fresh) or missing > max(FEW_MISSING, SCORER_DOWN * len(fresh))):
        raise NotJudged(
            f"{of.holdout}, the reward that training did not see, gave none to {missing} of {len(fresh)} answers of "
            "the policy that serves: nothing was decided; evaluate again when it does: the same items are looked at, "
            "at the same level"
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
        candidate=_party(candidate),
        incumbent=_party(incumbent),
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
        learned=race.learned,
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
        history, found.plan, state, looks, config,
        verdict=found.verdict, reasons=reasons, candidate=candidate.version, incumbent=incumbent.version,
        e_value=found.e_value, needs=found.needs, fresh=fresh, entry=entry.number, entry_sha256=entry.sha256,
        learned=found.learned,
    )  # fmt: skip


def _exhausted(
    history: History, race: _Race, candidate: Policy, incumbent: Policy, config: EvaluationConfig
) -> Verdict:
    """No item is fresh: undecided, which needs no entry, as nothing was looked at."""
    decision = gate.decide(race.plan, race.state)
    needs = gate.needs(race.plan, race.state, decision)
    entry = race.last and race.last[0]
    return _shown(
        history, race.plan, race.state, race.earlier, config,
        verdict="undecided", reasons=(*decision.reasons, _wants(needs, 0)), candidate=candidate.version,
        incumbent=incumbent.version, e_value=decision.e_value, needs=needs, fresh=0,
        entry=entry and entry.number, entry_sha256=entry and entry.sha256, learned=race.learned,
    )  # fmt: skip


def _shown(
    history: History, of: Plan, state: State, looks: Sequence[Look], config: EvaluationConfig, **fields: object
) -> Verdict:
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
            "budget": history.promise() or promise([of.budget]),
            "levels_given": history.levels_given(),
            "over_optimisation": measured(
                of, looks, confidence=confidence, resamples=config.resamples, seed=config.seed
            ),
            "not_compared": of.not_compared,
            "sampling": of.decoding,
            **fields,
        }
    )


def _wants(needs: int | None, fresh: int) -> str:
    wanted = f"more than {gate.MOST_FORESEEN} more" if needs is None else f"about {needs} more"
    return f"needs {wanted} items; {fresh} fresh ones are left in the suite"


def _kl_by_item(found: answers.Answers | None, items: int) -> list[float | None]:
    """KL(incumbent || candidate) of each item's samples, nats per token; None where there is none."""
    if found is None or found.kl is None:
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
