"""Boots vLLM: for a server in a process of its own, for an evaluation or a training worker in the calling process.

vLLM takes ten seconds to import, so this module and those that import it do so when an engine boots.
"""

from __future__ import annotations

import logging
import multiprocessing
import multiprocessing.spawn
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, fields
from functools import cache, partial
from multiprocessing import resource_tracker
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol

from feedback.processes.signals import stop_signals_blocked
from feedback.trusted_code import SETTING, UntrustedCode, trusted
from serve.config import EngineConfig, SwapConfig
from serve.kv_cache import SERVER_SHARE, KVCache, available_memory, fit_engine, machine_memory
from serve.local_ray.cluster import environment, loopback_sockets
from serve.policies.folder import compute_dtype
from serve.standby_room import Room, room_of
from serve.vllm import compat, engine_process
from serve.vllm.adapters.slots import adapter_arguments, request_of, server_places_bytes
from serve.vllm.engine_process import WaitingProcess

if TYPE_CHECKING:
    from vllm import LLM
    from vllm.outputs import CompletionOutput
    from vllm.sampling_params import SamplingParams
    from vllm.v1.engine.async_llm import AsyncLLM

log = logging.getLogger(__name__)

_WORKER: Final = "serve.vllm.weight_update.MillraceWorker"
_SCHEDULER: Final = "serve.vllm.response_collector.ResponseCollector"
_DISCARD_MS: Final = 1000  # within which an engine finds the socket, and behind which it has sent everything
_TIED_PYTHON: Final = Path(__file__).with_name("tied_python")

_OTHER_MODELS: Final = ("tokenizer", "hf_config_path", "speculative_config", "model_weights", "renderer_model")

OFFLINE_WORKER: Final = "serve.vllm.offline_worker.OfflineWorker"
"""``worker_extension_cls`` of an engine that scores, and takes other weights."""

SILENCED: Final = {
    "vllm.engine.arg_utils": (
        # Samples have seeds of their own, and training keeps its random states (train/checkpoint/random_state.py).
        "The global random seed is set to",
        "This model does not officially support disabling chunked prefill",  # see _prefill
    ),
    # What enforce_eager means, and what follows where Triton is not among the CPU build's requirements.
    "vllm.config.vllm": ("Enforce eager set", "Inductor compilation was disabled", "Model Runner V2 requires Triton"),
    "vllm.platforms.cpu": ("Triton is not installed", "Reset SSM cache type"),
    "torch._library.triton": ("Triton not available",),
    "vllm.triton_utils.importing": ("Triton not installed",),
    "vllm.config.scheduler": ("Using custom scheduler class",),  # which compat and the pinned version see to
    # Logged at each call once the engine has bound its threads, in this process too.
    "vllm.v1.worker.cpu_worker": ("CPU backend doesn't allow to use `torch.set_num_threads`",),
}
"""Warnings that nobody can do anything about: how they begin, by logger."""


@dataclass(frozen=True)
class EngineClient:
    """A process that uses an engine which another one starts: the ``index``-th of ``count``, 0 being that one.

    Some of them may be there only in place of others that have died.

    ``arguments``: the engine's; ``address``: what the sockets are called that it is to listen on.
    """

    index: int
    count: int
    arguments: dict[str, Any]
    address: str

    @property
    def addresses(self) -> dict[str, str]:
        """As vLLM's client has them."""
        return {"input_address": f"ipc://{self.address}.in", "output_address": f"ipc://{self.address}.out"}


class FurtherClients(Protocol):
    """The processes that use an engine beside the one that starts it (``serve.api_processes.first``).

    ``spare``: how many may take the place of others; ``waiting``: processes that are forked already and become some of
    them.
    """

    count: int
    spare: int
    folder: Path
    waiting: list[WaitingProcess]

    def begin(self, clients: Sequence[EngineClient]) -> None:
        """Start the first ``count``; called while the engine is launched, which none of them waits for long."""
        ...


def prepare_server(
    config: EngineConfig, stopped: Callable[[], bool], further: FurtherClients | None = None
) -> WaitingProcess | None:
    """Import vLLM, and fork the engine's process, and ``further`` ones, where that is safe, unless ``stopped``.

    For the main thread. Raises IncompatibleVersion, OSError, and what an import raises.
    """
    compat.require()
    if config.extra.get("numa_bind"):  # for which vLLM starts the interpreter by a program of its own
        return None
    # OpenMP reads its variables once, when torch is imported, and the fork has what it read. Where there is a GPU, the
    # engine's own interpreter reads others.
    with environment(_server_variables(config, config.threads or _all_cores_but_one())):
        _silence()
        waiting = engine_process.prepare(import_engine, stopped)
        if waiting is not None and further is not None:
            further.waiting += [WaitingProcess("millrace api") for _ in range(further.count)]
        return waiting


