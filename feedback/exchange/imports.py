"""Sets of others as rows of the lake: feedback on texts that no policy of ours sampled.

A text becomes an interaction of status ``imported``. It has the prompt's token ids, as the policy's tokenizer makes
them, so that it meets the same prompt of traffic; it has neither token ids of the response nor logprobs nor policy
spans, and is never scored, sampled from or learned from as a rollout. What the set says of it becomes feedback: a
preference, a thumb, or for a demonstration a correction by the text itself. Its user, and the source of the feedback,
is the name that the import is given: by it all of it is erased.

Ids are hashes of the content, so that an import which was killed can be repeated: what the lake has is left out.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Final

import pyarrow as pa

from feedback.exchange import ImportForm, record_files, trl
from feedback.exchange.record_files import RecordError
from feedback.files import locked, make_folder
from feedback.ingest.deduplication import append_feedback
from feedback.ingest.id_index import take_in_if_used
from feedback.journal.codec import to_batch
from feedback.lake.tables import Lake, LakeConflictError, LakeError
from feedback.redaction import REDACTED, RedactionError, Redactor
from feedback.schema import FEEDBACK, IMPORTED, INTERACTIONS

ENDPOINT: Final = "import"
METADATA: Final = "millrace:import"
"""The key of a row's metadata that names its set: source, format, file and its sha256, line or row."""

DUPLICATE: Final = "duplicates"
KNOWN: Final = "imported before"
NO_TEMPLATE: Final = "that the chat template fails on"

_GUARD: Final = (
    "lake.import"  # the application id that each commit of an import moves on: of two at once one is refused
)
_ROWS: Final = 8192  # in a commit
_ATTEMPTS: Final = 8

Tokenise = Callable[[trl.Prompt], tuple[str, str | None, list[int]]]
"""Of a prompt the text that is tokenised, its messages as JSON, and the token ids; raises what a template raises."""


@dataclass(frozen=True)
class Imported:
    """What an import added. ``left_out``: rows of the set that it did not, by reason."""

    rows: int
    responses: int
    feedback: int
    left_out: dict[str, int]


def import_set(
    lake: Lake,
    journal_folder: Path,
    path: Path,
    form: ImportForm,
    *,
    source: str,
    tokenise: Tokenise,
    tenant: str = "default",
    split: str | None = None,
    redactor: Redactor | None = None,
) -> Imported:
    """Add a set's responses and feedback to the lake; nothing of it, if a line or row is broken.

    Args:
        source: whose feedback it is; erasing this user erases the import.
        redactor: a row any of whose texts it changes is left out; no policy is to learn from such a text.

    Raises:
        feedback.redaction.RedactionError: a text can't be redacted; its line or row is named.
        RecordError: the set can't be read, or a line or row is not of the format; it is named.
        feedback.lake.tables.LakeError: the lake can't be read or written.
        feedback.files.LockTimeoutError: another process seals for too long.
    """
    origin = {"source": source, "format": form, "file": path.name, "sha256": record_files.sha256(path, split)}
    rows, responses, feedback = 0, dict[str, dict[str, Any]](), dict[str, dict[str, Any]]()
    left_out: Counter[str] = Counter()
    started = datetime.now(UTC)
    for record in record_files.read(path, split):
        rows += 1
        try:
            example = trl.example(form, record)
            try:
                prompt = tokenise(example.prompt)
            except RecordError as error:
                raise RecordError(f"{record.where}: {error}") from error
            except Exception as error:  # a template is a program, which may raise anything
                raise trl.UnfitError(NO_TEMPLATE) from error
            if not prompt[2]:
                raise trl.UnfitError(trl.EMPTY)
            if redactor is not None and _changed(redactor, example, prompt[0]):
                raise trl.UnfitError(REDACTED)
        except RedactionError as error:
            raise RedactionError(f"{record.where}: {error}") from error
        except trl.UnfitError as error:
            left_out[str(error)] += 1
            continue
        at = started + timedelta(microseconds=rows)  # of what a source says of one thing the last counts
        of_set = [(METADATA, json.dumps({**origin, "where": record.where.removeprefix(f"{path}, ")}))]
        ids = [_id(tenant, source, json.dumps(example.prompt), text) for text in example.responses]
        said = _feedback(form, example, ids, source=source, tenant=tenant, at=at)
        if said["feedback_id"] in feedback:
            left_out[DUPLICATE] += 1
            continue
        feedback[said["feedback_id"]] = said
        for response_id, text in zip(ids, example.responses, strict=True):
            made = _interaction(response_id, prompt, text, user=source, tenant=tenant, at=at, metadata=of_set)
            responses.setdefault(response_id, made)
    added = _append_interactions(lake, responses, origin)
    said_anew = _append_feedback(lake, journal_folder, feedback, origin)
    if known := len(feedback) - said_anew:
        left_out[KNOWN] += known
    return Imported(rows, added, said_anew, dict(sorted(left_out.items())))


