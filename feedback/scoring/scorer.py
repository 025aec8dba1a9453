"""The sources of a reward, as the settings name them, and what identifies them together: the scorer.

Texts that users and judges wrote must not end a run. So a source that fails on a batch is called again with its halves,
down to the row that it fails on, which has no value, with the reason.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import pyarrow as pa

from feedback.config import ClassifierConfig, KindsConfig, ScoringConfig
from feedback.scoring.sources import human
from feedback.scoring.sources.judge_cache import JudgeCacheError
from feedback.scoring.sources.rules import COLUMNS, Reasons, SqlRule, Values, load_rules

log = logging.getLogger(__name__)

NO_REASON: Final = "no reason given"
_REASON_LENGTH = 500

ByRow = Callable[[pa.Table], tuple[Values, Reasons]]
"""From a table with the columns of ``rules.COLUMNS`` to (values, why a row has none)."""


@dataclass(frozen=True)
class Source:
    """One component of the reward. ``identity`` is, as JSON values, all that decides it.

    Its value comes from the votes (neither ``rule`` nor ``by_row``), from SQL, or from a function over batches of at
    most ``batch_rows``.
    """

    name: str
    weight: float
    identity: Any
    rule: SqlRule | None = None
    by_row: ByRow | None = None
    batch_rows: int | None = None


def guarded(name: str, by_row: ByRow, *unusable: type[Exception]) -> ByRow:
    """``by_row`` that raises only the errors of an ``unusable`` source; else the rows it fails on get a reason.

    What the machine lacks (memory, files) is no property of a response: it is raised too, and a later run scores it.
    """
    return partial(_outcomes, name, by_row, unusable)  # a closure that calls itself is a cycle, here around a model


def _outcomes(
    name: str, by_row: ByRow, unusable: tuple[type[Exception], ...], batch: pa.Table
) -> tuple[Values, Reasons]:
    try:
        values, reasons = by_row(batch)
    except unusable:
        raise
    except Exception as error:
        if batch.num_rows > 1:
            middle = batch.num_rows // 2
            halves = batch.slice(0, middle), batch.slice(middle)
            (first, whys), (second, more) = (_outcomes(name, by_row, unusable, half) for half in halves)
            return first + second, whys + more
        if _is_of_the_machine(error):
            raise
        log.debug("%s fails on a response", name, exc_info=error)
        values, reasons = [None] * batch.num_rows, [f"{name} failed: {type(error).__name__}: {error}"]
    return values, [_recordable(reason) for reason in reasons]


def _is_of_the_machine(error: Exception) -> bool:
    """PyTorch's errors of a device by their names, since it is not imported here."""
    names = {kind.__name__ for kind in type(error).__mro__}
    return isinstance(error, OSError | MemoryError) or not names.isdisjoint(("OutOfMemoryError", "AcceleratorError"))


def _recordable(reason: str | None) -> str | None:
    """It may quote anything, half characters too, which can't be written."""
    return reason and reason[:_REASON_LENGTH].encode(errors="replace").decode()


def load_sources(config: ScoringConfig, kinds: KindsConfig) -> list[Source]:
    """The sources that have a weight, for logged responses.

    Raises RuleError, RewardModelError or JudgeCacheError for one that can't be loaded, ValueError if there is none.
    """
    found = []
    if config.human.weight > 0:
        found.append(Source(human.NAME, config.human.weight, human.identity(config.human, kinds)))
    found += _sources_by_row(config)
    if not found:
        raise ValueError("no reward source has a weight: set scoring.human.weight, or give scoring.rules a rule")
    return found


def load_rollout_sources(config: ScoringConfig) -> list[Source]:
    """The sources that have a weight, for responses that training samples: all of them give values by row.

    Nobody votes on those. A reward model that was trained on votes (``human.model``) stands in for them. A judge gives
    each batch its whole deadline. Raises as ``load_sources``.
    """
    found = []
    if config.human.weight > 0 and config.human.model is not None:
        found.append(_classifier(human.NAME, config.human.weight, config.human.model))
    found += _sources_by_row(config, once=True)
    if not found:
        raise ValueError(
            "no reward source that can reward fresh responses has a weight: give feedback.scoring a rule, a model or a "
            "judge, or feedback.scoring.human.model"
        )
    return found


def values_of(sources: Sequence[Source], rows: pa.Table) -> tuple[dict[str, Values], dict[str, Reasons]]:
    """Of each source of ``load_rollout_sources``, by name, the value of each row, and why a row has none."""
    components: dict[str, Values] = {}
    reasons: dict[str, Reasons] = {}
    for source in sources:
        by_row = source.by_row if source.rule is None else source.rule.by_row
        assert by_row is not None
        values, whys = by_row(rows)
        components[source.name] = values
        reasons[source.name] = [
            None if value is not None else why or NO_REASON for value, why in zip(values, whys, strict=True)
        ]
    return components, reasons


def _classifier(name: str, weight: float, config: ClassifierConfig) -> Source:
    from feedback.scoring.sources import reward_model as models

    model = models.RewardModel(config)
    by_row = guarded(name, model.by_row, models.RewardModelError)
    return Source(name, weight, model.identity, None, by_row, models.BATCH_ROWS)


def _sources_by_row(config: ScoringConfig, *, once: bool = False) -> list[Source]:
    """Rules, model and judge; ``once``: of ``Judge``."""
    found = []
    for rule, weight in load_rules(config.rules):
        if isinstance(rule, SqlRule):
            found.append(Source(rule.name, weight, rule.digest, rule=rule))
        else:
            found.append(Source(rule.name, weight, rule.digest, by_row=guarded(rule.name, rule.by_row)))
    if config.model is not None and config.model.weight > 0:
        found.append(_classifier("model", config.model.weight, config.model))
    if config.judge is not None and config.judge.weight > 0:
        from feedback.scoring.sources import judge as judges

        judge = judges.Judge(config.judge, once=once)
        by_row = guarded(judges.NAME, judge.by_row, JudgeCacheError)
        found.append(Source(judges.NAME, config.judge.weight, judge.identity, None, by_row, judges.BATCH_ROWS))
    return found


def columns_of(sources: list[Source]) -> list[str]:
    """Of what a rule may see of a response, what these sources look at, or a little more."""
    if any(source.by_row is not None for source in sources):
        return list(COLUMNS)
    text = " ".join(f"{source.rule.value} {source.rule.reason}" for source in sources if source.rule is not None)
    words = {word.lower() for word in re.findall(r"\w+", text)}  # SQL's names have no case
    return [column for column in COLUMNS if column in words or "columns" in words]


def scorer_name(sources: list[Source]) -> str:
    """``human+exact@<hash>``: the components and a hash of all that decides them."""
    content = [[source.name, source.weight, source.identity] for source in sources]
    digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
    return f"{'+'.join(source.name for source in sources)}@{digest[:16]}"
