"""Every setting of the server."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)


class EngineConfig(_Section):
    """vLLM."""

    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto", description="Type that the engine computes in; auto: as the policy's config.json says."
    )
    max_model_len: int | None = Field(
        None, ge=2, description="Most tokens of prompt and response together; none: what the model can."
    )
    max_num_seqs: int = Field(64, ge=1, description="Most responses that are generated at the same time.")
    kv_cache_bytes: int | None = Field(
        None, ge=1 << 20, description="Memory for the KV cache; none: 512 MiB on a CPU, what is free on a GPU."
    )
    gpu_memory_utilization: float = Field(
        0.9, gt=0, le=1, description="On a GPU, share of its memory that the engine may take."
    )
    enforce_eager: bool = Field(
        True, description="No compilation: starts half a minute sooner, decodes a quarter slower."
    )
    enable_prefix_caching: bool = Field(True, description="Reuse the KV cache of prompts that begin alike.")
    tensor_parallel_size: int = Field(1, ge=1, description="Devices that one policy is split over.")
    threads: int | None = Field(
        None,
        ge=1,
        description="CPU threads of the engine's process; none: all cores of a CPU engine, vLLM's own on a GPU.",
    )
    seed: int = Field(0, description="Seed of sampling, for requests that bring none.")
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = Field("WARNING", description="vLLM's own log level.")
    start_timeout_s: float = Field(600, gt=0, description="Give up starting the engine after this long.")
    stop_timeout_s: float = Field(
        15, gt=0, description="Kill the engine's process if it hasn't stopped after this long."
    )
    extra: dict[str, Any] = Field(
        default_factory=dict, description="Further arguments of vLLM's AsyncEngineArgs, by their own names."
    )


class SwapConfig(_Section):
    """Following the serving pointer."""

    poll_seconds: float = Field(0.5, gt=0, description="How often the serving pointer is looked at.")
    recompute: bool = Field(
        True,
        description="Requests in flight recompute their prefix under the new policy, so that each token's logprob is "
        "wholly of one policy. False: they keep the old policy's KV cache, for a shorter gap.",
    )
    check_finite: bool = Field(True, description="Refuse a policy with NaN or infinite weights.")
    prefetch_timeout_s: float = Field(
        600, gt=0, description="Give up a swap whose weights aren't read after this long."
    )
    hold_timeout_s: float = Field(120, gt=0, description="Give up a step of a swap, engine held, after this long.")


class LimitsConfig(_Section):
    """What one request may ask for."""

    body_bytes: int = Field(4 << 20, ge=1024, description="Largest request body.")
    n: int = Field(16, ge=1, description="Most responses to one prompt.")
    max_tokens: int = Field(4096, ge=1, description="Most tokens a response may ask for.")
    default_max_tokens: int = Field(256, ge=1, description="Tokens of a response when the request doesn't say.")
    metadata_entries: int = Field(64, ge=0, description="Most metadata entries of a request.")
    concurrent_requests: int = Field(
        1024, ge=1, description="Requests at work at the same time; further ones get 503 with Retry-After."
    )
    timeout_s: float = Field(300, gt=0, description="A request that takes longer is aborted and gets 504.")


class ServeConfig(_Section):
    """The server."""

    host: str = Field("127.0.0.1", description="Address to listen on.")
    port: int = Field(8000, ge=0, le=65535, description="Port to listen on.")
    policies: str = Field("policies", description="Folder of the policy store.")
    replicas: str = Field("replicas", description="Folder where each replica records its swaps.")
    replica_name: str = Field("replica-0", pattern=r"^[A-Za-z0-9_-]{1,64}$", description="Name of this server.")
    model_name: str = Field("millrace", min_length=1, description="What answers call the model.")
    tenant: str = Field("default", min_length=1, description="Tenant that rows are recorded under.")
    access_log: bool = Field(False, description="Log a line for every request.")
    drain_timeout_s: float = Field(20, ge=0, description="When stopping, wait this long for requests at work.")
    engine: EngineConfig = Field(default_factory=EngineConfig, description="vLLM.")
    swap: SwapConfig = Field(default_factory=SwapConfig, description="Following the serving pointer.")
    limits: LimitsConfig = Field(default_factory=LimitsConfig, description="What one request may ask for.")
