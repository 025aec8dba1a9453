"""The key file, the command that writes it, and the keyring that follows it."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import pwd
import socket
import stat
import threading
from datetime import UTC, datetime, timedelta, tzinfo
from pathlib import Path

import pytest

from deploy.cli import run
from deploy.config.root import load
from serve.config import LimitsConfig, ServeConfig
from serve.middleware.api_keys import KeyFileError, create_key, id_of, local_file, read_keys, revoke_key, set_scopes
from serve.middleware.keyring import Keyring, NeedsKeys, Refused, is_loopback, scope_of
from serve.observability.audit import AuditLog


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "keys.json"


def keyring(path: Path, **serve: object) -> Keyring:
    made = Keyring(ServeConfig(keys=str(path), **serve))
    made.load()
    return made


def test_a_process_that_is_started_when_the_file_is_gone_or_damaged_keeps_to_the_keys_of_the_one_before(
    path: Path,
) -> None:
    _, secret = create_key(path, name="one", tenant="t", scopes=["generate"])
    before = keyring(path).keys
    for damage in (path.unlink, lambda: path.write_text("{"), lambda: path.write_text('{"keys": []}')):
        damage()
        made = Keyring(ServeConfig(keys=str(path)))
        made.load(before)
        assert made.on
        assert made.error
        assert made.authenticate(secret.encode()).tenant == "t"
        with pytest.raises(Refused):
            made.authenticate(None)


def test_a_key_is_revoked_though_this_machines_own_secret_is_damaged(path: Path) -> None:
    key, secret = create_key(path, name="one", tenant="t", scopes=["generate"])
    create_key(path, name="admin", tenant="t", scopes=["admin"])
    made = keyring(path)
    local_file(path).write_bytes(b"\xff\xfe")
    revoke_key(path, key.id)
    made.refresh()
    assert made.error is None
    with pytest.raises(Refused, match="was revoked"):
        made.authenticate(secret.encode())


async def test_the_key_file_is_followed_whatever_went_wrong_at_a_look(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread that can't be started, say, where the system allows no more."""
    key, secret = create_key(path, name="one", tenant="t", scopes=["generate"])
    create_key(path, name="admin", tenant="t", scopes=["admin"])
    made, refresh, looks = keyring(path), Keyring.refresh, iter(range(10_000))

    def look(self: Keyring) -> None:
        if next(looks) == 0:
            raise RuntimeError("can't start new thread")
        refresh(self)

    monkeypatch.setattr(Keyring, "refresh", look)
    following = asyncio.create_task(made.follow())
    async with asyncio.timeout(60):
        while made.error is None:
            await asyncio.sleep(0.05)
        assert made.error == "can't start new thread"
        revoke_key(path, key.id)
        while made.error is not None:
            await asyncio.sleep(0.05)
    following.cancel()
    with pytest.raises(Refused, match="was revoked"):
        made.authenticate(secret.encode())


def test_a_process_that_is_started_later_takes_the_file_as_it_is_now(path: Path) -> None:
    create_key(path, name="one", tenant="t", scopes=["generate"])
    before = keyring(path).keys
    key, secret = create_key(path, name="two", tenant="t", scopes=["generate"])
    made = Keyring(ServeConfig(keys=str(path)))
    made.load(before)
    assert made.authenticate(secret.encode()).key == key.id
    assert made.error is None


def test_a_secret_is_nowhere_in_the_file_that_only_its_owner_can_read(path: Path) -> None:
    key, secret = create_key(path, name="one", tenant="t", scopes=["generate"])
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    text = path.read_text()
    assert secret not in text
    assert secret.split("_", 2)[2] not in text
    assert len(secret.split("_", 2)[2]) == 43  # 256 bits
    assert id_of(secret.encode()) == key.id


def test_two_keys_of_one_name_differ_and_a_name_is_free_again_when_its_key_is_revoked(path: Path) -> None:
    first, _ = create_key(path, name="one", tenant="t", scopes=["generate"])
    with pytest.raises(ValueError, match=f"key {first.id} is called 'one' already"):
        create_key(path, name="one", tenant="t", scopes=["generate"])
    assert revoke_key(path, "one").id == first.id
    second, _ = create_key(path, name="one", tenant="t", scopes=["generate"])
    assert [key.id for key in read_keys(path)] == [first.id, second.id]
    assert revoke_key(path, first.id).revoked_at == read_keys(path)[0].revoked_at
    with pytest.raises(KeyFileError, match="there is no key 'two'"):
        revoke_key(path, "two")


