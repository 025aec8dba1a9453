"""What JSON Schema has no words for: a preference is of two different responses."""

from __future__ import annotations

from typing import Any

import schemathesis


@schemathesis.hook
def map_body(context: Any, body: Any) -> Any:
    """Another response for one that would be preferred over itself."""
    if isinstance(body, dict) and body.get("kind") == "preference":
        first = body.get("response_id")
        if isinstance(first, str) and first == body.get("rejected_response_id"):
            return body | {"rejected_response_id": "another"}
    return body
