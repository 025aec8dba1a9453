"""Starts a program that nobody trusts, cut off from this machine. Run as a script, by ``sandbox``; Linux alone.

It makes namespaces of its own (mounts, network, processes, IPC, host name; as an ordinary user also of users), a file
system in memory with the system's and Python's folders read-only in it and nothing else, drops all privileges, sets
limits, takes away the system calls that reach past all of these (``_FORBIDDEN``), and has the program run as process 2.
Process 1 ends when the program does, and the kernel then ends all others.

Whoever starts it writes to its standard input the length of a JSON object, a line feed, the object, and then the
program's own input. The object: ``command``, ``files`` (name: text, in the program's folder), ``limits``, ``readable``
(paths). It exits with the program's code, or 128 and the signal; where it can't cut the program off, it says why on
the pipe whose number is its argument, and exits with ``REFUSAL``. The program doesn't have that pipe.
"""

import contextlib
import ctypes
import json
import os
import platform
import resource
import select
import signal
import stat
import struct
import sys

REFUSAL = 113

_NEWNS, _NEWUTS, _NEWIPC, _NEWUSER, _NEWPID, _NEWNET = (
    0x00020000,
    0x04000000,
    0x08000000,
    0x10000000,
    0x20000000,
    0x40000000,
)
_RDONLY, _NOSUID, _NODEV, _REMOUNT, _BIND, _REC, _PRIVATE = 1, 2, 4, 32, 4096, 16384, 1 << 18
_DETACH = 2
_PDEATHSIG, _SECCOMP, _NO_NEW_PRIVS = 1, 22, 38
_FILTER = 2
_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
_FIRST_USER = 0x70000000
"""Users from here on belong to nobody: each program has one of its own, so that its processes are counted alone."""
_HOME = "/program"
_ROOT = "/tmp"  # of this machine: in our own mounts, the new root hides it

_FORBIDDEN = {
    "x86_64": (
        *(165, 166, 155, 161, 308, 272),  # mount, umount2, pivot_root, chroot, setns, unshare
        *(319, 29, 68, 64, 240),  # memory that is no process' own: memfd_create, shmget, msgget, semget, mq_open
        *(248, 249, 250),  # keys of the user that trains: add_key, request_key, keyctl
        *(101, 310, 311, 312),  # other processes' memory: ptrace, process_vm_readv, process_vm_writev, kcmp
        *(298, 321, 323, 304),  # perf_event_open, bpf, userfaultfd, open_by_handle_at
    ),
    "aarch64": (
        *(40, 39, 41, 51, 268, 97),
        *(279, 194, 186, 190, 180),
        *(217, 218, 219),
        *(117, 270, 271, 272),
        *(241, 280, 282, 265),
    ),
}
"""System calls that reach past namespaces and limits, by their numbers."""
_FORBIDDEN_ANYWHERE = (
    *(428, 429, 430, 431, 432, 433, 442),  # open_tree, move_mount, fsopen, fsconfig, fsmount, fspick, mount_setattr
    *(425, 426, 427, 438, 447),  # io_uring_setup, io_uring_enter, io_uring_register, pidfd_getfd, memfd_secret
)
_ARCHITECTURE = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_CLONE = {"x86_64": 56, "aarch64": 220}
_CLONE3 = 435
_SOCKET = {"x86_64": 41, "aarch64": 198}
_FAMILIES = (1, 2, 10, 16)  # Unix, IPv4, IPv6, netlink: the others know no network namespace, as VM sockets don't
_NEW_NAMESPACE = 0x7E020000

_libc = ctypes.CDLL(None, use_errno=True)


def main() -> None:
    refusals = int(sys.argv[1])
    os.set_inheritable(refusals, False)
    spec = _read_spec()
    _prctl(_PDEATHSIG, signal.SIGKILL)
    user = _FIRST_USER + os.getpid()
    try:
        _isolate()
        _make_root(spec, user)
        alive, held = os.pipe()
        if not (first := os.fork()):
            os.close(held)
            _run_as_first(spec, user, alive, refusals)
    except (OSError, KeyError) as error:  # in process 1 as well
        _refuse(refusals, f"{type(error).__name__}: {error}")
    os.close(alive)
    os._exit(_code(os.waitpid(first, 0)[1]))