def test_a_key_gets_other_scopes_and_keeps_its_secret_and_all_else(path: Path) -> None:
    other, _ = create_key(path, name="other", tenant="t", scopes=["read"])
    made, secret = create_key(path, name="one", tenant="acme", scopes=["generate"], requests_per_minute=7)
    ring = keyring(path)
    before, after = set_scopes(path, "one", ["admin", "read", "admin"])
    assert (before, after) == (made, made.model_copy(update={"scopes": ("read", "admin")}))
    assert read_keys(path) == (other, after)
    ring.refresh()
    assert ring.authenticate(secret.encode()).scopes == {"read", "admin"}
    set_scopes(path, made.id, ["evaluate"])
    ring.refresh()
    principal = ring.authenticate(secret.encode())
    assert (principal.scopes, principal.capture) == ({"evaluate", "generate"}, False)  # and none of its traffic is kept


def test_scopes_that_make_no_sense_change_nothing(path: Path) -> None:
    create_key(path, name="one", tenant="t", scopes=["generate"])
    create_key(path, name="all", tenant="t", scopes=["read"], sso="*")
    create_key(path, name="gone", tenant="t", scopes=["read"])
    gone = revoke_key(path, "gone")
    before = path.read_bytes()
    with pytest.raises(ValueError, match="leave generate out"):
        set_scopes(path, "one", ["generate", "evaluate"])
    with pytest.raises(ValueError, match="each user whom the proxy lets in would be an admin"):
        set_scopes(path, "all", ["read", "admin"])
    with pytest.raises(ValueError, match="one scope at least"):
        set_scopes(path, "one", [])
    with pytest.raises(ValueError, match=f"key {gone.id} of gone was revoked"):
        set_scopes(path, gone.id, ["admin"])
    for unknown in ("gone", "nobody"):
        with pytest.raises(KeyFileError, match=f"there is no key '{unknown}'"):
            set_scopes(path, unknown, ["admin"])
    assert path.read_bytes() == before


def test_scopes_that_somebody_else_has_changed_meanwhile_stay(path: Path) -> None:
    made, _ = create_key(path, name="one", tenant="t", scopes=["read", "admin"])
    set_scopes(path, "one", ["read"])
    with pytest.raises(ValueError, match=f"key {made.id} has other scopes by now, read: look again"):
        set_scopes(path, "one", ["read", "admin", "feedback"], seen=made.scopes)
    assert read_keys(path)[0].scopes == ("read",)
    set_scopes(path, "one", ["read", "feedback"], seen=["read"])


def test_the_last_admin_stays_one_if_that_is_asked_for(path: Path) -> None:
    last, _ = create_key(path, name="last", tenant="t", scopes=["read", "admin"])
    with pytest.raises(ValueError, match=f"key {last.id} is the last one with the scope admin"):
        set_scopes(path, "last", ["read"], keep_admin=True)
    with pytest.raises(ValueError, match=f"key {last.id} is the last one with the scope admin"):
        revoke_key(path, "last", keep_admin=True)
    assert read_keys(path) == (last,)
    create_key(path, name="next", tenant="t", scopes=["admin"])
    set_scopes(path, "last", ["read"], keep_admin=True)
    assert revoke_key(path, "last", keep_admin=True).revoked_at is not None


def test_a_key_file_that_is_a_link_stays_one_so_that_what_is_revoked_behind_it_is(path: Path) -> None:
    kept = path.with_name("secret")
    kept.mkdir()
    path.symlink_to(kept / "keys.json")
    key, _ = create_key(path, name="one", tenant="t", scopes=["generate"])
    assert revoke_key(path, key.id).revoked_at == read_keys(kept / "keys.json")[0].revoked_at
    assert path.is_symlink()


def test_keys_made_at_the_same_time_are_all_there(path: Path) -> None:
    makers = [
        threading.Thread(target=create_key, args=(path,), kwargs={"name": f"k{i}", "tenant": "t", "scopes": ["admin"]})
        for i in range(16)
    ]
    for maker in makers:
        maker.start()
    for maker in makers:
        maker.join()
    assert {key.name for key in read_keys(path)} == {f"k{i}" for i in range(16)}
    assert [file.name for file in path.parent.iterdir() if ".json." in file.name] == [".keys.json.lock"]


