"""What a run computes on and how well: the model's size, its ranks, their memory, and the share of a peak they reach.

``resources.json`` of a run's folder has it from the begin on, and each rank's peak of memory after the end too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from feedback.files import replace_file
from train.config.training import TrainConfig
from train.controller.usage import Device, Usage
from train.controller.worker_group import WorkerGroup
from train.model.scalar_head import with_one_output
from train.observe.resource_file import FILE, Rank, Resources
from train.own_model.model_class import maker
from train.planner.machine import PRESETS
from train.planner.model_shape import read_config, shape_of
from train.planner.sizes import GIB, ModelShape
from train.planner.step_time import forward_flops, update_passes

PEAK_FLOPS: Final = {
    **dict.fromkeys(
        ("NVIDIA A100-SXM4-40GB", "NVIDIA A100-SXM4-80GB", "NVIDIA A100-PCIE-40GB", "NVIDIA A100 80GB PCIe"),
        PRESETS["A100"].flops,
    ),
    "NVIDIA H100 80GB HBM3": PRESETS["H100"].flops,
    "NVIDIA H200": PRESETS["H200"].flops,
}
"""Operations a second in bfloat16, by the name that torch has for a device; the same chips on other boards differ."""


class ResourceMonitor:
    """Asks the ranks, writes down what they say, and makes metrics of it.

    Args:
        policy: the folder that the trained model is built from.
        pools: a worker group on each pool, by the pool's name.
        actor: the one in training.
    """

    def __init__(
        self, config: TrainConfig, folder: Path, policy: Path, pools: Mapping[str, WorkerGroup], actor: WorkerGroup
    ) -> None:
        self._config, self._file, self._pools, self._actor = config, folder / FILE, pools, actor
        make = maker(config.model) if config.algorithm.trains_policy else with_one_output
        self._shape = shape_of(read_config(policy), config.lora, make, config.fsdp.layers)

    def begin(self) -> str:
        """Write down what there is; the same in a line for people."""
        found = {pool: group.device() for pool, group in self._pools.items()}
        devices: list[Device] = found[self._config.placement.actor]
        peak = None
        if self._config.dtype == "bfloat16" and all(device.name in PEAK_FLOPS for device in devices):
            peak = sum(PEAK_FLOPS[device.name] for device in devices)
        ranks = [
            Rank(pool=pool, rank=rank, host=on.host, device=on.name, index=on.index)
            for pool, each in found.items()
            for rank, on in enumerate(each)
        ]
        shape = self._shape
        self.resources = Resources(
            architecture=shape.architecture,
            parameters=shape.trained + shape.frozen,
            trained=shape.trained,
            peak_flops=peak,
            ranks=ranks,
        )
        self._write()
        placed = "; ".join(f"{pool}: {_listed(each)}" for pool, each in found.items())
        return f"{shape.architecture}, {self.resources.parameters:,} parameters, {shape.trained:,} trained; {placed}"

    def step(self) -> dict[str, float]:
        """Metrics of the step that is done: memory, and what its updates reached."""
        return step_metrics(self._config, self._shape, self._actor.usage(), self.resources.peak_flops)

    def end(self) -> str:
        """Write down each rank's peak of memory; the highest of each pool in a line for people."""
        found = {pool: [usage.peak_memory for usage in group.usage()] for pool, group in self._pools.items()}
        for rank in self.resources.ranks:
            rank.peak_memory = found[rank.pool][rank.rank]
        self._write()
        return "peak memory " + ", ".join(f"{max(peaks) / GIB:.2f} GiB on {pool}" for pool, peaks in found.items())

    def _write(self) -> None:
        replace_file(self._file, self.resources.model_dump_json(indent=1).encode())


def step_metrics(
    config: TrainConfig, shape: ModelShape, ranks: Sequence[Usage], peak_flops: float | None
) -> dict[str, float]:
    """``peak_memory_gib`` of the rank with the most, so far; and of the updates, if a policy learned:

    ``model_flops`` of all ranks together: what the model needs for the tokens, without what is computed again to save
    memory; ``model_flops_per_s``, in the time of the updates alone: no sampling, no scoring; ``mfu``: its share of the
    peak (model FLOPs utilisation, PaLM, arXiv 2204.02311, appendix B).
    """
    metrics = {"peak_memory_gib": max(usage.peak_memory for usage in ranks) / GIB}
    seconds = max(usage.seconds for usage in ranks)
    if seconds and config.algorithm.trains_policy:
        # The ranks that share sequences or layers count the same sequences.
        forward = sum(forward_flops(shape, usage) for usage in ranks) / config.fsdp.ranks_per_part
        metrics["model_flops"] = update_passes(shape) * forward
        metrics["model_flops_per_s"] = metrics["model_flops"] / seconds
        if peak_flops:
            metrics["mfu"] = metrics["model_flops_per_s"] / peak_flops
    return metrics


def _listed(devices: Sequence[Device]) -> str:
    """ "2 ranks on cpu of a, GPU 0 (…) of b": each place once."""
    places = list(dict.fromkeys(map(str, devices)))
    ranks = f"{len(devices)} rank{'s' if len(devices) > 1 else ''}"
    return f"{ranks} on {', '.join(places)}"
