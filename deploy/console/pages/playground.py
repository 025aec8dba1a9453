"""Playground: a chat with the policy that serves. The page's script speaks to /generate and /feedback itself."""

from __future__ import annotations

import json
from pathlib import Path

from deploy import status
from deploy.config.root import Settings
from deploy.console.pages import rows, traffic
from deploy.console.pages.visit import Answer, NotThere, Visit
from deploy.console.pages.visit import page as shown
from serve import kv_cache


def page(settings: Settings, visit: Visit) -> Answer:
    """The empty chat."""
    pointer, limits = settings.policy_store().serving(), settings.serve.limits
    chat, most = False, (limits.max_tokens, limits.default_max_tokens)
    if pointer is not None:
        folder = settings.policy_store().get(pointer.version).path
        config = folder / "tokenizer_config.json"
        chat = (folder / "chat_template.jinja").is_file()
        chat = chat or (config.is_file() and '"chat_template"' in config.read_text())
        most = _most_tokens(settings, folder)
    return shown("playground", visit, here="playground", pointer=pointer, chat=chat, most=most)


def judged(settings: Settings, visit: Visit) -> Answer:
    """What becomes of the viewer's feedback on a response: which policy learned from it; before, when a cycle can."""
    response_id = visit.query.get("response_id", "")
    row = rows.read(settings, lambda connection: rows.one(connection, visit.tenant, response_id))
    if row is None:
        raise NotThere(f"There is no response {response_id[:100]} of {visit.tenant}.")
    share, own = traffic.held_out(settings, row), visit.viewer["name"]
    given = [one["feedback_id"] for one in row["feedback"] if one["source"] == own and not one["of_session"]]
    learned = []
    if given and not share:  # by the newest: data with that has those before it too
        learned = traffic.learned(settings.lake(), settings.policy_store(), row, feedback=given[-1])
    now = status.look(settings, data=False)
    return shown("playground/judged", visit, held_out=share, learned=learned, status=now)


def _most_tokens(settings: Settings, folder: Path) -> tuple[int, int]:
    """The tokens that an answer may have, and of which the form starts: no more than fit into the policy's context."""
    limits, context = settings.serve.limits, settings.serve.engine.max_model_len
    own = kv_cache.full_context(json.loads((folder / "config.json").read_text()))
    most = min(one for one in (limits.max_tokens, context, own) if one is not None)
    return most, min(limits.default_max_tokens, most)