def _changed(redactor: Redactor, example: trl.Example, prompt: str) -> bool:
    """Whether redaction changes any text of an example. ``prompt``: the text that is tokenised."""
    messages = [] if isinstance(example.prompt, str) else example.prompt
    contents = [text for message in messages for text in message.values()]
    return any(text != kept for text, kept in redactor.texts([prompt, *contents, *example.responses]).items())


def _id(*parts: str) -> str:
    """An id that follows from content, and that no response of a server has."""
    return f"{ENDPOINT}-{hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:40]}"


def _interaction(
    response_id: str,
    prompt: tuple[str, str | None, list[int]],
    response: str,
    *,
    user: str,
    tenant: str,
    at: datetime,
    metadata: list[tuple[str, str]],
) -> dict[str, Any]:
    text, messages, token_ids = prompt
    return {
        "response_id": response_id,
        "request_id": response_id,
        "user": user,
        "tenant": tenant,
        "endpoint": ENDPOINT,
        "replica": ENDPOINT,
        "created_at": at,
        "completed_at": at,
        "messages": messages,
        "prompt": text,
        "prompt_token_ids": token_ids,
        "response": response,
        "response_token_ids": [],
        "logprobs": [],
        "policy_spans": [],
        "sampling": {},
        "status": IMPORTED,
        "timings": {},
        "metadata": metadata,
    }


def _feedback(
    form: ImportForm, example: trl.Example, ids: list[str], *, source: str, tenant: str, at: datetime
) -> dict[str, Any]:
    said: dict[str, Any]
    if form == "trl-preference":
        said = {"kind": "preference", "rejected_response_id": ids[1]}
    elif form == "trl-kto":
        said = {"kind": "thumb", "value": float(bool(example.label))}
    else:
        said = {"kind": "correction", "text": example.responses[0]}
    feedback_id = _id(tenant, source, ids[0], json.dumps(said))
    of = {"feedback_id": feedback_id, "response_id": ids[0], "source": source, "tenant": tenant, "created_at": at}
    return said | of


def _append_interactions(lake: Lake, rows: dict[str, dict[str, Any]], origin: dict[str, str]) -> int:
    """Add those that the lake lacks; their number."""
    added = 0
    for part in _parts(rows):
        for attempt in range(_ATTEMPTS):
            snapshot = lake.table("interactions")
            known = _known(lake, snapshot.version(), (row["response_id"] for row in part))
            fresh = [row for row in part if row["response_id"] not in known]
            if not fresh:
                break
            turn = {_GUARD: (snapshot.transaction_version(_GUARD) or 0) + 1}
            data = pa.Table.from_batches([to_batch(fresh, INTERACTIONS)])
            with suppress(LakeConflictError):
                lake.append("interactions", data, transactions=turn, metadata={"import": origin}, snapshot=snapshot)
                added += len(fresh)
                break
            if attempt + 1 == _ATTEMPTS:
                raise LakeError(f"{lake.uri}: other imports commit again and again; repeat this one")
    return added


def _known(lake: Lake, version: int, ids: Iterable[str]) -> set[str]:
    """Which of these the lake has."""
    query = "SELECT response_id FROM interactions SEMI JOIN looked_for USING (response_id) WHERE status = ?"

    def read(views: Any) -> set[str]:
        views.register("looked_for", wanted)
        return {response_id for (response_id,) in views.execute(query, [IMPORTED]).fetchall()}

    wanted = pa.table({"response_id": list(ids)})
    return lake.read(read, versions={"interactions": version}, tables=("interactions",))


def _append_feedback(lake: Lake, journal_folder: Path, rows: dict[str, dict[str, Any]], origin: dict[str, str]) -> int:
    """Add what the lake lacks, as a seal does; its number."""
    if not rows:
        return 0
    added = 0
    make_folder(journal_folder)
    with locked(journal_folder / ".seal.lock", lake.config.lock_timeout_s):
        for part in _parts(rows):
            data = pa.Table.from_batches([to_batch(part, FEEDBACK)])
            snapshot = lake.table("feedback")
            repeated, conflicts = append_feedback(
                lake, journal_folder, data, transactions={}, metadata={"import": origin}, snapshot=snapshot
            )
            added += len(part) - repeated - len(conflicts)
        take_in_if_used(lake, journal_folder)
    return added


def _parts(rows: dict[str, dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    """The rows of each commit."""
    listed = list(rows.values())
    return (listed[first : first + _ROWS] for first in range(0, len(listed), _ROWS))
