"""A run at work that other machines may go on with: its claim, what it takes over from them, and what it leaves them.

A claim is kept by a thread, checkpoints are uploaded by another one, and no step waits for either. An upload that fails
is tried again, then reported and counted, and the run goes on with what is on its disk. Who has lost its claim, as it
could not renew it in time, can't replace what is in the store, and ends at its next step.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Final, Literal

from feedback.files import link_or_copy, replace_file
from feedback.processes.exit import skip_teardown
from serve.policies.folder import PolicyError, sha256_file
from train.checkpoint.folders import CheckpointError, checkpoints, step_of, torn
from train.config.sections import RunStoreConfig
from train.context import RESULT, JobContext, JobResult
from train.observe.progress import say
from train.run.recovery.resume import checkpoints_of, last_whole
from train.run.recovery.run_store import (
    RECORDS,
    Claim,
    Found,
    Manifest,
    RunStore,
    RunTaken,
    StoredFile,
    ended_here,
    fetch_all_records,
    open_runs,
    taken,
)
from train.run.recovery.unfinished import START, UPLOADING, holder_of, kept
from train.run.retention import RunFolder, run_folders

_TRIES: Final = 3  # of an upload
_PAUSE_S: Final = 2.0  # before the second one, and twice that before the third
_LAST_S: Final = 300.0  # that a run waits at its end: for its claim before it publishes, and for its last upload
_STOPPED_S: Final = 5.0  # that a run which is stopped waits for that: within cycle.stop_grace_s it would be killed
_COPY: Final = ".copy"
FAILURES: Final = "failed_uploads.log"
"""A line for each upload that was given up, in the run's folder."""
_AGAIN: Final = 20  # snapshots that checkpoints went from meanwhile


@contextmanager
def shared_run(config: RunStoreConfig, context: JobContext) -> Iterator[SharedRun | None]:
    """Claim a run and take over what the store has of it; leave there what came of it. Needs the folder's lock.

    None if no store is set.

    Raises:
        RunTaken: another machine is at work on the run, or has been before this one.
        CheckpointError: the folder has another run of this name, or all that the store has is damaged.
        serve.policies.folder.PolicyError: the store does not answer, or can't hold runs.
    """
    if (store := open_runs(config)) is None:
        yield None
        return
    run = SharedRun(store, config, context)
    try:
        yield run
    except BaseException as error:
        run.close(_LAST_S if isinstance(error, Exception) else _STOPPED_S)
        raise
    run.close()


