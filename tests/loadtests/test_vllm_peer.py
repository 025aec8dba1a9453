"""vLLM's server in benchmarks has the engine's configuration of a server of ours."""

from __future__ import annotations

from pathlib import Path

from loadtests import vllm_peer
from serve.config import EngineConfig
from serve.vllm import boot


def test_the_peer_has_the_variables_and_the_batch_of_our_engine() -> None:
    config = EngineConfig()
    ours = boot._server_variables(config, config.threads or boot.default_threads())
    theirs = vllm_peer.variables()
    assert theirs.items() <= ours.items()
    # How we start an engine, on which interface its collectives listen, what is logged and what is refused.
    others = {"PYTHONWARNINGS", "TORCH_CPP_LOG_LEVEL", "VLLM_ENGINE_READY_TIMEOUT_S", "VLLM_MAX_STOP_STRINGS"}
    others |= {"VLLM_WORKER_MULTIPROC_METHOD", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"}
    assert set(ours) - set(theirs) <= others
    assert config.max_num_seqs == vllm_peer.SEQUENCES


def test_the_peer_has_our_engines_flags() -> None:
    config = EngineConfig()
    command = vllm_peer.command(Path("model"), 1, dtype="float32", kv_cache_bytes=1)
    assert ("--enforce-eager" in command) == config.enforce_eager
    assert ("--enable-prefix-caching" in command) == config.enable_prefix_caching
    assert ("--no-enable-chunked-prefill" in command) == (boot._prefill() == {"enable_chunked_prefill": False})
    assert "--disable-log-stats" not in command
