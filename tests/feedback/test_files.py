"""Files written whole or not at all, and locks."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from feedback import files
from feedback.files import (
    LockTimeoutError,
    append_file,
    fsync_tree,
    link_or_copy,
    locked,
    replace_file,
    write_once,
)


def test_a_replaced_file_has_all_of_the_new_content_and_nothing_is_left_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    for content in (b"long content", b"short", b""):
        replace_file(path, content)
        assert path.read_bytes() == content
    assert list(tmp_path.iterdir()) == [path]


def test_a_tree_is_linked_where_it_can_be_and_copied_where_not(tmp_path: Path) -> None:
    source = tmp_path / "source"
    (source / "below").mkdir(parents=True)
    (source / "below/weights").write_bytes(b"weights")
    shutil.copytree(source, tmp_path / "linked", copy_function=link_or_copy)
    assert (tmp_path / "linked/below/weights").samefile(source / "below/weights")
    shutil.rmtree(source / "below")
    assert (tmp_path / "linked/below/weights").read_bytes() == b"weights"
    with pytest.raises(FileNotFoundError):
        link_or_copy(str(source / "gone"), str(tmp_path / "to"))
    with tempfile.TemporaryDirectory(dir="/dev/shm") as elsewhere:
        if os.stat(elsewhere).st_dev == tmp_path.stat().st_dev:
            pytest.skip("needs two file systems")
        shutil.copytree(tmp_path / "linked", Path(elsewhere) / "copy", copy_function=link_or_copy)
        assert (Path(elsewhere) / "copy/below/weights").read_bytes() == b"weights"


def test_a_file_that_can_t_be_written_keeps_its_content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "record.json"
    replace_file(path, b"old")

    def full(fd: int, data: bytes) -> None:
        os.write(fd, data[:1])
        raise OSError(28, "no space left on device")

    monkeypatch.setattr(files, "write_all", full)
    with pytest.raises(OSError, match="no space"):
        replace_file(path, b"new")
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_private_file_is_for_its_owner_only_also_where_others_could_read_the_old_one(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    path.write_bytes(b"open to all")
    path.chmod(0o644)
    replace_file(path, b"secret", private=True)
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_replaced_file_can_keep_its_time(tmp_path: Path) -> None:
    path = tmp_path / "commit.json"
    replace_file(path, b"redacted", modified_ns=1_500_000_000_123_456_789)
    assert path.stat().st_mtime_ns == 1_500_000_000_123_456_789


@pytest.mark.parametrize("durable", [True, False])
def test_a_durable_file_is_synced_before_it_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, durable: bool
) -> None:
    calls: list[str] = []
    for name in ("fsync", "replace"):
        real = getattr(os, name)
        monkeypatch.setattr(os, name, lambda *a, name=name, real=real: (calls.append(name), real(*a)))
    replace_file(tmp_path / "report.json", b"{}", durable=durable)
    assert calls == (["fsync", "replace", "fsync"] if durable else ["replace"])


def test_of_several_first_writers_the_first_one_s_content_stands(tmp_path: Path) -> None:
    path = tmp_path / "new" / "erasure.key"
    write_once(path, b"first")
    write_once(path, b"second")
    assert path.read_bytes() == b"first"
    assert list(path.parent.iterdir()) == [path]


def test_appended_lines_follow_each_other(tmp_path: Path) -> None:
    for line in (b"one\n", b"two\n"):
        append_file(tmp_path / "history.jsonl", line)
    assert (tmp_path / "history.jsonl").read_bytes() == b"one\ntwo\n"


def test_a_tree_is_synced_with_its_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "b" / "file").write_bytes(b"x")
    synced: list[Path] = []
    monkeypatch.setattr(files, "fsync_path", synced.append)
    fsync_tree(tmp_path)
    assert set(synced) == {tmp_path, tmp_path / "a", tmp_path / "a" / "b", tmp_path / "a" / "b" / "file"}


@pytest.mark.parametrize("name", ["", ".lock"])
def test_a_folder_or_a_file_is_locked_by_one_at_a_time_and_shared_by_many(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    with locked(path, 1), pytest.raises(LockTimeoutError, match="held this lock for 0 s"), locked(path, 0):
        pass
    with locked(path, 0, shared=True), locked(path, 0, shared=True), pytest.raises(LockTimeoutError), locked(path, 0):
        pass


def test_a_lock_file_is_its_owners_alone_also_one_that_others_could_open(tmp_path: Path) -> None:
    old = tmp_path / "old.lock"
    old.touch(0o644)
    for path in (old, tmp_path / "new.lock"):
        with locked(path, 1):
            assert path.stat().st_mode & 0o777 == 0o600


def test_a_lock_does_not_outlive_its_process_in_a_fork_that_leaves_it(tmp_path: Path) -> None:
    code = (
        "import os, sys, time\nfrom pathlib import Path\nfrom feedback import files\n"
        "with files.locked(Path(sys.argv[1]), 0):\n"
        "    if os.fork() == 0:\n"
        "        files.leave_locks()\n"
        "        print('left', flush=True)\n"
        "    time.sleep(600)\n"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "lock")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as holder:
        try:
            assert holder.stdout is not None
            assert holder.stdout.readline() == "left\n"
            assert files.is_locked(tmp_path / "lock")  # its own process holds it still
            holder.kill()
            holder.wait(180)
            with files.locked(tmp_path / "lock", 0):
                pass
        finally:
            os.killpg(holder.pid, signal.SIGKILL)