class SharedRun:
    """A run that this process has claimed. ``failed``: uploads that were given up."""

    def __init__(self, store: RunStore, config: RunStoreConfig, context: JobContext) -> None:
        self._store, self._run, self._folder = store, context.run, context.folder
        self._lease = timedelta(seconds=config.lease_s)
        self.failed = 0
        self._alone = threading.Lock()  # of what the manifest is
        self._lost: RunTaken | None = None
        self._given_back = False
        self._uploaded: dict[str, StoredFile] = {}  # of checkpoints, whose files don't change
        self._due, self._stop = threading.Event(), threading.Event()
        mine = copy_id(context.runs)
        holder = f"pid {os.getpid()} on {socket.gethostname()}"
        self._me = {"holder": holder, "copy_id": mine, "token": uuid.uuid4().hex}
        found = store.read(context.run)
        if found is None:
            store.objects.try_out()  # once a run: without conditional writes two machines could go on with it
            found = Found(Manifest(run=context.run, write="", at=datetime.now(UTC)), None)
        claim = found.manifest.claim
        if claim is not None and claim.live and claim.copy_id != mine:  # of this copy we have the lock
            raise taken(context.run, claim)
        self._found = store.replace(found, claim=self._claim())
        if claim is not None:
            say(f"{context.run}: takes over from {claim.holder}, whose claim was until {claim.until:%H:%M:%S} UTC")
        self._threads = [
            threading.Thread(target=work, name=f"run store: {name}", daemon=True)
            for name, work in (("claim", self._renew), ("upload", self._upload_when_due))
        ]
        self._threads[0].start()
        try:
            self._sweep()
            self._take_over(context)
        except BaseException:
            self._stop.set()
            self._give_back()
            raise
        self._threads[1].start()

    def upload_soon(self) -> None:
        """Have the run be uploaded as it is now, or a little later, beside the steps."""
        self._due.set()

    def check(self) -> None:
        """Raise RunTaken if another machine has taken the run over."""
        if self._lost is not None:
            raise self._lost

    def renew(self) -> None:
        """Claim the run anew, now. A store that does not answer is reported while the claim still holds.

        Raises RunTaken; CheckpointError if the claim has run out and the store does not answer.
        """
        deadline = time.monotonic() + _LAST_S
        while True:
            try:
                return self._replace()
            except PolicyError as error:
                claim = self._found.manifest.claim
                if claim is not None and claim.live:
                    return say(f"{self._run}: whether this machine still has the run could not be asked: {error}")
                if time.monotonic() > deadline:
                    raise CheckpointError(
                        f"the claim on run {self._run} has run out, and whether another machine has the run can't be "
                        f"asked: {error}. When the store answers, start the run again: it goes on from its checkpoint"
                    ) from error
            self._stop.wait(_PAUSE_S)

    def close(self, within: float = _LAST_S) -> None:
        """Upload what is there at the end and give the claim back, or leave that to its thread after seconds."""
        self._stop.set()
        self._due.set()
        self._threads[1].join(within)
        if self._threads[1].is_alive():
            say(f"{self._run}: its last upload takes longer than {within:g} s, and is left")
            skip_teardown("an upload of a run still runs")  # the interpreter would wait for it

    def _give_back(self) -> None:
        with suppress(PolicyError, RunTaken):  # then it ends by itself
            self._replace(claim=None)

    # ------------------------------------------------------------------------------------------------ the claim

    def _claim(self) -> Claim:
        return Claim(until=datetime.now(UTC) + self._lease, **self._me)

    def _replace(self, **changes: Any) -> None:
        """Write the manifest anew, which renews the claim. Raises RunTaken, and whatever the store raises."""
        with self._alone:
            self.check()
            if self._given_back:
                return
            changes = {"claim": self._claim(), **changes}
            before, mine = self._found, self._me["token"]
            for _ in range(2):
                try:
                    self._found = self._store.replace(before, **changes)
                except RunTaken as lost:
                    if lost.now is None or (claim := lost.now.manifest.claim) is None or claim.token != mine:
                        self._lost = RunTaken(f"this machine has lost its claim: {lost}")
                        raise self._lost from None
                    before = lost.now  # an earlier write of ours, whose answer was lost
                else:
                    break
            self._given_back = changes["claim"] is None

    def _renew(self) -> None:
        while not self._stop.wait(self._lease.total_seconds() / 3):
            try:
                self._replace()
            except RunTaken as lost:
                return say(f"{self._run}: {lost}")
            except Exception as error:  # noqa: BLE001 - the store may be there again at the next time
                say(f"{self._run}: the claim could not be renewed: {error}")

    # ------------------------------------------------------------------------------------- from other machines

    def _take_over(self, context: JobContext) -> None:
        """Have the folder have what the store has, if that is further."""
        shutil.rmtree(self._folder / UPLOADING, ignore_errors=True)
        fetch_all_records(self._store, context.runs, lambda folder: not holder_of(folder) and folder != self._folder)
        manifest = self._found.manifest
        if manifest.id is None or ended_here(manifest, self._folder):  # it has not begun, or was forgotten
            return
        start = self._folder / START
        if start.exists() and (mine := json.loads(start.read_bytes())["id"]) != manifest.id:
            if any(kept(self._folder)):
                raise CheckpointError(
                    f"{self._folder} has run {mine}, and the store has another one of this name, {manifest.id}: remove "
                    "the folder, or give the run another name (--run)"
                )
            start.unlink()
        newest = last_whole(context) if checkpoints(checkpoints_of(context)) else None
        step = self._store.fetch_checkpoint(manifest, checkpoints_of(context), 0 if newest is None else step_of(newest))
        if newest is None or step is not None:
            # Its result is no record of this attempt's: who waits for one would take the attempt for finished.
            self._store.fetch_records(manifest, self._folder, [name for name in RECORDS if name != RESULT])
        if step is not None:
            say(f"{self._run}: downloaded the checkpoint after step {step} from {self._store.uri}")

    # --------------------------------------------------------------------------------------- for other machines

    def _upload_when_due(self) -> None:
        while not self._stop.is_set():
            self._due.wait()
            self._due.clear()
            if not self._stop.is_set():
                self._upload_or_say()
        if self._lost is None:
            self._upload_or_say(pause=time.sleep)
        self._give_back()

    def _upload_or_say(self, pause: Callable[[float], bool | None] | None = None) -> None:
        """``pause``: waits for seconds; whether to leave it at that, as the run's end uploads all again."""
        for attempt in range(1, _TRIES + 1):
            try:
                return self._upload()
            except RunTaken as lost:
                return say(f"{self._run}: nothing more is uploaded: {lost}")
            except Exception as error:  # noqa: BLE001 - the run goes on with what is on its disk
                problem = str(error) or type(error).__name__
            if attempt < _TRIES and (pause or self._stop.wait)(_PAUSE_S * attempt):
                return
        self.failed += 1
        with suppress(OSError), (self._folder / FAILURES).open("a") as file:
            file.write(f"{datetime.now(UTC).isoformat(timespec='seconds')} {problem}\n")
        say(
            f"{self._run}: AN UPLOAD FAILED {_TRIES} times ({self.failed} in this run, see {FAILURES}): {problem}. "
            "The run goes on with what is on this disk; another machine would go on from what was uploaded before"
        )

    def _upload(self) -> None:
        """Upload the whole checkpoints and the records; then the manifest; then remove what was there before."""
        self.check()
        upload, aside = uuid.uuid4().hex, self._folder / UPLOADING
        before = self._found.manifest
        _snapshot(self._folder, aside)
        try:
            paths = {path.relative_to(aside).as_posix(): path for path in sorted(aside.rglob("*")) if path.is_file()}
            files, new = dict[str, StoredFile](), dict[str, Path]()
            for name, path in paths.items():
                if (known := self._uploaded.get(name)) is None or known != before.files.get(name):
                    known = StoredFile(size=path.stat().st_size, sha256=sha256_file(path), upload=upload)
                    old = before.files.get(name)
                    if old is not None and (old.size, old.sha256) == (known.size, known.sha256):
                        known = old
                    else:
                        new[f"objects/{self._run}/{upload}/{name}"] = path
                files[name] = known
            start = json.loads(paths[START].read_bytes()) if START in paths else {}
            result = json.loads(paths["result.json"].read_bytes()) if "result.json" in paths else None
            try:
                self._store.objects.upload(new)
            except BaseException:
                with suppress(PolicyError):  # else the next claim removes it
                    self._store.objects.delete(new)
                raise
            # What it is not known to have written stays: the store may have the manifest that names it.
            self._replace(id=start.get("id"), files=files, result=result, failed_uploads=self.failed)
        finally:
            shutil.rmtree(aside, ignore_errors=True)
        self._uploaded = {name: of for name, of in files.items() if name not in RECORDS}
        with suppress(PolicyError):
            self._store.objects.delete(sorted(before.objects - self._found.manifest.objects))

    def _sweep(self) -> None:
        """Remove what uploads that were cut off have left."""
        names = self._store.objects.names(f"objects/{self._run}/")
        self._store.objects.delete(name for name in names if name not in self._found.manifest.objects)


