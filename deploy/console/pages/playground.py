"""Playground: a chat with the policy that serves. The page's script speaks to /generate and /feedback itself."""

from __future__ import annotations

from deploy import status
from deploy.config.root import Settings
from deploy.console.pages import rows, traffic
from deploy.console.pages.visit import Answer, NotThere, Visit
from deploy.console.pages.visit import page as shown


def page(settings: Settings, visit: Visit) -> Answer:
    """The empty chat."""
    pointer = settings.policy_store().serving()
    chat = False
    if pointer is not None:
        folder = settings.policy_store().get(pointer.version).path
        config = folder / "tokenizer_config.json"
        chat = (folder / "chat_template.jinja").is_file()
        chat = chat or (config.is_file() and '"chat_template"' in config.read_text())
    limits = settings.serve.limits
    return shown("playground", visit, here="playground", pointer=pointer, chat=chat, limits=limits)


def learned(settings: Settings, visit: Visit) -> Answer:
    """What becomes of feedback on a response: which policies have learned from it, or when the next one may."""
    response_id = visit.query.get("response_id", "")
    row = rows.read(settings, lambda connection: rows.one(connection, visit.tenant, response_id))
    if row is None:
        raise NotThere(f"There is no response {response_id[:100]} of {visit.tenant}.")
    versions = traffic.trained(settings.lake(), settings.policy_store(), row)
    return shown("playground/learned", visit, versions=versions, status=status.look(settings))