def import_engine() -> bool:
    """Import what the API's process and the engine's have in common, and what the engine imports by name.

    Returns whether the process may fork then: on a CPU. What asks whether there is a GPU may already have begun a CUDA
    context, which no fork survives.
    """
    import vllm.v1.engine.async_llm
    import vllm.v1.engine.core
    import vllm.v1.worker.worker_base  # noqa: F401
    from vllm.platforms import current_platform

    from serve.vllm import response_collector, weight_update  # noqa: F401

    return bool(current_platform.is_cpu())


def server_engine(
    config: EngineConfig,
    path: Path,
    stats: dict[str, float],
    waiting: WaitingProcess | None = None,
    further: FurtherClients | None = None,
    *,
    swap: SwapConfig,
    replicas: int = 1,
    sleeps: bool = False,
) -> tuple[AsyncLLM, Room]:
    """Boot a server's engine on the policy in ``path``; it dies with this process. ``stats``: gets its newest numbers.

    Args:
        waiting: the process that becomes the engine; by default a new one.
        further: its clients beside this process.
        swap: by which it leaves room for a second set of weights.
        replicas: that share this machine's memory, on a CPU.
        sleeps: it is to give a GPU's memory back when it sleeps.

    Returns:
        The engine, and what was decided of swaps.

    Raises IncompatibleVersion, ContextRefused, PolicyError, and what vLLM raises.
    """
    compat.require()  # the versions, before a name is imported that another one may lack
    with server_children(config):
        _silence()
        from vllm.config import StructuredOutputsConfig
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.platforms import current_platform
        from vllm.usage.usage_lib import UsageContext
        from vllm.v1.engine.async_llm import AsyncLLM

        compat.require()  # the names
        from serve.vllm import detokenizer
        from serve.vllm.stat_logger import StatLogger

        detokenizer.install()
        room = _standby_room(config, swap, path, replicas)
        cache = KVCache(config.max_model_len or -1, None)
        if room.kv_cache_bytes is not None:
            sized = config.model_copy(update={"kv_cache_bytes": room.kv_cache_bytes})
            cache = fit_engine(sized, path, section="serve.engine", share=SERVER_SHARE)
            if cut := cache.cut("serve.engine"):
                log.warning("%s", cut)
        arguments: dict[str, Any] = {
            "model": str(path),
            "served_model_name": "millrace",  # a label of its metrics: the first policy's path would stay there
            "dtype": compute_dtype(path, config.dtype),
            "max_model_len": cache.max_model_len,
            "max_num_seqs": config.max_num_seqs,
            "kv_cache_memory_bytes": cache.size,
            "gpu_memory_utilization": room.utilization,
            "use_tqdm_on_load": False,
            "enforce_eager": config.enforce_eager,
            "enable_prefix_caching": config.enable_prefix_caching,
            "tensor_parallel_size": config.tensor_parallel_size,
            "seed": config.seed,
            "logprobs_mode": "processed_logprobs",
            "generation_config": "auto",
            "worker_extension_cls": _WORKER,
            "scheduler_cls": _SCHEDULER,
            # By vLLM's own default each request's grammar is checked by a backend that suits it, and all are made by
            # that of the first request; and one of them writes a schema out without bounds.
            "structured_outputs_config": StructuredOutputsConfig(backend="xgrammar"),
            "disable_log_stats": True,
            "enable_sleep_mode": sleeps and not current_platform.is_cpu(),  # which has none
            **_prefill(),
        }
        if config.adapters is not None:
            arguments |= adapter_arguments(
                path, count=config.adapters.count, rank=config.adapters.rank, setting="serve.engine.adapters.rank"
            )
        if config.tensor_parallel_size == 1:
            arguments["distributed_executor_backend"] = "uni"
        arguments |= config.extra | _trust(path, config.extra)
        started = nullcontext() if waiting is None else engine_process.started_by(waiting)
        shared = nullcontext(arguments) if further is None else _shared_by(further, arguments)
        with started, shared as all_arguments:
            llm = AsyncLLM.from_engine_args(
                AsyncEngineArgs(**all_arguments),
                usage_context=UsageContext.ENGINE_CONTEXT,
                stat_loggers=[lambda vllm_config, engine_index: StatLogger(stats)],
            )
        _keep_end_token(llm)
        return llm, room


