"""Sections of the settings of training."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from feedback.config import Weight
from feedback.settings_base import Address, Section
from serve.config import ObjectStoreConfig, RetentionConfig

_Beta = Annotated[float, Field(ge=0, lt=1)]


class OptimizerConfig(Section):
    """AdamW."""

    learning_rate: float = Field(1e-6, gt=0, description="Peak learning rate.")
    warmup_steps: int = Field(2, ge=0, description="Steps of linear warm-up.")
    betas: tuple[_Beta, _Beta] = Field((0.9, 0.95), description="AdamW's betas.")
    weight_decay: float = Field(0.0, ge=0, description="Decoupled weight decay.")
    max_grad_norm: float = Field(1.0, gt=0, description="Gradients are clipped to this norm.")


class FsdpConfig(Section):
    """How the weights in training are spread over the ranks."""

    layers: list[str] | None = Field(
        None, description="Classes of the modules to shard by; if unset, those that the model declares indivisible."
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


class LoraConfig(Section):
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


class RolloutConfig(Section):
    """How training samples fresh responses: vLLM inside the training processes."""

    temperature: float = Field(1.0, gt=0, description="Sampling temperature. Full support is kept: no top-p, no top-k.")
    max_tokens: int = Field(256, ge=1, description="Longest response, in tokens.")
    max_model_len: int | None = Field(
        None,
        ge=2,
        description="Longest prompt and response together; if unset, the model's own, as far as the KV cache holds it.",
    )
    tensor_parallel_size: int = Field(
        1, ge=1, description="Ranks that share one generation engine; divides train.ranks."
    )
    kv_cache_bytes: int | None = Field(
        None,
        ge=2**20,
        description="KV cache of each engine, in bytes; if unset, what can be of use, at most a twentieth of a "
        "machine's memory for all of its ranks.",
    )
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


class ResidentConfig(Section):
    """Workers that stay between cycles.

    Training's processes, their Ray and their rollout engines sleep until the next cycle of `millrace up` or `millrace
    schedule`, which takes seconds less, and answer for its evaluation. Models and optimizers are not held meanwhile.
    """

    enabled: bool = Field(True, description="Keep them; false starts new ones for each run.")
    idle_seconds: float = Field(
        900.0,
        gt=0,
        description="Give them back after so many seconds without a request; less than between two cycles "
        "is still of use to the evaluation.",
    )
    min_free_memory: float = Field(
        0.1,
        ge=0,
        lt=1,
        description="Give them back while they sleep if less than this share of the memory of the machine, or of its "
        "container, is free.",
    )


class PromptSource(Section):
    """Prompts of your own: a file, or a dataset's folder."""

    path: Path = Field(
        description="JSONL, Parquet or Arrow file, or folder of a Hugging Face dataset; relative to home."
    )
    split: str | None = Field(None, description="Which split of a folder that has several.")
    prompt: str = Field("prompt", min_length=1, description="Column of the prompt: text, or a list of chat messages.")
    as_user_message: bool = Field(
        False, description="Put a prompt that is text into the policy's chat template, as the user's message."
    )
    metadata: dict[str, str] = Field(
        {},
        description="Columns that rewards read as a prompt's metadata, each as KEY: COLUMN, such as answer: solution.",
    )
    weight: float = Field(
        1.0, gt=0, le=1e9, description="How often these are drawn, beside the other prompts' weights."
    )

    @property
    def name(self) -> str:
        """The path, with the split if there is one."""
        return f"{self.path} ({self.split})" if self.split else str(self.path)


class PassRateConfig(Section):
    """Which of your own prompts are left out by how often earlier runs of this lineage solved them."""

    low: float = Field(0.0, ge=0, le=1, description="Prompts that were solved this often, or less, are left out.")
    high: float = Field(1.0, ge=0, le=1, description="Prompts that were solved this often, or more, are left out.")
    solved_reward: float = Field(1.0, description="A response with this reward, or more, has solved its prompt.")
    min_responses: int = Field(8, ge=1, description="With fewer responses to a prompt it stays, however they went.")
    runs: int = Field(5, ge=1, description="Runs that count: those that made the parent, its parent and so on.")

    @model_validator(mode="after")
    def _leaves_some(self) -> Self:
        if self.low >= self.high:
            raise ValueError(f"low ({self.low:g}) must be less than high ({self.high:g})")
        return self


class DataConfig(Section):
    """What training learns from."""

    prompts_per_step: int = Field(
        32, ge=1, description="Prompts that each step learns from; of offline algorithms, items."
    )
    min_prompts: int = Field(32, ge=1, description="With fewer prompts in the lake, no training takes place.")
    max_prompts: int = Field(10_000, ge=1, description="The most recent prompts of traffic to draw from.")
    prompts: list[PromptSource] = Field(
        [],
        description="Prompts of your own, each {path, split, prompt, as_user_message, metadata, weight}; responses are "
        "sampled to them as to those of traffic.",
    )
    traffic_weight: float = Field(
        1.0,
        ge=0,
        le=1e9,
        description="How often the prompts of traffic are drawn, beside the weights of train.data.prompts; 0: never.",
    )
    pass_rate: PassRateConfig | None = Field(
        None,
        description="Leave out those of train.data.prompts that earlier runs of this lineage solved always or never; "
        "null: none. Runs count what they solve while this is set.",
    )
    traffic_share: float = Field(
        0.0,
        ge=0,
        le=1,
        description="Share of prompts_per_step whose responses are logged ones, with the rewards that scoring gave, in "
        "place of fresh ones. 1: nothing is sampled.",
    )

    exclude_suites: list[Path] = Field(
        [],
        description="Suites, as evaluation.suite, whose prompts nothing is learned from, also in traffic; "
        "evaluation.suite is always one.",
    )
    holdout: float = Field(
        0.0,
        ge=0,
        lt=1,
        description="Share of all prompts, by hash, that nothing is learned from; at least evaluation.holdout.",
    )
    holdout_side: Literal["rest", "slice"] = Field(
        "rest",
        description="Which prompts are learned from: all but the held-out slice, or that slice alone, as the reward "
        "model does that evaluation scores by.",
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


class JudgementWeights(Section):
    """Weights of kinds of feedback in the reward model's likelihood; only their ratios matter."""

    preference: Weight = Field(1.0, description="Weight of a choice between two responses; 0 leaves them out.")
    correction: Weight = Field(1.0, description="Weight of a correction against what it corrects.")
    thumb: Weight = Field(1.0, description="Weight of thumbs, times feedback.scoring.human.thumbs.")
    rating: Weight = Field(1.0, description="Weight of ratings, times feedback.scoring.human.ratings.")
    metric: Weight = Field(1.0, description="Weight of metrics, times feedback.scoring.human.metrics.")

    @model_validator(mode="after")
    def _some_kind_counts(self) -> JudgementWeights:
        if not any(dict(self).values()):
            raise ValueError("train.reward_model.weights are all 0: there would be nothing to learn from")
        return self


class RewardModelConfig(Section):
    """Training of the reward model on people's feedback, in what else the settings of training say."""

    folder: Path = Field(Path("reward_models"), description="Folder of the reward models, relative to home.")
    min_new_feedback: int = Field(
        64, ge=1, description="In a cycle: train another when at least this many feedbacks are new since the last."
    )
    min_items: int = Field(32, ge=1, description="With fewer judged responses and pairs, none is trained.")
    steps: int = Field(60, ge=1, description="Steps of its training.")
    items_per_step: int = Field(32, ge=1, description="Judged responses and pairs that each step learns from.")
    learning_rate: float = Field(1e-5, gt=0, description="Peak learning rate.")
    vote_noise: float = Field(
        0.05, ge=0, lt=0.5, description="Share of votes and choices that are the opposite of what was meant."
    )
    held_out_share: float = Field(
        0.2, gt=0, lt=1, description="Share of the prompts whose judgements it is compared and calibrated by."
    )
    weights: JudgementWeights = Field(
        default_factory=JudgementWeights, description="What each kind of feedback weighs in its likelihood."
    )
    retention: RetentionConfig = Field(
        default_factory=RetentionConfig, description="Which reward models keep their weights."
    )
    votes: dict[str, Any] | None = Field(
        None, description="What votes are: feedback.scoring.human and feedback.kinds, which `millrace train` fills in."
    )


class RunRetentionConfig(Section):
    """Which runs keep what they would go on from. What a run was started with, its metrics and its result stay."""

    keep_last: int | None = Field(
        None,
        ge=1,
        description="Checkpoints of this many of the newest runs that were killed or stopped are kept; null: of all. "
        "Those of runs at work, and of a cycle's last one, stay too.",
    )
    days: float = Field(7, ge=0, description="So do those of runs that were at work in the last so many days.")


class RunStoreConfig(ObjectStoreConfig):
    """Where runs and their checkpoints are, so that another machine without a shared disk can go on with them."""

    uri: Address | None = Field(
        None,
        pattern=r"^(s3|gs|az)://[^/]",
        description="s3://, gs:// or az:// address below which an object store has the runs: what each was started "
        "with, its metrics, its result and its checkpoints. train.runs is this machine's copy then. Runs with the same "
        "address share their names. Whoever can write to it can run code on the machines that train. null: a run is on "
        "its machine alone.",
    )
    lease_s: float = Field(
        300,
        ge=1,
        description="A machine that is at work on a run renews its claim three times in so many seconds; when it has "
        "not, for so long, another one may go on with the run.",
    )


class CheckpointConfig(Section):
    """What a run keeps so that it can go on after its process was killed."""

    every_steps: int | None = Field(
        10, ge=1, description="Steps from one checkpoint to the next; null: none, a killed run starts again."
    )
    keep: int = Field(2, ge=1, description="Checkpoints kept; older ones go when a newer one is whole.")
    asynchronous: bool = Field(True, description="Write in the background, while the next steps are computed.")
