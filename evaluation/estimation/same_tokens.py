"""Whether logged token ids are what another policy would have read and written."""

from __future__ import annotations

import json
from typing import Any, Final

from serve.policies.folder import TOKENIZER_FILES
from serve.policies.store import Policy

_TEMPLATE_FILES: Final = ("chat_template.jinja", "tokenizer_config.json")
_COSMETIC: Final = ("truncation", "padding")  # of tokenizer.json: leftovers of the last call before it was saved


def other_tokens(candidate: Policy, incumbent: Policy) -> str | None:
    """Why token ids of the incumbent's traffic, prompts included, are not the candidate's; None if they are."""
    for name in (*TOKENIZER_FILES, *_TEMPLATE_FILES):
        if _content(candidate, name) != _content(incumbent, name):
            what = "chat template" if name in _TEMPLATE_FILES else "tokenizer"
            return (
                f"policy {candidate.version} has another {what} than policy {incumbent.version} ({name} differs): the "
                "logged token ids are not what it would read and write"
            )
    return None


def _content(policy: Policy, name: str) -> Any:
    """What decides token ids in a file of the policy; None if it has no such file."""
    if name not in policy.files:
        return None
    content = (policy.path / name).read_bytes()
    if not name.endswith(".json"):
        return content
    values = json.loads(content)
    if name in _TEMPLATE_FILES:
        return values.get("chat_template")
    return {key: value for key, value in values.items() if key not in _COSMETIC}
