"""Pools that stay between runs: their processes, process groups and rollout engines, at rest.

What a run builds of a policy (models, optimizers, a critic, a reference) is dropped when it ends and built anew by the
next one, from its own parent, as new processes would: so the result is the same, and little memory is held meanwhile.
What takes seconds and holds nothing of a run is kept: processes with their imports, meshes, and vLLM, which the next
run gives its parent's weights.
"""

from __future__ import annotations

import time
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

from evaluation.config import EngineConfig
from evaluation.engine import Call
from serve.kv_cache import fit_batch_engine
from serve.policies.folder import compute_dtype, sha256_file
from serve.policies.store import Policy
from serve.swap.compatibility import identity
from train.config.context_length import rollout_cache
from train.config.training import TrainConfig
from train.controller.heartbeat import Watch
from train.controller.imported_files import ImportedFiles
from train.controller.worker_group import Pending, Pool, WorkerError, WorkerGroup
from train.model.mesh import mesh_sizes
from train.workers.role_groups import environment, heartbeats, sizes, start_pools
from train.workers.rollout import RolloutWorker

_LENT_S: Final = 86_400.0  # for an answer, while there are signs of life; who asks has a limit of its own
_TURN_S: Final = 1.0
_REST_S: Final = 30.0  # for an answer of what rests; who asks waits for a minute


class ResidentPools:
    """The pools of one run after another. Use as a context manager, in a Ray that is there: leaving it ends them.

    Args:
        code: takes in what their ranks have imported.
    """

    def __init__(self, code: ImportedFiles) -> None:
        self._code = code
        self._started = ExitStack()
        self._pools: dict[str, Pool] = {}
        self._layout: dict[str, Any] | None = None
        self._engine: dict[str, Any] | None = None
        self._engine_pool = ""
        self._config: TrainConfig | None = None
        self._lent = ExitStack()
        self._watch: Watch | None = None

    def __enter__(self) -> ResidentPools:
        return self

    def __exit__(self, *exc: object) -> None:
        self._end()

    @contextmanager
    def of(self, config: TrainConfig, parent: Policy, model: Path) -> Generator[dict[str, Pool]]:
        """The pools for a run, those of the last one if they can be; at rest when it has ended well.

        ``model``: the parent's folder as it is trained from.

        After an exception they are of no further use, and end: a run that is stopped early has left them in the middle.
        """
        layout, engine = layout_of(config), None
        if config.samples and config.rollout.backend == "vllm":
            engine = rollout_engine(config, parent, model)
        if layout != self._layout or (engine and self._engine and engine != self._engine):
            self._end()
        if not self._pools:
            self._pools, self._layout = self._started.enter_context(start_pools(config)), layout
        if engine:
            self._engine, self._engine_pool, self._config = engine, config.placement.rollout, config
        try:
            yield self._pools
        except BaseException:
            self._end()
            raise
        for name in self._pools:
            self._rest(name)

    def lost(self) -> str | None:
        """Why what rests can't take another run, as where one of its processes was killed; None if it can."""
        try:
            for name in self._pools:
                self._rest(name, _REST_S)
        except WorkerError as error:
            return str(error)
        return None

    def refusal(self, config: EngineConfig, policy: Policy) -> str | None:
        """Why the rollout engine does not compute what an evaluation's own would of this policy; None if it does."""
        if self._engine is None:
            return "the resident workers have no engine"
        own = self._engine
        other = [
            f"{name} {own[name]!r}, not {value!r}"
            for name, value in evaluation_engine(config, policy).items()
            if own[name] != value
        ]
        return f"the resident workers' engine has {'; '.join(other)}" if other else None

    def load(self, policy: Policy) -> None:
        """Have the engines answer for this policy, until ``take_back``.

        Raises WorkerError, also where they can't be lent at all, or one of their ranks hangs.
        """
        if self._watch is None:
            self._watch = self._lent.enter_context(self._watching())
        self._answer(self._rollout.lend_load.start(policy))
        self.lend(Call("dtype"))

    def lend(self, call: Call) -> Any:
        """What a call of an engine returns, by all that there are. Raises WorkerError, also if a rank hangs."""
        return self._answer(self._rollout.lend.start(call))

    def take_back(self) -> None:
        """Let the engines sleep again."""
        self._end_loan()
        self._rest(self._engine_pool, _REST_S)

    @contextmanager
    def _watching(self) -> Generator[Watch]:
        """Have the ranks of the engines give signs of life in the block, as in a run."""
        config = self._config
        assert config is not None
        pools = {self._engine_pool: self._pools[self._engine_pool]}
        with TemporaryDirectory(prefix="millrace-lent-") as folder:
            watch = Watch(Path(folder), config.restarts.silence_s, config.start_timeout_s)
            with heartbeats(config, pools, Path(folder), _REST_S):
                yield watch

    def _answer(self, call: Pending) -> Any:
        """What it returns, waited for as long as its ranks give signs of life. Raises WorkerError."""
        assert self._watch is not None
        deadline = time.monotonic() + _LENT_S
        while True:
            try:
                return call.result(_TURN_S)
            except WorkerError as error:
                if error.kind != "hung":  # it only has no answer yet
                    raise
            late = time.monotonic() > deadline
            if why := f"no answer within {_LENT_S:g} s" if late else self._watch.hung():
                raise WorkerError(f"{call.what}: {why}", kind="hung")

    def _end_loan(self) -> None:
        self._lent.close()
        self._watch = None

    def _rest(self, name: str, timeout_s: float | None = None) -> None:
        pool = self._pools[name]
        for files in pool.call(f"rest {name}", "rest", [()] * pool.layout.ranks).result(timeout_s):
            self._code.add(files)

    @property
    def _rollout(self) -> WorkerGroup:
        return WorkerGroup(self._pools[self._engine_pool], "rollout", RolloutWorker)

    def _end(self) -> None:
        self._end_loan()
        self._started.close()
        self._pools, self._layout, self._engine = {}, None, None


