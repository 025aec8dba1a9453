"""Settings of training."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", validate_default=True)


class AlgorithmConfig(_Section):
    """What is learned from a batch of scored responses."""

    name: Literal["grpo"] = Field("grpo", description="The algorithm.")
    group_size: int = Field(8, ge=2, description="Responses sampled for each prompt; their rewards are compared.")
    normalise_by_std: bool = Field(True, description="Divide a group's advantages by their standard deviation.")
    clip_low: float = Field(0.2, gt=0, lt=1, description="The policy ratio is clipped below 1 - clip_low.")
    clip_high: float = Field(0.28, gt=0, description="The policy ratio is clipped above 1 + clip_high.")
    kl_coefficient: float = Field(0.0, ge=0, description="Weight of the KL to the parent policy in the loss.")
    kl_estimator: Literal["k1", "k2", "k3"] = Field("k3", description="Estimator of that KL.")
    importance_cap: float = Field(
        2.0, gt=0, description="Cap of the weight that corrects for sampling and training logprobs that differ."
    )


class OptimizerConfig(_Section):
    """AdamW."""

    learning_rate: float = Field(1e-6, gt=0, description="Peak learning rate.")
    warmup_steps: int = Field(2, ge=0, description="Steps of linear warm-up.")
    betas: tuple[float, float] = Field((0.9, 0.95), description="AdamW's betas.")
    weight_decay: float = Field(0.0, ge=0, description="Decoupled weight decay.")
    max_grad_norm: float = Field(1.0, gt=0, description="Gradients are clipped to this norm.")


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


class DataConfig(_Section):
    """What training learns from."""

    prompts_per_step: int = Field(32, ge=1, description="Prompts of traffic that each step samples responses for.")
    min_prompts: int = Field(32, ge=1, description="With fewer prompts in the lake, no training takes place.")
    max_prompts: int = Field(10_000, ge=1, description="The most recent prompts to draw from.")
    traffic_groups_per_step: int = Field(
        0, ge=0, description="Groups of logged responses, with the rewards that scoring gave them, added to each step."
    )


class TrainConfig(_Section):
    """The training job."""

    runs: Path = Field(Path("runs"), description="Folder of training runs, relative to home.")
    ranks: int = Field(1, ge=1, description="Worker processes; each holds an FSDP shard and generates.")
    threads_per_rank: int = Field(1, ge=1, description="CPU threads of each worker process.")
    dtype: Literal["float32", "bfloat16"] = Field("bfloat16", description="Compute type; master weights are float32.")
    steps: int = Field(20, ge=1, description="GRPO steps in one run.")
    minibatches: int = Field(1, ge=1, description="Optimizer steps on each batch of rollouts.")
    micro_batch_tokens: int = Field(4096, ge=16, description="Tokens in one forward and backward pass of a rank.")
    activation_checkpointing: bool = Field(
        False, description="Recompute activations in the backward pass to save memory."
    )
    seed: int = Field(0, description="Seed of sampling and order; the run's own number is mixed in.")
    reward: str | None = Field(
        None, description="module:function that rewards rollouts; the mean of feedback.scoring.rules if unset."
    )
    ray_address: str | None = Field(
        None, description="Ray's job API, http://host:8265, of the cluster to train on; a local Ray if unset."
    )
    start_timeout_s: float = Field(600.0, gt=0, description="Deadline for the workers to be up, in seconds.")
    step_timeout_s: float = Field(1800.0, gt=0, description="Deadline for any one call to the workers, in seconds.")
    max_kl: float | None = Field(
        None, gt=0, description="Stop, and publish nothing, when KL to the parent passes this."
    )
    algorithm: AlgorithmConfig = Field(default_factory=AlgorithmConfig, description="The algorithm.")
    optimizer: OptimizerConfig = Field(default_factory=OptimizerConfig, description="The optimizer.")
    rollout: RolloutConfig = Field(default_factory=RolloutConfig, description="Sampling of fresh responses.")
    data: DataConfig = Field(default_factory=DataConfig, description="What is learned from.")

    @model_validator(mode="after")
    def _ranks_divide(self) -> TrainConfig:
        t = self.rollout.tensor_parallel_size
        if self.ranks % t:
            raise ValueError(
                f"train.rollout.tensor_parallel_size={t} does not divide train.ranks={self.ranks}; use a divisor of it"
            )
        if self.minibatches > self.data.prompts_per_step:
            raise ValueError(
                f"train.minibatches={self.minibatches} is more than train.data.prompts_per_step="
                f"{self.data.prompts_per_step}; a minibatch needs at least one prompt"
            )
        return self
