"""Keys: who may use the server; make one, change what one may, revoke one. For admins."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Final

from pydantic import ValidationError

from deploy.config import wording
from deploy.config.root import Settings
from deploy.console.pages.visit import Answer, Visit
from deploy.console.pages.visit import page as shown
from serve.middleware.api_keys import SCOPES, KeyFileError, Scope, create_key, read_keys, revoke_key, set_scopes

EXPIRY: Final = {"": None, "1": timedelta(days=1), "30": timedelta(days=30), "365": timedelta(days=365)}


def page(settings: Settings, visit: Visit, *, secret: str | None = None, refused: str | None = None) -> Answer:
    """All keys there are, good ones first; ``secret``: of the one that was just made, which is shown this once."""
    now = datetime.now(UTC)
    listed = [(key, key.state(now)) for key in read_keys(settings.path(settings.serve.keys))]
    listed.sort(key=lambda one: (one[1] != "active", -one[0].created_at.timestamp()))
    values = {"listed": listed, "secret": secret, "refused": refused, "scopes": SCOPES, "settings": settings}
    return shown("keys", visit, here="keys", code=409 if refused else 200, **values)


def create(settings: Settings, visit: Visit) -> Answer:
    """Make a key, as ``millrace keys create`` does."""
    form = visit.form or {}
    lasts = EXPIRY.get(form.get("expires", ""))
    try:
        _, secret = create_key(
            settings.path(settings.serve.keys),
            name=form.get("name", "").strip(),
            tenant=form.get("tenant", "").strip() or settings.serve.tenant,
            scopes=_chosen(form),
            expires_at=None if lasts is None else datetime.now(UTC) + lasts,
            sso=form.get("sso", "").strip() or None,
        )
    except ValidationError as error:
        wrong = error.errors(include_url=False)[0]
        return page(settings, visit, refused=f"{'.'.join(map(str, wrong['loc']))}: {wording.wrong(wrong)}")
    except (ValueError, KeyFileError) as error:
        return page(settings, visit, refused=str(error))
    return page(settings, visit, secret=secret)


def scope(settings: Settings, visit: Visit) -> Answer:
    """Give a key the scopes that are ticked, and no others; its sessions have them from then on."""
    form = visit.form or {}
    seen = form["seen"].split() if "seen" in form else None
    try:
        set_scopes(settings.path(settings.serve.keys), visit.path["key_id"], _chosen(form), seen=seen, keep_admin=True)
    except (ValueError, KeyFileError) as error:
        return page(settings, visit, refused=str(error))
    return Answer(status=303, location="/console/keys")


def revoke(settings: Settings, visit: Visit) -> Answer:
    """Revoke a key for good; its sessions end with it."""
    try:
        revoke_key(settings.path(settings.serve.keys), visit.path["key_id"], keep_admin=True)
    except (ValueError, KeyFileError) as error:
        return page(settings, visit, refused=str(error))
    return Answer(status=303, location="/console/keys")


def _chosen(form: Mapping[str, str]) -> list[Scope]:
    """The scopes that are ticked in a form."""
    return [scope for scope in SCOPES if form.get(f"scope-{scope}") == "yes"]
