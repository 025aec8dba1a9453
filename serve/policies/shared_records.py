"""The records of a policy store that machines share: one object, which is only ever replaced by compare-and-swap.

    records.json.gz   {format, writes, records}: the text of each record by its path in a store's folder
    objects/ID/NAME   the files of one policy, below the id of its upload, which its manifest names

A write whose answer is lost may have been done. Each write has an id, and the object has those of the last ones: so
what was done is recognised, and not taken for another machine's.

Whoever can write to the bucket decides what is served. But what is read from it is checked before any of it becomes a
path or a command on this machine: a record or a file of a policy lies in its place below the store's folder.
"""

from __future__ import annotations

import contextlib
import gzip
import io
import json
import re
import uuid
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path, PurePosixPath
from typing import Any, Final

from serve.policies.folder import PICKLE_SUFFIXES, PolicyError, StoreUnreachable
from serve.policies.object_store import Conflict, ObjectStore
from serve.policies.records import now, write_json
from serve.policies.store import LEARNED, MANIFEST, OWN

RECORDS: Final = "records.json.gz"
OBJECTS: Final = "objects"
UPLOADS: Final = "uploads"
WEIGHTS: Final = ".safetensors"
_RECORD: Final = re.compile(
    r"(serving|candidate)\.json|(history|outcomes)\.jsonl|\.last_version|experiments/\d+\.json"
    r"|v\d{6,}/(policy|gate|erasures|pin|pruned)\.json|uploads/[0-9a-f]{32}\.json",
    re.ASCII,
)
"""What of a store's folder is in the records; the rest is this machine's own, or a policy's files."""
LAST_VERSION: Final = ".last_version"
_UPLOAD: Final = re.compile("[0-9a-f]{32}")
_SHA256: Final = re.compile("[0-9a-f]{64}")
_LARGEST: Final = 256 << 20  # bytes of all records
_WRITES: Final = 64  # whose ids the records keep


@dataclass(frozen=True)
class State:
    """The records, by path, at one version of their object; None before there is one. ``writes``: the last ids."""

    version: dict[str, str] | None
    writes: tuple[str, ...]
    records: dict[str, str]


class SharedRecords:
    """The object that has all records of a store."""

    def __init__(self, objects: ObjectStore) -> None:
        self._objects = objects
        self._at = f"{objects.uri}/{RECORDS}"

    def read(self) -> State:
        """Raises StoreUnreachable, PolicyError if the object is not one of records."""
        found = self._objects.read(RECORDS, _LARGEST)
        if found is None:
            self._objects.names(f"{UPLOADS}/")  # fails if it is the bucket that is missing
            with contextlib.suppress(StoreUnreachable):  # by a stray name, by which a sweep fails as well
                if left := self._objects.names(f"{OBJECTS}/"):
                    raise PolicyError(f"{self._at} is gone, and {len(left)} files of policies are there: restore it")
            return State(None, (), {})
        try:
            with gzip.open(io.BytesIO(found.content)) as file:
                text = file.read(_LARGEST + 1)
            if len(text) > _LARGEST:
                raise ValueError(f"more than {_LARGEST} bytes")
            content = json.loads(text)
            if content["format"] != 1:
                raise ValueError(f"format {content['format']!r}: another release made it")
            check(content["records"])
            return State(found.version, tuple(map(str, content["writes"])), content["records"])
        except (
            OSError,
            EOFError,
            zlib.error,
            ValueError,
            LookupError,
            TypeError,
            AttributeError,
            RecursionError,
        ) as error:
            raise PolicyError(f"{self._at} can't be used ({error}): restore an earlier version of it") from error

    def are_still(self, state: State) -> bool:
        """Whether the object is the version that was read. Raises StoreUnreachable."""
        there = None if state.version is None else self._objects.version(RECORDS)
        return there is not None and state.version is not None and there["e_tag"] == state.version["e_tag"]

    def replace(self, before: State, records: dict[str, str]) -> State | None:
        """Write records in place of those that were read; None if they were not the store's any more.

        Raises StoreUnreachable: whether they were written is then not known. PolicyError if they are too many.
        """
        write = uuid.uuid4().hex
        writes = (*before.writes, write)[-_WRITES:]
        text = json.dumps({"format": 1, "writes": writes, "records": records}).encode()
        if len(text) > _LARGEST:
            raise PolicyError(f"{self._at} would have more than {_LARGEST} bytes: begin a new store for new policies")
        content = gzip.compress(text, 6, mtime=0)
        try:
            return State(self._objects.write_if(RECORDS, content, before.version), writes, records)
        except (Conflict, StoreUnreachable) as error:
            found = self.read()
            if write in found.writes:  # its answer was lost
                return found
            if isinstance(error, Conflict):
                return None
            raise


