"""Is a policy what its manifest says, with no NaN in it? Answered by a process of its own at low priority.

``python -m serve.swap.verification STORE VERSION FINITE PARENT_PID MERGED`` reads every byte of the policy and prints
one JSON object: ``files``, or ``refused`` with the reason. MERGED 1: of an adapter, it makes the whole model first, and
its files are that one's. In the server's process, or the engine's, the same work would take the processor from
requests; and the pages that it read stay in the page cache, from where the engine takes them.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import threading
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Final

from feedback.processes.exit import end_with_parent
from serve.policies.folder import fingerprint
from serve.policies.store import PolicyError, PolicyStore, verify_files
from serve.policies.whole_policies import whole

_NICENESS: Final = 10  # about a tenth of a processor beside one busy thread: behind requests, and yet in time

Files = dict[str, dict[str, Any]]


class Refused(PolicyError):
    """The policy is not fit to serve; the text says why."""


async def verify(
    store: PolicyStore, version: int, *, check_finite: bool, timeout_s: float, merged: bool = True
) -> Files:
    """Read a policy whole; each of its weight files with its ``sha256`` and its ``fingerprint`` while it was read.

    ``merged``: of an adapter the files of the whole model (``serve.policies.whole_policies``), else its own.

    Where the folder is a copy, what is damaged in it is fetched anew first. Raises Refused, naming the file or the
    tensor, TimeoutError, and PolicyError if it can't be fetched.
    """
    result = await _read_apart(store, version, check_finite, timeout_s, merged)
    if "refused" in result and await asyncio.to_thread(store.repair, version):
        result = await _read_apart(store, version, check_finite, timeout_s, merged)
    if "refused" in result:
        raise Refused(result["refused"])
    files: Files = result["files"]
    return files


async def _read_apart(
    store: PolicyStore, version: int, check_finite: bool, timeout_s: float, merged: bool
) -> dict[str, Any]:
    """What the process that reads the policy prints."""
    output: Future[str] = Future()
    command = [
        sys.executable,
        "-P",
        "-m",
        "serve.swap.verification",
        str(store.root.absolute()),
        str(version),
        str(int(check_finite)),
        str(os.getpid()),
        str(int(merged)),
    ]
    thread = threading.Thread(target=_run, args=(command, timeout_s, output), name="verification", daemon=True)
    thread.start()
    text = await asyncio.wrap_future(output)
    result: dict[str, Any] = json.loads(text)
    return result


def main() -> None:
    end_with_parent(int(sys.argv[4]))
    root, version, check_finite, merged = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3] == "1", sys.argv[5] == "1"
    try:
        print(json.dumps({"files": read(PolicyStore(root), version, check_finite=check_finite, merged=merged)}))
    except (PolicyError, OSError) as error:
        print(json.dumps({"refused": str(error)}))


def read(store: PolicyStore, version: int, *, check_finite: bool, merged: bool = True) -> Files:
    """``verify``, in this process. Raises PolicyError."""
    from serve.swap.compatibility import require_finite

    policy = store.get(version)
    if policy.base is None or not merged:
        prints = {path.name: fingerprint(path) for path in policy.weight_files if path.exists()}
        policy = store.verify(version)
    else:
        for part in (version, policy.base["version"]):
            store.verify(part)
        policy = whole(policy)
        prints = {path.name: fingerprint(path) for path in policy.weight_files if path.exists()}
        verify_files(policy)
    if check_finite:
        require_finite(policy)
    return {
        path.name: {"sha256": policy.files[path.name]["sha256"], "fingerprint": prints[path.name]}
        for path in policy.weight_files
    }


def _run(command: list[str], timeout_s: float, output: Future[str]) -> None:
    """Run the process; from a thread, whose priority it inherits, and with which it would die."""
    output.set_running_or_notify_cancel()
    try:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)
        if done.returncode != 0:
            raise Refused(f"reading the policy ended with {done.returncode}: {done.stderr.strip()[-500:]}")
    except subprocess.TimeoutExpired:
        reason = f"the policy was not read within serve.swap.prepare_timeout_s ({timeout_s:g} s)"
        output.set_exception(TimeoutError(reason))
    except Exception as error:  # noqa: BLE001 - a thread's failure is the future's
        output.set_exception(error)
    else:
        output.set_result(done.stdout)


if __name__ == "__main__":
    main()
