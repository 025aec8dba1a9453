"""The policy store: versioned, hashed policies on disk and the pointer to the one that serves.

    policies/v000042/            a Hugging Face folder, safetensors only; its weights may be an adapter of another's
    policies/v000042/policy.json the manifest: version, parent, sha256 of every file, lineage, metrics
    policies/v000042/learned.json   hashes of the prompts that it learned from, of which the manifest has the sha256
    policies/v000042/gate.json   the gate's verdict, which comes after the policy and is not hashed
    policies/v000042/erasures.json  erasures of rows that it was trained on, which come after it too
    policies/v000042/pin.json    who pinned it, so that its weights are kept
    policies/v000042/pruned.json when and why its weights were removed; they are there only without it
    policies/merged/v000042/     of an adapter, the whole model of it and its base (``whole_policies.py``)
    policies/serving.json        the pointer, with its records (``pointer.py``)

A policy is written to a folder beside the others, fsynced and renamed, so a reader sees all of it or nothing. Versions
only grow and are never used twice, even when the newest policy has been removed. Imports neither torch nor vLLM.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import uuid
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from feedback.files import ERASURES, LockTimeoutError, fsync_path, fsync_tree, locked, replace_file, try_lock
from serve.policies.adapter_files import ADAPTER_CONFIG, ADAPTER_WEIGHTS, check_adapter
from serve.policies.experiments import Experiments
from serve.policies.folder import (
    PolicyCorrupt,
    PolicyError,
    PolicyInvalid,
    WrittenFile,
    check_folder,
    copy_model,
    regular_files,
    sha256_file,
)
from serve.policies.pointer import Pointer as Pointer
from serve.policies.pointer import RecordDamaged as RecordDamaged
from serve.policies.pointer import ServingPointer
from serve.policies.pointer import StalePointer as StalePointer
from serve.policies.records import now, read_json, record_erasure, write_json

MANIFEST: Final = "policy.json"
GATE: Final = "gate.json"
LEARNED: Final = "learned.json"
PIN: Final = "pin.json"
PRUNED: Final = "pruned.json"
OWN: Final = re.compile(
    "|".join(rf"{name}|\.{name}\..*" for name in map(re.escape, (MANIFEST, LEARNED, GATE, ERASURES, PIN, PRUNED)))
)
"""The store's own files in a policy's folder, and what a killed process left of one that it was writing."""
_FOLDER: Final = re.compile(r"v(\d{6,})")
UNPUBLISHED: Final = ".publishing-"
MERGED: Final = "merged"
MERGE_S: Final = 3600.0
"""A merge of an adapter into its base takes less."""


class PolicyNotFound(PolicyError):
    """The store has no such version."""


class PolicyPruned(PolicyError):
    """The policy's weights were removed; its manifest is there."""


@dataclass(frozen=True)
class Policy:
    """One published policy. ``created_at`` is ISO 8601, UTC; ``files`` maps a name to its ``sha256`` and ``size``;
    ``probe`` has what ``serve.policies.probe`` compares a server with; ``erasures`` the erasures that reach it, oldest
    first; ``pinned`` and ``pruned`` who, when and why, or None; ``learned`` of how many prompts it learned since its
    parent, and the sha256 of their list; ``base`` the ``version`` and ``sha256`` of the policy that it is an adapter
    of, None if it has weights of its own."""

    version: int
    parent: int | None
    path: Path
    created_at: str
    files: dict[str, dict[str, Any]]
    lineage: dict[str, Any]
    metrics: dict[str, Any]
    gate: dict[str, Any] | None
    probe: dict[str, Any] | None = None
    erasures: tuple[dict[str, Any], ...] = ()
    pinned: dict[str, Any] | None = None
    pruned: dict[str, Any] | None = None
    learned: dict[str, Any] | None = None
    base: dict[str, Any] | None = None

    @property
    def marked(self) -> bool:
        """Whether it is marked for retraining: an erasure reaches it, and nothing more is to be trained from it."""
        return any(erasure.get("retrain") for erasure in self.erasures)

    @property
    def sha256(self) -> str:
        """One hash of the whole content (names and hashes of all files), the same whatever the version."""
        listing = "".join(f"{name}\0{self.files[name]['sha256']}\n" for name in sorted(self.files))
        return hashlib.sha256(listing.encode()).hexdigest()

    @property
    def weight_files(self) -> list[Path]:
        """The safetensors files, by name."""
        return [self.path / name for name in sorted(self.files) if name.endswith(".safetensors")]

    def require_whole(self) -> None:
        """Raise PolicyCorrupt naming the first file that is missing or has another size than the manifest says.

        Raises PolicyPruned if its weights were removed.
        """
        if self.pruned is not None:
            raise PolicyPruned(
                f"policy {self.version}: its weights were removed at {self.pruned['at'][:19]} ({self.pruned['why']}); "
                "`millrace policies` shows which policies have theirs"
            )
        for name, expected in self.files.items():
            path = self.path / name
            if not path.is_file():
                raise PolicyCorrupt(f"policy {self.version}: {name} is missing")
            if (size := path.stat().st_size) != expected["size"]:
                raise PolicyCorrupt(
                    f"policy {self.version}: {name} has {size} bytes, its manifest says {expected['size']}"
                )


