"""Every setting of the server."""

from __future__ import annotations

import ipaddress
from typing import Annotated, Any, Final, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, field_validator, model_validator

from feedback.config import without_credentials
from feedback.settings_base import Address, Secret, Section
from feedback.trusted_code import SETTING


def _off(value: Any) -> Any:
    return "off" if value is False else value  # what YAML makes of an off without quotes


MemoryCheck = Annotated[Literal["refuse", "warn", "off"], BeforeValidator(_off)]
"""What becomes of settings that can't fit the machine's memory, before anything is started."""


def without_trust(extra: dict[str, Any]) -> dict[str, Any]:
    """Further arguments of vLLM's as they stand. Raises ValueError if they would run whatever code a model brings."""
    if "trust_remote_code" in extra:
        raise ValueError(f"trust_remote_code has no setting: code that comes with a model runs by {SETTING}")
    return extra


class AdaptersConfig(Section):
    """Room for low-rank adapters beside the weights of an engine."""

    count: int = Field(
        2,
        ge=1,
        description="Adapters at once: that of the policy that serves, and those whose requests are still at work or "
        "that share traffic with it.",
    )
    rank: int = Field(
        16, ge=1, le=512, description="The largest rank; an adapter of a larger one is served merged into its base."
    )
    tenants: dict[str, Annotated[int, Field(ge=1)]] = Field(
        default_factory=dict,
        description="Tenant: the policy that answers it, an adapter of the same base as the one that serves others.",
    )

    @model_validator(mode="after")
    def _leave_a_place(self) -> AdaptersConfig:
        if self.count <= (own := len(set(self.tenants.values()))):
            raise ValueError(
                f"serve.engine.adapters.count={self.count} has no place for the policy that serves beside the {own} of "
                "serve.engine.adapters.tenants: use more"
            )
        return self


class EngineConfig(Section):
    """vLLM."""

    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto", description="Type that the engine computes in; auto: as the policy's config.json says."
    )
    max_model_len: int | None = Field(
        None,
        ge=2,
        description="Most tokens of prompt and response together; none: what the model can and the KV cache holds.",
    )
    max_num_seqs: int = Field(64, ge=1, description="Most responses that are generated at the same time.")
    kv_cache_bytes: int | None = Field(
        None,
        ge=1 << 20,
        description="Memory for the KV cache; none: on a CPU what can be of use, at most a tenth of the machine's; on "
        "a GPU what is free.",
    )
    gpu_memory_utilization: float = Field(
        0.9,
        gt=0,
        le=1,
        description="On a GPU, share of its memory that the engine may take; less, where a swap's second set of "
        "weights needs room.",
    )
    enforce_eager: bool = Field(
        True, description="No compilation: starts half a minute sooner, decodes a quarter slower."
    )
    enable_prefix_caching: bool = Field(True, description="Reuse the KV cache of prompts that begin alike.")
    tensor_parallel_size: int = Field(1, ge=1, description="Devices that one policy is split over.")
    threads: int | None = Field(
        None,
        ge=1,
        description="CPU threads of the engine's process; none: on a CPU all cores but one, which is left to the API's "
        "process; on a GPU vLLM's own choice.",
    )
    seed: int = Field(0, description="Seed of sampling, for requests that bring none.")
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = Field("WARNING", description="vLLM's own log level.")
    start_timeout_s: float = Field(600, gt=0, description="Give up starting the engine after this long.")
    stop_timeout_s: float = Field(
        15, gt=0, description="Kill the engine's process if it hasn't stopped after this long."
    )
    adapters: AdaptersConfig | None = Field(
        None,
        description="Serve policies that are adapters of one base beside each other; none: each is served merged into "
        "its base.",
    )
    extra: dict[str, Any] = Field(
        default_factory=dict, description="Further arguments of vLLM's AsyncEngineArgs, by their own names."
    )

    @field_validator("extra")
    @classmethod
    def _no_second_place_for_a_setting(cls, extra: dict[str, Any]) -> dict[str, Any]:
        if twice := sorted(extra.keys() & cls.model_fields.keys()):
            raise ValueError(f"{twice[0]} is a setting of its own: set serve.engine.{twice[0]}")
        return without_trust(extra)

    @model_validator(mode="after")
    def _adapters_have_one_place(self) -> EngineConfig:
        if self.adapters is not None and (own := sorted(name for name in self.extra if "lora" in name)):
            raise ValueError(f"{own[0]} is set by serve.engine.adapters: take it out of serve.engine.extra")
        return self


