"""Feedback as it comes in: validated by kind, turned into a row of the ``feedback`` table."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, model_validator

from feedback.ids import uuid7

Identifier = Annotated[str, StringConstraints(min_length=1, max_length=200, pattern=r"^[\x21-\x7e]+$")]
"""An id: 1 to 200 printable ASCII characters without spaces."""

_NEEDS: dict[str, tuple[str, ...]] = {
    "thumb": ("value",),
    "rating": ("value",),
    "preference": ("rejected_response_id",),
    "correction": ("text",),
    "comment": ("text",),
    "metric": ("name", "value"),
}
_MAY_HAVE: dict[str, tuple[str, ...]] = {
    "thumb": ("text",),
    "rating": ("text", "name"),
    "preference": ("text",),
    "correction": (),
    "comment": (),
    "metric": ("text",),
}
_CONTENT = ("value", "text", "name", "rejected_response_id")


class FeedbackIn(BaseModel):
    """What somebody, or something, says of a response: the body of ``POST /feedback``."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    response_id: Identifier = Field(description="The response that this is about, as /generate returned it.")
    kind: Literal["thumb", "rating", "preference", "correction", "comment", "metric"] = Field(
        description="thumb (value 1 is up, 0 is down), rating (value), preference (response_id is preferred over "
        "rejected_response_id), correction (text is what the response should have been), comment (text), "
        "metric (name, value)."
    )
    value: Annotated[float, Field(allow_inf_nan=False)] | None = Field(
        default=None, description="The number of a thumb, a rating or a metric."
    )
    text: Annotated[str, StringConstraints(min_length=1, max_length=100_000)] | None = Field(
        default=None, description="The text of a correction or comment; an optional remark with the other kinds."
    )
    name: Identifier | None = Field(default=None, description="Which metric, or which rating scale.")
    rejected_response_id: Identifier | None = Field(default=None, description="The response that a preference rejects.")
    feedback_id: Identifier | None = Field(
        default=None,
        description="The caller's own id, which makes a repeated request harmless. Made here if none is given.",
    )
    source: Identifier = Field(
        default="user", description="Who says it; a later thumb of the same source replaces an earlier."
    )

    @model_validator(mode="after")
    def _fits_its_kind(self) -> Self:
        for field in _NEEDS[self.kind]:
            if getattr(self, field) is None:
                raise ValueError(f"kind {self.kind!r} needs {field!r}")
        for field in _CONTENT:
            if getattr(self, field) is not None and field not in _NEEDS[self.kind] + _MAY_HAVE[self.kind]:
                raise ValueError(f"kind {self.kind!r} takes no {field!r}")
        if self.kind == "thumb" and self.value not in (0.0, 1.0):
            raise ValueError(f"a thumb's value is 1 (up) or 0 (down), got {self.value:g}")
        if self.kind == "preference" and self.rejected_response_id == self.response_id:
            raise ValueError("a preference needs two different responses")
        return self

    def to_row(self, tenant: str) -> dict[str, Any]:
        """A row of the ``feedback`` table, with the time of this call and a new UUIDv7 if the caller gave no id."""
        return {
            "feedback_id": self.feedback_id or uuid7(),
            "response_id": self.response_id,
            "kind": self.kind,
            "value": self.value,
            "text": self.text,
            "name": self.name,
            "rejected_response_id": self.rejected_response_id,
            "source": self.source,
            "tenant": tenant,
            "created_at": datetime.now(UTC),
        }
