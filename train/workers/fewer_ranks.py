"""With how many ranks a run goes on where a machine of its cluster has gone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Final

from pydantic import ValidationError

from train.config.training import TrainConfig
from train.context import JobContext
from train.controller.ray_pool import gpus_of_cluster, reserve
from train.controller.worker_group import WorkerError
from train.observe.progress import say
from train.observe.resource_file import FILE, Resources
from train.workers.role_groups import gpus_by_pool

_TRY_S: Final = 10.0
"""For a smaller number of ranks, of which it is known by then that there is room or not."""


def fitting(config: TrainConfig, context: JobContext) -> TrainConfig:
    """The settings with as many ranks as the cluster has room for within ``train.restarts.wait_s``.

    A pool has its own number of ranks or fewer, and at least ``min_ranks``; other settings stay, so that numbers that
    they don't divide are passed over. A run that computed on GPUs is given no CPUs.

    Raises:
        WorkerError: there is no room for the fewest that there may be.
    """
    on_gpus = _was_on_gpus(context.folder)
    try:
        _reserve(config, config.restarts.wait_s, on_gpus=on_gpus)
        return config
    except WorkerError as error:
        why = error
    for smaller in fewer(config):
        try:
            _reserve(smaller, _TRY_S, on_gpus=on_gpus)
        except WorkerError:
            continue
        ranks = {name: smaller.ranks_of(name) for name in smaller.placement.pools}
        say(f"{context.run}: goes on with fewer ranks, {ranks}: {why}")
        return smaller
    least = f"train.restarts.min_ranks={config.restarts.min_ranks}"
    raise WorkerError(f"there is no room to go on, with {least}: {why}", kind="lost") from why


def fewer(config: TrainConfig) -> Iterator[TrainConfig]:
    """The settings with ever fewer ranks, as far as they can be."""
    least, most = config.restarts.min_ranks, max(config.ranks_of(name) for name in config.placement.pools)
    if least is None:
        return
    for ranks in range(most - 1, least - 1, -1):
        pools = {
            name: pool.model_copy(update={"ranks": min(ranks, config.ranks_of(name))})
            for name, pool in config.placement.pools.items()
        }
        placement = config.placement.model_copy(update={"pools": pools})
        try:
            yield TrainConfig.model_validate(
                config.model_dump() | {"ranks": min(ranks, config.ranks), "placement": placement.model_dump()}
            )
        except ValidationError:
            continue


def _reserve(config: TrainConfig, timeout_s: float, *, on_gpus: bool) -> None:
    """See whether there is room for all pools at once, and give it back. Raises WorkerError if there is not."""
    from ray.util.placement_group import remove_placement_group

    if on_gpus and not gpus_of_cluster():
        raise WorkerError("the run computed on GPUs, and the cluster has none")
    gpus = gpus_by_pool(config, gpus_of_cluster())
    with ExitStack() as held:
        for name, pool in config.placement.pools.items():
            each: dict[str, float] = {"CPU": config.threads_of(name), **({"GPU": gpus[name]} if gpus[name] else {})}
            place = reserve(name, config.ranks_of(name), each, pool.strategy, timeout_s)
            held.callback(remove_placement_group, place)


def _was_on_gpus(folder: Path) -> bool:
    """Whether the ranks of the attempt before had GPUs, by what it noted of them."""
    try:
        ranks = Resources.model_validate_json((folder / FILE).read_bytes()).ranks
    except (FileNotFoundError, ValidationError):
        return False
    return any(rank.index is not None for rank in ranks)