class SwapConfig(Section):
    """Following the serving pointer."""

    poll_seconds: float = Field(0.5, gt=0, description="How often the serving pointer is looked at.")
    mode: Literal["keep", "wait"] = Field(
        "keep",
        description="keep: requests in flight go on under the new policy. wait: they are finished under the old one "
        "first, while new ones wait; those that take longer than drain_timeout_s go on under the new one.",
    )
    drain_timeout_s: float = Field(10, gt=0, description="How long mode wait waits.")
    recompute: bool = Field(
        False,
        description="Requests in flight recompute their prefix under the new policy, for which all of them wait, so "
        "that each token's logprob is wholly of one policy. False: they keep the KV cache that the old one made.",
    )
    shadow_weights: bool = Field(
        False,
        description="Keep a second set of weights laid out, the policy's before, so that a rollback reads and lays out "
        "nothing: twice the memory at all times. False: the second set is there during a swap only.",
    )
    prepare_early: bool = Field(
        True,
        description="Verify a candidate, and lay out its weights, while the gate is still at work on it, so that a "
        "promotion is only the exchange; what is not promoted is dropped. It takes the memory of a second set of "
        "weights for that time. Where there is none (in_place), or shadow_weights keeps another set, files are "
        "verified and no more.",
    )
    in_place: bool | None = Field(
        None,
        description="Make no second set of weights: less memory, and no token is made for as long as the load takes. "
        "None: decided when the server starts; the engine leaves room for a second set, unless it would have less KV "
        "cache than least_kv_tokens then. False: a second set is made whatever that leaves.",
    )
    least_kv_tokens: int = Field(
        16384,
        ge=1,
        description="Tokens that the KV cache must still hold beside the room for a second set of weights, as far as "
        "requests can use them: with less, policies are swapped in place.",
    )
    spare_bytes: int = Field(
        256 << 20, ge=0, description="Refuse a swap whose second set of weights would leave less memory than this."
    )
    check_finite: bool = Field(True, description="Refuse a policy with NaN or infinite weights.")
    probe: bool = Field(
        True,
        description="After a swap, and at the start, compare logprobs with the numbers in the policy's manifest; the "
        "old policy comes back if they differ.",
    )
    prepare_timeout_s: float = Field(
        600, gt=0, description="Give up a swap whose weights aren't verified, or aren't laid out, after this long."
    )
    hold_timeout_s: float = Field(120, gt=0, description="Give up a step of a swap, engine held, after this long.")


class SleepConfig(Section):
    """A server that sleeps: another program has its devices for a while, and requests wait."""

    allowed: bool | None = Field(
        None,
        description="Whether the server may be asked to sleep (POST /server/sleep). On a GPU its engine is started "
        "with vLLM's sleep mode then, by which it gives its memory back. None: where `devices` are used in turns.",
    )
    drain_timeout_s: float = Field(
        30,
        gt=0,
        description="How long requests at work may take to end before it sleeps; what takes longer is aborted, with "
        "the tokens so far on record.",
    )
    wait_s: float = Field(
        20, ge=0, description="How long a request waits for a server that sleeps, before it gets 503 with Retry-After."
    )
    waiting_requests: int = Field(
        256, ge=0, description="Requests that may wait so at once; further ones get 503 with Retry-After."
    )
    timeout_s: float = Field(
        120, gt=0, description="How long the engine may take to give its memory back, or to get it again (seconds)."
    )


def _network(value: str) -> str:
    try:
        ipaddress.ip_network(value)
    except ValueError as error:
        raise ValueError(f"{value!r} is no address or network, such as 10.0.0.7 or 10.1.0.0/16: {error}") from None
    return value


ProxyAddress = Annotated[str, AfterValidator(_network)]