class PolicyStore(ServingPointer):
    """The policies under one folder. Safe between threads and processes that share the folder on one machine."""

    uri: str | None = None
    """The object store that holds the policies, of which the folder is a copy (``shared``); None: there is none."""

    @property
    def experiments(self) -> Experiments:
        """The experiments on these policies."""
        return Experiments(self.root)

    @property
    def age(self) -> float:
        """Seconds since the folder was known to be what the store has; 0 where it is the store."""
        return 0.0

    def follow(self, seconds: float) -> None:
        """Have reads not wait for a network: where there is one, another thread looks, every so many seconds."""

    def unfollow(self) -> None:
        """End ``follow``."""

    def repair(self, version: int) -> bool:
        """Fetch anew what differs from a policy's manifest; False where there is nowhere to fetch it from."""
        return False

    def publish(
        self,
        source: Callable[[Path], object] | Path | str,
        *,
        parent: int | None,
        lineage: Mapping[str, Any],
        metrics: Mapping[str, Any],
        probe: Callable[[Path], dict[str, Any]] | None = None,
        learned_prompts: Collection[str] | None = None,
        written: Mapping[str, WrittenFile] | None = None,
        base: Policy | None = None,
    ) -> Policy:
        """Make the next version of what ``source`` holds and return it.

        ``source`` is a function that writes a Hugging Face folder into an empty path, or such a folder,
        whose top-level files are copied; pickled weights that lie beside the safetensors are left out of a copy.
        ``probe`` works out, from the folder, the numbers that a server proves itself by
        (``serve.policies.probe.measure``). ``learned_prompts``: hashes of the prompts that it learned from since its
        parent; None if that is not known. ``written``: by name, files that this run hashed while it wrote them: they
        are not read once more for their hash, where they are still those files. ``base``: the policy that what
        ``source`` holds is an adapter of.

        Raises PolicyInvalid if the result is no safetensors policy, PolicyNotFound if there is no ``parent``,
        ValueError if lineage or metrics are not JSON (a NaN is not).
        """
        _require_json("lineage", lineage)
        _require_json("metrics", metrics)
        if parent is not None:
            self.get(parent)
        aside, hold = self._unpublished()
        try:
            if callable(source):
                source(aside)
            else:
                copy_model(Path(source), aside)
            for path in aside.iterdir():  # a copy of another policy's folder brings these
                if OWN.fullmatch(path.name):
                    path.unlink()
            check_folder(aside)
            _check_base(aside, base)
            files = {
                (name := path.relative_to(aside).as_posix()): {
                    "sha256": _hash_of(path, (written or {}).get(name)),
                    "size": path.stat().st_size,
                }
                for path in regular_files(aside)
            }
            manifest = {
                "parent": parent,
                "created_at": now(),
                "files": files,
                "lineage": dict(lineage),
                "metrics": dict(metrics),
            }
            if base is not None:
                manifest["base"] = {"version": base.version, "sha256": base.sha256}
            if probe is not None:
                manifest["probe"] = probe(aside)
            if learned_prompts is not None:
                (aside / LEARNED).write_text(json.dumps(sorted(learned_prompts)))
                manifest["learned"] = {"sha256": sha256_file(aside / LEARNED), "prompts": len(learned_prompts)}
            fsync_tree(aside)
            version = self._take_version(aside, manifest)
        except BaseException:
            shutil.rmtree(aside, ignore_errors=True)
            raise
        finally:
            os.close(hold)
        return self.get(version)

    def _take_version(self, aside: Path, manifest: Mapping[str, Any]) -> int:
        """Make what was written aside the next version, and return that."""
        with self._locked():
            self._refuse_again(manifest)
            version = self._next_version()
            write_json(aside / MANIFEST, {"version": version, **manifest})
            os.rename(aside, self._folder(version))
            fsync_path(self.root)
        return version

    def _refuse_again(self, manifest: Mapping[str, Any]) -> None:
        """Raise PolicyError if the run has published a policy: another machine may have gone on with it meanwhile."""
        run = manifest["lineage"].get("run_id")
        for version in reversed(self.versions()) if run is not None else ():
            if version <= (manifest["parent"] or 0):
                return
            with suppress(PolicyNotFound, PolicyCorrupt):
                if self.get(version).lineage.get("run_id") == run:
                    raise PolicyError(f"run {run} has published policy {version}, and a run publishes one")

    def add_record(self, manifest: Mapping[str, Any]) -> int:
        """Take a version for files that are elsewhere (``shared``), and return it."""
        with self._locked():
            self._refuse_again(manifest)
            version = self._next_version()
            self._folder(version).mkdir()
            write_json(self._folder(version) / MANIFEST, {"version": version, **manifest})
        return version

    def get(self, version: int) -> Policy:
        """The policy of that version. Raises PolicyNotFound, PolicyCorrupt (unreadable manifest)."""
        folder = self._folder(version)
        try:
            manifest = json.loads((folder / MANIFEST).read_bytes())
        except FileNotFoundError:
            have = ", ".join(map(str, self.versions())) or "none"
            raise PolicyNotFound(f"there is no policy {version} in {self.place} (there: {have})") from None
        except ValueError as error:
            raise PolicyCorrupt(f"{folder / MANIFEST} is not JSON: {error}") from error
        try:
            policy = Policy(
                version=manifest["version"],
                parent=manifest["parent"],
                path=folder,
                created_at=manifest["created_at"],
                files=manifest["files"],
                lineage=manifest["lineage"],
                metrics=manifest["metrics"],
                gate=read_json(folder / GATE),
                probe=manifest.get("probe"),
                erasures=tuple((read_json(folder / ERASURES) or {}).get("erasures", ())),
                pinned=read_json(folder / PIN),
                pruned=read_json(folder / PRUNED),
                learned=manifest.get("learned"),
                base=manifest.get("base"),
            )
        except (KeyError, TypeError) as error:
            raise PolicyCorrupt(f"{folder / MANIFEST} lacks {error}") from error
        if policy.version != version:
            raise PolicyCorrupt(f"{folder / MANIFEST} says version {policy.version}")
        return policy

    def learned_prompts(self, version: int) -> tuple[frozenset[str], tuple[int, ...]]:
        """Hashes of the prompts that a policy and those that it descends from learned from, and the versions among them
        of which it is not known. Of the first one nothing is.

        Raises PolicyNotFound, PolicyCorrupt if a list is not the one that was published.
        """
        found, unknown = set[str](), list[int]()
        policy = self.get(version)
        while (parent := policy.parent) is not None:
            own = self.own_prompts(policy)
            if own is None:
                unknown.append(policy.version)
            else:
                found |= own
            try:
                policy = self.get(parent)
            except PolicyNotFound:  # removed by hand
                unknown.append(parent)
                break
        return frozenset(found), tuple(unknown)

    def first_of(self, version: int) -> Policy:
        """The policy that a lineage began with. Raises PolicyNotFound, PolicyCorrupt."""
        policy = self.get(version)
        while policy.parent is not None:
            policy = self.get(policy.parent)
        return policy

    def own_prompts(self, policy: Policy) -> frozenset[str] | None:
        """Hashes of the prompts that a policy itself learned from; None if its manifest does not say.

        Raises PolicyCorrupt if the list is not the one that was published.
        """
        if policy.learned is None:
            return None
        try:
            content = (policy.path / LEARNED).read_bytes()
        except OSError as error:
            raise PolicyCorrupt(f"policy {policy.version}: {LEARNED} can't be read: {error.strerror}") from error
        if hashlib.sha256(content).hexdigest() != policy.learned["sha256"]:
            raise PolicyCorrupt(f"policy {policy.version}: {LEARNED} is not the one that was published")
        return frozenset(json.loads(content))

    def versions(self) -> list[int]:
        """All published versions, rising."""
        if not self.root.is_dir():
            return []
        matches = (_FOLDER.fullmatch(entry.name) for entry in self.root.iterdir())
        return sorted(int(match[1]) for match in matches if match)

    def latest(self) -> Policy | None:
        """The newest policy, whether it serves or not; None in an empty store."""
        versions = self.versions()
        return self.get(versions[-1]) if versions else None

    def verify(self, version: int) -> Policy:
        """Read every byte of a policy and compare it with the manifest. Raises PolicyCorrupt naming the file."""
        policy = self.get(version)
        policy.require_whole()
        verify_files(policy)
        return policy

    def require_servable(self, version: int) -> None:
        """Raises PolicyNotFound, PolicyPruned."""
        policy = self.get(version)
        if policy.pruned is not None:
            policy.require_whole()

    @contextmanager
    def hold(self, version: int) -> Iterator[Policy]:
        """The policy, whose weights, and those that it is an adapter of, are not pruned within the block.

        A share in the lock on its manifest; ``prune`` takes the whole. Raises PolicyNotFound, PolicyPruned,
        PolicyCorrupt.
        """
        with (self.get(version).path / MANIFEST).open("rb") as manifest:
            if not try_lock(manifest.fileno(), shared=True):
                raise PolicyPruned(f"policy {version}: its weights are being removed at this moment")
            policy = self.get(version)
            policy.require_whole()
            with nullcontext() if policy.base is None else self.hold(policy.base["version"]):
                yield policy

    def pin(self, version: int, *, who: str, why: str) -> None:
        """Have a policy's weights kept. Raises PolicyNotFound, PolicyPruned."""
        with self._locked():
            self.require_servable(version)
            write_json(self._folder(version) / PIN, {"at": now(), "who": who, "why": why})

    def unpin(self, version: int) -> None:
        """Undo ``pin``; harmless to repeat. Raises PolicyNotFound."""
        with self._locked():
            folder = self.get(version).path
            (folder / PIN).unlink(missing_ok=True)
            fsync_path(folder)

    def prune(self, version: int, why: str, kept: Callable[[], Mapping[int, str]]) -> str | None:
        """Remove a policy's weights unless ``kept``, version -> reason, or somebody who holds it needs them.

        The reason why they are still there, or None. That they are gone is on record before the first file goes, so
        that what a kill leaves is never taken for a policy; called again, it goes on. No pointer moves meanwhile.
        """
        with ExitStack() as held:
            with self._locked():
                policy = self.get(version)
                if policy.pruned is None and (reason := kept().get(version)) is not None:
                    return reason
                manifest = held.enter_context((policy.path / MANIFEST).open("rb"))
                if not try_lock(manifest.fileno()):
                    return "in use"
                if policy.pruned is None:
                    write_json(policy.path / PRUNED, {"at": now(), "why": why})
            drop_merged(policy.path)  # it may wait for another's merge, and nobody for us meanwhile
            for path in policy.weight_files:
                path.unlink(missing_ok=True)
            fsync_path(policy.path)
        return None

    def record_gate(self, version: int, verdict: Mapping[str, Any]) -> Policy:
        """Keep the gate's verdict with a policy (``Policy.gate``); a later verdict replaces it."""
        with self._locked():
            policy = self.get(version)
            write_json(policy.path / GATE, verdict)
            return self.get(version)

    def record_erasure(
        self, version: int, *, certainty: str, why: str, erasure: str | None = None, retrain: bool = False
    ) -> Policy:
        """Keep with a policy that rows which it was trained on have been erased (``Policy.erasures``).

        An ``erasure`` is recorded once; ``retrain`` marks the policy for retraining. Raises PolicyNotFound, PolicyError
        if others hold the locks for long.
        """
        with self._locked():
            record_erasure(self.get(version).path, certainty=certainty, why=why, erasure=erasure, retrain=retrain)
            return self.get(version)

    def withdraw(self, version: int) -> None:
        """Remove a policy that must not have been published.

        Raises PolicyError if it serves, or is the base of an adapter, PolicyNotFound.
        """
        folder = self.get(version).path
        with self._locked():
            pointer = self.serving()
            if pointer is not None and pointer.version == version:
                raise PolicyError(f"policy {version} serves, so it can't be withdrawn: roll back first")
            experiment = self.experiments.current()
            if experiment is not None and version in (experiment.candidate, experiment.control):
                raise PolicyError(f"policy {version} is in experiment {experiment.number}: stop that first")
            if (adapter := self._adapter_of(version)) is not None:
                raise PolicyError(f"policy {adapter} is an adapter of policy {version}: withdraw that first")
            aside = self.root / f"{UNPUBLISHED}{uuid.uuid4().hex}"  # the next publish goes on if we are killed
            os.rename(folder, aside)
            fsync_path(self.root)
        shutil.rmtree(aside, ignore_errors=True)  # a publish may be at it, and the next one goes on
        with suppress(LockTimeoutError):  # as that does with this
            drop_merged(folder)

    def _adapter_of(self, version: int) -> int | None:
        """The first adapter of a policy that has its weights. One whose manifest is damaged serves nobody."""
        for number in self.versions():
            with suppress(PolicyError):
                other = self.get(number)
                if other.base is not None and other.base["version"] == version and other.pruned is None:
                    return number
        return None

    def _folder(self, version: int) -> Path:
        return self.root / f"v{version:06d}"

    def _next_version(self) -> int:
        """Take the next version number, for good; call it under the lock."""
        counter = self.root / ".last_version"
        last = int(counter.read_text()) if counter.exists() else 0
        version = max([last, *self.versions()]) + 1
        replace_file(counter, f"{version}\n".encode())
        return version

    def _unpublished(self) -> tuple[Path, int]:
        """A new folder to write into and an open, locked descriptor of it that marks it as in use."""
        with self._locked():
            for entry in self.root.glob(UNPUBLISHED + "*"):
                descriptor = os.open(entry, os.O_RDONLY)
                try:
                    if try_lock(descriptor):  # its writer died
                        shutil.rmtree(entry)
                finally:
                    os.close(descriptor)
            aside = self.root / f"{UNPUBLISHED}{uuid.uuid4().hex}"
            aside.mkdir()
            hold = os.open(aside, os.O_RDONLY)
            try_lock(hold)
        for merged in (self.root / MERGED).glob("v*.json"):
            if not (folder := self.root / merged.stem).exists():  # its withdrawal was killed
                with suppress(LockTimeoutError):
                    drop_merged(folder, wait_s=0)
        return aside, hold


