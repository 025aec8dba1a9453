"""Machines by their rates: presets, ``8x80GB`` and ``8xH100`` as text, or a YAML file of one's own."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Final

import yaml

from serve.kv_cache import machine_memory, swap_memory
from train.planner.sizes import GIB


class MachineUnknown(ValueError):
    """The machine's description can't be read; the text says what is wrong, and what would do."""


@dataclass(frozen=True)
class Machine:
    """Devices of one kind; every rate is of one device, in a second.

    ``memory``: bytes that a process finds; ``swap``: that a CPU's may be swapped to. ``reserved``: of memory, what the
    driver, its context and collectives take. ``fragmentation``: share of a device's memory that its allocator can't
    hand out. ``flops``: of matrix products in bfloat16, at the peak. ``bandwidth``: bytes of its memory. ``link``:
    bytes that it sends to others of its node; ``network``: to other nodes; ``host``: to the host's memory;
    ``host_memory``: of the host's memory, its share; ``host_capacity``: bytes that a node has of it, where that is
    known. ``flops_share``, ``bandwidth_share``, ``link_share``: of those peaks that is reached. ``float32_share``: of
    the flops, in float32. ``fp8_gain``: times those of bfloat16, of linear layers in fp8, casts and scales included; 1
    where the device has none. ``layer_s``: the least that a decoder layer takes to generate a token, as its kernels are
    started one by one; ``graph_layer_s``: where CUDA graphs start them. Of a CPU, where the shares have none of it:
    ``parameter_s``: what a matrix product takes for a parameter of its weight, whatever the rows; ``operation_s``: what
    an operation takes, whatever its size; ``touched``: bytes that operations element by element read and write;
    ``unit_s``: what FSDP takes to gather or reduce a layer, whatever its size; ``wait_s``: what a collective within a
    layer takes, whatever its size; ``again_share``: what checkpointing
    takes to compute a forward pass again, over that pass.
    """

    name: str
    devices: int
    memory: int
    flops: float
    bandwidth: float
    link: float
    network: float
    host: float
    host_memory: float = 25e9
    host_capacity: float = math.inf
    node_devices: int = 8
    reserved: int = int(1.5 * GIB)
    fragmentation: float = 0.05
    flops_share: float = 0.45
    bandwidth_share: float = 0.7
    link_share: float = 0.7
    float32_share: float = 0.5
    fp8_gain: float = 1.0
    layer_s: float = 3e-4
    graph_layer_s: float = 5e-5
    kind: str = "cuda"
    swap: int = 0
    parameter_s: float = 0.0
    operation_s: float = 0.0
    touched: float = math.inf
    unit_s: float = 0.0
    wait_s: float = 0.0
    again_share: float = 1.0

    @property
    def usable(self) -> int:
        """Bytes that a plan may fill on a device."""
        return int(self.memory * (1 - self.fragmentation)) - self.reserved

    def slowest_link(self, ranks: int) -> float:
        """Bytes a second of a collective over so many ranks: one that crosses nodes is as fast as the network."""
        return self.link_share * (self.link if ranks <= self.node_devices else min(self.link, self.network))

    def matrix_flops(self, itemsize: int) -> float:
        """Floating-point operations a second that training reaches."""
        return self.flops * self.flops_share * (self.float32_share if itemsize == 4 else 1)


def this_cpu(ranks: int) -> Machine:
    """This machine's memory in as many parts. Rates are a preset's, and mean nothing."""
    parts = {"memory": machine_memory() // ranks, "swap": swap_memory() // ranks}
    return replace(PRESETS["A100"], name="this CPU", devices=ranks, kind="cpu", **parts)


# NVIDIA's data sheets: A100 80GB SXM (2021), H100 SXM and H200 SXM (2024); dense bfloat16. NVLink both ways is twice
# ``link``. ``network``: the InfiniBand of a DGX A100 (8 × 200 Gbit/s) and DGX H100 (8 × 400 Gbit/s). ``host``: PCIe 4
# and 5, 16 lanes. ``host_memory``: an eighth of two sockets' some 200 GB/s. Memory as torch reports it. The shares are
# what published runs reach (utilisation of 40 to 50 % in PaLM, arXiv 2204.02311, and MegaScale, arXiv 2402.15627), not
# measured here. In fp8 Hopper's peak is twice that in bfloat16; torchao's documentation reports whole steps of training
# that are 1.25 (8B, 8 GPUs) to 1.5 times as fast (405B, 512 GPUs), of which layers' products are the most.
PRESETS: Final = {
    "A100": Machine("A100-80", 1, int(79.2 * GIB), 312e12, 2.04e12, 300e9, 25e9, 25e9),
    "H100": Machine("H100-80", 1, int(79.1 * GIB), 989e12, 3.35e12, 450e9, 50e9, 50e9, fp8_gain=1.4),
    "H200": Machine("H200", 1, int(139.8 * GIB), 989e12, 4.8e12, 450e9, 50e9, 50e9, fp8_gain=1.4),
}
_EXAMPLES: Final = "8x80GB, 8xA100, 8xH100, 4xH200 or cpu"


def machine_of_gpus(name: str, devices: int, memory: int) -> Machine:
    """Devices of a name that the driver gives them, each with so much memory: a preset's rates, or else an A100's."""
    like = next((known for known in PRESETS if known in name.upper()), "")
    named = f"{like} {memory / GIB:.0f}GB".strip()
    return replace(PRESETS[like or "A100"], name=named, devices=devices, memory=memory)


def parse_gpus(text: str) -> Machine:
    """``8x80GB``: devices with so much memory and an A100's rates; ``8xH100``: a preset.

    Raises:
        MachineUnknown: it is neither.
    """
    found = re.fullmatch(r"(\d+)\s*[x×*]\s*(?:(\d+(?:\.\d+)?)\s*G(?:i?B)?|([A-Z]\w*?)(?:-80)?)", text.strip(), re.I)
    if found is None or int(found[1]) < 1 or (found[3] and found[3].upper() not in PRESETS):
        raise MachineUnknown(f"--gpus {text}: no such machine; write {_EXAMPLES}, or describe one with --machine FILE")
    if found[3]:
        return replace(PRESETS[found[3].upper()], devices=int(found[1]))
    memory = int(float(found[2]) * 0.985 * GIB)  # what the driver leaves of it
    if memory <= PRESETS["A100"].reserved * 2:
        raise MachineUnknown(f"--gpus {text}: {found[2]} GB are too few for anything; write {_EXAMPLES}")
    return replace(PRESETS["A100"], name=f"{found[2]}GB", devices=int(found[1]), memory=memory)


def better_presets(machine: Machine) -> list[Machine]:
    """As many devices of the presets that are quicker at something and worse at nothing, the next better one first.

    That one has a hundredth less memory than another counts for nothing.
    """
    return [
        replace(
            preset,
            devices=machine.devices,
            node_devices=machine.node_devices,
            host_capacity=machine.host_capacity,
        )
        for preset in PRESETS.values()
        if machine.kind == preset.kind
        and min(preset.flops / machine.flops, preset.bandwidth / machine.bandwidth) >= 1
        and max(preset.flops / machine.flops, preset.bandwidth / machine.bandwidth) > 1
        and preset.memory >= 0.99 * machine.memory
    ]


def read_machine(file: Path) -> Machine:
    """A machine from YAML: fields of ``Machine``, and ``like: A100`` for those that are left out.

    Raises:
        MachineUnknown: it can't be read, or has a field that there is not.
    """
    try:
        values: Any = yaml.safe_load(file.read_text())
    except (OSError, yaml.YAMLError) as error:
        raise MachineUnknown(f"--machine {file}: can't be read: {error}") from error
    known = {field.name: field.type for field in fields(Machine)}
    if not isinstance(values, dict) or (unknown := sorted(values.keys() - known.keys() - {"like"})):
        what = f"unknown {', '.join(unknown)}" if isinstance(values, dict) else "it has no fields"
        raise MachineUnknown(f"--machine {file}: {what}; it has fields out of: like, {', '.join(known)}")
    like = str(values.pop("like", "A100")).upper()
    if like not in PRESETS:
        raise MachineUnknown(f"--machine {file}: like: {like} is no preset; use one of {', '.join(PRESETS)}")
    kinds: dict[str, Any] = {"str": str, "int": int, "float": float}
    try:
        given = {name: kinds[str(known[name])](float(v) if known[name] != "str" else v) for name, v in values.items()}
    except (TypeError, ValueError) as error:
        raise MachineUnknown(f"--machine {file}: {error}; every field but name and kind is a number") from error
    machine = replace(PRESETS[like], **{"name": file.stem, **given})
    if machine.devices < 1 or machine.usable <= 0:
        raise MachineUnknown(
            f"--machine {file}: devices={machine.devices} with memory={machine.memory} bytes hold nothing; memory must "
            f"be above {machine.reserved} bytes, which the driver takes"
        )
    return machine