_NOT_FOR_USERS: Final = frozenset(
    {"authorization", "connection", "content-length", "content-type", "cookie", "host", "origin", "transfer-encoding"}
    | {"referer", "sec-fetch-site", "user-agent", "x-api-key", "x-csrf-token", "x-forwarded-for", "x-forwarded-proto"}
)


class SsoConfig(Section):
    """Single sign-on to the console, by a proxy that authenticates people."""

    header: str | None = Field(
        None,
        pattern=r"^[A-Za-z0-9-]{1,64}$",
        description="Header in which such a proxy says who makes a request, such as X-Forwarded-User; none: no single "
        "sign-on. A user gets in who is named by a key (`millrace keys create --sso USER`), and may do what it may.",
    )
    proxies: list[ProxyAddress] = Field(
        default_factory=list,
        description="Addresses or networks of the proxies whose header is believed; they must remove it from what they "
        "are sent. From all others, this server removes it.",
    )

    @model_validator(mode="after")
    def _is_from_somewhere(self) -> Self:
        if (self.header is None) != (not self.proxies):
            raise ValueError("header and proxies go together: which header is believed, and of whom")
        if self.header is not None and self.header.lower() in _NOT_FOR_USERS:
            raise ValueError(f"header {self.header!r} is one that requests have anyway")
        if everybody := [one for one in self.proxies if ipaddress.ip_network(one).prefixlen == 0]:
            raise ValueError(f"proxies: {everybody[0]} is everybody, who could each say to be anybody")
        return self


class LimitsConfig(Section):
    """What one request may ask for."""

    body_bytes: int = Field(4 << 20, ge=1024, description="Largest request body.")
    bodies: int = Field(
        1024,
        ge=1,
        description="Request bodies that may be on their way at the same time; one more ends the one that has been so "
        "for longest.",
    )
    n: int = Field(16, ge=1, description="Most responses to one prompt.")
    prompts: int = Field(64, ge=1, description="Most prompts of one request to /v1/completions.")
    max_tokens: int = Field(4096, ge=1, description="Most tokens a response may ask for.")
    default_max_tokens: int = Field(256, ge=1, description="Tokens of a response when the request doesn't say.")
    metadata_entries: int = Field(64, ge=0, description="Most metadata entries of a request.")
    concurrent_requests: int = Field(
        1024,
        ge=1,
        description="Requests at work at the same time; further ones get 503 with Retry-After. With several "
        "api_processes, one fewer than there are of them may be let in beyond that.",
    )
    waiting_responses: int = Field(
        1024, ge=1, description="Responses that may wait for the engine; further requests get 503 with Retry-After."
    )
    timeout_s: float = Field(300, gt=0, description="A request that takes longer is aborted and gets 504.")
    requests_per_minute: float | None = Field(
        None, gt=0, description="Requests a minute that a key may make, unless it has a limit of its own; none: any."
    )
    tokens_per_minute: float | None = Field(
        None,
        gt=0,
        description="Tokens a minute, of prompts and responses, that a key may use, unless it has a limit of its own; "
        "max_tokens counts until the response is there. None: any.",
    )
    refused_per_minute: float = Field(
        60,
        gt=0,
        description="Keys and logins that are not good, from one address, that are answered with 401 in a minute; "
        "further ones get 429 with Retry-After. A good key is always let in. Each of several api_processes, or "
        "replicas, counts its own.",
    )
    burst_seconds: float = Field(
        60, gt=0, description="What a key earns in this long it may use at once, after it has asked for nothing."
    )


class OpenAIConfig(Section):
    """The routes below /v1."""

    tool_parser: str | None = Field(
        None, description="vLLM's name of the parser that finds tool calls in responses; none: tools are refused."
    )
    request_chat_template: bool = Field(
        False, description="Whether a request may bring its own chat template, a program that runs in the server."
    )


