"""Opens the policy store that the settings name: a folder, or a folder that is a copy of an object store."""

from __future__ import annotations

from pathlib import Path

from serve.config import PolicyStoreConfig
from serve.policies.store import PolicyStore


def open_store(root: Path, config: PolicyStoreConfig) -> PolicyStore:
    """The store in the folder ``root``. Raises PolicyError if an object store is set, and its address can't work."""
    if config.uri is None:
        return PolicyStore(root)
    from serve.policies.shared import SharedPolicyStore  # obstore is loaded where it is used

    return SharedPolicyStore(root, config)
