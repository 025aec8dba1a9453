"""The processes of a command: all of them, what they listen on, and signals to all at once."""

from __future__ import annotations

import ipaddress
import signal
from collections.abc import Iterable
from contextlib import suppress

import psutil


def tree(pid: int) -> list[psutil.Process]:
    """The process and all below it."""
    top = psutil.Process(pid)
    return [top, *top.children(recursive=True)]


def send_to_all(processes: Iterable[psutil.Process], number: signal.Signals) -> None:
    """As a service manager stops a service, and a terminal what is in its foreground."""
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.send_signal(number)


def exposed(processes: Iterable[psutil.Process]) -> dict[str, str]:
    """What of them listens where other machines reach it: "name:port" to the address."""
    found = {}
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            for connection in process.net_connections(kind="tcp"):
                address = ipaddress.ip_address(connection.laddr.ip)
                address = getattr(address, "ipv4_mapped", None) or address
                if connection.status == psutil.CONN_LISTEN and not address.is_loopback:
                    found[f"{process.name()}:{connection.laddr.port}"] = str(address)
    return found


def left_of(processes: Iterable[psutil.Process], timeout: float = 20) -> list[str]:
    """Which of them still run, when they have had their time."""
    _, left = psutil.wait_procs(list(processes), timeout=timeout)
    return [process.name() for process in left if process.is_running() and process.status() != psutil.STATUS_ZOMBIE]
