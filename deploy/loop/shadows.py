"""Shadows by the settings of a home: run, put on record, and heeded.

A shadow can only refuse: harm that is on record is an objection to promoting the candidate, or to trying it on live
traffic, as a refusal of the gate is (``deploy.loop.promotion.verdict_on``). It lets nothing pass that has not passed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path

from deploy.config.root import ConfigError, Settings
from deploy.loop.preflight import judging_problems
from evaluation.decisions.ledger import Entry, Ledger, LedgerError
from evaluation.estimation.training_reads import reads_of_policy
from evaluation.shadow.kept import FOLDER, Kept, Result, ShadowError, shadows
from evaluation.shadow.run import Redact, Shadow
from evaluation.shadow.verification import ShadowRuling
from feedback.lake.tables import Lake
from feedback.redaction import Redactor


def run_shadow(
    settings: Settings,
    lake: Lake,
    version: int,
    *,
    who: str,
    say: Callable[[str], None],
    turn: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> Result:
    """Shadow policy ``version`` beside the one that serves, and put what that shows on record.

    ``turn``: within it the devices are those of engines and reward models.

    Where too few requests were answered, nothing is on record. Raises ConfigError, ShadowError, PolicyError,
    LedgerError, LakeError, and what a source of rewards, or a redact function, raises that can't be used.
    """
    store, resolved = settings.policy_store(), settings.resolved()
    pointer = store.serving()
    if pointer is None:
        raise ShadowError(f"nothing serves in {store.root}: there is nothing to compare with")
    if pointer.version == version:
        raise ShadowError(f"policy {version} serves: a shadow compares another one with it")
    if problems := judging_problems(settings, store.get(version)):
        raise ConfigError("\n".join(problems))

    def moved() -> str | None:
        now = store.serving()
        return None if now is None or now.version == pointer.version else f"policy {now.version} serves now"

    with store.hold(version), store.hold(pointer.version) as incumbent, redacting(resolved) as redact:
        candidate = store.verify(version)
        shadow = Shadow(
            lake,
            candidate,
            incumbent,
            resolved.evaluation,
            resolved.feedback.scoring,
            reads=reads_of_policy(store, candidate),
            redact=redact,
            stop=moved,
            say=say,
            turn=turn,
        )
        result = shadow.run()
    if result.comparison.decision != "can't tell":
        record(settings.ledger(), shadow.kept, result, who=who)
    return result


def record(ledger: Ledger, kept: Kept, result: Result, *, who: str) -> Entry | None:
    """Put what a shadow shows into the ledger, with the pairs it rests on; None if that is there already."""
    pairs = [pair.model_dump(mode="json") for pair in kept.pairs(result.scorer)]
    ruling = ShadowRuling(
        candidate=result.candidate,
        incumbent=result.incumbent,
        plan=result.plan,
        scorer=result.scorer,
        comparison=result.comparison,
        evidence=ledger.keep({"pairs": pairs}),
    )
    body = ruling.model_dump(mode="json")

    def recorded(entries: list[Entry]) -> str | None:
        known = any(entry.kind == "shadow" and entry.body == body for entry in entries)
        return "what the shadow shows is there already" if known else None

    try:
        return ledger.append("shadow", body, who=who, unless=recorded)
    except LedgerError:
        if recorded(ledger.entries()) is None:
            raise
        return None


def results(settings: Settings) -> list[Result]:
    """What each shadow shows, oldest first; of those that somebody has looked at."""
    return [found for kept in shadows(shadows_folder(settings)) if (found := kept.result()) is not None]


def shadows_folder(settings: Settings) -> Path:
    """Where shadows keep what they have."""
    return settings.path(settings.evaluation.folder) / FOLDER


@contextmanager
def redacting(settings: Settings) -> Iterator[Redact | None]:
    """What texts pass before they are kept, as ``feedback.capture.redact`` has it; None if nothing."""
    if not settings.feedback.capture.redact:
        yield None
        return
    redactor = Redactor(settings.feedback.capture)
    try:
        yield redactor.texts
    finally:
        redactor.close()
