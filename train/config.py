"""Settings of training."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from feedback.rewards.config import RuleName, Weight
from feedback.section import Address
from train import refusals
from train.algorithms.config import AlgorithmConfig
from train.placement_config import PlacementConfig


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", validate_default=True, allow_inf_nan=False)


_Beta = Annotated[float, Field(ge=0, lt=1)]


class OptimizerConfig(_Section):
    """AdamW."""

    learning_rate: float = Field(1e-6, gt=0, description="Peak learning rate.")
    warmup_steps: int = Field(2, ge=0, description="Steps of linear warm-up.")
    betas: tuple[_Beta, _Beta] = Field((0.9, 0.95), description="AdamW's betas.")
    weight_decay: float = Field(0.0, ge=0, description="Decoupled weight decay.")
    max_grad_norm: float = Field(1.0, gt=0, description="Gradients are clipped to this norm.")


class FsdpConfig(_Section):
    """How the weights in training are spread over the ranks."""

    layers: list[str] | None = Field(
        None, description="Classes of the modules to shard by; those that the model itself says not to split if unset."
    )
    replicas: int = Field(
        1, ge=1, description="Groups of ranks that each hold the whole model, in shards (HSDP); divides train.ranks."
    )
    sequence_parallel: int = Field(
        1,
        ge=1,
        description="Ranks that share each sequence (Ulysses), for sequences too long for one; divides train.ranks and "
        "the model's attention heads.",
    )
    cpu_offload: bool = Field(
        False, description="Keep parameters, gradients and optimizer in CPU memory; without a GPU it does nothing."
    )
    reduce_every_micro_batch: bool = Field(
        False,
        description="Reduce gradients after each micro-batch, so that a rank never holds more than its shard of them; "
        "otherwise it holds all until the last, and reduces once.",
    )
    attention: Literal["auto", "sdpa", "flash_attention_2", "eager"] = Field(
        "auto",
        description="Implementation of attention; auto: sequence by sequence, flash attention on a GPU, SDPA on a CPU.",
    )


class LoraConfig(_Section):
    """Low-rank adapters: what is trained in place of the weights themselves."""

    rank: int = Field(16, ge=1, description="Rank of the adapters.")
    alpha: int = Field(32, ge=1, description="An adapter's output is scaled by alpha / rank.")
    dropout: float = Field(0.0, ge=0, lt=1, description="Dropout of an adapter's input, in training.")
    target_modules: Literal["all-linear"] | list[str] = Field(
        "all-linear", description="Names of the linear layers that get one; all-linear: all but the output layer."
    )
    publish_adapter: bool = Field(
        False, description="Leave the adapter in the run's folder too, in peft's format, beside the merged policy."
    )


class RolloutConfig(_Section):
    """How training samples fresh responses: vLLM inside the training processes."""

    temperature: float = Field(1.0, gt=0, description="Sampling temperature. Full support is kept: no top-p, no top-k.")
    max_tokens: int = Field(256, ge=1, description="Longest response, in tokens.")
    max_model_len: int | None = Field(
        None, ge=2, description="Longest prompt and response together; the model's own if unset."
    )
    tensor_parallel_size: int = Field(
        1, ge=1, description="Ranks that share one generation engine; divides train.ranks."
    )
    kv_cache_bytes: int = Field(256 * 2**20, ge=2**20, description="KV cache of each engine, in bytes.")
    max_num_seqs: int = Field(256, ge=1, description="Sequences that an engine decodes at once.")
    enforce_eager: bool = Field(True, description="Don't compile the model: starts in seconds, decodes slower.")
    reshard: Literal["plan", "gather"] = Field(
        "plan",
        description="How trained weights reach the engine. plan: a rank gets the slices that it lacks. gather: every "
        "rank gets every tensor whole; for models whose weight loaders compute.",
    )
    reshard_bucket_bytes: int = Field(
        64 * 2**20, ge=2**16, description="Extra memory that resharding by plan takes on each rank, in bytes."
    )
    staleness: Literal[0, 1] = Field(
        0,
        description="1: the next batch is sampled while this one is learned from, so that responses are of the policy "
        "one step back (corrected by their logprobs); needs generation on a pool of its own. 0: no overlap.",
    )


class DataConfig(_Section):
    """What training learns from."""

    prompts_per_step: int = Field(
        32, ge=1, description="Prompts that each step learns from; of offline algorithms, items."
    )
    min_prompts: int = Field(32, ge=1, description="With fewer prompts in the lake, no training takes place.")
    max_prompts: int = Field(10_000, ge=1, description="The most recent prompts to draw from.")
    traffic_share: float = Field(
        0.0,
        ge=0,
        le=1,
        description="Share of prompts_per_step whose responses are logged ones, with the rewards that scoring gave, in "
        "place of fresh ones. 1: nothing is sampled.",
    )

    exclude_suites: list[Path] = Field(
        [],
        description="Suites, as evaluation.suite, whose prompts nothing is learned from, whoever asks them; "
        "evaluation.suite is always one.",
    )
    held_out_share: float = Field(
        0.1,
        ge=0,
        lt=1,
        description="Share of the prompts of an offline algorithm's items that it is measured by and never learns "
        "from; the same ones as the lake grows, but for a few.",
    )
    held_out_most: int = Field(256, ge=1, description="Held-out items that are measured, at most.")
    held_out_every_steps: int = Field(
        10, ge=1, description="Steps from one measurement to the next; at the start and at the end there is one too."
    )

    @property
    def traffic_prompts_per_step(self) -> int:
        """Prompts of a step whose responses are logged ones."""
        return round(self.traffic_share * self.prompts_per_step)

    @property
    def fresh_prompts_per_step(self) -> int:
        """Prompts of a step that responses are sampled for."""
        return self.prompts_per_step - self.traffic_prompts_per_step


class CheckpointConfig(_Section):
    """What a run keeps so that it can go on after its process was killed."""

    every_steps: int | None = Field(
        10, ge=1, description="Steps from one checkpoint to the next; null: none, a killed run starts again."
    )
    keep: int = Field(2, ge=1, description="Checkpoints kept; older ones go when a newer one is whole.")
    asynchronous: bool = Field(True, description="Write in the background, while the next steps are computed.")


class TrainConfig(_Section):
    """The training job."""

    runs: Path = Field(Path("runs"), description="Folder of training runs, relative to home.")
    ranks: int = Field(1, ge=1, description="Worker processes; each holds an FSDP shard and generates.")
    threads_per_rank: int = Field(1, ge=1, description="CPU threads of each worker process.")
    dtype: Literal["float32", "bfloat16"] = Field("bfloat16", description="Compute type; master weights are float32.")
    steps: int = Field(20, ge=1, description="Steps in one run.")
    minibatches: int = Field(1, ge=1, description="Parts of a step's batch, each of which is an optimizer step.")
    epochs: int = Field(1, ge=1, description="Passes over a step's minibatches; ratios are to the policy before them.")
    micro_batch_tokens: int = Field(
        4096,
        ge=16,
        description="Tokens that a rank computes in one forward and backward pass; a prompt counts once for all of its "
        "responses in it.",
    )
    activation_checkpointing: bool = Field(
        False, description="Recompute activations in the backward pass to save memory."
    )
    seed: int = Field(0, description="Seed of sampling and order; the run's own number is mixed in.")
    reward: str | None = Field(
        None, description="module:function that rewards rollouts; the mean of feedback.scoring.rules if unset."
    )
    ray_address: Address | None = Field(
        None, description="Ray's job API, http://host:8265, of the cluster to train on; a local Ray if unset."
    )
    launcher: Literal["ray", "torchrun"] = Field(
        "ray",
        description="What starts the workers. torchrun: one process a rank on this machine, without Ray; all workers "
        "share them.",
    )
    placement: PlacementConfig = Field(
        default_factory=PlacementConfig, description="Which workers share devices; by default all do."
    )
    start_timeout_s: float = Field(600.0, gt=0, description="Deadline for the workers to be up, in seconds.")
    step_timeout_s: float = Field(1800.0, gt=0, description="Deadline for any one call to the workers, in seconds.")
    reward_weights: dict[RuleName, Weight] = Field(
        {},
        description="Weights of rules of feedback.scoring.rules in training's reward, in place of their own; 0 leaves "
        "one out.",
    )
    max_kl: float | None = Field(
        None,
        gt=0,
        description="Stop, and publish nothing, when KL to the parent (offline: half the squared log ratio), in nats a "
        "token, passes this.",
    )
    min_entropy: float | None = Field(
        None, gt=0, description="Stop, and publish nothing, when the policy's mean entropy (nats a token) falls below."
    )
    max_length_growth: float | None = Field(
        10.0,
        gt=1,
        description="Stop, and publish nothing, when responses are more than so many times as long as in the run's "
        "first three steps; null: never.",
    )
    max_idle_steps: int = Field(
        10, ge=1, description="Steps in a row without an update, for want of rewards that differ, that end a run."
    )
    erased_rows: Literal["refuse", "mark"] = Field(
        "refuse",
        description="What becomes of a run while which rows that it had read were erased. refuse: it publishes nothing "
        "and keeps nothing; the next run learns without them. mark: it publishes, and the policy's record says so.",
    )
    measure_kl: bool = Field(
        True,
        description="Measure the KL to the parent policy on every step, also where neither loss nor max_kl needs it: "
        "a forward pass, and the parent's weights in memory.",
    )
    dataflow: str | None = Field(
        None, description="module:class of a dataflow of your own, a subclass of train.dataflows.base.Dataflow."
    )
    algorithm: AlgorithmConfig = Field(default_factory=AlgorithmConfig, description="The algorithm.")
    optimizer: OptimizerConfig = Field(default_factory=OptimizerConfig, description="The optimizer.")
    fsdp: FsdpConfig = Field(default_factory=FsdpConfig, description="How the weights in training are spread.")
    lora: LoraConfig | None = Field(None, description="Train low-rank adapters in place of all weights.")
    rollout: RolloutConfig = Field(default_factory=RolloutConfig, description="Sampling of fresh responses.")
    data: DataConfig = Field(default_factory=DataConfig, description="What is learned from.")
    checkpoint: CheckpointConfig = Field(
        default_factory=CheckpointConfig, description="What a killed run goes on from."
    )
    trackers: list[str] = Field(
        [], description="module:function, each called with the run, of further trackers: see train.trackers.Tracker."
    )
    hooks: list[str] = Field(
        [], description="module:function, each called with the run, of hooks: see train.hooks.Hook."
    )

    def resolved(self, path: Callable[[Path], Path]) -> TrainConfig:
        """The same with every path made absolute by ``path``."""
        critic = self.algorithm.critic
        if critic.model is not None:
            critic = critic.model_copy(update={"model": path(critic.model)})
        algorithm = self.algorithm.model_copy(update={"critic": critic})
        data = self.data.model_copy(update={"exclude_suites": [path(suite) for suite in self.data.exclude_suites]})
        return self.model_copy(update={"runs": path(self.runs), "algorithm": algorithm, "data": data})

    def excluding(self, suite: Path) -> TrainConfig:
        """The same, with one more suite whose prompts nothing is learned from."""
        suites = self.data.exclude_suites
        data = self.data.model_copy(update={"exclude_suites": suites if suite in suites else [*suites, suite]})
        return self.model_copy(update={"data": data})

    def ranks_of(self, pool: str) -> int:
        """The ranks of the named pool."""
        return self.placement.pools[pool].ranks or self.ranks

    def threads_of(self, pool: str) -> int:
        """The threads of each rank of the named pool."""
        return self.placement.pools[pool].threads or self.threads_per_rank

    @property
    def samples(self) -> bool:
        """Whether responses are sampled: not where it learns from feedback, nor where all are logged ones."""
        return not self.algorithm.is_offline and self.data.fresh_prompts_per_step > 0

    @property
    def has_reference(self) -> bool:
        """Whether a run needs the parent policy's logprobs."""
        if not self.algorithm.trains_policy:
            return False
        return self.measure_kl or self.algorithm.kl.coefficient > 0 or self.max_kl is not None

    @property
    def old_log_probs_first(self) -> bool:
        """Whether the policy's logprobs are asked for before it learns.

        An update's own forward pass gives them at no cost, unless there are several updates, it drops some of the
        adapters' inputs, or the reward has the KL in it.
        """
        kl = self.algorithm.kl
        dropout = self.lora is not None and self.lora.dropout > 0
        updates = self.minibatches * self.epochs
        return updates > 1 or dropout or (kl.coefficient > 0 and kl.placement == "reward")

    @property
    def data_parallel_ranks(self) -> int:
        """Parts that a batch is split into: of the pools that compute on it, the one with the most."""
        on = self.placement
        pools = {on.actor, on.reference, on.critic or on.actor}
        return max(self.ranks_of(pool) // self.fsdp.sequence_parallel for pool in pools)

    @model_validator(mode="after")
    def _algorithm_knows_the_longest_response(self) -> TrainConfig:
        self.algorithm = self.algorithm.with_lengths(self.rollout.max_tokens)
        return self

    @model_validator(mode="after")
    def _can_work(self) -> TrainConfig:
        refusals.check(self)
        return self