def _snapshot(folder: Path, aside: Path) -> None:
    """Have ``aside`` have the whole checkpoints and the records of a run, which change meanwhile: links and copies."""
    for _ in range(_AGAIN):
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(mode=0o700)
        try:
            for checkpoint in checkpoints(folder / "checkpoints"):
                there = aside / "checkpoints" / checkpoint.name
                shutil.copytree(checkpoint, there, copy_function=link_or_copy)
                if torn(there):
                    shutil.rmtree(there)
            for name in RECORDS:
                with suppress(FileNotFoundError):
                    shutil.copyfile(folder / name, aside / name)
            return
        except (FileNotFoundError, shutil.Error):  # an older checkpoint has just been removed
            continue
    raise OSError(f"{folder} changes too fast for a snapshot")


def copy_id(runs: Path) -> str:
    """What names this folder of runs on this machine: a copy of it elsewhere is another one."""
    path, host = runs / _COPY, socket.gethostname()
    runs.mkdir(parents=True, exist_ok=True)
    with suppress(FileNotFoundError):
        if (found := path.read_text()).startswith(f"{host}-"):
            return found
    replace_file(path, f"{host}-{uuid.uuid4().hex}".encode())
    return path.read_text()


def with_shared(
    store: RunStore, runs: Path, report: Callable[[str], None] = say
) -> tuple[list[RunFolder], dict[str, str]]:
    """The runs of this machine and of the store, as ``run_folders`` has them; and of the store's, how they are there.

    Raises serve.policies.folder.PolicyError: the store does not answer.
    """
    manifests = {one.run: one for one in fetch_all_records(store, runs, lambda folder: not holder_of(folder), report)}
    found = {run.name: run for run in run_folders(runs)}
    how = dict[str, str]()
    for name, manifest in manifests.items():
        claim, here = manifest.claim, found.get(name)
        live = claim is not None and claim.live
        how[name] = (
            f"at work: {claim.holder}" if claim is not None and live else f"{len(manifest.checkpoints)} checkpoints"
        )
        if manifest.failed_uploads:
            how[name] += f", {manifest.failed_uploads} uploads failed"
        if here is not None and here.state != "ended":
            continue
        state: Literal["at work", "unfinished", "ended"] = "unfinished" if manifest.checkpoints else "ended"
        result = None if manifest.result is None else JobResult.model_validate(manifest.result)
        found[name] = RunFolder(runs / name, manifest.at, "at work" if live else state, manifest.bytes, result)
    return sorted(found.values(), key=lambda run: (run.at, run.name)), how
