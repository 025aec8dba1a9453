"""What an evaluation finds, as it is kept on disk."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from evaluation.statistics.pairwise import WinRate
from evaluation.suites.decoding import GREEDY, Decoding
from feedback.files import replace_file

log = logging.getLogger(__name__)


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Interval(_Record):
    """An estimate and the ends of its interval, at the evaluation's confidence."""

    value: float
    low: float
    high: float

    @classmethod
    def of(cls, estimate: tuple[float, float, float]) -> Interval:
        """What ``evaluation.statistics.intervals`` gives."""
        return cls(value=estimate[0], low=estimate[1], high=estimate[2])


class PolicyResult(_Record):
    """One policy on one suite. Lengths in tokens; ``truncated`` is the share cut at max_tokens.

    ``accuracy``, here and elsewhere: of scores that say what is right; None with a judge or a reward model.
    """

    version: int
    sha256: str
    n: int
    missing: int
    reward: Interval
    accuracy: Interval | None
    distinct_1: float
    distinct_2: float
    length_mean: float
    length_p95: float
    truncated: float


class KlEstimate(_Record):
    """KL between the policies, nats per token, on ``samples`` responses that the incumbent sampled (see kl_terms)."""

    incumbent_candidate: Interval
    candidate_incumbent: Interval
    samples: int
    tokens: int


class BestOfPoint(_Record):
    """The best of ``k`` responses: expected score, share with score 1, and the most that KL to the policy can be."""

    k: int
    reward: Interval
    accuracy: Interval | None
    kl_bound: float


class BestOf(_Record):
    """What the incumbent reaches without training, by choosing among ``n`` sampled responses to each item.

    ``by`` names the reward that chooses. ``points``, by k, end with k = n. ``missing`` counts items of which a response
    has no reward or no score.
    """

    by: str
    n: int
    items: int
    missing: int
    points: tuple[BestOfPoint, ...]


class Wins(_Record):
    """The candidate's win rate over the incumbent, of answers of one length shown in neither order.

    Of what was taken out, ``raw`` is the mean of both orders as the judge said, ``first`` how often it takes the first
    of two equal answers, ``longer`` how often the longer one. ``identical`` counts items with the same text twice.
    """

    rate: Interval
    raw: float
    first: float
    longer: float
    identical: int

    @classmethod
    def of(cls, found: WinRate) -> Wins:
        """What ``evaluation.statistics.pairwise`` gives."""
        rate = Interval.of((found.value, found.low, found.high))
        return cls(rate=rate, raw=found.raw, first=found.first, longer=found.longer, identical=found.identical)


class Greedy(_Record):
    """The same items answered greedily, beside sampled answers; it decides nothing. Fields are those of Evaluation."""

    candidate: PolicyResult
    incumbent: PolicyResult
    n: int
    missing: int
    reward: Interval
    accuracy: Interval | None


class Sample(_Record):
    """One item with both responses and their scores."""

    id: str
    prompt: str
    answer: str | None
    candidate: str
    incumbent: str
    candidate_score: float | None
    incumbent_score: float | None


class Evaluation(_Record):
    """Candidate against incumbent on one held-out suite. ``n`` items have a score for both.

    ``role``: what the suite decides; ``name``: of a further suite.

    Only they are compared; with a judge or a reward model, whose scores are from 0 to 1, the others are too: a missing
    score counts as 0 for the candidate and as 1 for the incumbent, so that silence is never to the candidate's good.
    ``reward`` and ``accuracy`` are differences, candidate less incumbent, with paired bootstrap intervals. ``missing``
    counts items without a score for one or both. ``kl`` is None for the reason in ``kl_missing``, and ``best_of`` for
    that in ``best_of_missing``, or because none was to be had.
    ``scorer_details``: what scores, in words, where it is a judge or a reward model. ``missing_reasons``: the commonest
    of why answers have no score. ``position_consistency``: see ``evaluation.judging.Judged``.
    ``wins``, of a judge that compares: None for the reason in ``wins_missing``.
    ``sampling``: how the items were answered. ``greedy``: what greedy answers come to, where those are sampled; None
    for the reason in ``greedy_missing``.
    ``settings`` is the hash of what decides the responses; ``seconds`` the wall time a stage (a stage that the cache
    answered takes none). ``engines``: what answered, by stage: an engine of the evaluation's own, that of the resident
    workers, or the cache; None in evaluations before there were such.
    """

    candidate: PolicyResult
    incumbent: PolicyResult
    n: int
    missing: int
    reward: Interval
    accuracy: Interval | None
    kl: KlEstimate | None
    kl_missing: str | None
    best_of: BestOf | None = None
    best_of_missing: str | None = None
    confidence: float
    resamples: int
    seed: int
    name: str | None = None
    role: Literal["success", "guardrail", "watch"] = "success"
    suite: str
    suite_sha256: str
    suite_items: int
    scorer: str
    scorer_details: dict[str, Any] = {}
    missing_reasons: dict[str, int] = {}
    position_consistency: float | None = None
    wins: Wins | None = None
    wins_missing: str | None = None
    sampling: Decoding = GREEDY
    greedy: Greedy | None = None
    greedy_missing: str | None = None
    settings: str
    created_at: str
    seconds: dict[str, float]
    engines: dict[str, Literal["own", "resident", "cache"]] | None = None
    samples: tuple[Sample, ...]

    @property
    def judged(self) -> bool:
        """Whether a judge or a reward model scored, by none of whose scores an answer is simply right."""
        return self.accuracy is None

    def save(self, folder: Path) -> Path:
        """Write ``<candidate>-vs-<incumbent>.json`` in ``folder``, whole or not at all; returns its path.

        A further suite's has the suite's name before ``.json``.
        """
        folder.mkdir(parents=True, exist_ok=True)
        suffix = "" if self.name is None else f".{self.name}"
        path = folder / f"{self.candidate.version}-vs-{self.incumbent.version}{suffix}.json"
        replace_file(path, self.model_dump_json(indent=2).encode() + b"\n")
        return path

    @classmethod
    def load(cls, path: Path) -> Evaluation:
        """Read what ``save`` wrote. Raises FileNotFoundError, ValueError naming the file."""
        try:
            return cls.model_validate_json(path.read_bytes())
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False, include_context=False)[0]  # no text of people
            where = "".join(f"{part}: " for part in first["loc"])
            raise ValueError(f"{path} is no evaluation: {where}{first['msg']}") from None


def load_readable(paths: Iterable[Path]) -> tuple[list[Evaluation], list[str]]:
    """The evaluations in files, and the names of the files that can't be read: the log says why.

    A file that is gone by now is in neither.
    """
    found, damaged = [], []
    for path in paths:
        try:
            found.append(Evaluation.load(path))
        except FileNotFoundError:
            continue
        except (OSError, ValueError) as error:
            log.warning("an evaluation is left out: %s", error)
            damaged.append(path.name)
    return found, damaged