def stays(config: TrainConfig) -> bool:
    """Whether the pools of such runs can stay: in a Ray of this machine, without streams of weights between them."""
    here = config.launcher == "ray" and not config.ray_address
    return here and (not config.samples or config.placement.rollout == config.placement.actor)


def layout_of(config: TrainConfig) -> dict[str, Any]:
    """What processes and their groups are made by, apart from the model."""
    on = config.placement
    return {
        "pools": {
            name: [
                config.ranks_of(name),
                config.threads_of(name),
                pool.gpus,
                pool.strategy,
                config.rollout.tensor_parallel_size,
                sizes(config, name),
            ]
            for name, pool in on.pools.items()
        },
        "roles": [on.actor, on.reference, on.critic, on.rollout if config.samples else on.actor],
        "backend": config.rollout.backend,
        "meshes": mesh_sizes(config, config.ranks_of(on.actor)),
        "timeouts": [config.start_timeout_s, config.step_timeout_s],
        "environment": environment(config),
    }


def rollout_engine(config: TrainConfig, policy: Policy, model: Path) -> dict[str, Any]:
    """What an engine for rollouts is started by."""
    r, cache = config.rollout, rollout_cache(config, model)
    return {
        "model": identity(policy),
        "config": sha256_file(model / "config.json"),
        "dtype": config.dtype,
        "tensor_parallel_size": r.tensor_parallel_size,
        "max_model_len": cache.max_model_len,
        "max_num_seqs": r.max_num_seqs,
        "max_num_batched_tokens": None,
        "enforce_eager": r.is_eager,
        "extra": {} if config.fp8 is None or config.fp8.rollout is None else {"quantization": config.fp8.rollout},
        "kv_cache_bytes": cache.size,
        "enable_prefix_caching": r.enable_prefix_caching,
        "labels_tokens": r.staleness > 0,  # it schedules no step ahead then
        "adapters": [config.lora.rank, config.lora.target_modules]
        if config.lora and config.generates_beside_adapters
        else None,
    }


def evaluation_engine(config: EngineConfig, policy: Policy) -> dict[str, Any]:
    """Of an engine of an evaluation's own, what decides the numbers, under the same names.

    The size of its KV cache only decides how often a response has to wait, unless vLLM finds the context by it; and a
    cache of prefixes what is computed once.
    """
    cache = fit_batch_engine(config, policy.path, section="evaluation.engine")
    return {
        "model": identity(policy),
        "config": sha256_file(policy.path / "config.json"),
        "dtype": compute_dtype(policy.path, config.dtype),
        "tensor_parallel_size": config.tensor_parallel_size,
        **cache.context,
        "max_num_seqs": config.max_num_seqs,
        "max_num_batched_tokens": config.max_batched_tokens,
        **({} if config.enforce_eager is None else {"enforce_eager": config.enforce_eager}),
        "extra": config.extra or {},
    }
