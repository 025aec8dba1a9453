"""Feedback as it comes in: validated by kind, turned into a row of the ``feedback`` table."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Annotated, Any, Final, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, PlainValidator, StringConstraints, ValidationError, model_validator
from pydantic_core import InitErrorDetails, PydanticCustomError

from feedback.config import KindsConfig, MetricConfig, RatingConfig
from feedback.ids import uuid7
from feedback.settings_base import Identifier

TURN: Final = "~turn:"
"""In the id of a session's feedback on a response: ID~turn:0 on the last one, ID~turn:K~RESPONSE before it."""

LAST_TURN: Final = f"{TURN}0"

EARLIER_TURN: Final = f"%{TURN}%~%"
"""SQL pattern of the ids of a session's feedback on any response but its last."""

Kind = Literal["thumb", "rating", "preference", "correction", "comment", "metric"]

_FIELDS: Final[dict[str, tuple[tuple[str, ...], tuple[str, ...]]]] = {
    "thumb": (("value",), ("text",)),
    "rating": (("value",), ("text", "name")),
    "preference": (("rejected_response_id",), ("text",)),
    "correction": (("text",), ()),
    "comment": (("text",), ()),
    "metric": (("name", "value"), ("text",)),
}
"""Of each kind the fields that it needs, and those that it may have."""

_OF_SESSIONS: Final = ("thumb", "rating", "metric")
"""The kinds that may be on a session."""

_CONTENT: Final = ("value", "text", "name", "rejected_response_id")


class FeedbackError(ValueError):
    """Feedback that fits its kind's form, but not what is declared; ``field`` is the one that is wrong."""

    def __init__(self, field: str, reason: str) -> None:
        super().__init__(f"{field}: {reason}")
        self.field = field
        self.reason = reason


def _number_or_boolean(value: object) -> float | bool:
    """What JSON writes as a number or a boolean; a text is neither, whatever its content."""
    if isinstance(value, bool):
        return value
    if not isinstance(value, int | float):
        raise ValueError(f"a value is a number, true or false, not {_shown(value)}")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise ValueError(f"a value is a finite number, not {_shown(value)}")
    return number + 0.0  # -0 is 0


ANYBODY: Final = "user"
"""The source of feedback that names none."""


