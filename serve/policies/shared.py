"""A policy store that machines share without a shared disk: an object store has it, a local folder is a copy.

**One object, one truth.** What must hold between records (the pointer names a policy that is there and has its weights;
a policy in an experiment is not withdrawn; of two moves from one state one is refused; a version is taken once) holds
between machines because all of them are in one object (``shared_records``), which is only ever replaced on the
condition that it is still the one that was read: If-Match on its ETag, If-None-Match for the first. A change is made as
a plain ``PolicyStore`` makes it, by its own code, on a scratch folder with the records just read; then the result is
written. If another machine was first, nothing of it has happened, and it is made anew from the fresh records, a bounded
number of times. So the object is linearizable, and needs no lease: a machine that dies in the middle holds nothing up,
and no clock decides.

**Files** are never changed. They are uploaded before their version is taken, below an id that is on record first;
taking the version replaces that record by the manifest. So an object of which no record knows, in records that were
read after it was listed, is left over, and the next publish removes it. An upload whose process died is struck from the
records by the next publish on that machine, or after a day by one elsewhere; one that was alive after all then fails:
the clock decides only how long an upload may take. Weights of pruned and withdrawn policies go when the records say so,
never before.

**The copy** on this machine has the layout of a plain store, so all that opens a policy's folder goes on as it is. Its
records are replaced under the local lock by those of a state that was read under it, so they never go back. A process
reads them in full when it first looks, which repairs a torn copy; then it asks whether the object has changed, at most
once a second, or from a thread of its own (``follow``), so that a server waits for no network. Weights are downloaded
when a policy is to be whole (``hold``, ``verify``, ``require_whole``) to a folder beside, compared with the manifest's
sha256, and renamed. They are removed when the policy is pruned or withdrawn, on each machine when it sees that, unless
somebody there holds them: who holds a policy on another machine reads on from a copy of its own. So ``serve.retention``
bounds every machine's disk.

While the store does not answer, reads are of the copy, with a warning, and its age is known; changes fail.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import random
import shutil
import socket
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from datetime import timedelta
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any, Final, TypeVar

from feedback.files import LockTimeoutError, locked, make_folder, replace_file, try_lock
from serve.config import PolicyStoreConfig
from serve.policies.experiments import Experiment, Experiments
from serve.policies.folder import PolicyCorrupt, PolicyError, StoreUnreachable, regular_files, sha256_file
from serve.policies.object_store import ObjectStore
from serve.policies.pointer import Outcome, Pointer
from serve.policies.records import exclusive, write_json
from serve.policies.shared_records import (
    LAST_VERSION,
    OBJECTS,
    RECORDS,
    UPLOADS,
    WEIGHTS,
    SharedRecords,
    State,
    age_of,
    begin_upload,
    last_version,
    read_folder,
    strike_upload,
    unreferenced,
    upload_of,
    write_folder,
)
from serve.policies.store import (
    LEARNED,
    MANIFEST,
    OWN,
    PRUNED,
    UNPUBLISHED,
    Policy,
    PolicyNotFound,
    PolicyStore,
    drop_merged,
)

log = logging.getLogger(__name__)

T = TypeVar("T")

_MARKER: Final = ".object_store.json"
_CHANGING: Final = ".changing-"
_FETCHING: Final = ".fetching"
_ATTEMPTS: Final = 30  # of a change that other machines come before
_FRESH_S: Final = 1.0  # what was looked at is taken for new for so long
_AGAIN_S: Final = 5.0  # after which a store that did not answer is asked again
_UPLOAD_AGE: Final = timedelta(days=1)
_DOWNLOAD_S: Final = 6 * 3600.0


@dataclass(frozen=True)
class _CachedPolicy(Policy):
    """A policy whose files are downloaded when it is to be whole. Elsewhere, in another process, it is a plain one."""

    fetch: Callable[[], None] = field(default=lambda: None, compare=False, repr=False)

    def require_whole(self) -> None:
        if self.pruned is None:
            self.fetch()
        super().require_whole()

    def __reduce__(self) -> tuple[Any, ...]:
        return Policy, tuple(getattr(self, one.name) for one in fields(Policy))


class SharedPolicyStore(PolicyStore):
    """The policies of an object store, with a copy under one folder. Safe between threads, processes and machines."""

    def __init__(self, root: Path, config: PolicyStoreConfig) -> None:
        """Raises PolicyError if the address can't work. Looks at nothing yet."""
        super().__init__(root)
        assert config.uri is not None
        self.objects = ObjectStore(config.uri, config.store_options, config.redact)
        self.uri = self.place = self.objects.uri
        self._records = SharedRecords(self.objects)
        self._config = config
        self._state: State | None = None  # of which this process knows that the copy has it, or a later one
        self._next_look = 0.0
        self._mine = threading.local()  # whether this thread changes the records
        self._silent: str | None = None  # what was last logged of a store that does not answer
        self._follower: threading.Thread | None = None
        self._stop = threading.Event()

    def __reduce__(self) -> tuple[Any, ...]:
        return SharedPolicyStore, (self.root, self._config)

    # ------------------------------------------------------------------------------------------------ reads

    @property
    def experiments(self) -> Experiments:
        return _SharedExperiments(self)

    def serving(self) -> Pointer | None:
        self.look()
        return super().serving()

    def announced(self) -> int | None:
        with contextlib.suppress(PolicyError, OSError):
            self.look()
        return super().announced()

    def history(self) -> list[Pointer]:
        self.look()
        return super().history()

    def outcomes(self) -> list[Outcome]:
        self.look()
        return super().outcomes()

    def versions(self) -> list[int]:
        self.look()
        return super().versions()

    def get(self, version: int) -> Policy:
        self.look()
        try:
            policy = super().get(version)
        except PolicyNotFound:  # it may have been published since the last look
            with contextlib.suppress(StoreUnreachable):
                self._update()
            policy = super().get(version)
        own = {one.name: getattr(policy, one.name) for one in fields(Policy)}
        return _CachedPolicy(**own, fetch=partial(self._fetch_with_base, policy))

    def own_prompts(self, policy: Policy) -> frozenset[str] | None:
        self._fetch(policy, weights=False)
        return super().own_prompts(policy)

    def verify(self, version: int) -> Policy:
        try:
            return super().verify(version)
        except PolicyCorrupt as error:  # it may be the copy alone
            log.warning("%s: it is downloaded anew", error)
            self.repair(version)
            return super().verify(version)

    def repair(self, version: int) -> bool:
        policy = self.get(version)
        for path in regular_files(policy.path):
            of = policy.files.get(name := path.relative_to(policy.path).as_posix())
            if not OWN.fullmatch(name) and (of is None or sha256_file(path) != of["sha256"]):
                path.unlink(missing_ok=True)
        policy.require_whole()
        return True

    @property
    def age(self) -> float:
        """Seconds since this machine last knew that its copy is what the store has; inf if it never did."""
        try:
            return max(0.0, time.time() - (self.root / _MARKER).stat().st_mtime)
        except FileNotFoundError:
            return float("inf")

    def look(self) -> None:
        """Have the copy be what the store has, as of a second ago; if that does not answer, what it had.

        Raises StoreUnreachable if there is no copy yet, PolicyError if the folder or the object is something else.
        """
        following = self._follower is not None and self._follower.is_alive()  # not so in a process forked from that
        if getattr(self._mine, "changing", False) or following or time.monotonic() < self._next_look:
            return
        try:
            self._look()
        except StoreUnreachable as error:
            if not (self.root / _MARKER).exists():
                raise
            self._next_look = time.monotonic() + _AGAIN_S
            self._warn(error)

    def follow(self, seconds: float) -> None:
        """Look from a thread of its own, every so many seconds, and never at a read."""
        self.look()
        self._stop.clear()
        self._follower = threading.Thread(target=self._follow, args=(seconds,), name="policy store", daemon=True)
        self._follower.start()

    def unfollow(self) -> None:
        """End ``follow``, and downloads with an error; a look under way is not waited for."""
        self._stop.set()
        self._follower = None

    def _follow(self, seconds: float) -> None:
        while not self._stop.wait(seconds):
            try:
                self._look()
            except Exception as error:  # noqa: BLE001 - whatever it was, the next look may find what is there again
                self._warn(error)

    def _warn(self, error: Exception) -> None:
        if str(error) != self._silent:  # once, not at every look
            log.warning("%s. What it had %.0f s ago is used", error, self.age)
        self._silent = str(error)

    def _look(self) -> None:
        self._update()
        if (pointer := super().serving()) is not None:
            try:  # the tokenizer of what serves is read by many who hold nothing
                self._fetch(super().get(pointer.version), weights=False)
            except (PolicyError, OSError) as error:
                log.warning("the tokenizer of policy %d can't be had: %s", pointer.version, error)

    def _update(self) -> None:
        if self._state is None:
            self.objects.version(RECORDS)  # a store that does not answer is found out before it is read
        if self._unchanged() is None:
            with self._alone():
                self._pull()
        self._next_look, self._silent = time.monotonic() + _FRESH_S, None

    # ------------------------------------------------------------------------------------------------ changes

    def promote(
        self,
        version: int,
        *,
        expected: Pointer | int | None,
        who: str,
        why: str,
        verdict: Mapping[str, Any] | None = None,
    ) -> Pointer:
        given: dict[str, Any] = {"expected": expected, "who": who, "why": why, "verdict": verdict}
        return self.change(lambda store: store.promote(version, **given))

    def announce(self, candidate: int | None) -> None:
        self.change(lambda store: store.announce(candidate))

    def record_outcome(self, pointer: Pointer, *, served: bool, by: str) -> None:
        self.change(lambda store: store.record_outcome(pointer, served=served, by=by))

    def pin(self, version: int, *, who: str, why: str) -> None:
        self.change(lambda store: store.pin(version, who=who, why=why))

    def unpin(self, version: int) -> None:
        self.change(lambda store: store.unpin(version))

    def record_gate(self, version: int, verdict: Mapping[str, Any]) -> Policy:
        self.change(lambda store: store.record_gate(version, verdict))
        return self.get(version)

    def record_erasure(
        self, version: int, *, certainty: str, why: str, erasure: str | None = None, retrain: bool = False
    ) -> Policy:
        given: dict[str, Any] = {"certainty": certainty, "why": why, "erasure": erasure, "retrain": retrain}
        self.change(lambda store: store.record_erasure(version, **given))
        return self.get(version)

    def withdraw(self, version: int) -> None:
        upload = self.change(lambda store: _withdraw(store, version))
        self.objects.delete(self.objects.names(f"{OBJECTS}/{upload}/"))

    def prune(self, version: int, why: str, kept: Callable[[], Mapping[int, str]]) -> str | None:
        def remove(store: PolicyStore) -> str | None:
            folder = super(SharedPolicyStore, self).get(version).path
            with (folder / MANIFEST).open("rb") as manifest:
                return store.prune(version, why, kept) if try_lock(manifest.fileno()) else "in use"

        if (reason := self.change(remove)) is not None:
            return reason
        with self._alone():
            self._drop_pruned()
        upload, files = upload_of(self._folder(version)), super().get(version).files
        self.objects.delete(f"{OBJECTS}/{upload}/{name}" for name in files if name.endswith(WEIGHTS))
        return None

    def _take_version(self, aside: Path, manifest: Mapping[str, Any]) -> int:
        """Upload what was written aside, then take a version for it."""
        try:
            self.sweep()
        except PolicyError as error:  # nothing depends on it
            log.warning("what was left over in the store stays there: %s", error)
        upload = aside.name.removeprefix(UNPUBLISHED)
        try:
            own = self._marker()["copy"]
            self.change(lambda store: begin_upload(store.root, upload, by=own))
            names = list(manifest["files"])
            if "learned" in manifest:
                size = (aside / LEARNED).stat().st_size
                manifest = {**manifest, "learned": {**manifest["learned"], "size": size}}
                names.append(LEARNED)
            self.objects.upload({f"{OBJECTS}/{upload}/{name}": aside / name for name in names})
            version = self.change(partial(_end_upload, upload=upload, manifest=manifest))
        except BaseException:
            with contextlib.suppress(PolicyError):  # else the next publish does it
                if self.change(lambda store: strike_upload(store.root, upload)):
                    self.objects.delete(self.objects.names(f"{OBJECTS}/{upload}/"))
            raise
        try:  # so that it need not be downloaded
            with self._locked():
                _place(aside, names, self._folder(version))
            shutil.rmtree(aside)
        except (PolicyError, OSError) as error:
            log.warning("policy %d is published, and will be downloaded: %s", version, error)
        return version

    def sweep(self) -> list[str]:
        """Remove what no record knows of, and forget uploads whose process died; the objects that went."""
        listed = self.objects.names(f"{OBJECTS}/")  # before the records: what is uploaded is on record first
        records = self.change(self._without_dead_uploads)
        self.objects.delete(left := unreferenced(listed, records))
        return left

    def _without_dead_uploads(self, store: PolicyStore) -> dict[str, str]:
        own = self._marker()["copy"]
        for path in (store.root / UPLOADS).glob("*.json"):
            mark = json.loads(path.read_bytes())
            if age_of(mark) > _UPLOAD_AGE or (
                mark["by"] == own and not (self.root / f"{UNPUBLISHED}{path.stem}").exists()
            ):
                path.unlink()
        return read_folder(store.root)

    def change(self, change: Callable[[PolicyStore], T]) -> T:
        """What ``change`` returns of a plain store with the records; what it makes of them is what the store has.

        It may be called several times, each time with fresh records, and must have no other effect. Raises
        StoreUnreachable, PolicyError if other machines were first each time, and what ``change`` raises.
        """
        for attempt in range(_ATTEMPTS):
            with self._alone():
                before = self._pull()
                with tempfile.TemporaryDirectory(prefix=_CHANGING, dir=self.root) as folder:
                    scratch = PolicyStore(Path(folder))
                    scratch.place = self.place
                    # A version is taken once, also where older records were restored: rows name it.
                    last = max(self._marker()["last_version"], last_version(before.records))
                    write_folder(scratch.root, {**before.records, LAST_VERSION: f"{last}\n"})
                    given = read_folder(scratch.root)
                    result = change(scratch)
                    records = read_folder(scratch.root)
                if records == given:
                    return result
                if (after := self._records.replace(before, records)) is not None:
                    self._apply(after)
                    return result
            time.sleep(random.uniform(0, 0.02 * 2 ** min(attempt, 6)))
        raise PolicyError(f"{self.uri}: other machines were first {_ATTEMPTS} times in a row: try again")

    # ------------------------------------------------------------------------------------------------ the copy

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Be the only one on this machine that changes the copy."""
        make_folder(self.root)
        with exclusive(self.root / ".lock"):
            self._mine.changing = True
            try:
                for left in self.root.glob(f"{_CHANGING}*"):  # of a killed process: the lock is ours
                    shutil.rmtree(left)
                yield
            finally:
                self._mine.changing = False

    def _pull(self) -> State:
        """What the store has, and so the copy; under the lock."""
        if (known := self._unchanged()) is None:
            self._apply(known := self._records.read())
        return known

    def _unchanged(self) -> State | None:
        """What this process knows, if the store has nothing else, and the copy is there."""
        known, marker = self._state, self.root / _MARKER
        if known is None or not marker.exists() or not self._records.are_still(known):
            return None
        os.utime(marker)
        return known

    def _apply(self, state: State) -> None:
        """Make the copy's records those of a state, versions before what may name them."""
        marker = self._marker()
        if state.version is None and marker["seen"]:
            raise PolicyError(
                f"{self.uri}/{RECORDS} is gone, and {self.root} has a copy of what it was: restore the object"
            )
        have = read_folder(self.root)
        wanted = state.records
        for name in sorted(have.keys() - wanted.keys(), key=_order, reverse=True):
            if name.endswith(f"/{MANIFEST}"):  # withdrawn
                self._drop(Path(name).parent)
            (self.root / name).unlink(missing_ok=True)
        new = {name for name in wanted if have.get(name) != wanted[name]}
        for name in [name for name in new if name.endswith(f"/{MANIFEST}")]:  # what is there is torn, or another policy
            self._drop(Path(name).parent)
            new |= {other for other in wanted if Path(other).parent == Path(name).parent}
        for name in sorted(new, key=_order):
            (self.root / name).parent.mkdir(exist_ok=True)
            replace_file(self.root / name, wanted[name].encode(), durable=False)
        self._state = state
        self._drop_pruned()
        last = max(marker["last_version"], last_version(wanted))
        write_json(self.root / _MARKER, {**marker, "seen": state.version is not None, "last_version": last})

    def _drop(self, folder: Path) -> None:
        """Remove a policy's folder from the copy, all of it at once, and the whole model that was made of it."""
        with contextlib.suppress(LockTimeoutError):  # the next publish from here does it
            drop_merged(self.root / folder, wait_s=0)
        aside = self.root / f"{_CHANGING}{uuid.uuid4().hex}"
        with contextlib.suppress(FileNotFoundError):
            os.rename(self.root / folder, aside)
            shutil.rmtree(aside)

    def _drop_pruned(self) -> None:
        """Remove the weights of pruned policies from the copy, unless somebody here holds them; and parts of them."""
        for pruned in self.root.glob("v*/pruned.json"):
            weights = list(pruned.parent.glob(f"*{WEIGHTS}"))
            if not weights:
                continue
            with (pruned.parent / MANIFEST).open("rb") as manifest:
                if not try_lock(manifest.fileno()):
                    continue
                with contextlib.suppress(LockTimeoutError):  # a merge is under way: with the next look
                    drop_merged(pruned.parent, wait_s=0)
                    for path in weights:
                        path.unlink()
        for aside in (self.root / _FETCHING).glob("v*[!k]"):  # what killed downloads left
            folder = self.root / aside.name.removesuffix("-small")
            if not (folder / MANIFEST).exists() or (folder / PRUNED).exists():
                shutil.rmtree(aside, ignore_errors=True)

    def _marker(self) -> dict[str, Any]:
        """What says that the folder is a copy, and of which store. Raises PolicyError if it is something else."""
        path = self.root / _MARKER
        try:
            marker: dict[str, Any] = json.loads(path.read_bytes())
        except FileNotFoundError:
            if PolicyStore(self.root).versions():
                raise PolicyError(
                    f"{self.root} has policies of its own, and serve.policy_store.uri is {self.uri}: set "
                    "serve.policies to another folder, and publish what is to serve (millrace init --model FOLDER)"
                ) from None
            marker = {"uri": self.uri, "copy": _name_of_copy(), "seen": False, "last_version": 0}
            self.objects.try_out()  # once a machine: a store without conditional writes would lose promotions
            write_json(path, marker)
        if not marker["copy"].startswith(f"{socket.gethostname()}-"):  # a copy of another machine's home
            marker["copy"] = _name_of_copy()
            write_json(path, marker)
        if marker["uri"] != self.uri:
            raise PolicyError(
                f"{self.root} is a copy of {marker['uri']}, and serve.policy_store.uri is {self.uri}: set "
                "serve.policies to another folder"
            )
        return marker

    def _fetch_with_base(self, policy: Policy) -> None:
        """Download what is missing of a policy, and of the one that it is an adapter of. Raises as ``_fetch``."""
        self._fetch(policy)
        if policy.base is not None:
            self._fetch(super().get(policy.base["version"]))

    def _fetch(self, policy: Policy, *, weights: bool = True) -> None:
        """Download what is missing of a policy's files.

        Raises StoreUnreachable, PolicyNotFound or PolicyPruned if it went meanwhile, PolicyCorrupt.
        """
        if not self._missing(policy, weights):
            return
        aside = self.root / _FETCHING / (policy.path.name + ("" if weights else "-small"))
        make_folder(aside.parent)
        busy = StoreUnreachable(
            f"policy {policy.version}: another process has downloaded it for {_DOWNLOAD_S / 3600:g} hours"
        )
        with locked(aside.with_name(f"{aside.name}.lock"), _DOWNLOAD_S, busy=busy):
            missing = self._missing(policy, weights)
            needed, free = sum(size for size, _ in missing.values()), shutil.disk_usage(self.root).free
            if needed > free:
                raise StoreUnreachable(
                    f"policy {policy.version} needs {needed >> 20} MiB in {self.root}, {free >> 20} MiB are free: make "
                    "room, or set serve.retention.keep_last and run `millrace policies prune`"
                )
            try:
                upload = upload_of(policy.path)
                self.objects.download(
                    {f"{OBJECTS}/{upload}/{name}": (aside / name, *of) for name, of in missing.items()},
                    self._stop.is_set,
                )
                _place(aside, missing, policy.path)
            except FileNotFoundError as error:
                self._update()
                self.require_servable(policy.version)
                raise PolicyCorrupt(
                    f"policy {policy.version}: a file of it is gone from the store ({error})"
                ) from error
            except OSError as error:
                raise StoreUnreachable(f"policy {policy.version} can't be downloaded: {error}") from error
            shutil.rmtree(aside, ignore_errors=True)

    def _missing(self, policy: Policy, weights: bool) -> dict[str, tuple[int, str]]:
        """Name -> size and sha256 of each file that the copy has not, or not in that size."""
        found = {
            name: (int(of["size"]), str(of["sha256"]))
            for name, of in policy.files.items()
            if (weights and policy.pruned is None) or not name.endswith(WEIGHTS)
        }
        if policy.learned is not None:
            found[LEARNED] = policy.learned["size"], policy.learned["sha256"]
        return {name: of for name, of in found.items() if _size(policy.path / name) != of[0]}


