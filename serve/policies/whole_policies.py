"""Policies that are an adapter beside another policy's weights, for whoever needs one whole model.

policies/v000043/adapter_config.json, adapter_model.safetensors   in peft's format, in place of weights
policies/v000043/policy.json                                      names the base: its version and sha256
policies/merged/v000043/                                          the whole model of both, made when somebody needs it

An engine with room for adapters serves the two as they are; training, evaluation and any other engine take ``whole``.
"""

from __future__ import annotations

import shutil
import uuid
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from feedback.files import fsync_tree, locked, make_folder
from serve.policies.adapter_files import ADAPTER_CONFIG, ADAPTER_WEIGHTS, write_merged
from serve.policies.folder import PolicyCorrupt, sha256_file
from serve.policies.records import read_json, write_json
from serve.policies.store import MERGE_S, MERGED, Policy, PolicyStore

_KEPT: Final = 3  # whole models that nobody may need any more


def weights_of(policy: Policy) -> int:
    """The version whose weights a policy is made of: its own, or that of the policy that it is an adapter of."""
    return policy.version if policy.base is None else int(policy.base["version"])


def whole(policy: Policy) -> Policy:
    """The policy with weights of its own: itself, or of an adapter the model that it makes of its base.

    That is in a folder of its own, made on the first call and kept for the next. Raises PolicyError.
    """
    if policy.base is None:
        return policy
    policy.require_whole()
    base = base_of(policy)
    made_of = {"adapter": policy.sha256, "base": base.sha256}
    place = policy.path.parent / MERGED
    folder = place / policy.path.name
    make_folder(place)
    with locked(place / ".lock", MERGE_S):
        record = read_json(kept := place / f"{folder.name}.json")
        if record is None or record["made_of"] != made_of or not _as_long(folder, record["files"]):
            shutil.rmtree(folder, ignore_errors=True)
            record = {"made_of": made_of, "files": _merge(policy, base, folder)}
            write_json(kept, record)
            _drop_old(place, kept)
        kept.touch()
    return replace(policy, path=folder, files=record["files"], base=None)


def base_of(policy: Policy) -> Policy:
    """The policy whose weights an adapter is of, whole. Raises PolicyError, PolicyCorrupt if it is another one now."""
    assert policy.base is not None
    base = PolicyStore(policy.path.parent).get(policy.base["version"])
    base.require_whole()
    if base.sha256 != policy.base["sha256"]:
        raise PolicyCorrupt(
            f"policy {policy.version} is an adapter of policy {base.version} with sha256 "
            f"{policy.base['sha256'][:12]}…, and that has {base.sha256[:12]}…"
        )
    return base


def _merge(policy: Policy, base: Policy, folder: Path) -> dict[str, dict[str, Any]]:
    """Make the whole model in ``folder``; its files as a manifest has them."""
    aside = folder.with_name(f".{folder.name}-{uuid.uuid4().hex}")
    for dead in folder.parent.glob(f".{folder.name}-*"):  # the lock is ours
        shutil.rmtree(dead)
    aside.mkdir()
    for name in policy.files:
        if name not in (ADAPTER_CONFIG, ADAPTER_WEIGHTS):
            (aside / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(policy.path / name, aside / name)
    for name in base.files:
        if name.endswith(".safetensors.index.json"):
            shutil.copyfile(base.path / name, aside / name)
    write_merged(base.weight_files, policy.path, aside)
    files = {
        path.relative_to(aside).as_posix(): {"sha256": sha256_file(path), "size": path.stat().st_size}
        for path in sorted(aside.rglob("*"))
        if path.is_file()
    }
    fsync_tree(aside)
    aside.rename(folder)
    return files


def _as_long(folder: Path, files: dict[str, dict[str, Any]]) -> bool:
    with suppress(OSError):
        return all((folder / name).stat().st_size == of["size"] for name, of in files.items())
    return False


def _drop_old(place: Path, newest: Path) -> None:
    """Keep the last few. Who reads another one at this moment has it open, or makes it again."""
    others = sorted(place.glob("v*.json"), key=lambda record: record.stat().st_mtime)
    others.remove(newest)
    for record in others[: max(0, len(others) + 1 - _KEPT)]:
        record.unlink()
        shutil.rmtree(record.with_suffix(""), ignore_errors=True)