def check(records: Mapping[str, str]) -> None:
    """Raise ValueError, or what a value of the wrong kind raises, unless each record and file has a place of its own.

    That is: below the store's folder, where nothing else is.
    """
    for name, text in records.items():
        if not _RECORD.fullmatch(name):
            raise ValueError(f"{name!r} is no record")
        text.encode()
        if name == LAST_VERSION:
            int(text)
        elif name.startswith(f"{UPLOADS}/"):
            age_of(json.loads(text)), json.loads(text)["by"]
        elif name.endswith(f"/{MANIFEST}"):
            manifest = json.loads(text)
            if not _UPLOAD.fullmatch(manifest["objects"]):
                raise ValueError(f"{name} names the upload {manifest['objects']!r}")
            _check_files(name, manifest["files"])
            if (learned := manifest.get("learned")) is not None:
                _check_file(name, LEARNED, learned)


def _check_files(manifest: str, files: Mapping[str, Any]) -> None:
    for name, of in files.items():
        path = PurePosixPath(name)
        if path.is_absolute() or not path.parts or ".." in path.parts or str(path) != name or "\0" in name:
            raise ValueError(f"{manifest} has the file {name!r}")
        if path.suffix.lower() in PICKLE_SUFFIXES or OWN.fullmatch(name):
            raise ValueError(f"{manifest} has the file {name!r}, which no policy has")
        _check_file(manifest, name, of)


def _check_file(manifest: str, name: str, of: Mapping[str, Any]) -> None:
    name.encode()
    if type(of["size"]) is not int or of["size"] < 0 or not _SHA256.fullmatch(of["sha256"]):
        raise ValueError(f"{manifest} does not say what {name!r} is")


def last_version(records: Mapping[str, str]) -> int:
    """The highest version that was ever taken; 0 if none was."""
    return int(records.get(LAST_VERSION, 0))


def age_of(mark: Mapping[str, Any]) -> timedelta:
    """How long ago an upload was begun."""
    return datetime.now(UTC) - datetime.fromisoformat(mark["at"])


def read_folder(root: Path) -> dict[str, str]:
    """The records in a folder, by path."""
    paths = (*root.iterdir(), *(path for of in ("v*", "experiments", UPLOADS) for path in root.glob(f"{of}/*.json")))
    names = {path.relative_to(root).as_posix(): path for path in paths}
    return {
        name: names[name].read_bytes().decode(errors="replace") for name in sorted(names) if _RECORD.fullmatch(name)
    }


def write_folder(root: Path, records: Mapping[str, str]) -> None:
    """Write records that were checked into an empty folder."""
    for folder in {Path(name).parent for name in records}:
        (root / folder).mkdir(exist_ok=True)
    for name, text in records.items():
        (root / name).write_bytes(text.encode())


def begin_upload(root: Path, upload: str, *, by: str) -> None:
    """Put on record in a folder that files are being uploaded, before the first one is."""
    (root / UPLOADS).mkdir(exist_ok=True)
    write_json(root / UPLOADS / f"{upload}.json", {"at": now(), "by": by})


def strike_upload(root: Path, upload: str) -> bool:
    """Forget an upload; whether it was on record."""
    mark = root / UPLOADS / f"{upload}.json"
    there = mark.exists()
    mark.unlink(missing_ok=True)
    return there


def upload_of(folder: Path) -> str:
    """The id below which the files of the policy in a folder were uploaded."""
    return str(json.loads((folder / MANIFEST).read_bytes())["objects"])


def unreferenced(objects: Iterable[str], records: Mapping[str, str]) -> list[str]:
    """Those of a store's objects that belong to no policy and no upload under way, and weights of pruned policies."""
    uploading = {Path(name).stem for name in records if name.startswith(f"{UPLOADS}/")}
    pruned = {
        json.loads(text)["objects"]: f"{Path(name).parent}/pruned.json" in records
        for name, text in records.items()
        if name.endswith(f"/{MANIFEST}")
    }

    def needed(name: str) -> bool:
        upload = name.split("/")[1]
        return upload in uploading or (upload in pruned and not (pruned[upload] and name.endswith(WEIGHTS)))

    return [name for name in objects if not needed(name)]
