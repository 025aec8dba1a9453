"""Which of a machine's devices the server, training and evaluation have: their own, or the same ones in turns.

Plain arithmetic over numbers of devices. Whether what runs on them fits into their memory is ``check``'s to say.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Final, Literal

from train.planner.sizes import GIB

Role = Literal["serve", "train", "evaluate"]
Use = Literal["auto", "own", "in_turns"]

ASLEEP: Final = GIB
"""Bytes of a device that a server's engine keeps while it sleeps: its CUDA context, graphs and buffers of collectives.
An estimate."""

_NAMES: Final[dict[Role, str]] = {"serve": "the server", "train": "training", "evaluate": "evaluation"}


class CannotAssign(ValueError):
    """The devices don't do for all roles; the text says for which, and what would."""


@dataclass(frozen=True)
class Need:
    """The devices that a role needs at once. ``count``: how many, 0 if it runs elsewhere; ``by``: the setting that says
    so; ``chosen``: their numbers, if somebody has chosen them."""

    count: int
    by: str
    chosen: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Assignment:
    """The devices of each role, by number; none: it is assigned none, and sees all that there are.

    ``waits_for``: the roles that the server shares devices with, and sleeps for while they work.
    """

    serve: tuple[int, ...]
    train: tuple[int, ...]
    evaluate: tuple[int, ...]
    waits_for: tuple[Role, ...] = ()

    @property
    def in_turns(self) -> bool:
        """Whether the server is to sleep now and then."""
        return bool(self.waits_for)

    def of(self, role: Role) -> tuple[int, ...]:
        return {"serve": self.serve, "train": self.train, "evaluate": self.evaluate}[role]

    def __str__(self) -> str:
        roles: list[Role] = ["serve", "train", "evaluate"]
        named = [f"{_NAMES[role]} has {devices_text(self.of(role))}" for role in roles if self.of(role)]
        turns = f"the server sleeps while {' or '.join(_NAMES[role] for role in self.waits_for)} works"
        return "; ".join(filter(None, [", ".join(named), turns if self.in_turns else ""]))


def devices_text(devices: Sequence[int]) -> str:
    """``device 0``, ``devices 1, 2 and 5``, ``devices 0 to 7``."""
    if len(devices) == 1:
        return f"device {devices[0]}"
    if len(devices) > 2 and list(devices) == list(range(devices[0], devices[-1] + 1)):
        return f"devices {devices[0]} to {devices[-1]}"
    return f"devices {', '.join(map(str, devices[:-1]))} and {devices[-1]}"


def assign(devices: int | None, serve: Need, train: Need, evaluate: Need, use: Use = "auto") -> Assignment:
    """Deal out the devices of a machine, numbered from 0.

    What is chosen stays. Else the server has the first devices, training those behind them, and evaluation, which never
    works beside a cycle's training, others where there are some left, or training's. Where they don't suffice for all,
    training and evaluation share devices with the server, which then sleeps meanwhile (``auto``); or it is refused
    (``own``). With ``in_turns`` they share as many as they can.

    Args:
        devices: how many there are; None if that isn't known, as on a CPU: only what is chosen is assigned then.

    Raises:
        CannotAssign: a role needs more than there are, or has chosen too few or what there is not; or ``use`` can't be.
    """
    needs: dict[Role, Need] = {"serve": serve, "train": train, "evaluate": evaluate}
    for role, need in needs.items():
        _require_possible(role, need, devices)
    found = _picked(needs, devices, share=use == "in_turns")
    others: list[Role] = [role for role in ("train", "evaluate") if serve.count and needs[role].count]
    shared = {role: set(found["serve"]) & set(found[role]) for role in others}
    waits_for = tuple(role for role in others if shared[role])
    if use == "own" and waits_for:
        raise CannotAssign(_too_few(needs, devices, set().union(*shared.values())))
    if use == "in_turns":
        unknown = tuple(role for role in others if not (found["serve"] and found[role]))
        waits_for = tuple(role for role in others if role in waits_for + unknown)
        if not waits_for:
            raise CannotAssign(
                "devices.use=in_turns, and the server shares none with training or evaluation, so that nobody has to "
                "wait: set devices.use=own"
            )
    return Assignment(found["serve"], found["train"], found["evaluate"], waits_for)


def _require_possible(role: Role, need: Need, devices: int | None) -> None:
    name = _NAMES[role]
    if devices is not None and need.count > devices:
        there = "there is 1" if devices == 1 else f"there are {devices}"
        raise CannotAssign(
            f"{name} needs {need.count} devices ({need.by}), and {there}: lower {need.by}, or use a machine with more"
        )
    if need.chosen is None:
        return
    setting = f"devices.{role}"
    if devices is not None and (absent := [number for number in need.chosen if number >= devices]):
        raise CannotAssign(
            f"{setting} names {devices_text(absent)}, and this machine has "
            f"{f'devices 0 to {devices - 1}' if devices > 1 else 'device 0 alone' if devices else 'none'}"
        )
    if len(need.chosen) < need.count and devices is not None:
        raise CannotAssign(
            f"{setting} has {devices_text(need.chosen)}, and {name} needs {need.count} devices ({need.by}): name more, "
            f"or lower {need.by}"
        )


def _picked(needs: dict[Role, Need], devices: int | None, *, share: bool) -> dict[Role, tuple[int, ...]]:
    chosen = {role: need.chosen for role, need in needs.items() if need.chosen is not None and need.count}
    found: dict[Role, tuple[int, ...]] = dict.fromkeys(needs, ())
    found.update(chosen)
    if devices is None:
        return found
    every = range(devices)

    def pick(role: Role, *avoided: Collection[int]) -> None:
        """Devices of none of these groups first; of those of the first group, which is shared, the last ones first."""
        if role in chosen:
            return

        def rank(number: int) -> tuple[list[bool], int]:
            within = [number in group for group in avoided]
            return within, -number if any(within[:1]) else number

        found[role] = tuple(sorted(sorted(every, key=rank)[: needs[role].count]))

    of_others = set(chain(*chosen.values()))
    if share:
        for role in needs:
            pick(role, *([set(every) - of_others] if of_others else []))
        return found
    pick("serve", of_others)
    pick("train", found["serve"])
    left = set(every) - set(found["serve"]) - set(found["train"])
    if len(left) >= needs["evaluate"].count:
        pick("evaluate", found["serve"], found["train"])
    else:
        pick("evaluate", found["serve"], set(every) - set(found["train"]))
    return found


def _too_few(needs: dict[Role, Need], devices: int | None, shared: set[int]) -> str:
    if devices is None or all(need.chosen is not None for need in needs.values() if need.count):
        return (
            f"devices.use=own, and the server shares {devices_text(sorted(shared))} with training or evaluation: name "
            "others, or set devices.use=in_turns, and the server sleeps while they work"
        )
    counts = ", ".join(f"{_NAMES[role]} {need.count} ({need.by})" for role, need in needs.items() if need.count)
    left = devices - needs["serve"].count
    fewer = [need.by for role, need in needs.items() if role != "serve" and need.count > left]
    lower = f"lower {' and '.join(dict.fromkeys(fewer))} to {left}, " if left > 0 and fewer else ""
    return (
        f"devices.use=own, and {devices} devices are too few for each to have its own: {counts}; {lower}use a machine "
        "with more, or set devices.use=in_turns, and the server sleeps while the others work"
    )