@pytest.mark.parametrize(
    "content", ["", "{", "[]", '{"keys": [{"id": "a"}]}', '{"version": 2, "keys": []}', '{"keys": 3}']
)
def test_a_file_that_is_no_key_file_keeps_the_server_from_starting(path: Path, content: str) -> None:
    path.write_text(content)
    with pytest.raises(KeyFileError, match=str(path)):
        keyring(path)


def test_a_key_is_who_brings_it_until_it_is_revoked_or_expires(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    soon = datetime.now(UTC) + timedelta(hours=1)
    key, secret = create_key(path, name="one", tenant="acme", scopes=["feedback", "generate"], expires_at=soon)
    ring = keyring(path, limits=LimitsConfig(requests_per_minute=7, tokens_per_minute=9))
    principal = ring.authenticate(secret.encode())
    assert (principal.tenant, principal.key, principal.name, principal.scopes) == (
        "acme",
        key.id,
        "one",
        frozenset({"generate", "feedback"}),
    )
    assert (principal.requests_per_minute, principal.tokens_per_minute) == (7, 9)
    for wrong in (None, b"", b"x", b"\xff" * 50, secret[:-1].encode(), f"{secret}x".encode(), secret.upper().encode()):
        with pytest.raises(Refused):
            ring.authenticate(wrong)

    class Later(datetime):
        @classmethod
        def now(cls, tz: tzinfo | None = None) -> datetime:
            return soon + timedelta(seconds=1)

    with monkeypatch.context() as later:
        later.setattr("serve.middleware.keyring.datetime", Later)
        with pytest.raises(Refused, match="has expired"):
            ring.authenticate(secret.encode())
    revoke_key(path, key.id)
    ring.refresh()
    with pytest.raises(Refused, match="was revoked"):
        ring.authenticate(secret.encode())


def test_a_key_has_its_own_limits_where_it_has_some(path: Path) -> None:
    _, secret = create_key(
        path, name="a", tenant="t", scopes=["generate"], requests_per_minute=1, tokens_per_minute="unlimited"
    )
    principal = keyring(path, limits=LimitsConfig(requests_per_minute=7, tokens_per_minute=9)).authenticate(
        secret.encode()
    )
    assert (principal.requests_per_minute, principal.tokens_per_minute) == (1, None)


def test_the_first_key_shuts_the_door_of_a_running_server_and_a_revoked_one_keeps_it_shut(path: Path) -> None:
    ring = keyring(path)
    assert not ring.on
    create_key(path, name="one", tenant="t", scopes=["generate"])
    ring.refresh()
    assert ring.on
    revoke_key(path, "one")
    assert keyring(path).on


@pytest.mark.parametrize("damage", ["cut", "empty", "gone", "unreadable"])
def test_a_file_that_can_no_longer_be_read_changes_nothing_and_is_told_of(
    path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    _, secret = create_key(path, name="one", tenant="t", scopes=["generate"])
    ring = keyring(path)
    whole = path.read_bytes()
    if damage == "cut":
        path.write_bytes(whole[:50])
    elif damage == "empty":
        path.write_text('{"version": 1, "keys": []}')
    else:
        path.unlink()
        if damage == "unreadable":
            path.mkdir()
    with caplog.at_level(logging.ERROR):
        for _ in range(5):
            ring.refresh()
    assert ring.on
    assert ring.authenticate(secret.encode()).name == "one"
    assert ring.stats()["healthy"] == 0
    assert len(caplog.records) == 1
    assert "the keys that were read before stay in use" in caplog.text
    if damage == "unreadable":
        path.rmdir()
    path.write_bytes(whole)
    revoke_key(path, "one")
    ring.refresh()
    assert ring.stats() == {"needed": 1, "active": 0, "healthy": 1}


async def test_a_change_is_taken_up_within_a_second_without_anybody_asking(path: Path) -> None:
    ring = keyring(path)
    follower = asyncio.create_task(ring.follow())
    create_key(path, name="one", tenant="t", scopes=["generate"])
    try:
        async with asyncio.timeout(120):
            while not ring.on:
                await asyncio.sleep(0.05)
    finally:
        follower.cancel()


def test_commands_of_this_machine_have_a_key_for_admin_alone(tmp_path: Path) -> None:
    settings = load(options=[("home", str(tmp_path))], environment={})
    path = Path(settings.resolved().serve.keys)
    assert path == tmp_path / "keys.json"
    assert settings.server_headers == {}
    create_key(path, name="one", tenant="t", scopes=["generate"])
    ring = keyring(path)
    principal = ring.authenticate(settings.server_headers["X-API-Key"].encode())
    assert (principal.key, principal.scopes) == ("local", frozenset({"admin"}))
    assert stat.S_IMODE(local_file(path).stat().st_mode) == 0o600
    assert ring.stats()["active"] == 1  # of those that somebody made
    assert keyring(path).authenticate(settings.server_headers["X-API-Key"].encode()) == principal  # another replica


@pytest.mark.parametrize(
    ("host", "own"),
    [
        ("127.0.0.1", True),
        ("127.3.2.1", True),
        ("localhost", True),
        ("::1", True),
        ("::ffff:127.0.0.1", True),
        ("0.0.0.0", False),
        ("::", False),
        ("10.0.0.1", False),
        ("", False),
    ],
)
def test_without_keys_only_loopback_is_listened_on(path: Path, host: str, own: bool) -> None:
    assert is_loopback(host) is own
    ring = keyring(path)
    if own:
        ring.check_host(host)
    else:
        with pytest.raises(NeedsKeys, match="millrace keys create"):
            ring.check_host(host)
        keyring(path, auth="off").check_host(host)
        create_key(path, name="one", tenant="t", scopes=["generate"])
        keyring(path).check_host(host)


def test_the_server_does_not_start_on_an_address_of_others_without_keys(tmp_path: Path) -> None:
    from feedback.config import FeedbackConfig
    from serve.app import run as serve

    paths = {name: str(tmp_path / name) for name in ("keys", "replicas", "audit")}
    with pytest.raises(NeedsKeys, match=r"serve\.host is 0\.0\.0\.0"):
        serve(ServeConfig(host="0.0.0.0", port=0, **paths), FeedbackConfig())


def test_auth_off_is_understood_with_and_without_quotes(tmp_path: Path) -> None:
    file = tmp_path / "millrace.yaml"
    for text in ("off", "'off'"):
        file.write_text(f"serve: {{auth: {text}}}\n")
        assert load(file, environment={}).serve.auth == "off"
    assert load(environment={"MILLRACE__SERVE__AUTH": "off"}).serve.auth == "off"


def test_with_auth_off_nobody_is_asked_whatever_keys_there_are(path: Path) -> None:
    create_key(path, name="one", tenant="t", scopes=["generate"])
    assert not keyring(path, auth="off").on


@pytest.mark.parametrize(
    ("route", "scope"),
    [
        ("/health", None),
        ("/docs", None),
        ("/generate", "generate"),
        ("/v1/models/{model}", "generate"),
        ("/feedback/batch", "feedback"),
        ("/policy", "admin"),
        ("/metrics", "admin"),
        ("/what/was/added/later", "admin"),
    ],
)
def test_a_route_that_is_not_known_to_be_for_others_is_for_admins(route: str, scope: str | None) -> None:
    assert scope_of(route) == scope


def test_the_command_shows_a_secret_once_lists_and_revokes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    home = ["--home", str(tmp_path)]
    assert run(["keys", "list", *home]) == 0
    assert "no keys in" in capsys.readouterr().out
    options = ["--tenant", "acme", "--scope", "admin", "--expires", "30d", "--tokens-per-minute", "unlimited", "--json"]
    assert run(["keys", "create", "--name", "ci", *options, *home]) == 0
    made = json.loads(capsys.readouterr().out)
    assert (made["tenant"], made["scopes"], made["tokens_per_minute"]) == ("acme", ["admin"], "unlimited")
    assert keyring(tmp_path / "keys.json").authenticate(made["secret"].encode()).key == made["id"]
    assert run(["keys", "list", "--json", *home]) == 0
    (listed,) = json.loads(capsys.readouterr().out)
    assert listed == {name: value for name, value in made.items() if name != "secret"}
    assert run(["keys", "scope", "ci", "--scope", "generate", "--scope", "read", *home]) == 0
    told = capsys.readouterr()
    assert told.out == f"key {made['id']} of ci: generate, read; before, admin\n"
    assert "No key has the scope admin" in told.err
    assert keyring(tmp_path / "keys.json").authenticate(made["secret"].encode()).scopes == {"generate", "read"}
    assert run(["keys", "scope", "ci", "--scope", "generate", "--scope", "evaluate", *home]) == 2
    assert "leave generate out" in capsys.readouterr().err
    assert run(["keys", "scope", "ci", *home]) == 2
    assert "--scope" in capsys.readouterr().err
    entries = [entry for entry in AuditLog(tmp_path / "audit.jsonl").entries() if entry.action == "keys.scope"]
    assert [entry.subject for entry in entries] == [
        {"key": "ci", "scopes": ["generate", "read"]},
        {"key": "ci", "scopes": ["generate", "evaluate"]},
    ]
    assert entries[0].result == {"key": made["id"], "name": "ci", "before": ["admin"]}
    assert [str(entry.outcome)[:6] for entry in entries] == ["done", "failed"]
    assert run(["keys", "revoke", "ci", *home]) == 0
    assert run(["keys", "list", *home]) == 0
    assert "revoked" in capsys.readouterr().out
    assert run(["keys", "revoke", "nobody", *home]) == 1
    assert "there is no key 'nobody'" in capsys.readouterr().err


def test_the_audit_log_has_who_made_and_revoked_a_key_by_command_when_and_from_where_and_no_secret(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    home, host = ["--home", str(tmp_path)], socket.gethostname()
    began = datetime.now(UTC) - timedelta(milliseconds=1)  # of which the log has whole ones
    who = f"{pwd.getpwuid(os.getuid()).pw_name}@{host}"
    monkeypatch.delenv("SSH_CONNECTION", raising=False)
    assert run(["keys", "create", "--name", "ci", "--tenant", "acme", "--scope", "admin", "--json", *home]) == 0
    key = json.loads(capsys.readouterr().out)
    monkeypatch.setenv("SSH_CONNECTION", "192.0.2.7 50000 192.0.2.1 22")
    assert run(["keys", "revoke", key["secret"], *home]) == 0  # also by its secret
    assert run(["keys", "revoke", "nobody", *home]) == 1
    made, revoked, failed = AuditLog(tmp_path / "audit.jsonl").entries()
    assert (made.action, made.subject) == ("keys.create", {"name": "ci", "scopes": ["admin"]})
    assert (made.who, made.origin) == (who, f"a command on {host}")
    assert (made.outcome, made.result) == ("done", {"key": key["id"], "tenant": "acme"})
    assert (revoked.action, revoked.subject) == ("keys.revoke", {"key": key["id"]})
    assert (revoked.who, revoked.origin) == (who, f"a command on {host}, from 192.0.2.7")
    assert (revoked.outcome, revoked.result) == ("done", {"key": key["id"], "name": "ci"})
    assert (failed.action, failed.subject) == ("keys.revoke", {"key": "nobody"})
    assert (failed.outcome or "").startswith("failed: ")
    assert began <= datetime.fromisoformat(made.at) <= datetime.fromisoformat(revoked.at) <= datetime.now(UTC)
    assert key["secret"] not in (tmp_path / "audit.jsonl").read_text()
    capsys.readouterr()
    assert run(["audit", "--json", *home]) == 0
    assert [one["action"] for one in json.loads(capsys.readouterr().out)] == ["keys.create", *["keys.revoke"] * 2]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--name", "a", "--expires", "soon"], "'soon' is neither a span"),
        (["--name", "a", "--expires", "2020-01-01"], "would never be good"),
        (["--name", "a", "--requests-per-minute", "-1"], "'-1' is neither a number above 0"),
        (["--name", ""], "name: must be a text that is not empty"),
        (["--name", "a", "--scope", "all"], "'all' is not one of"),
        ([], "--name"),
    ],
)
def test_a_key_that_makes_no_sense_is_refused_by_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], says: str
) -> None:
    assert run(["keys", "create", *options, "--home", str(tmp_path)]) == 2
    assert says in capsys.readouterr().err
    assert not (tmp_path / "keys.json").exists()


def test_a_write_that_was_killed_leaves_the_keys_as_they_were(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    create_key(path, name="one", tenant="t", scopes=["generate"])
    before = path.read_bytes()
    with monkeypatch.context() as broken:
        broken.setattr(os, "fsync", lambda fd: (_ for _ in ()).throw(OSError(5, "Input/output error")))
        with pytest.raises(KeyFileError, match="can't be written: Input/output error"):
            create_key(path, name="two", tenant="t", scopes=["generate"])
    assert path.read_bytes() == before
    create_key(path, name="two", tenant="t", scopes=["generate"])
    assert len(read_keys(path)) == 2