def _read_spec() -> dict:
    length = b""
    while not length.endswith(b"\n"):
        length += _exactly(1)
    return json.loads(_exactly(int(length)))


def _exactly(count: int) -> bytes:
    found = b""
    while len(found) < count:
        if not (more := os.read(0, count - len(found))):
            os._exit(REFUSAL)  # whoever started it has gone
        found += more
    return found


def _isolate() -> None:
    kinds = _NEWNS | _NEWNET | _NEWPID | _NEWIPC | _NEWUTS
    if os.geteuid() == 0:
        _call("unshare", kinds)
        return
    user, group = os.geteuid(), os.getegid()
    _call("unshare", kinds | _NEWUSER)
    # Inside it is no root: what it executes loses all privileges over the namespaces.
    for name, text in (("setgroups", "deny"), ("uid_map", f"1000 {user} 1"), ("gid_map", f"1000 {group} 1")):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)


def _make_root(spec: dict, user: int) -> None:
    """A file system in memory, of which the program can write to its folder and /tmp."""
    limits = spec["limits"]
    sources = {path: os.open(path, os.O_PATH) for path in spec["readable"] if not os.path.islink(path)}
    links = {path: os.readlink(path) for path in spec["readable"] if os.path.islink(path)}
    devices = {path: os.open(path, os.O_PATH) for path in ("/dev/null", "/dev/zero", "/dev/urandom")}
    _mount("none", "/", None, _REC | _PRIVATE)
    options = f"size={limits['disk_bytes']},nr_inodes={limits['files']},mode=755"
    _mount("tmpfs", _ROOT, "tmpfs", _NOSUID | _NODEV, options)
    for path, target in links.items():
        os.makedirs(os.path.dirname(f"{_ROOT}{path}"), exist_ok=True)
        os.symlink(target, f"{_ROOT}{path}")
    for path, file in sources.items():
        _bind(file, f"{_ROOT}{path}")
    for place in _mounts_below(_ROOT):
        flags = os.statvfs(place).f_flag & ~1  # an ordinary user may not take any of them away
        _mount("none", place, None, _BIND | _REMOUNT | _RDONLY | _NOSUID | _NODEV | flags & 0x1C0A)
    for path, file in devices.items():
        _bind(file, f"{_ROOT}{path}")
    for folder in (_HOME, "/tmp"):
        os.makedirs(f"{_ROOT}{folder}", exist_ok=True)  # Python itself may be below it
    for name, text in spec["files"].items():
        with open(f"{_ROOT}{_HOME}/{name}", "w") as out:
            out.write(text)
    if os.geteuid() == 0:
        for path in (_HOME, "/tmp", *(f"{_HOME}/{name}" for name in spec["files"])):
            os.chown(f"{_ROOT}{path}", user, user)
    for file in (*sources.values(), *devices.values()):
        os.close(file)
    os.chdir(_ROOT)
    _call("syscall", _PIVOT_ROOT[platform.machine()], b".", b".")
    _call("umount2", b".", _DETACH)
    os.chdir(_HOME)


def _run_as_first(spec: dict, user: int, alive: int, refusals: int) -> None:
    """Process 1: starts the program, waits for it, and reaps what is left behind meanwhile."""
    _prctl(_PDEATHSIG, signal.SIGKILL)
    if select.select([alive], [], [], 0)[0]:  # its parent had ended before
        os._exit(REFUSAL)
    os.close(alive)
    program = os.fork()
    if not program:
        _execute(spec, user, refusals)
    while True:
        with contextlib.suppress(InterruptedError):
            process, status = os.wait()
            if process == program:
                os._exit(_code(status))


def _execute(spec: dict, user: int, refusals: int) -> None:
    limits = spec["limits"]
    try:
        for kind, most in (
            (resource.RLIMIT_AS, limits["memory_bytes"]),
            (resource.RLIMIT_CPU, limits["cpu_seconds"]),
            (resource.RLIMIT_FSIZE, limits["disk_bytes"]),
            (resource.RLIMIT_NOFILE, limits["open_files"]),
            (resource.RLIMIT_CORE, 0),
            # As an ordinary user process 1 and its parent count too.
            (resource.RLIMIT_NPROC, limits["processes"] + (0 if os.geteuid() == 0 else 2)),
        ):
            resource.setrlimit(kind, (most, most))
        if os.geteuid() == 0:
            os.setgroups([])
            os.setresgid(user, user, user)
            os.setresuid(user, user, user)
        _prctl(_NO_NEW_PRIVS, 1)
        _filter_system_calls()
        environment = {"PATH": "/usr/bin:/bin", "HOME": _HOME, "LANG": "C.UTF-8", "PYTHONDONTWRITEBYTECODE": "1"}
        os.execve(spec["command"][0], spec["command"], environment)
    except OSError as error:
        _refuse(refusals, f"{spec['command'][0]}: {error}")