def _standby_room(config: EngineConfig, swap: SwapConfig, path: Path, replicas: int) -> Room:
    """Whether there will be a second set of weights, and what the engine is started with for that."""
    from vllm.platforms import current_platform

    adapters = server_places_bytes(config, path)
    if not current_platform.is_cpu():
        memory = current_platform.get_device_total_memory()
        return room_of(config, swap, path, gpu=True, memory=memory, adapters=adapters)
    t, machine = config.tensor_parallel_size, machine_memory()
    available = min(available_memory(), machine // replicas) // t
    return room_of(config, swap, path, gpu=False, memory=machine // t, available=available, adapters=adapters)


def attached_engine(client: EngineClient, stats: dict[str, float]) -> AsyncLLM:
    """Connect to an engine that another process starts, once it is ready. ``stats``: gets its own requests' numbers.

    Raises IncompatibleVersion, UntrustedCode, TimeoutError, and what vLLM raises.
    """
    compat.require()
    _trust(Path(client.arguments["model"]), client.arguments)
    _silence()
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.usage.usage_lib import UsageContext
    from vllm.v1.engine.async_llm import AsyncLLM

    _log_by_environment()
    compat.require()
    from serve.vllm import detokenizer
    from serve.vllm.stat_logger import StatLogger

    detokenizer.install()
    # A spare one's rank is another's too: it says no more than which GPU decodes images.
    rank = min(client.index, client.arguments["_api_process_count"] - 1)
    arguments = client.arguments | {"_api_process_rank": rank}
    llm = AsyncLLM.from_vllm_config(
        AsyncEngineArgs(**arguments).create_engine_config(UsageContext.ENGINE_CONTEXT),
        usage_context=UsageContext.ENGINE_CONTEXT,
        stat_loggers=[lambda vllm_config, engine_index: StatLogger(stats)],
        disable_log_stats=True,
        client_addresses=client.addresses,
        client_count=client.count,
        client_index=client.index,
    )
    _keep_end_token(llm)
    return llm


def discard_outputs(client: EngineClient) -> None:
    """Take out of the engine's memory what it could not send to a client that has died."""
    import zmq

    with zmq.Context() as context, context.socket(zmq.PULL) as socket:
        socket.bind(client.addresses["output_address"])
        while socket.poll(_DISCARD_MS):
            socket.recv()


def _keep_end_token(llm: AsyncLLM) -> None:
    end_token = llm.renderer.get_eos_token_id()
    llm.renderer.get_eos_token_id = lambda: end_token  # looked for in the vocabulary at each request


@contextmanager
def _shared_by(further: FurtherClients, arguments: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Have the engine that is launched meanwhile know of further clients, which begin then. Yields its arguments.

    vLLM's own launcher of several API servers (``run_multi_api_server``) is none of them itself. Here the first one
    launches the engine, as a single one does.
    """
    from vllm.v1.engine import core_client

    launch, count = core_client.launch_core_engines, further.count + further.spare + 1
    arguments = arguments | {"_api_process_count": further.count + 1}
    clients = [EngineClient(i, count, arguments, str(further.folder / f"engine{i}")) for i in range(1, count)]

    def launched(vllm_config: Any, executor_class: Any, log_stats: bool, addresses: Any) -> Any:
        for client in clients:
            addresses.inputs.append(client.addresses["input_address"])
            addresses.outputs.append(client.addresses["output_address"])
        further.begin(clients)
        return launch(vllm_config, executor_class, log_stats, addresses)

    core_client.launch_core_engines = launched
    try:
        yield arguments
    finally:
        core_client.launch_core_engines = launch


def offline_engine(path: Path, *, extra: Mapping[str, Any] | None = None, **arguments: Any) -> LLM:
    """Boot an engine on the policy in ``path`` in this process, with these arguments of vLLM's.

    ``extra``: a server's further arguments; those that its asynchronous engine alone takes are left out. What vLLM
    reads from the environment (``engine_variables``) must be set before. Raises as ``server_engine``.
    """
    compat.require()
    _silence()
    from vllm import LLM, EngineArgs

    from serve.vllm import detokenizer

    _log_by_environment()
    detokenizer.install()
    known = {field.name for field in fields(EngineArgs)}
    shared = {name: value for name, value in (extra or {}).items() if name in known}
    return LLM(**shared | {"model": str(path), **arguments, **_prefill(), **_trust(path, shared)})


def _trust(path: Path, extra: Mapping[str, Any]) -> dict[str, Any]:
    """vLLM's arguments that let the code run which comes with the model in a folder, if there is some.

    Raises UntrustedCode if it may not, or if ``extra`` names other models, whose code would run too.
    """
    if not trusted(path):
        return {}
    if others := [name for name in _OTHER_MODELS if extra.get(name) is not None]:
        raise UntrustedCode(
            f"{path} comes with code of its own, which {SETTING} lets run; vLLM would then run that of what "
            f"serve.engine.extra.{others[0]} names too, which nothing allows: take it out"
        )
    return {"trust_remote_code": True}


def engine_variables(log_level: str, *, one_process: bool, one_machine: bool) -> dict[str, str]:
    """What an engine needs in the environment before vLLM is imported.

    ``one_process``: the engine runs in the calling process; a second one would take seconds to start and gain an
    offline batch nothing. ``one_machine``: gloo listens on loopback, unless the environment names an interface; left
    to itself it listens on whatever address the machine's name has.
    """
    variables = {
        "VLLM_LOGGING_LEVEL": log_level,
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0" if one_process else "1",
        # Where there is a GPU vLLM would fork this process, with its threads, sockets and locks.
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    }
    if one_machine:
        variables |= {name: value for name, value in loopback_sockets().items() if name not in os.environ}
    return variables


def sampling_params(**options: Any) -> SamplingParams:
    """vLLM's parameters: by default the sampled token's logprob alone, and the response when it is whole.

    ``structured_outputs`` may be a mapping, as rows record it. Raises ValueError for what can't be sampled by.
    """
    from vllm.sampling_params import RequestOutputKind, SamplingParams, StructuredOutputsParams

    defaults = {"logprobs": 0, "flat_logprobs": True, "output_kind": RequestOutputKind.FINAL_ONLY}
    if isinstance(structured := options.get("structured_outputs"), Mapping):
        options["structured_outputs"] = StructuredOutputsParams(**structured)
    return SamplingParams(**defaults | options)


def add_request(
    engine: Any,
    name: str,
    prompt_token_ids: list[int],
    params: SamplingParams,
    *,
    cache_salt: str | None = None,
    adapter: int | None = None,
) -> None:
    """Begin a request on an LLMEngine in this process, whose ``step`` then goes on with it.

    ``params``: of this request alone, so that vLLM need not copy them, which takes as long as all else of a beginning.
    ``cache_salt``: it reads cached prefixes of requests with the same one alone. ``adapter``: the number of one that
    the engine has (``serve.vllm.adapters``).
    """
    from vllm.inputs.engine import tokens_input

    params.skip_clone = True
    lora_request = None if adapter is None else request_of(adapter)
    prompt = tokens_input(prompt_token_ids, cache_salt=cache_salt)
    engine.add_request(name, prompt, params, lora_request=lora_request)


def spans_of(output: CompletionOutput) -> list[tuple[int, str]]:
    """(first token, label of the weights) of a response that ended."""
    return [(span.start, str(span.version)) for span in output.weight_versions or []]


@contextmanager
def policy_logprobs(llm: LLM) -> Iterator[None]:
    """Have an engine in this process return the policy's own logprobs, whatever the sampling, as vLLM does by default.

    For one that was started with ``logprobs_mode="processed_logprobs"``. On what is sampled it has no influence.
    """
    llm.collective_rpc(_return_logprobs, args=("raw_logprobs",))
    try:
        yield
    finally:
        llm.collective_rpc(_return_logprobs, args=("processed_logprobs",))


def _return_logprobs(worker: Any, mode: str) -> None:
    if (sampler := worker.model_runner.sampler) is None:  # of a stage of a pipeline that is not its last
        return
    sampler.logprobs_mode = mode
    if hasattr(sampler, "topk_topp_sampler"):  # that of vLLM's second model runner, which GPUs have, does all by itself
        sampler.topk_topp_sampler.logprobs_mode = mode


def request_errors() -> tuple[type[Exception], ...]:
    """What vLLM raises for a request that it can't take, rather than because something has failed."""
    from vllm.exceptions import GracefulHTTPError, VLLMClientError

    return VLLMClientError, GracefulHTTPError, ValueError, TypeError, OverflowError


def launched_executor(job: str) -> type:
    """vLLM's executor for processes that somebody else launched, its shared memory named after this job.

    vLLM takes that name from the last part of the init method, which is otherwise unused here: the process group
    exists. With its own ``env://``, all jobs of a machine would share one name, and a second one would not start.
    """
    from vllm.v1.executor.uniproc_executor import ExecutorWithExternalLauncher

    class LaunchedExecutor(ExecutorWithExternalLauncher):
        def _distributed_args(self) -> tuple[str, int, int]:
            _, rank, local_rank = super()._distributed_args()
            return f"env://:{job}", rank, local_rank

    return LaunchedExecutor


@contextmanager
def server_children(config: EngineConfig) -> Iterator[None]:
    """Have the processes that are spawned meanwhile be of a server with this engine, and die with this process."""
    with (
        environment(_server_variables(config, config.threads or default_threads())),
        _children_die_with_this_process(),
    ):
        yield


def default_threads() -> int | None:
    """On a CPU all cores that this process may use but one; None on a GPU, where vLLM chooses."""
    import torch

    if torch.cuda.is_available():
        return None
    return _all_cores_but_one()


def _all_cores_but_one() -> int:
    return max(1, len(os.sched_getaffinity(0)) - 1)


def _prefill() -> dict[str, Any]:
    """Arguments by which, on a CPU, each prompt is computed in one step, whole.

    A prompt that is split over steps has a token sampled after each part and thrown away. Of a request with a seed
    vLLM then turns its generator back, which PyTorch's generators on a CPU cannot do: the engine would die of a few
    seeded requests whose prompts don't fit into a step together. A step holds the longest context then, unless
    ``max_num_batched_tokens`` says less, which vLLM refuses.
    """
    from vllm.platforms import current_platform

    return {"enable_chunked_prefill": False} if current_platform.is_cpu() else {}


def _is_news(beginnings: tuple[str, ...], record: logging.LogRecord) -> bool:
    return not record.getMessage().startswith(beginnings)


def _log_by_environment() -> None:
    """Have vLLM log as the environment says now, which a process that was forked had not when it was imported."""
    from vllm import envs

    logger = logging.getLogger("vllm")
    logger.setLevel(envs.VLLM_LOGGING_LEVEL)
    if envs.VLLM_LOGGING_STREAM == "ext://sys.stderr":
        for handler in logger.handlers:
            # vLLM's own one only: whoever else listens keeps what it writes to.
            if type(handler) is logging.StreamHandler and handler.stream is sys.stdout:
                handler.setStream(sys.stderr)


@cache
def _silence() -> None:
    """Silence ``SILENCED`` in this process; to be called before vLLM is imported."""
    for name, beginnings in SILENCED.items():
        logging.getLogger(name).addFilter(partial(_is_news, beginnings))
    # vLLM looks at every attribute of torch.distributed, this one among them.
    warnings.filterwarnings("ignore", message="`torch.distributed.reduce_op` is deprecated", category=FutureWarning)


def _server_variables(config: EngineConfig, threads: int | None) -> dict[str, str]:
    one_process = config.tensor_parallel_size == 1
    variables = {
        **engine_variables(config.log_level, one_process=one_process, one_machine=True),
        "TORCH_CPP_LOG_LEVEL": "ERROR",
        "PYTHONWARNINGS": "ignore::FutureWarning",
        "VLLM_ENGINE_READY_TIMEOUT_S": str(int(config.start_timeout_s)),
        "VLLM_MAX_STOP_STRINGS": "16",  # its own bound is 4; ``serve.api.bounds.STOPS`` is ours
        "OMP_WAIT_POLICY": "PASSIVE",  # OpenMP threads that have no work sleep, the cores are shared with training
    }
    if one_process:
        variables["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
    if config.enforce_eager:
        # Eager engines still compile a few helpers, which takes seconds and a C++ compiler.
        variables["TORCHDYNAMO_DISABLE"] = "1"
    if threads is not None:
        variables["OMP_NUM_THREADS"] = str(threads)
    return variables


@contextmanager
def _children_die_with_this_process() -> Iterator[None]:
    """Have the processes that are spawned meanwhile killed when this one dies, also while they only start.

    ``millrace_begin`` comes when vLLM is ready, and left to itself a starting engine waits minutes for its parent.
    They act upon this process's signals alone (``serve.vllm.response_collector``): it ends them when the requests have
    ended.
    """
    with stop_signals_blocked():  # starting the tracker unblocks what a process above us holds back
        resource_tracker.ensure_running()  # this one is to clean up after us
    before = multiprocessing.spawn.get_executable()
    multiprocessing.set_executable(str(_TIED_PYTHON))
    try:
        with (
            environment({"MILLRACE_PYTHON": sys.executable, "MILLRACE_PARENT": str(os.getpid())}),
            stop_signals_blocked(),
        ):
            yield
    finally:
        multiprocessing.set_executable(before)