class _SharedExperiments(Experiments):
    """The experiments of a shared store."""

    def __init__(self, store: SharedPolicyStore) -> None:
        super().__init__(store.root)
        self._store = store

    def numbers(self) -> list[int]:
        self._store.look()
        return super().numbers()

    def get(self, number: int) -> Experiment:
        self._store.look()
        return super().get(number)

    def begin(self, experiment: Experiment) -> None:
        self._store.change(lambda store: store.experiments.begin(experiment))

    def change(self, number: int, to: Callable[[Experiment], Experiment]) -> Experiment:
        return self._store.change(lambda store: store.experiments.change(number, to))


def _name_of_copy() -> str:
    return f"{socket.gethostname()}-{uuid.uuid4().hex}"


def _end_upload(store: PolicyStore, *, upload: str, manifest: Mapping[str, Any]) -> int:
    """Take a version for what was uploaded."""
    if not strike_upload(store.root, upload):
        raise PolicyError(
            "the upload was taken for one that was left over, as it took more than a day or a copy of this machine's "
            "home published meanwhile: publish the policy again"
        )
    return store.add_record({**manifest, "objects": upload})


def _withdraw(store: PolicyStore, version: int) -> str:
    upload = upload_of(store.get(version).path)
    store.withdraw(version)
    return upload


def _place(aside: Path, names: Iterable[str], folder: Path) -> None:
    """Move files into a policy's folder. Raises FileNotFoundError if that is gone: it is not made again."""
    for name in names:
        for parent in reversed(PurePosixPath(name).parents[:-1]):
            (folder / parent).mkdir(exist_ok=True)
        os.rename(aside / name, folder / name)


def _order(name: str) -> tuple[bool, str]:
    return "/" not in name, name


def _size(path: Path) -> int | None:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return None
