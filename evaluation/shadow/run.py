"""A shadow: requests are drawn from traffic, answered by the candidate, scored beside what people got, and compared.

What is drawn follows from the lake, and each step is kept before the next: killed anywhere and run again, it goes on,
and answers and counts each request once.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import UTC, datetime, timedelta
from typing import Any, Final

import pyarrow as pa

from evaluation.config import EvaluationConfig
from evaluation.decisions.history import Party, hypothesis
from evaluation.engine import OfflineEngine, OfflineEngines
from evaluation.estimation.same_tokens import other_tokens
from evaluation.estimation.training_reads import TrainingRead
from evaluation.shadow.comparison import Answer, Comparison, Pair, ShadowPlan, compare, scorer_is_down
from evaluation.shadow.kept import FOLDER, Kept, Response, Result, ShadowError
from evaluation.shadow.requests import Draw, Drawn, draw_requests, read_requests, sampling_of
from feedback.config import ScoringConfig
from feedback.lake.tables import Lake
from feedback.schema import INTERACTIONS
from feedback.scoring.composition import compose
from feedback.scoring.scorer import load_rollout_sources, scorer_name, values_of
from feedback.scoring.sources.rules import COLUMNS
from serve.kv_cache import fit_batch_engine, full_context
from serve.policies.store import Policy

REDACTED: Final = "the candidate's is redacted"
REFUSED: Final = "the engine does not take the request again"

_ROWS: Final = 256  # scored at a time: a judge has its deadline for so many
_MOST_REASONS: Final = 5
_MOST_QUOTED: Final = 160
_READ_BY_SOURCES: Final = pa.schema([INTERACTIONS.field(name).with_nullable(True) for name in COLUMNS])

Redact = Callable[[Sequence[str]], Mapping[str, str]]
"""Texts to what is kept of each."""


class Shadow:
    """A candidate that answers copies of requests which an incumbent has answered."""

    def __init__(
        self,
        lake: Lake,
        candidate: Policy,
        incumbent: Policy,
        config: EvaluationConfig,
        scoring: ScoringConfig,
        *,
        reads: Sequence[TrainingRead] = (),
        redact: Redact | None = None,
        engines: OfflineEngines | None = None,
        stop: Callable[[], str | None] = lambda: None,
        say: Callable[[str], None] = print,
        turn: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        """``reads``: what the candidate's training has read; ``redact``: what responses pass before they are kept;
        ``engines``: those that answer, by default one that is closed before a reward model needs its memory; ``stop``:
        why it is to end, None while it is not; ``say`` gets one line for each thing that happens; ``turn``: within it
        the devices are those of engines and reward models.

        Raises ShadowError if the two policies' tokens differ, or nothing can score; what a source of rewards raises
        that can't be loaded.
        """
        if why := other_tokens(candidate, incumbent):
            raise ShadowError(why)
        self.lake, self.candidate, self.incumbent = lake, candidate, incumbent
        self.config, self.scoring = config, scoring
        self.reads, self.redact, self.engines, self.stop, self.say = reads, redact, engines, stop, say
        self._turn = turn
        try:
            self.scorer = scorer_name(load_rollout_sources(scoring))
        except ValueError as error:
            raise ShadowError(f"nothing can score the candidate's responses: {error}") from error
        self.seed = hypothesis(candidate.sha256, incumbent.sha256)
        self.kept = Kept(config.folder / FOLDER / self.seed[:16])
        self.plan = ShadowPlan.of(config.experiment.shadow)
        """What the settings say until it runs, and what the first run began with from there on."""
        self._longest = _longest(candidate, incumbent, config)
        self._unscored: Counter[str] = Counter()
        self._last_draw: tuple[Any, Draw] | None = None

    def run(self) -> Result:
        """Go on until the requests show something, there are enough of them, or time is up; what they show then.

        Raises ShadowError (the candidate can't be loaded, a reward is out of bounds), ShadowBusy,
        feedback.lake.tables.LakeError, and what a source of rewards raises that can't be used at all.
        """
        config = self.config.experiment.shadow
        deadline = time.monotonic() + config.seconds
        with self.kept.alone():
            began = self.kept.began(_party(self.candidate), _party(self.incumbent))
            self._settle()
            if gone := self.kept.forget_gone(self.lake):
                self.say(f"{gone} requests are gone, erased or dropped: so is what the candidate answered to them")
            with self._turn():
                self._score()  # what a killed run has answered
            ended = self._ended()
            while ended is None:
                late, room = time.monotonic() >= deadline, config.max_requests - len(self._units())
                waiting = self._draw(began).waiting[:room]
                answers = bool(waiting) and (late or len(waiting) >= min(room, config.min_requests))
                if answers:
                    with self._turn():
                        self._answer(waiting)
                        self._score()
                ended = self._ended() or (f"time is up ({config.seconds:g} s)" if late else None)
                self.kept.put_result(self._result(began, None))
                if ended is None and not answers:
                    time.sleep(min(config.poll_seconds, max(0.0, deadline - time.monotonic())))
            result = self._result(began, ended)
            self.kept.put_result(result)
        return result

    def _settle(self) -> None:
        """Take the plan of the first run, and say what was changed in the settings since."""
        declared, self.plan = self.plan, self.kept.settle(self.scorer, self.plan)
        if changed := [name for name in ShadowPlan.model_fields if getattr(declared, name) != getattr(self.plan, name)]:
            self.say(
                f"the shadow goes on by the settings of its first run: {', '.join(changed)} changed since, and that "
                "doesn't count for it"
            )

    def _ended(self) -> str | None:
        """Why there is nothing more to answer; None while there is."""
        if self._compare().decision in ("harm", "no worse"):
            return "it is known what they show"
        if (answered := len(self._units())) >= self.config.experiment.shadow.max_requests:
            return f"{answered} requests were answered, as many as may be"
        return self.stop()

    def _compare(self) -> Comparison:
        return compare(self.plan, self.kept.pairs(self.scorer))

    def _units(self) -> set[str]:
        """Those of which a request was answered, whatever became of it."""
        return {one.unit for one in self.kept.responses()} | {one.unit for one in self.kept.pairs(self.scorer)}

    # Requests

    def _draw(self, began: datetime) -> Draw:
        """What waits to be answered now, read again when there is something new."""
        answered = frozenset(one.response_id for one in self.kept.responses())
        state = self.lake.versions()["interactions"], answered
        if self._last_draw is None or self._last_draw[0] != state:
            config = self.config.experiment.shadow
            draw = draw_requests(
                self.lake,
                seed=self.seed,
                policy=self.incumbent.version,
                share=self.plan.share,
                since=began - timedelta(seconds=config.before_seconds),
                longest=self._longest,
                reads=self.reads,
                answered=answered,
                units=self._units(),
            )
            self._last_draw = state, draw
        return self._last_draw[1]

    def _requests(self, of: Sequence[Drawn | Response]) -> dict[str, dict[str, Any]]:
        """By id the rows of requests, with the responses that people got, of those that are there."""
        rows = read_requests(self.lake, [one.response_id for one in of]).to_pylist() if of else []
        return {row["response_id"]: row for row in rows}

    # Answers

    def _answer(self, waiting: Sequence[Drawn]) -> None:
        """Have the candidate answer requests, and keep what it says."""
        each, self._last_draw = self.config.experiment.shadow.min_requests, None  # an erasure may have begun
        self.say(f"policy {self.candidate.version} answers {len(waiting)} requests, and nobody sees it")
        with OfflineEngines(self.config.engine) if self.engines is None else nullcontext(self.engines) as engines:
            try:
                engine = engines.of(self.candidate)
            except Exception as error:
                why = f"policy {self.candidate.version} can't be loaded: {type(error).__name__}: {error}"
                raise ShadowError(why) from error
            for at in range(0, len(waiting), each):
                self._answer_some(engine, waiting[at : at + each])

    def _answer_some(self, engine: OfflineEngine, waiting: Sequence[Drawn]) -> None:
        rows = self._requests(waiting)
        there = [one for one in waiting if one.response_id in rows]
        prompts = [rows[one.response_id]["prompt_token_ids"] for one in there]
        answers = engine.answer(prompts, [sampling_of(rows[one.response_id], one.draw) for one in there])
        found = [
            Response.of(one, answer.text, answer.token_ids, answer.finish_reason)
            for one, answer in zip(there, answers, strict=True)
        ]
        redacted = {} if self.redact is None else self.redact([one.response for one in found])
        self.kept.add_responses(self.lake, [_as_kept(one, redacted) for one in found])

    # Scores

    def _score(self) -> None:
        """Score what was answered and has no score by this scorer, beside what people got to the same requests.

        Raises ShadowError if the scorer is down: these are scored by the next run then.
        """
        known = {pair.unit for pair in self.kept.pairs(self.scorer)}
        responses = [one for one in self.kept.responses() if one.unit not in known]
        for at in range(0, len(responses), _ROWS):
            some = responses[at : at + _ROWS]
            rows = self._requests(some)
            there = [one for one in some if one.response_id in rows]
            if there:
                self.kept.add_pairs(self.scorer, self._pairs(there, [rows[one.response_id] for one in there]))

    def _pairs(self, responses: Sequence[Response], rows: Sequence[dict[str, Any]]) -> list[Pair]:
        own = [
            row | {"response": one.response, "response_token_ids": one.response_token_ids}
            for one, row in zip(responses, rows, strict=True)
        ]
        measured = [one.finish_reason != "error" and one.left_out is None for one in responses]
        # In turn, so that a judge's deadline cuts both policies' alike.
        scored = [
            [after, before] if both else [before] for both, after, before in zip(measured, own, rows, strict=True)
        ]
        rewards = iter(self._rewards([row for of in scored for row in of]))
        found = [(next(rewards) if both else None, next(rewards)) for both in measured]
        self._require_scorer([before for _, before in found])
        pairs = []
        for one, row, (after, before) in zip(responses, rows, found, strict=True):
            failed, withheld = one.finish_reason == "error", one.left_out is not None
            self._require_bounded(one.response_id, after, before)
            tokens = len(one.response_token_ids), len(row["response_token_ids"])
            cut = one.finish_reason == "length", row["finish_reason"] == "length"
            pairs.append(
                Pair(
                    unit=one.unit,
                    draw=one.draw,
                    candidate=Answer(reward=after, tokens=tokens[0], cut=cut[0], failed=failed, withheld=withheld),
                    incumbent=Answer(reward=before, tokens=tokens[1], cut=cut[1]),
                )
            )
        return pairs

    def _rewards(self, rows: Sequence[Mapping[str, Any]]) -> list[float | None]:
        """The reward of each row, by the sources of scoring that need nobody's feedback."""
        sources = load_rollout_sources(self.scoring)  # anew: a reward model's memory is the engine's in between
        table = pa.Table.from_pylist([{name: row[name] for name in COLUMNS} for row in rows], _READ_BY_SOURCES)
        values, reasons = values_of(sources, table)
        composed = compose(
            [source.name for source in sources],
            [source.weight for source in sources],
            [pa.array(of, pa.float64()) for of in values.values()],
            [pa.array(of, pa.string()) for of in reasons.values()],
        )
        found: list[float | None] = composed.reward.to_pylist()
        for i, reward in enumerate(found):
            if reward is None:
                why = "; ".join(f"{name}: {' '.join(str(of[i]).split())}" for name, of in reasons.items())
                self._unscored[why[:_MOST_QUOTED]] += 1
        return found

    def _require_scorer(self, before: Sequence[float | None]) -> None:
        missing = sum(reward is None for reward in before)
        if scorer_is_down(missing, len(before)):
            whys = "".join(f"; {count} × {why}" for why, count in self._unscored.most_common(_MOST_REASONS))
            raise ShadowError(
                f"{self.scorer} gave no reward to {missing} of {len(before)} responses of policy "
                f"{self.incumbent.version}, which people got: these show nothing of policy {self.candidate.version}"
                f"{whys}; run the shadow again when it scores: the same responses are scored"
            )

    def _require_bounded(self, response_id: str, after: float | None, before: float | None) -> None:
        low, high = self.plan.reward_bounds
        for whose, reward in (("the candidate's response to the request of", after), ("", before)):
            if reward is not None and not low <= reward <= high:
                raise ShadowError(
                    f"{f'{whose} response {response_id}'.strip()} has the reward {reward:g} by {self.scorer}, outside "
                    f"[{low:g}, {high:g}]: say what rewards lie between with evaluation.experiment.shadow.reward_bounds"
                    f"{' before its first run: it keeps them' if self.kept.pairs(self.scorer) else ''}"
                )

    # Results

    def _result(self, began: datetime, ended: str | None) -> Result:
        draw = self._draw(began)
        unscored = self._unscored + Counter(one.left_out for one in self.kept.responses() if one.left_out is not None)
        return Result(
            candidate=_party(self.candidate),
            incumbent=_party(self.incumbent),
            began=began.isoformat(),
            at=datetime.now(UTC).isoformat(timespec="milliseconds"),
            plan=self.plan,
            comparison=self._compare(),
            considered=draw.considered,
            drawn=draw.taken,
            left_out=draw.left_out,
            scorer=self.scorer,
            unscored=dict(unscored.most_common(_MOST_REASONS)),
            ended=ended,
        )


def _party(policy: Policy) -> Party:
    return Party(version=policy.version, sha256=policy.sha256)


def _as_kept(response: Response, redacted: Mapping[str, str]) -> Response:
    if response.finish_reason == "refused":
        return response.without_text(REFUSED)
    if redacted.get(response.response, response.response) != response.response:
        return response.without_text(REDACTED)
    return response


def _longest(candidate: Policy, incumbent: Policy, config: EvaluationConfig) -> int | None:
    """Tokens of a prompt and of max_tokens together, beyond which this engine may cut what a server would not.

    None where it holds the whole context that either model has.
    """
    own, before = (full_context(json.loads((one.path / "config.json").read_text())) for one in (candidate, incumbent))
    fitting = fit_batch_engine(config.engine, candidate.path, section="evaluation.engine").max_model_len
    if own is None or before is None or fitting < 0:
        return None
    return None if fitting >= max(own, before) else fitting
