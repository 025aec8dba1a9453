"""Which versions' weights are kept, and the removal of the others'. Manifests stay: lineage can always be told."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from typing import Any, Final

from serve.config import RetentionConfig
from serve.policies.records import read_json
from serve.policies.store import Policy, PolicyError, PolicyStore

Needed = Callable[[], Mapping[int, str]]
"""Version -> why it is needed by what this package does not know of, such as runs."""

_FLEET: Final = "fleet.json"  # serve.fleet.state


@dataclass(frozen=True)
class Kept:
    """A store, and what decides which of its versions keep their weights.

    ``needed``: what is needed beside that. ``rewards``: they are reward models, of which none is trained from another.
    """

    store: PolicyStore
    config: RetentionConfig
    needed: Needed = dict
    rewards: bool = False

    def reasons(self) -> dict[int, str]:
        """Version -> why its weights are kept, for each that has them and whose weights are.

        Raises PolicyError where a record can't be read that says what serves or has served: then nothing may go.
        """
        store, config = self.store, self.config
        found = [policy for policy in map(store.get, store.versions()) if policy.pruned is None]
        if config.keep_last is None:
            return {policy.version: "all are: keep_last is null" for policy in found}
        reasons: dict[int, str] = dict(self.needed())
        newest = {policy.version for policy in found[-config.keep_last :]}
        pointer, served = store.serving(), _served_since(store, timedelta(days=config.served_days))
        fleet = _versions_in(read_json(store.root / _FLEET))
        experiment = None if self.rewards else store.experiments.current()
        tried = () if experiment is None else (experiment.candidate, experiment.control)
        clean = untouched = None
        if pointer is not None and not self.rewards:
            clean, untouched = retraining_parent(store, pointer.version), untouched_ancestor(store, pointer.version)
        serves, did = ("rewards", "rewarded") if self.rewards else ("serves", "served")
        trained_from = {policy.parent for policy in found}
        for policy in found:
            version = policy.version
            for holds, reason in (
                (pointer is not None and version == pointer.version, f"it {serves}"),
                (pointer is not None and version == pointer.previous, f"it {did} before what {serves} now"),
                (clean is not None and version == clean.version, "the next training starts from it"),
                (untouched is not None and version == untouched.version, "no erasure can mark it"),
                (version in fleet, "the fleet serves it or is moved to it"),
                (version in tried, "it is in an experiment"),
                (policy.pinned is not None, f"pinned: {(policy.pinned or {}).get('why')}"),
                (self._waits(policy, pointer.version if pointer else 0, trained_from), "a candidate"),
                (version in newest, f"one of the last {config.keep_last}"),
                (version in served, f"it {did} in the last {config.served_days:g} days"),
            ):
                if holds:
                    reasons.setdefault(version, reason)
        for policy in found:
            if policy.base is not None and policy.version in reasons:
                reasons.setdefault(policy.base["version"], f"policy {policy.version} is an adapter of it")
        there = {policy.version for policy in found}
        return {version: reason for version, reason in reasons.items() if version in there}

    def prune(self) -> tuple[list[Policy], dict[int, str]]:
        """Remove the weights of all others: (those versions, and why some that would go are still there).

        Each is looked at anew under the store's lock, as the pointer may have moved to it meanwhile. What a killed
        call had begun is finished.
        """
        store, stay = self.store, self.reasons()
        removed, left = [], {}
        for version in store.versions():
            policy = store.get(version)
            begun = policy.pruned is not None and any(path.exists() for path in policy.weight_files)
            if version in stay or (policy.pruned is not None and not begun):
                continue
            reason = store.prune(version, "retention", self.reasons)
            if reason is None:
                removed.append(store.get(version))
            else:
                left[version] = reason
        return removed, left

    def _waits(self, policy: Policy, serving: int, trained_from: Collection[int | None]) -> bool:
        """Whether it is newer than what serves, and may yet be judged or promoted."""
        if self.rewards:  # its run has judged it, and has yet to have it reward
            return policy.version > serving and bool(policy.metrics.get("keep"))
        if policy.gate is None:  # one that another was trained from is a stage of a recipe
            return policy.version > serving and policy.version not in trained_from
        return policy.version > serving and policy.gate.get("verdict") in ("pass", "undecided")


def retraining_parent(store: PolicyStore, version: int) -> Policy | None:
    """What to train from where a policy serves: that, unless it or one that it descends from is marked for retraining.

    Then it is the nearest ancestor that has its weights and no mark in its line; or, better, the last of those that
    were trained from that one since, each of which has passed the gate against the one before. None if there is none.

    Raises PolicyError if the policy itself can't be had.
    """
    clean = _line_without(store, version, lambda policy: policy.marked)
    for ancestor in clean:
        line = [ancestor]
        for later in store.versions() if clean[0].version != version else ():
            with suppress(PolicyError):  # withdrawn meanwhile, or damaged
                policy, last = store.get(later), line[-1].version
                gate = policy.gate or {}
                passed = gate.get("incumbent") == last and gate["verdict"] == "pass" and not policy.marked
                if passed and _trained_from(store, policy, last):
                    line.append(policy)
        for policy in reversed(line):
            if policy.pruned is None:
                return policy
    return None


def in_marked_line(store: PolicyStore, version: int) -> bool:
    """Whether a policy, or one that it descends from, is marked for retraining. Raises PolicyError as above."""
    clean = _line_without(store, version, lambda policy: policy.marked)
    return not clean or clean[0].version != version


def _trained_from(store: PolicyStore, policy: Policy, ancestor: int) -> bool:
    """Whether its line leads to an ancestor over nothing but unmarked stages of a recipe, which no gate has judged."""
    while policy.parent is not None and policy.parent > ancestor:
        policy = store.get(policy.parent)
        if policy.marked or policy.gate is not None:
            return False
    return policy.parent == ancestor


def untouched_ancestor(store: PolicyStore, version: int) -> Policy | None:
    """A policy itself or its nearest ancestor, with its weights, in whose line nobody was trained on rows of the lake.

    No erasure can ever mark it: that is the model which the line began with. While its weights are there, an erasure
    that marks all else leaves something to train from, whatever was pruned before.
    """
    line = _line_without(store, version, lambda policy: policy.lineage.get("lake_versions") is not None)
    return next((policy for policy in line if policy.pruned is None), None)


def _line_without(store: PolicyStore, version: int, touched: Callable[[Policy], bool]) -> list[Policy]:
    """Of a policy and its ancestors, newest first, those that neither are ``touched`` nor descend from one that is.

    The line ends where a folder was removed or its manifest can't be read.
    """
    policy: Policy | None = store.get(version)
    clean: list[Policy] = []
    while policy is not None:
        clean = [] if touched(policy) else [*clean, policy]
        try:
            policy = None if policy.parent is None else store.get(policy.parent)
        except PolicyError:
            break
    return clean


def weights_bytes(policy: Policy) -> int:
    """The size of a policy's weights, by its manifest."""
    return sum(int(policy.files[path.name]["size"]) for path in policy.weight_files)


def _served_since(store: PolicyStore, ago: timedelta) -> set[int]:
    """What the pointer has named within that time, but does no more. Raises RecordDamaged."""
    since, history = datetime.now(UTC) - ago, store.history()
    ended = [(pointer.version, datetime.fromisoformat(after.at)) for pointer, after in pairwise(history)]
    return {version for version, end in ended if end >= since}


def _versions_in(record: Any) -> set[int]:
    """All policies that the fleet's record names, serving or on their way."""
    if isinstance(record, dict):
        own = {record[name] for name in ("version", "previous") if isinstance(record.get(name), int)}
        return own.union(*map(_versions_in, record.values()))
    return set().union(*map(_versions_in, record)) if isinstance(record, list) else set()
