"""Runs that machines share without a shared disk: an object store has them, a folder under ``train.runs`` is a copy.

    runs/NAME.json            the run's manifest: who is at work on it, and its files with their sha256
    objects/NAME/UPLOAD/PATH  the files of one upload, never changed

A manifest is only ever replaced on the condition that it is still the one that was read. It has both the claim and the
files, so who has lost the claim can't replace the files, and an upload that was cut off is never seen. The files of the
manifest before go when the new one is there. Imports no torch.

A name that is read from the store is checked before it becomes a path. But a checkpoint has pickled metadata (of
torch.distributed.checkpoint): whoever can write to the store can run code where a run goes on.
"""

from __future__ import annotations

import hashlib
import json
import re
import uuid
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path, PurePosixPath
from typing import Any, Final, Literal

from pydantic import AwareDatetime, BaseModel, ConfigDict, Field, ValidationError, model_validator

from feedback.files import fsync_path
from serve.policies.folder import PolicyCorrupt, PolicyError, StoreUnreachable, sha256_file
from serve.policies.object_store import Conflict, Contents, ObjectStore
from train.checkpoint.folders import (
    CheckpointError,
    aside_of,
    checkpoints,
    name_of,
    remove_unfinished,
    require_room,
    step_of,
    torn,
)
from train.config.sections import RunStoreConfig
from train.context import RUN_NAME
from train.observe.progress import say
from train.run.recovery.resume_settings import started

RECORDS: Final = (
    "start.json",
    "metrics.jsonl",
    "pass_rates.json",
    "data.json",
    "resources.json",
    "restarts.json",
    "result.json",
)
"""What of a run is shared beside its checkpoints. Not ``job.json``, which has credentials in clear."""
_CHECKPOINT: Final = re.compile(r"checkpoints/(step-\d{8})/([^/]+/)?[^/]+", re.ASCII)
_LARGEST: Final = 16 << 20  # bytes of a manifest
RUNS: Final = Contents("runs", "train.run_store", "restore the object, or give the run another name (--run)")


class RunTaken(CheckpointError):
    """Another machine is at work on the run; the text names it. ``now``: the run as it is, if that is known."""

    def __init__(self, message: str, now: Found | None = None) -> None:
        super().__init__(message)
        self.now = now


class StoredFile(BaseModel):
    """A file of a run, and the object that has it."""

    model_config = ConfigDict(frozen=True)

    size: int = Field(ge=0)
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")
    upload: str = Field(pattern=r"^[0-9a-f]{32}$")


class Claim(BaseModel):
    """Who is at work on a run: a process, on a machine with this copy, until then unless it says so again.

    ``token``: of the process, as its id may be another one's on the same machine.
    """

    model_config = ConfigDict(frozen=True)

    holder: str
    token: str
    copy_id: str
    until: AwareDatetime

    @property
    def live(self) -> bool:
        return datetime.now(UTC) < self.until


class Manifest(BaseModel):
    """A run as the store has it. ``id``: of its start. ``failed_uploads``: of the process that wrote this."""

    model_config = ConfigDict(frozen=True)

    format: Literal[1] = 1
    run: str = Field(pattern=RUN_NAME)
    id: str | None = None
    write: str
    at: AwareDatetime
    claim: Claim | None = None
    result: dict[str, Any] | None = None
    failed_uploads: int = 0
    files: dict[str, StoredFile] = {}

    @model_validator(mode="after")
    def _files_lie_in_the_run(self) -> Manifest:
        for name in self.files:
            parts = PurePosixPath(name).parts
            in_place = name in RECORDS or (_CHECKPOINT.fullmatch(name) and ".." not in parts and "." not in parts)
            if not in_place or str(PurePosixPath(name)) != name or "\0" in name:
                raise ValueError(f"{name!r} is no file of a run")
        return self

    @property
    def checkpoints(self) -> list[str]:
        """Names of folders, the newest first."""
        found = {match[1] for name in self.files if (match := _CHECKPOINT.fullmatch(name))}
        return sorted(found, reverse=True)

    def files_of(self, checkpoint: str) -> dict[str, StoredFile]:
        """The files of a checkpoint, by their paths in it."""
        prefix = f"checkpoints/{checkpoint}/"
        return {name.removeprefix(prefix): of for name, of in self.files.items() if name.startswith(prefix)}

    def bytes_of(self, checkpoint: str) -> int:
        return sum(of.size for of in self.files_of(checkpoint).values())

    @property
    def bytes(self) -> int:
        """Of its checkpoints."""
        return sum(of.size for name, of in self.files.items() if name not in RECORDS)

    def object_of(self, name: str) -> str:
        return f"objects/{self.run}/{self.files[name].upload}/{name}"

    @property
    def objects(self) -> set[str]:
        return {self.object_of(name) for name in self.files}


