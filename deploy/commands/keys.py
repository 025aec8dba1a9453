"""keys create, list, scope, revoke: who may use the server, and for what."""

from __future__ import annotations

import json
import re
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click

from deploy.commands.common import as_json_option, audited, pass_settings
from deploy.config import wording
from deploy.config.root import Settings
from deploy.display.tables import print_table
from serve.middleware.api_keys import SCOPES

if TYPE_CHECKING:
    from serve.middleware.api_keys import ApiKey, Scope

_UNITS = {"m": "minutes", "h": "hours", "d": "days"}
_SCOPES_HELP = (
    "generate: /generate and /v1; feedback: /feedback; evaluate: as generate, and never recorded; read: the pages of "
    "/console, with rows of its tenant alone; admin: /policy, /metrics, /experiments, and on the console promotions "
    "and keys. Can be repeated."
)


def when(value: str) -> datetime:
    """A time: 30d, 12h or 45m from now, or ISO 8601."""
    if found := re.fullmatch(r"(\d{1,6})([mhd])", value):
        return datetime.now(UTC) + timedelta(**{_UNITS[found[2]]: int(found[1])})
    try:
        time = datetime.fromisoformat(value)
    except ValueError:
        known = "a span like 30d, 12h or 45m nor a time like 2030-01-31T12:00+00:00"
        raise click.BadParameter(f"{value!r} is neither {known}") from None
    return time if time.tzinfo else time.astimezone()


def rate(value: str) -> float | Literal["unlimited"]:
    """A number per minute, or unlimited."""
    if value == "unlimited":
        return "unlimited"
    with suppress(ValueError):
        if 0 < float(value) < float("inf"):
            return float(value)
    raise click.BadParameter(f"{value!r} is neither a number above 0 nor unlimited")


@click.group()
def keys() -> None:
    """Manage the keys that clients authenticate with.

    As soon as there is a key, every request needs one; until then the server listens on loopback only. A running
    server applies changes within a second.
    """


@keys.command()
@click.option("--name", required=True, help="Whose key it is; no two active keys have the same.")
@click.option("--tenant", help="Under which its rows are recorded.  [default: serve.tenant]")
@click.option(
    "--scope",
    "scopes",
    multiple=True,
    type=click.Choice(SCOPES),
    default=("generate", "feedback"),
    show_default=True,
    help=_SCOPES_HELP,
)
@click.option("--expires", type=when, metavar="WHEN", help="30d, 12h, 45m, or a time in ISO 8601; never without.")
@click.option("--requests-per-minute", type=rate, metavar="N", help="Its own limit, or unlimited.")
@click.option("--tokens-per-minute", type=rate, metavar="N", help="Its own limit, or unlimited.")
@click.option("--no-capture", is_flag=True, help="Answer its requests and store no response to them.")
@click.option(
    "--sso",
    metavar="USER",
    help="Let this user of the single sign-on (serve.sso) into the console by it; *: each who has no other key.",
)
@as_json_option
@pass_settings
def create(
    settings: Settings,
    name: str,
    tenant: str | None,
    scopes: tuple[Scope, ...],
    expires: datetime | None,
    requests_per_minute: float | Literal["unlimited"] | None,
    tokens_per_minute: float | Literal["unlimited"] | None,
    no_capture: bool,
    sso: str | None,
    as_json: bool,
) -> None:
    """Create a key and show it, once: only its hash is kept."""
    from pydantic import ValidationError

    from serve.middleware.api_keys import create_key, read_keys

    path = settings.path(settings.serve.keys)
    first = not read_keys(path)
    try:
        with audited(settings, "keys.create", name=name, scopes=scopes) as outcome:
            key, secret = create_key(
                path,
                name=name,
                tenant=tenant or settings.serve.tenant,
                scopes=scopes,
                expires_at=expires,
                requests_per_minute=requests_per_minute,
                tokens_per_minute=tokens_per_minute,
                capture=not no_capture,
                sso=sso,
            )
            outcome.result = {"key": key.id, "tenant": key.tenant}
    except ValidationError as error:
        wrong = error.errors(include_url=False)[0]
        raise click.UsageError(
            f"{'.'.join(map(str, wrong['loc']))}: {wording.wrong(wrong)}, not {wrong['input']!r}"
        ) from None
    except ValueError as error:
        raise click.UsageError(str(error)) from None
    if as_json:
        click.echo(json.dumps(_as_json(key) | {"secret": secret}, indent=2))
        return
    click.echo(f"key {key.id} of {key.name} ({key.tenant}; {', '.join(key.scopes)}):\n\n    {secret}\n")
    click.echo("It is not shown again. Send it as Authorization: Bearer KEY, or as X-API-Key.")
    if first:
        click.echo("This is the first key: from now on the server refuses requests without one.")
    _say_without_admin(path)