class FleetConfig(Section):
    """Several replicas of the server, on Ray Serve. With one replica and no ray_address, nothing of Ray is used."""

    replicas: int = Field(
        1, ge=1, le=1000, description="How many replicas serve; with max_replicas, how many at first."
    )
    min_replicas: int | None = Field(
        None, ge=1, description="Fewest replicas that the load may leave; none: `replicas`, if max_replicas is set."
    )
    max_replicas: int | None = Field(
        None, ge=1, description="Most replicas that the load may call for; none: their number stays as it is."
    )
    target_ongoing_requests: float = Field(
        16, gt=0, description="Requests at work in a replica that the number of replicas aims at, with max_replicas."
    )
    upscale_delay_s: float = Field(30, ge=0, description="Start replicas when there was too much work for this long.")
    downscale_delay_s: float = Field(
        600, ge=0, description="End replicas when there was too little work for this long; they finish what they have."
    )
    num_cpus: float = Field(
        1, ge=0, description="CPU cores that Ray sets aside for a replica, where there is a cluster."
    )
    num_gpus: float = Field(
        0, ge=0, description="GPUs that Ray sets aside for a replica: tensor_parallel_size, or less."
    )
    sticky: Literal["none", "session"] = Field(
        "none",
        description="session: requests with one X-Session-Id go to one replica, which has their prefix cached, for as "
        "long as it has room; all pass Ray Serve's proxy then. none: each goes to one with few at work.",
    )
    canary_seconds: float = Field(
        30, ge=0, description="How long a promoted policy serves in one replica before the others follow; 0: no canary."
    )
    canary_requests: int = Field(
        20, ge=0, description="Requests that the canary must have answered by then; 0: it need not have answered any."
    )
    canary_hold_seconds: float = Field(
        3600, ge=0, description="How much longer a canary that has answered fewer may serve alone, until it has."
    )
    canary_unproven: Literal["undo", "commit"] = Field(
        "undo",
        description="What becomes of a policy whose canary has answered too few to the end. undo: the rollout fails, "
        "and the pointer goes back. commit: the others follow, and the rollout's record says `unproven`.",
    )
    canary_share: float | None = Field(
        None, gt=0, lt=1, description="Part of the sessions that the canary gets; none: its part of the replicas."
    )
    canary_tolerance: float = Field(
        0.01,
        ge=0,
        le=1,
        description="The canary's part of failed requests may be this much above the others'. What counts is requests "
        "to /generate and /v1 that were let in; those that were refused (4xx) or given up by their client don't.",
    )
    step_timeout_s: float = Field(
        900, gt=0, description="Undo a rollout when a replica has not taken its step of it after this long."
    )
    health_check_period_s: float = Field(5, gt=0, description="How often each replica is asked whether it is alive.")
    health_check_timeout_s: float = Field(
        30, gt=0, description="A replica that does not answer for this long, three times, is replaced."
    )
    ray_address: Address | None = Field(
        None, description="Ray cluster to run on; none: a Ray of its own on this machine, ended with the server."
    )

    @property
    def is_one(self) -> bool:
        """Whether there is no fleet at all: one process, without Ray."""
        return self.ray_address is None and max(self.replicas, self.max_replicas or 1) == 1

    @property
    def least_replicas(self) -> int:
        """How many replicas there are when all is well, at least."""
        return self.replicas if self.min_replicas is None else self.min_replicas

    @property
    def longest_canary_s(self) -> float:
        """How long a canary serves alone, at most."""
        return 0.0 if self.canary_seconds == 0 else self.canary_seconds + self.canary_hold_seconds

    @model_validator(mode="after")
    def _bounds(self) -> Self:
        low, high = self.least_replicas, self.max_replicas
        if high is not None and not low <= self.replicas <= high:
            raise ValueError(f"replicas={self.replicas} is not between min_replicas={low} and max_replicas={high}")
        if high is None and self.min_replicas is not None:
            raise ValueError(f"min_replicas={self.min_replicas} needs max_replicas")
        return self


_OBJECT_STORE = r"^(s3|gs|az)://[^/]"