@dataclass(frozen=True)
class Found:
    """A manifest, and what names this version of it for a conditional write; None before there is one."""

    manifest: Manifest
    version: dict[str, str] | None


class RunStore:
    """The runs below one address. All raise StoreUnreachable if it does not answer."""

    def __init__(self, config: RunStoreConfig) -> None:
        assert config.uri is not None
        self.objects = ObjectStore(config.uri, config.store_options, config.redact, RUNS)
        self.uri = self.objects.uri
        self._answered = False

    def names(self) -> list[str]:
        """The runs that it has, by name."""
        self._look()
        names = (Path(name).name.removesuffix(".json") for name in self.objects.names("runs/"))
        return sorted(name for name in names if re.fullmatch(RUN_NAME, name))

    def read(self, run: str) -> Found | None:
        """A run, None if there is none. Raises CheckpointError if its manifest can't be used."""
        self._look()
        found = self.objects.read(f"runs/{run}.json", _LARGEST)
        if found is None:
            return None
        try:
            manifest = Manifest.model_validate_json(found.content)
            if manifest.run != run:
                raise ValueError(f"it is of run {manifest.run}")
        except ValueError as error:
            why = "; ".join(one["msg"] for one in error.errors()) if isinstance(error, ValidationError) else error
            raise CheckpointError(
                f"{self.uri}/runs/{run}.json can't be used ({why}): restore an earlier version of it, or remove it"
            ) from error
        return Found(manifest, found.version)

    def _look(self) -> None:
        """A store that does not answer is found out before it is read, as that waits for much longer."""
        if not self._answered:
            self.objects.version("runs/-.json")
        self._answered = True

    def all(self, report: Callable[[str], None] = say) -> list[Found]:
        """All runs, by name; one whose manifest can't be used is reported and left out."""
        found = []
        for name in self.names():
            try:
                one = self.read(name)
            except CheckpointError as error:
                report(str(error))
                continue
            if one is not None:
                found.append(one)
        return found

    def replace(self, before: Found, **changes: Any) -> Found:
        """Write a run's manifest in place of the one that was read. Raises RunTaken if it is not that any more.

        After StoreUnreachable whether it was written is not known; the next call finds out.
        """
        manifest = before.manifest.model_copy(update={**changes, "write": uuid.uuid4().hex, "at": datetime.now(UTC)})
        try:
            version = self.objects.write_if(
                f"runs/{manifest.run}.json", manifest.model_dump_json().encode(), before.version
            )
        except (Conflict, StoreUnreachable) as error:
            now = self.read(manifest.run)
            if now is not None and now.manifest.write == manifest.write:  # its answer was lost
                return now
            if isinstance(error, Conflict):
                raise taken(manifest.run, None if now is None else now.manifest.claim, now) from None
            raise
        return Found(manifest, version)

    def drop(self, run: str, *, forget: bool = False) -> bool:
        """Remove a run's checkpoints unless a machine is at work on it, or takes it up meanwhile; whether it did.

        ``forget``: that it ever began, too.
        """
        found = self.read(run)
        if found is None or (found.manifest.claim and found.manifest.claim.live):
            return False
        kept = {} if forget else {name: of for name, of in found.manifest.files.items() if name in RECORDS}
        try:
            self.replace(found, claim=None, files=kept, **({"id": None} if forget else {}))
        except RunTaken:
            return False
        self.objects.delete(sorted(found.manifest.objects - {found.manifest.object_of(name) for name in kept}))
        return True

    def sweep(self) -> None:
        """Remove the objects of idle runs that no manifest names: their uploads were cut off, or their removal was."""
        runs: dict[str, set[str]] = {}
        for name in self.objects.names("objects/"):  # first: so nothing is among them that is uploaded from here on
            runs.setdefault(name.split("/")[1], set()).add(name)
        for found in self.all():
            manifest = found.manifest
            stray = runs.get(manifest.run, set()) - manifest.objects
            if not stray or (manifest.claim and manifest.claim.live):
                continue
            if manifest.claim is not None:  # its holder may yet be at an upload, which must not be named any more
                try:
                    self.replace(found, claim=None)
                except RunTaken:
                    continue
            self.objects.delete(sorted(stray))

    def start_of(self, manifest: Manifest) -> dict[str, Any] | None:
        """What a run was started with; None if that is not there, has gone meanwhile, or is damaged."""
        if (of := manifest.files.get("start.json")) is None:
            return None
        found = self.objects.read(manifest.object_of("start.json"), _LARGEST)
        if found is None or hashlib.sha256(found.content).hexdigest() != of.sha256:
            return None
        return dict(json.loads(found.content))

    def fetch_records(self, manifest: Manifest, folder: Path, names: Iterable[str] = RECORDS) -> None:
        """Have a folder have the records of a run. Raises PolicyError if one is damaged or gone."""
        missing = {name: manifest.files[name] for name in names if name in manifest.files}
        missing = {name: of for name, of in missing.items() if not _is(folder / name, of)}
        for name, of in missing.items():
            aside = folder / f".{name}.fetched"
            aside.unlink(missing_ok=True)
            self._download({manifest.object_of(name): (aside, of.size, of.sha256)})
            aside.rename(folder / name)

    def fetch_checkpoint(self, manifest: Manifest, folder: Path, than: int) -> int | None:
        """Download a run's newest checkpoint that is newer ``than`` a step to a folder of checkpoints; its step.

        A damaged one is reported, and passed over. None if there is none newer. What the run was started with comes
        first: by that an erasure knows what the rest may have, if this is killed.

        Raises:
            CheckpointError: all that are newer are damaged, and ``than`` is 0, or there is no room.
        """
        problems = []
        for name in manifest.checkpoints:
            step = step_of(Path(name))
            if step <= than:
                break
            folder.mkdir(parents=True, exist_ok=True)
            aside, files = aside_of(folder, step), manifest.files_of(name)
            there = sum(path.stat().st_size for path in aside.rglob("*") if path.is_file())
            require_room(folder, manifest.bytes_of(name) - there)
            self.fetch_records(manifest, folder.parent, ("start.json",))
            try:
                self._download(
                    {
                        manifest.object_of(f"checkpoints/{name}/{path}"): (aside / path, of.size, of.sha256)
                        for path, of in files.items()
                    }
                )
            except PolicyCorrupt as error:
                say(f"{manifest.run}: {name} in the store is damaged, looking for an older one: {error}")
                problems.append(str(error))
                remove_unfinished(folder)
                continue
            if problem := torn(aside):
                problems.append(f"{name}: {problem}")
                continue
            for path in [one for one in aside.rglob("*") if one.is_dir()] + [aside]:
                fsync_path(path)
            aside.rename(folder / name_of(step))
            fsync_path(folder)
            return step
        if problems and not than:
            raise CheckpointError(
                f"run {manifest.run}: every checkpoint in {self.uri} is damaged ({'; '.join(problems)})"
            )
        return None

    def _download(self, files: dict[str, tuple[Path, int, str]]) -> None:
        """To files that their user alone can read: they have texts. Raises PolicyCorrupt for one damaged, or gone."""
        for path, *_ in files.values():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch(mode=0o600)
        try:
            self.objects.download(files)
        except FileNotFoundError as error:
            raise PolicyCorrupt(f"an object of it is gone ({error}): {RUNS.remedy}") from error
        for path, *_ in files.values():  # one that was torn is written anew
            path.chmod(0o600)


