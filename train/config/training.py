"""Settings of training."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, Literal

from pydantic import ConfigDict, Field, model_validator

from feedback.config import ComponentName, Weight
from feedback.settings_base import Address, Section
from serve.config import MemoryCheck
from train.config.algorithms import ANY_SUPPORT, BEST_OF_N, DISTILL, GROUPED, ONLINE_DPO, REWARD_MODEL, AlgorithmConfig
from train.config.environment import EnvironmentConfig
from train.config.fp8 import Fp8Config
from train.config.placement import PlacementConfig
from train.config.sections import (
    CheckpointConfig,
    DataConfig,
    FsdpConfig,
    LoraConfig,
    OptimizerConfig,
    PolicyModelConfig,
    ResidentConfig,
    RestartsConfig,
    RewardModelConfig,
    RolloutConfig,
    RunRetentionConfig,
    RunStoreConfig,
)

MAX_RANK: Final = 512
"""Of adapters that vLLM has kernels for."""

_OF_ANY_RUN: Final = (
    *(
        "runs",
        "run_store",
        "ranks",
        "threads_per_rank",
        "dtype",
        "fp8",
        "micro_batch_tokens",
        "activation_checkpointing",
        "seed",
    ),
    *("ray_address", "launcher", "start_timeout_s", "step_timeout_s", "erased_rows", "fsdp", "checkpoint"),
    *("resident", "restarts"),
)
"""Settings that training a policy and training a reward model share."""


class TrainConfig(Section):
    """The training job."""

    model_config = ConfigDict(frozen=False)  # a validator completes ``algorithm``

    runs: Path = Field(Path("runs"), description="Folder of training runs, relative to home.")
    run_store: RunStoreConfig = Field(
        default_factory=RunStoreConfig, description="Runs in an object store, for machines without a shared disk."
    )
    ranks: int = Field(1, ge=1, description="Worker processes; each holds an FSDP shard and generates.")
    plan: MemoryCheck = Field(
        "refuse",
        description="What is done before the start where a phase of a step is planned not to fit. refuse: end with an "
        "error where it is far beyond a rank's memory (on a GPU 1.1 times, on a CPU 1.25 times), and warn of what is "
        "closer. warn: warn, and start. off: plan nothing.",
    )
    threads_per_rank: int = Field(1, ge=1, description="CPU threads of each worker process.")
    dtype: Literal["float32", "bfloat16"] = Field("bfloat16", description="Compute type; master weights are float32.")
    fp8: Fp8Config | None = Field(None, description="Multiply in fp8, in training, generation or both.")
    steps: int = Field(20, ge=1, description="Steps in one run.")
    minibatches: int = Field(1, ge=1, description="Parts of a step's batch, each of which is an optimizer step.")
    epochs: int = Field(1, ge=1, description="Passes over a step's minibatches; ratios are to the policy before them.")
    micro_batch_tokens: int = Field(
        4096,
        ge=16,
        description="Tokens that a rank computes in one forward and backward pass; a prompt counts once for all of its "
        "responses in it.",
    )
    activation_checkpointing: bool | None = Field(
        None,
        description="Recompute activations in the backward pass to save memory. None: by the plan when a run starts, "
        "where they don't fit.",
    )
    seed: int = Field(0, description="Seed of sampling and order; the run's own number is mixed in.")
    reward: str | None = Field(
        None, description="module:function that rewards rollouts; the sources of feedback.scoring if unset."
    )
    ray_address: Address | None = Field(
        None, description="Ray's job API, http://host:8265, of the cluster to train on; a local Ray if unset."
    )
    launcher: Literal["ray", "torchrun"] = Field(
        "ray",
        description="What starts the workers. torchrun: one process per rank on this machine, without Ray; all workers "
        "share them.",
    )
    placement: PlacementConfig = Field(
        default_factory=PlacementConfig, description="Which workers share devices; by default all do."
    )
    start_timeout_s: float = Field(600.0, gt=0, description="Deadline for the workers to be up, in seconds.")
    step_timeout_s: float = Field(1800.0, gt=0, description="Deadline for any one call to the workers, in seconds.")
    reward_weights: dict[ComponentName, Weight] = Field(
        {},
        description="Weights in training's reward of components of feedback.scoring (rules by name, model, judge, and "
        "human where it has a model), in place of their own; 0 leaves one out.",
    )
    reward_max_missing: float = Field(
        0.2,
        ge=0,
        le=1,
        description="Stop, and publish nothing, when a larger share of a step's sampled responses gets no reward. Up "
        "to it they are left out and counted.",
    )
    max_kl: float | None = Field(
        None,
        gt=0,
        description="Stop, and publish nothing, when KL to the parent (offline: half the squared log ratio), in nats a "
        "token, passes this.",
    )
    min_entropy: float | None = Field(
        None,
        gt=0,
        description="Stop, and publish nothing, when the policy's mean entropy (nats per token) falls below.",
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
    evaluate_suite: Path | None = Field(
        None,
        description="Suite of prompts, relative to home, that nothing is learned from and that the policy in training "
        "answers greedily as it goes, for the run's own reward; not the gate's.",
    )
    evaluate_every: int = Field(
        10,
        ge=1,
        description="Steps from one such evaluation to the next; at the start and at the end there is one too.",
    )
    keep: Literal["last", "best"] = Field(
        "last",
        description="Which weights become the candidate: those after the last step, or after the step with the highest "
        "mean reward on train.evaluate_suite. Not together with train.run_store.",
    )
    model: PolicyModelConfig = Field(default_factory=PolicyModelConfig, description="The policy's model.")
    optimizer: OptimizerConfig = Field(default_factory=OptimizerConfig, description="The optimizer.")
    fsdp: FsdpConfig = Field(default_factory=FsdpConfig, description="How the weights in training are spread.")
    lora: LoraConfig | None = Field(None, description="Train low-rank adapters in place of all weights.")
    rollout: RolloutConfig = Field(default_factory=RolloutConfig, description="Sampling of fresh responses.")
    environment: EnvironmentConfig | None = Field(
        None,
        description="Sample episodes with an environment, which answers the policy's turns and rewards them, in place "
        "of single responses.",
    )
    data: DataConfig = Field(default_factory=DataConfig, description="What is learned from.")
    reward_model: RewardModelConfig = Field(
        default_factory=RewardModelConfig, description="Training of the reward model (recipe rlhf)."
    )
    checkpoint: CheckpointConfig = Field(
        default_factory=CheckpointConfig, description="What a killed run goes on from."
    )
    restarts: RestartsConfig = Field(
        default_factory=RestartsConfig, description="How a run goes on by itself when a process of it dies or hangs."
    )
    resident: ResidentConfig = Field(default_factory=ResidentConfig, description="Workers that stay between cycles.")
    retention: RunRetentionConfig = Field(
        default_factory=RunRetentionConfig, description="Which runs keep their checkpoints."
    )
    trackers: list[str] = Field(
        [],
        description="Trackers beside metrics.jsonl and TensorBoard: wandb, mlflow, or module:function, called with the "
        "run, of your own (train.observe.trackers.Tracker).",
    )
    hooks: list[str] = Field(
        [], description="module:function, each called with the run, of hooks: see train.observe.hooks.Hook."
    )

    def resolved(self, path: Callable[[Path], Path]) -> TrainConfig:
        """The same with every path made absolute by ``path``."""
        critic = self.algorithm.critic
        if critic.model is not None:
            critic = critic.model_copy(update={"model": path(critic.model)})
        algorithm = self.algorithm.model_copy(update={"critic": critic})
        data = self.data.model_copy(
            update={
                "exclude_suites": [path(suite) for suite in self.data.exclude_suites],
                "prompts": [own.model_copy(update={"path": path(own.path)}) for own in self.data.prompts],
            }
        )
        reward_model = self.reward_model.model_copy(update={"folder": path(self.reward_model.folder)})
        suite = None if self.evaluate_suite is None else path(self.evaluate_suite)
        parts = {"algorithm": algorithm, "data": data, "reward_model": reward_model, "evaluate_suite": suite}
        return self.model_copy(update={"runs": path(self.runs), **parts})

    def of_reward_model(self) -> TrainConfig:
        """The settings of a run that trains a reward model: ``train.reward_model``, and the machine's part of these."""
        own, sampling = self.reward_model, {"rollout": None}
        model = self.model.model_copy(update={"class_name": None})  # it is transformers' own, of the policy's body
        data = {
            "prompts_per_step": own.items_per_step,
            "min_prompts": own.min_items,
            "max_prompts": self.data.max_prompts,
            "exclude_suites": self.data.exclude_suites,
            "holdout": self.data.holdout,
            "held_out_share": own.held_out_share,
        }
        return TrainConfig.model_validate(
            {name: getattr(self, name) for name in _OF_ANY_RUN}
            | {"fp8": None if self.fp8 is None or self.fp8.training is None else self.fp8.model_copy(update=sampling)}
            | {"reward_model": own, "steps": own.steps, "data": data, "model": model}
            | {"algorithm": {"name": REWARD_MODEL, "vote_noise": own.vote_noise}}
            | {"optimizer": self.optimizer.model_copy(update={"learning_rate": own.learning_rate})}
            | {"rollout": {"max_model_len": self.rollout.max_model_len, "backend": self.rollout.backend}}
        )

    def excluding(self, suite: Path | None, holdout: float) -> TrainConfig:
        """The same, with one more suite, and the held-out slice, whose prompts nothing is learned from."""
        suites = self.data.exclude_suites
        more = [] if suite is None or suite in suites else [suite]
        data = {"exclude_suites": [*suites, *more], "holdout": max(holdout, self.data.holdout)}
        return self.model_copy(update={"data": self.data.model_copy(update=data)})

    def ranks_of(self, pool: str) -> int:
        """The ranks of the named pool."""
        return self.placement.pools[pool].ranks or self.ranks

    def threads_of(self, pool: str) -> int:
        """The threads of each rank of the named pool."""
        return self.placement.pools[pool].threads or self.threads_per_rank

    @property
    def cores(self) -> int:
        """The cores that all ranks of all pools compute on."""
        return sum(self.ranks_of(pool) * self.threads_of(pool) for pool in self.placement.pools)

    @property
    def samples(self) -> bool:
        """Whether responses are sampled: not where it learns from feedback, nor where all are logged ones."""
        return not self.algorithm.is_offline and self.data.fresh_prompts_per_step > 0

    @property
    def generates_beside_adapters(self) -> bool:
        """Whether generation has the parent's weights, and beside them the adapters in training."""
        return self.samples and self.lora is not None and self.lora.sync == "adapters"

    @property
    def rewards_responses(self) -> bool:
        """Whether what is sampled is rewarded by a reward function; an environment rewards by itself."""
        return self.samples and self.environment is None

    @property
    def longest_response(self) -> int:
        """Tokens that are sampled for a response, or for all turns of an episode, at most."""
        turn = self.rollout.max_tokens
        return turn if self.environment is None else self.environment.longest(turn)

    @property
    def has_reference(self) -> bool:
        """Whether a run needs the parent policy's logprobs."""
        if not self.algorithm.trains_policy:
            return False
        if self.algorithm.name == ONLINE_DPO:
            return True
        return self.measure_kl or self.algorithm.kl.coefficient > 0 or self.max_kl is not None

    @property
    def old_log_probs_first(self) -> bool:
        """Whether the policy's logprobs are computed before it learns.

        An update's own forward pass computes them at no cost, unless there are several updates, it drops some of the
        adapters' inputs, or the reward has the KL in it.
        """
        kl = self.algorithm.kl
        dropout = self.lora is not None and self.lora.dropout > 0
        updates = self.minibatches * self.epochs
        return updates > 1 or dropout or (kl.coefficient > 0 and kl.placement == "reward")

    @property
    def updates(self) -> int:
        """Optimizer steps of a run, at most."""
        return self.steps * self.minibatches * self.epochs

    @property
    def updates_of_policy(self) -> int:
        """Of them, those in which not the critic alone learns."""
        return (self.steps - self.algorithm.critic.warmup_steps) * self.minibatches * self.epochs

    @property
    def data_parallel_ranks(self) -> int:
        """Parts that a batch is split into: of the pools that compute on it, the one with the most."""
        on = self.placement
        pools = {on.actor, on.reference, on.critic or on.actor}
        return max(self.ranks_of(pool) // self.fsdp.ranks_per_part for pool in pools)

    @property
    def sequences_per_prompt(self) -> int:
        """Of a sampled prompt, that an update learns from: its group, or the best of it."""
        return self.algorithm.group_size if self.samples and self.algorithm.name != BEST_OF_N else 1

    @property
    def sequences_per_step(self) -> int:
        """That a step learns from, at least."""
        return self.data.fresh_prompts_per_step * self.sequences_per_prompt + self.data.traffic_prompts_per_step

    @model_validator(mode="after")
    def _can_work(self) -> TrainConfig:
        self.algorithm = self.algorithm.with_lengths(self.longest_response)
        _evaluation_suits(self)
        if self.evaluate_suite is not None:
            self.data = self.excluding(self.evaluate_suite, 0.0).data
        _backend_suits(self)
        _fp8_suits(self)
        _adapters_suit(self)
        _placement_suits(self)
        _offload_suits(self)
        _ranks_divide(self)
        _shares_are_prompts(self)
        name = self.algorithm.name
        check_baseline(self, compares_groups=name in (*GROUPED, ONLINE_DPO, BEST_OF_N), needs_greedy=name == "remax")
        if self.samples:
            _responses_suit(self)
            _prompts_suit(self.data)
        else:
            _nothing_is_sampled(self)
        _batch_suits(self)
        _environment_suits(self)
        _teacher_suits(self)
        _critic_suits(self)
        _schedule_suits(self)
        if not self.algorithm.trains_policy:
            _no_policy_is_trained(self)
        elif self.data.holdout_side == "slice":
            raise ValueError(
                f"train.data.holdout_side=slice: {name} trains a policy, which learns nothing of the held-out slice; "
                "take it out"
            )
        if self.reward is not None and self.reward_weights:
            raise ValueError(
                f"train.reward={self.reward} rewards responses by itself, and train.reward_weights weighs the "
                "sources of feedback.scoring; set one of them"
            )
        return self


def _backend_suits(config: TrainConfig) -> None:
    on, rollout, fsdp = config.placement, config.rollout, config.fsdp
    if rollout.backend == "vllm" or not config.samples:
        return
    environment = None if config.environment is None else config.environment.name
    own = "generates with the actor's own weights"
    for setting, value, possible, why in (
        ("train.environment", environment, None, "has no engine for turns of any number"),
        ("train.placement.rollout", on.rollout, on.actor, own),
        ("train.rollout.staleness", rollout.staleness, 0, f"{own}, not with those before"),
        ("train.rollout.tensor_parallel_size", rollout.tensor_parallel_size, 1, "shares no layer"),
        ("train.fsdp.tensor_parallel", fsdp.tensor_parallel, 1, "shares no layer"),
        ("train.fsdp.sequence_parallel", fsdp.sequence_parallel, 1, "shares no sequence"),
        ("train.rollout.enforce_eager", rollout.is_eager, True, "compiles nothing"),
        ("train.fsdp.offload_while_generating", bool(fsdp.offload_while_generating), False, own),
        ("train.rollout.reshard", rollout.reshard, "plan", "sends no weights"),
    ):
        if value != possible:
            raise ValueError(
                f"train.rollout.backend=hf {why}: take out {setting}={value}, or set train.rollout.backend to vllm"
            )


def _fp8_suits(config: TrainConfig) -> None:
    fp8 = config.fp8
    if fp8 is None:
        return
    if config.dtype != "bfloat16":
        raise ValueError(
            f"{fp8.asked_for} rounds what is bfloat16, and train.dtype={config.dtype}: set train.dtype to bfloat16, or "
            "train.fp8 to null"
        )
    if fp8.training is not None and config.fsdp.tensor_parallel > 1:
        raise ValueError(
            f"train.fp8.training={fp8.training} multiplies in whole layers, and train.fsdp.tensor_parallel="
            f"{config.fsdp.tensor_parallel} shares them: set either to null or 1"
        )
    if fp8.rollout is not None and config.samples and config.rollout.backend != "vllm":
        raise ValueError(
            f"train.fp8.rollout={fp8.rollout} is vLLM's, and train.rollout.backend={config.rollout.backend} generates "
            "by the weights in training, in fp8 by train.fp8.training: set it to null"
        )


def _adapters_suit(config: TrainConfig) -> None:
    if config.generates_beside_adapters:
        assert config.lora is not None
        for name, found, wanted, reason in (
            ("train.lora.base", config.lora.base, None, "generation would have the weights as they are stored"),
            ("train.rollout.backend", config.rollout.backend, "vllm", "generates by the weights in training"),
        ):
            if found != wanted:
                raise ValueError(
                    f"train.lora.sync=adapters and {name}={found}: {reason}; set train.lora.sync to merged, or "
                    f"{name} to {wanted or 'null'}"
                )
        if config.lora.rank > MAX_RANK:
            raise ValueError(
                f"train.lora.rank={config.lora.rank} is more than the {MAX_RANK} that vLLM computes adapters of: use "
                "less, or train.lora.sync=merged"
            )
    for setting, lora in (("train.lora", config.lora), ("train.algorithm.critic.lora", config.algorithm.critic.lora)):
        if lora is None or lora.base is None:
            continue
        for other, value, possible, why in (
            (
                "train.fsdp.tensor_parallel",
                config.fsdp.tensor_parallel,
                1,
                "can't be cut to share layers",
            ),
            ("train.fsdp.cpu_offload", config.fsdp.cpu_offload, False, "stay on their device"),
            ("train.fsdp.compile_layers", config.fsdp.compile_layers, None, "are unpacked in what is not compiled"),
            (
                "train.fp8.training",
                config.fp8 and config.fp8.training,
                None,
                "are unpacked to train.dtype",
            ),
        ):
            if value != possible:
                raise ValueError(
                    f"{setting}.base={lora.base}: weights of 4 bits {why}; take out {other}={value}, or set it to null"
                )


def _placement_suits(config: TrainConfig) -> None:
    on = config.placement
    if config.launcher == "torchrun" and len(on.pools) > 1:
        raise ValueError(
            f"train.launcher=torchrun has one pool, and train.placement.pools has {len(on.pools)}; use one, or "
            "train.launcher=ray"
        )
    if config.launcher == "torchrun" and config.ray_address:
        raise ValueError(f"train.ray_address={config.ray_address} needs train.launcher=ray")


def _evaluation_suits(config: TrainConfig) -> None:
    if config.keep == "best" and config.evaluate_suite is None:
        raise ValueError("train.keep=best needs train.evaluate_suite, by whose rewards the best step is known; set it")
    if config.keep == "best" and config.run_store.uri is not None:
        raise ValueError(
            "train.keep=best and train.run_store can't be had together: the weights of the best step stay on the "
            "machine that has it, and another one could not publish them; set train.keep=last"
        )
    if config.evaluate_suite is not None and not config.samples:
        raise ValueError(
            f"train.evaluate_suite={config.evaluate_suite} is answered by what samples responses, and this run samples "
            f"nothing (train.algorithm.name={config.algorithm.name}, train.data.traffic_share="
            f"{config.data.traffic_share:g}); take it out"
        )


def _offload_suits(config: TrainConfig) -> None:
    on = config.placement
    if config.fsdp.offload_while_generating and config.samples and on.rollout != on.actor:
        raise ValueError(
            f"train.fsdp.offload_while_generating=true is for devices that train and generate in turns, and "
            f"train.placement.rollout={on.rollout} has devices of its own; take it out"
        )


def _ranks_divide(config: TrainConfig) -> None:
    on = config.placement
    generating = config.ranks_of(on.rollout)
    t, replicas, share = config.rollout.tensor_parallel_size, config.fsdp.replicas, config.fsdp.sequence_parallel
    n = config.fsdp.tensor_parallel
    if generating % t:
        raise ValueError(
            f"train.rollout.tensor_parallel_size={t} does not divide {_setting_of(config, on.rollout)}; use a divisor "
            "of it"
        )
    for pool in (on.actor, on.reference, on.critic or on.actor):
        ranks = config.ranks_of(pool)
        if ranks % replicas or (pool == on.rollout and ranks // replicas % t):
            raise ValueError(
                f"train.fsdp.replicas={replicas} must divide {_setting_of(config, pool)} into groups that "
                f"train.rollout.tensor_parallel_size={t} divides"
            )
        if ranks // replicas % n:
            raise ValueError(
                f"train.fsdp.tensor_parallel={n} does not divide the {ranks // replicas} ranks of a replica "
                f"({_setting_of(config, pool)}, train.fsdp.replicas={replicas}); use a divisor"
            )
        if pool == on.rollout and config.samples and n % t and t % n:
            raise ValueError(
                f"train.fsdp.tensor_parallel={n} and train.rollout.tensor_parallel_size={t} share the ranks of pool "
                f"{pool!r}, and neither divides the other; choose one that does"
            )
        if ranks % (share * n) and n > 1:
            raise ValueError(
                f"train.fsdp.sequence_parallel={share} times train.fsdp.tensor_parallel={n} does not divide "
                f"{_setting_of(config, pool)}; use divisors of it"
            )
        if ranks % share:
            raise ValueError(
                f"train.fsdp.sequence_parallel={share} does not divide {_setting_of(config, pool)}; use a divisor of "
                "it, and of the model's attention heads"
            )


def _setting_of(config: TrainConfig, pool: str) -> str:
    own = config.placement.pools[pool].ranks
    return f"train.ranks={config.ranks}" if own is None else f"train.placement.pools.{pool}.ranks={own}"


def _shares_are_prompts(config: TrainConfig) -> None:
    data = config.data
    for share, prompts in (
        (data.traffic_share, data.traffic_prompts_per_step),
        (1 - data.traffic_share, data.fresh_prompts_per_step),
    ):
        if share > 0 and prompts == 0:
            raise ValueError(
                f"train.data.traffic_share={data.traffic_share:g} of train.data.prompts_per_step="
                f"{data.prompts_per_step} prompts is {data.traffic_prompts_per_step} logged and "
                f"{data.fresh_prompts_per_step} fresh ones; set it to 0 or 1, or have more prompts in a step"
            )


def check_baseline(config: TrainConfig, *, compares_groups: bool, needs_greedy: bool) -> None:
    """Raise ValueError if responses would have nothing to be compared with. The flags are the algorithm's."""
    a, share = config.algorithm, config.data.traffic_share
    if compares_groups and config.samples and a.group_size == 1:
        raise ValueError(
            f"train.algorithm.group_size=1 gives {a.name} nothing to compare a response with; use at least 2, or an "
            "algorithm with another baseline (reinforce_pp, remax, ppo)"
        )
    if needs_greedy and share > 0:
        raise ValueError(
            f"train.data.traffic_share={share:g}: {a.name} compares a response with the greedy one of the policy in "
            "training, which logged responses don't have; set it to 0, or use another algorithm"
        )


def _responses_suit(config: TrainConfig) -> None:
    a, rollout = config.algorithm, config.rollout
    if (rollout.top_p < 1 or rollout.top_k) and a.name not in ANY_SUPPORT and ":" not in a.name:
        raise ValueError(
            f"train.rollout.top_p={rollout.top_p:g} and train.rollout.top_k={rollout.top_k} cut the distribution that "
            f"responses are of, and {a.name} weighs them by its logprobs, which no weight makes unbiased then; set "
            f"them to 1 and 0, or use {' or '.join(ANY_SUPPORT)}"
        )
    if a.resample_rounds > 0 and rollout.staleness > 0:
        raise ValueError(
            f"train.algorithm.resample_rounds={a.resample_rounds} samples again once a step's rewards are known, when "
            f"train.rollout.staleness={rollout.staleness} has later steps' responses sampled; set either to 0"
        )
    if config.data.curriculum is not None and rollout.staleness > 0:
        raise ValueError(
            "train.data.curriculum draws prompts by what all steps before have solved, which is not known yet when "
            f"train.rollout.staleness={rollout.staleness} has them drawn; set train.rollout.staleness to 0, or "
            "train.data.curriculum to null"
        )
    if rollout.max_model_len is not None and rollout.max_tokens >= rollout.max_model_len:
        raise ValueError(
            f"train.rollout.max_tokens={rollout.max_tokens} leaves no room for a prompt in train.rollout.max_model_len="
            f"{rollout.max_model_len}; use less"
        )
    if a.overlong_buffer > config.longest_response:
        of = "train.rollout.max_tokens" if config.environment is None else "the tokens of an episode"
        raise ValueError(
            f"train.algorithm.overlong_buffer={a.overlong_buffer} is more than {of}="
            f"{config.longest_response}; use at most that"
        )


def _environment_suits(config: TrainConfig) -> None:
    a, environment = config.algorithm, config.environment
    if environment is None:
        if a.credit == "turn" and not (config.data.traffic_share > 0 and config.data.sessions == "episodes"):
            raise ValueError(
                "train.algorithm.credit=turn is of turns with an environment, or of logged sessions, and "
                "train.environment is unset, and no sessions are learned from (train.data.traffic_share="
                f"{config.data.traffic_share:g}, train.data.sessions={config.data.sessions}); set one of them, or "
                "train.algorithm.credit to episode"
            )
        return
    name = f"train.environment.name={environment.name}"
    if not config.samples:
        raise ValueError(f"{name} plays what is sampled, and this run samples nothing; set train.environment to null")
    for setting, value in (
        ("train.reward", config.reward),
        ("train.reward_weights", config.reward_weights),
        ("train.placement.reward", config.placement.reward),
    ):
        if value:
            raise ValueError(f"{name} rewards its episodes by itself; take out {setting}={value}")
    if config.rollout.tensor_parallel_size > 1:
        raise ValueError(
            f"{name} needs an engine on one rank, and train.rollout.tensor_parallel_size="
            f"{config.rollout.tensor_parallel_size}: ranks that share one would have to hear of each turn together; "
            "set it to 1"
        )
    if a.name == ONLINE_DPO and environment.rewritten_turns == "split":
        raise ValueError(
            f"train.algorithm.name={a.name} compares whole episodes as pairs, which can't be split: set "
            "train.environment.rewritten_turns to drop"
        )
    if environment.name == "tools" and environment.tool_parser is None:
        raise ValueError(f"{name} needs train.environment.tool_parser, by which calls are found, for example hermes")


def _prompts_suit(data: DataConfig) -> None:
    if data.traffic_weight == 0 and not data.prompts:
        raise ValueError(
            "train.data.traffic_weight=0 draws no prompts of traffic, and train.data.prompts has none: set either"
        )
    if data.pass_rate is not None and not data.prompts:
        raise ValueError("train.data.pass_rate is of train.data.prompts, which has none: set it to null")


def _nothing_is_sampled(config: TrainConfig) -> None:
    if config.algorithm.is_offline:
        why = f"train.algorithm.name={config.algorithm.name} learns from feedback, and samples nothing"
    else:
        why = f"train.data.traffic_share={config.data.traffic_share:g} learns from logged responses alone"
    settings: dict[str, Any] = {
        f"train.rollout.{name}": getattr(config.rollout, name)
        for name in ("temperature", "top_p", "top_k", "tensor_parallel_size", "reshard", "staleness")  # sizes may stay
        if getattr(config.rollout, name) != RolloutConfig.model_fields[name].default
    }
    if config.fp8 is not None and config.fp8.rollout is not None:
        settings["train.fp8.rollout"] = config.fp8.rollout
    on = config.placement
    if on.rollout not in (on.actor, on.reference):
        settings["train.placement.rollout"] = on.rollout
    if on.reward is not None:
        settings["train.placement.reward"] = on.reward
    if config.algorithm.is_offline and config.data.traffic_share > 0:
        settings["train.data.traffic_share"] = config.data.traffic_share
    if config.data.prompts:
        settings["train.data.prompts"] = [own.name for own in config.data.prompts]
    for name in ("pass_rate", "curriculum"):
        if getattr(config.data, name) is not None:
            settings[f"train.data.{name}"] = "…"
    if config.data.traffic_weight != DataConfig.model_fields["traffic_weight"].default:
        settings["train.data.traffic_weight"] = config.data.traffic_weight
    for name in ("resample_rounds", "overlong_buffer"):
        if getattr(config.algorithm, name) > 0 and config.algorithm.name != "dapo":  # which has them by default
            settings[f"train.algorithm.{name}"] = getattr(config.algorithm, name)
    if settings:
        raise ValueError(f"{why}; take out {', '.join(f'{name}={value}' for name, value in settings.items())}")


def _teacher_suits(config: TrainConfig) -> None:
    if config.algorithm.name != DISTILL:
        return
    refused: dict[str, tuple[Any, str]] = {
        "train.rollout.temperature": (config.rollout.temperature != 1, "the teacher's logprobs are those at 1"),
        "train.data.traffic_share": (config.data.traffic_share > 0, "logged responses have no rewards of a teacher"),
        "train.environment": (config.environment is not None, "an environment rewards its episodes by itself"),
        "train.reward": (config.reward is not None, "the teacher is what rewards"),
        "train.reward_weights": (bool(config.reward_weights), "the teacher is what rewards"),
    }
    for name, (differs, why) in refused.items():
        if differs:
            raise ValueError(f"train.algorithm.name=distill: {why}; take out {name}")


def _critic_suits(config: TrainConfig) -> None:
    a, on = config.algorithm, config.placement
    if a.critic.warmup_steps >= config.steps:
        raise ValueError(
            f"train.algorithm.critic.warmup_steps={a.critic.warmup_steps} are all of train.steps={config.steps}, so "
            "that the policy would never learn; use fewer"
        )
    if config.model.class_name is not None and a.name == "ppo" and a.critic.model is None:
        raise ValueError(
            f"train.model.class={config.model.class_name}: a critic is made of transformers' own class for the "
            "policy's config, which may not be this model's; set train.algorithm.critic.model, or take an algorithm "
            "without a critic"
        )
    if on.critic is not None and a.name != "ppo" and ":" not in a.name:
        raise ValueError(
            f"train.placement.critic={on.critic}: {a.name} has no critic; set it to null, and take its pool out"
        )


def _schedule_suits(config: TrainConfig) -> None:
    o, updates = config.optimizer, config.updates_of_policy
    if o.schedule != "constant" and o.warmup_steps >= updates:
        raise ValueError(
            f"train.optimizer.warmup_steps={o.warmup_steps} leaves train.optimizer.schedule={o.schedule} none of the "
            f"{updates} optimizer steps; use less, or schedule=constant"
        )


def _no_policy_is_trained(config: TrainConfig) -> None:
    for setting, value in (("train.lora", config.lora), ("train.max_kl", config.max_kl)):
        if value is not None:
            raise ValueError(
                f"{setting} is set, and train.algorithm.name={config.algorithm.name} trains no policy: a reward model "
                f"trains all its weights, and has no KL; set {setting} to null"
            )


def _batch_suits(config: TrainConfig) -> None:
    data, ranks = config.data, config.data_parallel_ranks
    if config.epochs > 1 and config.algorithm.is_offline:
        raise ValueError(
            f"train.epochs={config.epochs} is of responses that are sampled or logged; train.algorithm.name="
            f"{config.algorithm.name} draws all items of feedback again and again: use more train.steps"
        )
    if config.minibatches > data.prompts_per_step:
        raise ValueError(
            f"train.minibatches={config.minibatches} is more than train.data.prompts_per_step={data.prompts_per_step}; "
            "a minibatch needs at least one prompt"
        )
    if config.sequences_per_step < ranks * config.minibatches:
        each = config.sequences_per_prompt
        groups = f" of train.algorithm.group_size={each}" if config.samples and each > 1 else ""
        raise ValueError(
            f"train.data.prompts_per_step={data.prompts_per_step}{groups} is too little for train.minibatches="
            f"{config.minibatches} that {ranks} data-parallel ranks share, each with at least one response; use at "
            f"least {-(-ranks * config.minibatches // each)} prompts"
        )