class ObjectStoreConfig(Section):
    """An object store; one without ``uri`` is not used."""

    uri: Address | None = Field(None, pattern=_OBJECT_STORE, description="s3://, gs:// or az:// address; null: none.")
    storage_options: dict[str, Secret] = Field(
        default_factory=dict,
        description="Options of the object store (region, endpoint, keys), as feedback.lake.storage_options has them "
        "for the lake; masked wherever settings are shown.",
    )

    @property
    def store_options(self) -> dict[str, str]:
        """``storage_options`` in clear, for the object store's client."""
        return {name: secret.get_secret_value() for name, secret in self.storage_options.items()}

    def redact(self, text: str) -> str:
        """A text of the object store's client without the keys and tokens that are among its options."""
        return without_credentials(text, self.storage_options)


class PolicyStoreConfig(ObjectStoreConfig):
    """Where policies are that several machines share without a shared disk."""

    uri: Address | None = Field(
        None,
        pattern=_OBJECT_STORE,
        description="s3://, gs:// or az:// address below which an object store has the policies and all that is on "
        "record of them; serve.policies is this machine's copy then, a folder of its own. The store must keep to "
        "conditional writes (`millrace doctor` tries). null: serve.policies has them.",
    )


class RetentionConfig(Section):
    """Which versions keep their weights. Manifests always stay."""

    keep_last: int | None = Field(
        None,
        ge=1,
        description="Weights of this many of the newest versions are kept; null: of all. What serves (of reward "
        "models, rewards) or did before it, what is pinned, what waits for a verdict or a promotion, what unfinished "
        "runs need, and the policy that training can start from whatever is erased stay too.",
    )
    served_days: float = Field(
        30, ge=0, description="So do versions that served (of reward models: rewarded) in the last so many days."
    )


class TracesConfig(Section):
    """OpenTelemetry: spans of requests and of cycles, rewards as evaluation events."""

    endpoint: Address | None = Field(
        None,
        pattern=r"^https?://[^/]",
        description="Base address of a collector that takes OTLP over HTTP, such as http://127.0.0.1:4318; none: no "
        "traces. Headers that it asks for are in the environment, as OTEL_EXPORTER_OTLP_HEADERS.",
    )
    sample_ratio: float = Field(
        1.0,
        ge=0,
        le=1,
        description="Share of the traces that begin here which are exported; others are as their parent says. Where "
        "keys are needed, the trace of a request without a good one begins here, whatever it says.",
    )
    timeout_s: float = Field(10, gt=0, le=60, description="An export may take this long (seconds).")


_LONGEST_NAME: Final = 64 - len("-api-71")  # a journal's writer has 64 characters