def open_runs(config: RunStoreConfig) -> RunStore | None:
    """The store that the settings name, if they name one. Raises PolicyError if its address can't work."""
    return None if config.uri is None else RunStore(config)


def taken(run: str, claim: Claim | None, now: Found | None = None) -> RunTaken:
    """The error of a machine that another has been before."""
    who = "another machine" if claim is None else claim.holder
    until = "" if claim is None else f" until {claim.until:%Y-%m-%d %H:%M:%S} UTC at least"
    return RunTaken(
        f"{who} is at work on run {run}{until}: wait for it, end it there, or give this run another name (--run)",
        now,
    )


def fetch_all_records(
    store: RunStore, runs: Path, is_free: Callable[[Path], bool], report: Callable[[str], None] = say
) -> list[Manifest]:
    """Have ``runs`` have the records of the store's runs that it has no checkpoint of; all manifests, by name.

    So what is said of runs (the list, pass rates of a lineage, the report) is the same on all machines.

    ``is_free``: whether no process here is at work on a run's folder.
    """
    found = []
    for one in store.all(report):
        manifest, folder = one.manifest, runs / one.manifest.run
        found.append(manifest)
        if not manifest.files or checkpoints(folder / "checkpoints") or ended_here(manifest, folder):
            continue
        folder.mkdir(parents=True, exist_ok=True)
        if is_free(folder):
            try:
                store.fetch_records(manifest, folder)
            except PolicyError as error:
                report(f"the records of run {manifest.run} can't be had: {error}")
    return found


def ended_here(manifest: Manifest, folder: Path) -> bool:
    """Whether a run has ended in this folder and the store does not know, as its last upload failed."""
    return manifest.result is None and (folder / "result.json").exists() and started(folder).get("id") == manifest.id


def _is(path: Path, of: StoredFile) -> bool:
    try:
        return path.stat().st_size == of.size and sha256_file(path) == of.sha256
    except FileNotFoundError:
        return False