def _refuse(refusals: int, why: object) -> None:
    os.write(refusals, str(why).encode())
    os._exit(REFUSAL)


def _filter_system_calls() -> None:
    """Have the kernel refuse what ``_FORBIDDEN`` names, sockets of other families, and new namespaces (seccomp)."""
    machine = platform.machine()
    load, equal, at_least, any_bit, end = 0x20, 0x15, 0x35, 0x45, 0x06
    number, architecture, first_argument = 0, 4, 16  # where struct seccomp_data has them
    refused, no_such_call, no_such_family, killed, allowed = 0x50001, 0x50026, 0x50061, 0x80000000, 0x7FFF0000
    code = [(load, 0, 0, architecture), (equal, 1, 0, _ARCHITECTURE[machine]), (end, 0, 0, killed)]
    code += [(load, 0, 0, number), (at_least, 0, 1, 0x40000000), (end, 0, 0, refused)]  # x32, with numbers of its own
    for call in (*_FORBIDDEN[machine], *_FORBIDDEN_ANYWHERE):
        code += [(equal, 0, 1, call), (end, 0, 0, refused)]
    code += [(equal, 0, 1, _CLONE3), (end, 0, 0, no_such_call)]  # its flags are in memory; libc then uses clone
    code += [(equal, 0, 4, _CLONE[machine]), (load, 0, 0, first_argument)]
    code += [(any_bit, 0, 1, _NEW_NAMESPACE), (end, 0, 0, refused), (load, 0, 0, number)]
    code += [(equal, 0, 2 + len(_FAMILIES), _SOCKET[machine]), (load, 0, 0, first_argument)]
    code += [(equal, len(_FAMILIES) - i, 0, family) for i, family in enumerate(_FAMILIES)]
    code += [(end, 0, 0, no_such_family), (end, 0, 0, allowed)]
    lines = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *line) for line in code))
    program = ctypes.create_string_buffer(struct.pack("HP", len(code), ctypes.addressof(lines)))
    _prctl(_SECCOMP, _FILTER, ctypes.addressof(program))


def _bind(file: int, target: str) -> None:
    if stat.S_ISDIR(os.fstat(file).st_mode):
        os.makedirs(target, exist_ok=True)
    else:
        os.makedirs(os.path.dirname(target), exist_ok=True)
        with open(target, "w"):
            pass
    _mount(f"/proc/self/fd/{file}", target, None, _BIND | _REC)


def _mounts_below(folder: str) -> list[str]:
    """Where something is mounted in it, as what a readable folder has mounted below."""
    with open("/proc/self/mountinfo", "rb") as file:  # octal numbers stand for spaces and their like
        places = [line.split(b" ")[4].decode("unicode_escape").encode("latin-1") for line in file]
    return [os.fsdecode(place) for place in places if place.startswith(os.fsencode(folder) + b"/")]


def _mount(source: str, target: str, kind: str | None, flags: int, options: str = "") -> None:
    name = None if kind is None else kind.encode()
    _call("mount", source.encode(), target.encode(), name, flags, options.encode())


def _prctl(option: int, value: int, more: int = 0) -> None:
    _call("prctl", option, int(value), more, 0, 0)


def _call(name: str, *arguments: int | bytes | None) -> None:
    """A call of libc's. Raises OSError."""
    found = [ctypes.c_ulong(a) if isinstance(a, int) else ctypes.c_char_p(a) for a in arguments]
    if getattr(_libc, name)(*found) != 0:
        error = ctypes.get_errno()
        shown = b" ".join(a for a in arguments if isinstance(a, bytes)).decode()
        raise OSError(error, f"{name}: {os.strerror(error)} {shown}".strip())


def _code(status: int) -> int:
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    main()