class ServeConfig(Section):
    """The server."""

    host: str = Field("127.0.0.1", description="Address to listen on.")
    port: int = Field(8000, ge=0, le=65535, description="Port to listen on.")
    api_processes: int = Field(
        1,
        ge=1,
        le=64,
        description="How many processes read requests and write answers and rows, in front of one engine; more than "
        "one where a single one is what the server is limited by, as with a small model on a GPU. Feedback, the "
        "console and the policy are the first one's.",
    )
    api_process_timeout_s: float = Field(
        30, gt=0, description="One of several api_processes that does not answer the first for so long is replaced."
    )
    allowed_hosts: list[str] = Field(
        default_factory=list,
        description="Names that requests may ask for (their Host header) where no key is needed, beside localhost, "
        "loopback addresses and `host`; *: any.",
    )
    proxies: list[ProxyAddress] = Field(
        default_factory=list,
        description="Addresses or networks of the proxies before the server. Only of theirs is X-Forwarded-For taken "
        "for where a request comes from: in the audit log, the access log, and where keys are slowed down.",
    )
    sso: SsoConfig = Field(default_factory=SsoConfig)
    plan: MemoryCheck = Field(
        "refuse",
        description="What is done before the start where weights and KV cache are planned not to fit. refuse: end with "
        "an error where they are far beyond the memory (on a GPU 1.1 times, on a CPU 1.25 times), and warn of what is "
        "closer, and of a second set of weights for which there is no room. warn: warn, and start. off: plan nothing.",
    )
    policies: str = Field("policies", description="Folder of the policy store.")
    policy_store: PolicyStoreConfig = Field(
        default_factory=PolicyStoreConfig,
        description="Policies in an object store, where there is no shared disk.",
    )
    replicas: str = Field("replicas", description="Folder where each replica records its swaps.")
    replica_name: str = Field(
        "replica-0",
        pattern=r"^[A-Za-z0-9_-]{1,64}$",
        description="Name of this server; replicas of a fleet are numbered on from it.",
    )
    model_name: str = Field("millrace", min_length=1, description="What answers call the model.")
    tenant: str = Field("default", min_length=1, description="Tenant that rows are recorded under.")
    session_days: int = Field(
        7, ge=1, le=3650, description="Feedback on a session is on its responses of this many days."
    )
    auth: Annotated[Literal["keys", "off"], BeforeValidator(_off)] = Field(
        "keys",
        description="keys: who asks needs a key as soon as there is one (`millrace keys create`); until then the "
        "server listens on loopback only. off: everybody who reaches the server may do everything.",
    )
    keys: str = Field("keys.json", description="File of the API keys, which `millrace keys` writes.")
    audit: str = Field(
        "audit.jsonl", description="File that keeps who did what to keys, policies and data; `millrace audit` shows it."
    )
    access_log: bool = Field(False, description="Log a line for every request.")
    log_format: Literal["text", "json"] = Field(
        "text",
        description="How log lines are written, also those of `up`, of the scheduler and of cycles; json: one object a "
        "line, with request and trace ids.",
    )
    drain_timeout_s: float = Field(20, ge=0, description="When stopping, wait this long for requests at work.")
    engine: EngineConfig = Field(default_factory=EngineConfig, description="vLLM.")
    swap: SwapConfig = Field(default_factory=SwapConfig, description="Following the serving pointer.")
    sleep: SleepConfig = Field(
        default_factory=SleepConfig, description="Sleeping, while training has the server's devices."
    )
    limits: LimitsConfig = Field(default_factory=LimitsConfig, description="What one request may ask for.")
    retention: RetentionConfig = Field(
        default_factory=RetentionConfig, description="Which policies keep their weights."
    )
    fleet: FleetConfig = Field(
        default_factory=FleetConfig, description="Several replicas, and how they go from one policy to another."
    )
    traces: TracesConfig = Field(default_factory=TracesConfig, description="OpenTelemetry's traces.")
    openai: OpenAIConfig = Field(default_factory=OpenAIConfig, description="The routes below /v1.")

    def with_replicas(self, replicas: int) -> ServeConfig:
        """These settings with another number of replicas. Raises ValueError if that can't be."""
        fleet = FleetConfig(**self.fleet.model_dump() | {"replicas": replicas})
        made = self.model_copy(update={"fleet": fleet})
        made.require_one_engine()
        return made

    @model_validator(mode="after")
    def _can_work(self) -> Self:
        self.require_one_engine()
        return self

    @property
    def never_sleeps(self) -> str | None:
        """Why such a server can't sleep, and what would; None if it can."""
        if not self.fleet.is_one:
            return "a fleet's replicas don't sleep: have one server (fleet.replicas=1, without fleet.ray_address)"
        if self.api_processes > 1:
            return f"with api_processes={self.api_processes} requests have several ways in: leave api_processes out"
        return None

    def require_one_engine(self) -> None:
        """Raises ValueError for several API processes before anything else than one engine, or what never sleeps."""
        if self.sleep.allowed and (why := self.never_sleeps):
            raise ValueError(f"sleep.allowed: {why}")
        if self.api_processes == 1:
            return
        if not self.fleet.is_one:
            raise ValueError(
                f"api_processes={self.api_processes} are for one server, and fleet has {self.fleet.replicas} replicas, "
                "of which each has one: leave api_processes out, or have one replica and no fleet.ray_address"
            )
        if several := sorted(name for name in self.engine.extra if name.startswith("data_parallel")):
            raise ValueError(
                f"api_processes={self.api_processes} share one engine, and engine.extra.{several[0]} is for several: "
                "leave one of them out"
            )
        if len(self.replica_name) > _LONGEST_NAME:
            raise ValueError(
                f"replica_name={self.replica_name} is too long with api_processes={self.api_processes}, whose journals "
                f"are named after it: at most {_LONGEST_NAME} characters"
            )