def verify_files(policy: Policy) -> None:
    """Compare every byte of a policy's folder with its ``files``. Raises PolicyCorrupt naming the file."""
    for name, expected in policy.files.items():
        if (digest := sha256_file(policy.path / name)) != expected["sha256"]:
            raise PolicyCorrupt(
                f"policy {policy.version}: {name} has sha256 {digest[:12]}…, its manifest says "
                f"{expected['sha256'][:12]}…"
            )
    # A loader takes every *.safetensors that it finds, so an extra file is as bad as a changed one.
    names = {path.relative_to(policy.path).as_posix() for path in regular_files(policy.path)}
    if surplus := sorted(name for name in names - policy.files.keys() if not OWN.fullmatch(name)):
        raise PolicyCorrupt(f"policy {policy.version}: {surplus[0]} is not in its manifest")


def drop_merged(folder: Path, *, wait_s: float = MERGE_S) -> None:
    """Remove the whole model that was made of an adapter in a policy's folder, and what killed processes left of it.

    A merge that is under way, of whichever adapter, is waited for. Raises LockTimeoutError.
    """
    place = folder.parent / MERGED

    def there() -> list[Path]:
        record = place / f"{folder.name}.json"
        return [path for path in (record, place / folder.name, *place.glob(f".{folder.name}-*")) if path.exists()]

    if not there():
        return
    with locked(place / ".lock", wait_s):
        for path in there():
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink()


def _check_base(folder: Path, base: Policy | None) -> None:
    """Raise PolicyInvalid where a folder is an adapter and is not said to be, or is no adapter of ``base``."""
    if base is None:
        if (folder / ADAPTER_CONFIG).exists():
            raise PolicyInvalid(f"{ADAPTER_CONFIG}: this is an adapter: say of which policy, or publish it merged")
        return
    if base.base is not None:
        raise PolicyInvalid(
            f"policy {base.version} is an adapter of policy {base.base['version']}: an adapter's base has weights of "
            "its own"
        )
    if surplus := [path.name for path in folder.glob("*.safetensors") if path.name != ADAPTER_WEIGHTS]:
        raise PolicyInvalid(f"{surplus[0]}: an adapter has no weights beside {ADAPTER_WEIGHTS}")
    base.require_whole()
    check_adapter(folder, base.weight_files)


def _hash_of(path: Path, written: WrittenFile | None) -> str:
    return written.sha256 if written is not None and written.is_at(path) else sha256_file(path)


def _require_json(what: str, value: Mapping[str, Any]) -> None:
    for key, item in value.items():
        try:
            json.dumps(item, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise ValueError(f"{what}[{key!r}] can't be kept as JSON: {error}") from error