@keys.command("list")
@as_json_option
@pass_settings
def list_keys(settings: Settings, as_json: bool) -> None:
    """List the keys, without their secrets."""
    from serve.middleware.api_keys import read_keys

    path = settings.path(settings.serve.keys)
    found = read_keys(path)
    if as_json:
        click.echo(json.dumps([_as_json(key) for key in found], indent=2))
        return
    now = datetime.now(UTC)
    rows = [
        [
            key.id,
            key.name,
            key.tenant,
            ",".join(key.scopes),
            key.state(now),
            f"{key.created_at:%Y-%m-%d %H:%M}",
            f"{key.expires_at.astimezone(UTC):%Y-%m-%d %H:%M}" if key.expires_at else "-",
            _rate(key.requests_per_minute),
            _rate(key.tokens_per_minute),
            "yes" if key.capture else "no",
            key.sso or "-",
        ]
        for key in found
    ]
    limits = ["requests/min", "tokens/min"]
    header = ["id", "name", "tenant", "scopes", "state", "created (UTC)", "expires (UTC)", *limits, "capture", "sso"]
    empty = f"no keys in {path}: the server listens on loopback only; make one with `millrace keys create`"
    print_table(header, rows, empty)


@keys.command()
@click.argument("key", metavar="KEY")
@click.option("--scope", "scopes", multiple=True, required=True, type=click.Choice(SCOPES), help=_SCOPES_HELP)
@pass_settings
def scope(settings: Settings, key: str, scopes: tuple[Scope, ...]) -> None:
    """Give a key other scopes, by its id, its name or its secret: those named here, and none of those that it had.

    The secret stays the same. A running server applies it within a second, to the sessions of the key too.
    """
    from serve.middleware.api_keys import id_of, set_scopes

    key = id_of(key.encode(errors="replace")) or key  # no secret that is still good may get into the audit log
    path = settings.path(settings.serve.keys)
    try:
        with audited(settings, "keys.scope", key=key, scopes=scopes) as outcome:
            before, after = set_scopes(path, key, scopes)
            outcome.result = {"key": after.id, "name": after.name, "before": before.scopes}
    except ValueError as error:
        raise click.UsageError(str(error)) from None
    click.echo(f"key {after.id} of {after.name}: {', '.join(after.scopes)}; before, {', '.join(before.scopes)}")
    _say_without_admin(path)


@keys.command()
@click.argument("key", metavar="KEY")
@pass_settings
def revoke(settings: Settings, key: str) -> None:
    """Revoke a key for good, by its id, its name or its secret. A running server applies it within a second."""
    from serve.middleware.api_keys import id_of, revoke_key

    key = id_of(key.encode(errors="replace")) or key  # no secret that is still good may get into the audit log
    with audited(settings, "keys.revoke", key=key) as outcome:
        revoked = revoke_key(settings.path(settings.serve.keys), key)
        outcome.result = {"key": revoked.id, "name": revoked.name}
    click.echo(f"key {revoked.id} of {revoked.name} is revoked")
    _say_without_admin(settings.path(settings.serve.keys))


def _say_without_admin(path: Path) -> None:
    from serve.middleware.api_keys import read_keys

    now = datetime.now(UTC)
    if not any("admin" in key.scopes and key.state(now) == "active" for key in read_keys(path)):
        click.echo(
            "No key has the scope admin: nobody reads /policy and /metrics, nor promotes on the console, until "
            "`millrace keys create --name NAME --scope admin` makes one.",
            err=True,
        )


def _rate(own: float | Literal["unlimited"] | None) -> str:
    return "default" if own is None else own if own == "unlimited" else f"{own:g}"


def _as_json(key: ApiKey) -> dict[str, Any]:
    return key.model_dump(mode="json", exclude={"sha256"}) | {"state": key.state(datetime.now(UTC))}
