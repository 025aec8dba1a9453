"""A visit of a page: who looks, at what, and the answer."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from deploy.console.rendering import render


class NotThere(Exception):
    """There is no such thing, or it is another tenant's; the text names it."""


@dataclass(frozen=True)
class Visit:
    """``viewer``: tenant, name, scopes, token, address, keys (whether one is needed); ``form``: None to look only.

    ``file``: where a page writes what is to be downloaded.
    """

    path: dict[str, str]
    query: dict[str, str]
    form: dict[str, str] | None
    viewer: dict[str, Any]
    file: str = ""

    @property
    def tenant(self) -> str:
        return str(self.viewer["tenant"])

    def may(self, scope: str) -> bool:
        """Whether the viewer's key has a scope."""
        return scope in self.viewer["scopes"]


@dataclass(frozen=True)
class Answer:
    """``location``: where it leads on to; ``refused``: why what was asked for was not done."""

    body: str = ""
    status: int = 200
    type: str = "text/html"
    location: str | None = None
    headers: dict[str, str] = field(default_factory=dict)
    refused: str = ""


def page(template: str, visit: Visit, *, code: int = 200, **values: Any) -> Answer:
    """A template, for this visitor."""
    refused = str(values.get("refused") or "")
    return Answer(render(template, visit=visit, viewer=visit.viewer, **values), code, refused=refused)


def page_of_error(status: int, reason: str, visit: Visit) -> Answer:
    """What went wrong, as a page."""
    title = "Not there" if status == 404 else "That did not work"
    return page("error", visit, code=status, here="", title=title, reason=reason)