class FeedbackIn(BaseModel):
    """Feedback on a response, from a person or a program: the body of ``POST /feedback``."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    response_id: Identifier | None = Field(
        default=None, description="The response that this is about, as /generate returned it."
    )
    session_id: Annotated[str, StringConstraints(min_length=1, max_length=200)] | None = Field(
        default=None,
        description="In place of response_id, for a thumb, a rating or a metric: the conversation that this is about, "
        "which is all responses recorded with that session_id so far.",
    )
    kind: Kind = Field(
        description="thumb (value 1 or true is up, 0 or false is down), rating (value, on the scale that name names), "
        "preference (response_id is preferred over rejected_response_id), correction (text is what the response "
        "should have been), comment (text), metric (name, value)."
    )
    value: Annotated[float | bool, PlainValidator(_number_or_boolean, json_schema_input_type=float | bool)] | None = (
        Field(default=None, description="The number, or true or false, of a thumb, a rating or a metric.")
    )
    text: Annotated[str, StringConstraints(min_length=1, max_length=100_000)] | None = Field(
        default=None, description="The text of a correction or comment; an optional remark with the other kinds."
    )
    name: Identifier | None = Field(
        default=None, description="Which of the declared metrics, or which of the declared rating scales."
    )
    rejected_response_id: Identifier | None = Field(default=None, description="The response that a preference rejects.")
    feedback_id: Identifier | None = Field(
        default=None,
        description="The caller's own id, which makes a repeated request harmless. Generated here if it is missing; "
        "sent again without an id, it is recorded again.",
    )
    source: Identifier = Field(
        default=ANYBODY, description="Whose feedback it is; a later thumb of the same source replaces an earlier."
    )

    @model_validator(mode="after")
    def _fits_its_kind(self) -> Self:
        wrong: dict[str, str] = {}
        needs, may_have = _FIELDS[self.kind]
        for field in _CONTENT:
            present = getattr(self, field) is not None
            if not present and field in needs:
                wrong[field] = f"kind {self.kind!r} needs {field!r}"
            if present and field not in needs + may_have:
                wrong[field] = f"kind {self.kind!r} takes no {field!r}"
        if (self.response_id is None) == (self.session_id is None):
            both = self.response_id is not None
            given = "both are given: leave one out" if both else "give response_id or session_id"
            wrong["response_id"] = f"feedback is on a response or on a session: {given}"
        elif self.session_id is not None and self.kind not in _OF_SESSIONS:
            wrong["session_id"] = f"kind {self.kind!r} is on a response, not on a session"
        if self.feedback_id is not None and TURN in self.feedback_id:
            wrong["feedback_id"] = f"ids with {TURN!r} in them are Millrace's own"
        if not wrong and self.kind == "thumb" and self.value not in (0, 1):
            wrong["value"] = f"a thumb's value is 1 (up) or 0 (down), true or false, got {_shown(self.value)}"
        if not wrong and self.kind == "preference" and self.rejected_response_id == self.response_id:
            wrong["rejected_response_id"] = f"a preference needs two different responses, both are {self.response_id}"
        if wrong:
            raise ValidationError.from_exception_data(
                type(self).__name__,
                [
                    InitErrorDetails(
                        type=PydanticCustomError("feedback", "{reason}", {"reason": reason}),
                        loc=(field,),
                        input=getattr(self, field),
                    )
                    for field, reason in wrong.items()
                ],
            )
        return self

    def to_row(self, tenant: str, kinds: KindsConfig | None = None) -> dict[str, Any]:
        """A row of the ``feedback`` table, with the time of this call and a new UUIDv7 if the caller gave no id.

        A rating's row names its scale, also when the caller did not. ``kinds``: what is declared; by default what the
        default settings declare. Raises FeedbackError for a scale or metric that is not, or a value that it has not.
        """
        name, value = _declared(self, kinds or KindsConfig())
        return {
            "feedback_id": self.feedback_id or uuid7(),
            "response_id": self.response_id,
            "kind": self.kind,
            "value": value,
            "text": self.text,
            "name": name,
            "rejected_response_id": self.rejected_response_id,
            "source": self.source,
            "tenant": tenant,
            "created_at": datetime.now(UTC),
        }


def session_rows(row: dict[str, Any], response_ids: Sequence[str]) -> list[dict[str, Any]]:
    """The rows of a session's feedback: one on each response, in their order, the last one's last.

    That one's id depends on nothing but ``row``'s, so that feedback which was sent again is recognised by it.
    """
    rows = []
    for turns, response_id in zip(reversed(range(len(response_ids))), response_ids, strict=True):
        suffix = f"{TURN}{turns}~{response_id}" if turns else LAST_TURN
        rows.append(row | {"feedback_id": row["feedback_id"] + suffix, "response_id": response_id})
    return rows


def kinds_schema(kinds: KindsConfig) -> list[dict[str, Any]]:
    """JSON Schema: which fields each kind needs and takes, one of which fits any feedback that is taken."""
    described = []
    for kind, (needs, may_have) in _FIELDS.items():
        if kind == "thumb":
            variants: list[dict[str, Any]] = [{"value": {"enum": [0, 1, True, False]}}]
        elif kind == "rating":
            variants = [{"name": {"const": name}, "value": _values(scale)} for name, scale in kinds.ratings.items()]
            if kinds.default_scale is not None:
                variants.append({"name": {"type": "null"}, "value": _values(kinds.ratings[kinds.default_scale])})
        elif kind == "metric":
            variants = [{"name": {"const": name}, "value": _values(metric)} for name, metric in kinds.metrics.items()]
        else:
            variants = [{field: {"type": "string"} for field in needs}]
        for variant in variants:
            required = {*needs, *(field for field, schema in variant.items() if schema != {"type": "null"})}
            nothing = [field for field in _CONTENT if field not in needs + may_have]
            properties = {"kind": {"const": kind}, **variant, **{field: {"type": "null"} for field in nothing}}
            for about, other in (("response_id", "session_id"), ("session_id", "response_id")):
                if about == "response_id" or kind in _OF_SESSIONS:
                    described.append(
                        {
                            "properties": properties | {about: {"type": "string"}, other: {"type": "null"}},
                            "required": ["kind", about, *sorted(required)],
                        }
                    )
    return described


def _values(declared: RatingConfig | MetricConfig) -> dict[str, Any]:
    if _is_boolean(declared):
        return {"enum": [0, 1, True, False]}
    bounds = {"minimum": declared.low, "maximum": declared.high}
    return {"type": "number", **{name: bound for name, bound in bounds.items() if math.isfinite(bound)}}


def _declared(feedback: FeedbackIn, kinds: KindsConfig) -> tuple[str | None, float | None]:
    """(name, value) as they are recorded. Raises FeedbackError."""
    if feedback.kind not in ("rating", "metric"):
        return feedback.name, None if feedback.value is None else float(feedback.value)
    is_rating = feedback.kind == "rating"
    what = "rating scale" if is_rating else "metric"
    declared: Mapping[str, RatingConfig | MetricConfig] = kinds.ratings if is_rating else kinds.metrics
    name = feedback.name or kinds.default_scale  # a metric has a name
    if name is None:
        raise FeedbackError("name", f"a rating must name its scale; {_listed(what, declared)}")
    if name not in declared:
        raise FeedbackError("name", f"there is no {what} {name!r}; {_listed(what, declared)}")
    return name, _in_range(feedback.value, f"{what} {name!r}", declared[name])


def _is_boolean(declared: RatingConfig | MetricConfig) -> bool:
    return isinstance(declared, MetricConfig) and declared.type == "boolean"


def _in_range(value: float | bool | None, what: str, declared: RatingConfig | MetricConfig) -> float:
    assert value is not None, "the kinds that have a range need a value"
    if _is_boolean(declared):
        if value not in (0, 1):
            raise FeedbackError("value", f"{what} takes true or false (or 1 or 0), got {_shown(value)}")
    elif isinstance(value, bool):
        raise FeedbackError("value", f"{what} takes a number {_range(declared)}, got {_shown(value)}")
    elif not declared.low <= value <= declared.high:
        raise FeedbackError("value", f"{what} goes {_range(declared)}, got {_shown(value)}")
    return float(value)


def _listed(what: str, declared: Mapping[str, RatingConfig | MetricConfig]) -> str:
    if not declared:
        return f"no {what} is declared (feedback.kinds)"
    described = (f"{name} ({_range(config)})" for name, config in sorted(declared.items()))
    return f"declared (feedback.kinds): {', '.join(described)}"


def _range(declared: RatingConfig | MetricConfig) -> str:
    return "boolean" if _is_boolean(declared) else f"from {_shown(declared.low)} to {_shown(declared.high)}"


def _shown(value: object) -> str:
    """A value for a message, as JSON would write it, not at any length."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return f"{value:.15g}"
    text = repr(value) if not isinstance(value, int) or value.bit_length() < 128 else "so large a number"
    return text if len(text) <= 80 else f"{text[:80]}…"
