"""Sections of the settings of training."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, Final, Literal, Self

from pydantic import ConfigDict, Field, field_validator, model_validator

from feedback.config import Weight
from feedback.settings_base import FUNCTION, Address, Section
from serve.config import ObjectStoreConfig, RetentionConfig

_Beta = Annotated[float, Field(ge=0, lt=1)]

NOT_OVERRIDDEN: Final = {
    "architectures": "a class of your own is train.model.class",
    "auto_map": "code that comes with a model is named by its own files",
    "dtype": "set train.dtype",
    "model_type": "it says which class reads all the others",
    "quantization_config": "weights are trained as they are stored",
    "torch_dtype": "set train.dtype",
    "transformers_version": "it says what wrote the file",
}
"""Keys of config.json that train.model.config_overrides may not have, and why."""


class ParameterGroup(Section):
    """Parameters that are learned at a rate, or with a weight decay, of their own."""

    pattern: str = Field(
        min_length=1,
        description="Regular expression that is searched for in a parameter's name, as in the policy's files, for "
        "example `\\.mlp\\.` or `^lm_head`; adapters have `lora_A` and `lora_B` in theirs.",
    )
    learning_rate_factor: float = Field(1.0, gt=0, description="What the learning rate is multiplied by.")
    weight_decay: float | None = Field(
        None, ge=0, description="Their weight decay; null: as of all others of their kind."
    )

    @field_validator("pattern")
    @classmethod
    def _compiles(cls, pattern: str) -> str:
        try:
            re.compile(pattern)
        except re.error as error:
            raise ValueError(f"{pattern!r} is no regular expression: {error}") from error
        return pattern


class OptimizerConfig(Section):
    """How the gradients change the weights."""

    name: str = Field(
        "adamw",
        pattern=r"^(adamw|adamw_8bit|muon|sgd|[\w.]+:\w+)$",
        description="adamw; adamw_8bit: AdamW whose moments take a quarter of the memory (torchao's); muon: "
        "matrices inside the body by Muon, all else by AdamW; sgd; or module:name of a class or function of your own.",
    )
    learning_rate: float = Field(1e-6, gt=0, description="Peak learning rate.")
    warmup_steps: int = Field(2, ge=0, description="Optimizer steps of linear warm-up.")
    schedule: Literal["constant", "linear", "cosine"] = Field(
        "constant", description="What the learning rate does after the warm-up, until the last step of the run."
    )
    final_learning_rate: float = Field(
        0.0, ge=0, le=1, description="What linear and cosine end with, as a share of the peak."
    )
    betas: tuple[_Beta, _Beta] = Field((0.9, 0.95), description="AdamW's betas.")
    momentum: float | None = Field(
        None, ge=0, lt=1, description="Momentum of muon (0.95 if unset) and of sgd (0 if unset)."
    )
    weight_decay: float = Field(
        0.0, ge=0, description="Weight decay, decoupled from the gradient; with sgd an L2 penalty."
    )
    decay_vectors: bool = Field(
        False, description="Let parameters of one dimension, which are norms and biases, decay too."
    )
    groups: list[ParameterGroup] = Field(
        [],
        description="Parameters with settings of their own, each {pattern, learning_rate_factor, weight_decay}; of "
        "those whose pattern fits, the first counts.",
    )
    options: dict[str, Any] = Field({}, description="Arguments of an optimizer of your own, beside its parameters.")
    max_grad_norm: float = Field(1.0, gt=0, description="Gradients are clipped to this norm.")

    @property
    def is_own(self) -> bool:
        """Whether it is a user's own class or function."""
        return ":" in self.name

    @model_validator(mode="after")
    def _belong_together(self) -> Self:
        if self.momentum is not None and self.name not in ("muon", "sgd"):
            raise ValueError(f"momentum={self.momentum:g} is of muon and sgd, and name is {self.name}; take it out")
        if (self.name == "sgd" or self.is_own) and self.betas != type(self).model_fields["betas"].default:
            raise ValueError(f"betas={self.betas} are of adamw, adamw_8bit and muon, and name is {self.name}")
        if self.options and not self.is_own:
            raise ValueError(f"options={self.options} are of an optimizer of your own, and name is {self.name}")
        if self.final_learning_rate and self.schedule == "constant":
            raise ValueError(
                f"final_learning_rate={self.final_learning_rate:g} is of schedule=linear and cosine; set one of them"
            )
        return self


class FsdpConfig(Section):
    """How the weights in training are spread over the ranks."""

    layers: list[str] | Annotated[str, Field(pattern=r"^[\w.]+:\w+$")] | None = Field(
        None,
        description="Classes of the modules to shard by, or module:name of a function that is called with the model "
        "and returns the modules; if unset, those that the model declares indivisible.",
    )
    reshard_after_forward: bool = Field(
        True,
        description="Free a layer's gathered parameters after its forward pass and gather them again for the backward "
        "one; false keeps them between the two, which takes memory and saves a gather.",
    )
    prefetch_layers: int | None = Field(
        None,
        ge=1,
        description="Layers whose parameters are gathered before their turn, in either pass; if unset, as FSDP2 does "
        "by itself, which is one.",
    )
    compile_layers: str | None = Field(
        None,
        pattern=r"^\w+$",
        description="Backend by which torch.compile compiles each of the layers, for example inductor; if unset, they "
        "are not compiled.",
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
    tensor_parallel: int = Field(
        1,
        ge=1,
        description="Ranks that share each layer in training (Megatron): of the Llama, Qwen2, Qwen3, Mistral and Gemma "
        "families. They learn from the same sequences. It divides train.ranks, over train.fsdp.replicas and "
        "train.fsdp.sequence_parallel, and the model's heads, key and value heads and MLP.",
    )
    cpu_offload: bool = Field(
        False,
        description="Keep parameters, gradients and the optimizer's state in CPU memory, where the optimizer then "
        "steps; without a GPU it does nothing.",
    )
    offload_optimizer: bool = Field(
        False,
        description="Keep the optimizer's state alone in CPU memory but for the time of its step, which is on the GPU; "
        "without one it does nothing.",
    )
    offload_while_generating: bool | None = Field(
        None,
        description="Keep the models in training, their optimizers' state and the reference in CPU memory while the "
        "same devices generate. None: by the plan when a run starts; without a GPU never.",
    )
    reduce_every_micro_batch: bool | None = Field(
        None,
        description="Reduce gradients after each micro-batch, so that a rank never holds more than its shard of them; "
        "otherwise it holds all until the last, and reduces once. None: by the plan when a run starts.",
    )
    attention: Literal["auto", "sdpa", "flash_attention_2", "eager"] = Field(
        "auto",
        description="Implementation of attention; auto: sequence by sequence, flash attention on a GPU, SDPA on a CPU.",
    )

    @model_validator(mode="after")
    def _belong_together(self) -> Self:
        if self.cpu_offload and self.offload_optimizer:
            raise ValueError(
                "cpu_offload=true keeps the optimizer's state in CPU memory too; take offload_optimizer out"
            )
        if self.cpu_offload and self.offload_while_generating:
            raise ValueError(
                "cpu_offload=true keeps what is trained in CPU memory at all times; take offload_while_generating out"
            )
        shared = self.sequence_parallel * self.tensor_parallel
        if self.compile_layers is not None and shared > 1:
            raise ValueError(
                f"compile_layers={self.compile_layers}: ranks that share layers or sequences talk to each other inside "
                f"a layer, which is not compiled; take it out, or set sequence_parallel={self.sequence_parallel} and "
                f"tensor_parallel={self.tensor_parallel} to 1"
            )
        return self

    @property
    def ranks_per_part(self) -> int:
        """Ranks that learn from the same part of a batch."""
        return self.sequence_parallel * self.tensor_parallel


class AdapterConfig(Section):
    """Low-rank adapters: what is trained in place of the weights themselves."""

    rank: int = Field(16, ge=1, description="Rank of the adapters.")
    alpha: int = Field(32, ge=1, description="An adapter's output is scaled by alpha / rank.")
    dropout: float = Field(0.0, ge=0, lt=1, description="Dropout of an adapter's input, in training.")
    target_modules: Literal["all-linear"] | list[str] = Field(
        "all-linear", description="Names of the linear layers that get one; all-linear: all but the output layer."
    )
    base: Literal["nf4"] | None = Field(
        None,
        description="What the frozen weights under the adapters are held in. nf4: 4 bits a value, by torchao (QLoRA); "
        "null: as all that is frozen.",
    )


class LoraConfig(AdapterConfig):
    """Low-rank adapters of the policy: what is trained in place of its weights."""

    publish_adapter: bool = Field(
        False, description="Leave the adapter in the run's folder too, in peft's format, beside the merged policy."
    )
    publish: Literal["merged", "adapter"] = Field(
        "merged",
        description="What the candidate is. merged: a model with the adapters merged into its weights; adapter: the "
        "adapter alone, beside the parent's weights or those that the parent is an adapter of.",
    )
    publish_rank: int = Field(
        64,
        ge=1,
        description="The largest rank of a candidate that is an adapter. It has that of a parent which is one in it; "
        "beyond this rank the candidate is merged.",
    )
    sync: Literal["merged", "adapters"] = Field(
        "merged",
        description="What generation gets after each step. merged: all weights, with the adapters merged into them; "
        "adapters: the adapters alone, which vLLM computes beside the parent's weights.",
    )


class PolicyModelConfig(Section):
    """Which class the policy in training has, which code that comes with models may run, and changes to its config."""

    model_config = ConfigDict(serialize_by_alias=True, validate_by_name=True)

    class_name: str | None = Field(
        None,
        alias="class",
        pattern=FUNCTION.pattern,
        description="module:Class of a model of your own, a subclass of transformers.PreTrainedModel that predicts the "
        "next token; if unset, the class that config.json names.",
    )
    trusted_code: dict[str, list[Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]]] = Field(
        {},
        description="Python files that come with models and may run, each as FILE: SHA256, or a list of them; in "
        "training, the server, evaluation and scoring. A model with another such file is refused, and the error has "
        "what to put here.",
    )
    config_overrides: dict[str, Any] = Field(
        {},
        description="Values in place of those in the policy's config.json, by its keys, in training and in what it "
        "publishes; they must leave every weight its shape.",
    )

    @field_validator("trusted_code", mode="before")
    @classmethod
    def _one_or_several(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        return {name: [hashes] if isinstance(hashes, str) else hashes for name, hashes in value.items()}

    @field_validator("config_overrides")
    @classmethod
    def _no_identity(cls, overrides: dict[str, Any]) -> dict[str, Any]:
        for part in (overrides, *(inner for inner in overrides.values() if isinstance(inner, dict))):
            if refused := sorted(part.keys() & NOT_OVERRIDDEN.keys()):
                raise ValueError(f"{refused[0]} is no value to override: {NOT_OVERRIDDEN[refused[0]]}")
        return overrides


class RolloutConfig(Section):
    """How training samples fresh responses: inside the training processes."""

    backend: Literal["vllm", "hf"] = Field(
        "vllm",
        description="What generates. hf: transformers, on the sharded weights in training, for models that vLLM does "
        "not have, and to compare with; slower, and without a copy of the weights.",
    )
    temperature: float = Field(
        1.0, ge=0.01, description="Sampling temperature; vLLM samples below 0.01 as if it were that."
    )
    top_p: float = Field(
        1.0,
        gt=0,
        le=1,
        description="Sample from the likeliest tokens that have this probability together; below 1 for algorithms "
        "alone that need no logprobs of what they sample.",
    )
    top_k: int = Field(
        0, ge=0, description="Sample from this many likeliest tokens; 0: from all. For the same algorithms as top_p."
    )
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
        description="KV cache of each engine, in bytes; if unset, on a GPU by the plan when a run starts, and on a CPU "
        "what can be of use, at most a twentieth of a machine's memory for all of its ranks.",
    )
    max_num_seqs: int = Field(256, ge=1, description="Sequences that an engine decodes at once.")
    enable_prefix_caching: bool = Field(
        True,
        description="Compute a prompt once for all of its responses, and what turns of an episode share; what other "
        "weights made is never read.",
    )
    enforce_eager: bool | None = Field(
        None,
        description="Don't compile the model, and capture no CUDA graphs: starts in seconds, decodes slower. None: "
        "true on a CPU, false on a GPU.",
    )
    reshard: Literal["plan", "gather"] = Field(
        "plan",
        description="How trained weights reach the engine, on the same pool or another. plan: a rank gets the slices "
        "that it lacks. gather: every rank gets every tensor whole; for models whose weight loaders compute.",
    )
    reshard_bucket_bytes: int = Field(
        64 * 2**20, ge=2**16, description="Extra memory that resharding by plan takes on each rank, in bytes."
    )
    staleness: int = Field(
        0,
        ge=0,
        description="The most steps that a token may be behind the policy that learns from it, by whose logprobs it is "
        "corrected. 0: each step samples, then learns. From 1 on responses that a step does not wait for go on in the "
        "next ones, with the new weights; with generation on a pool of its own, also while training learns.",
    )

    @property
    def is_eager(self) -> bool:
        """``enforce_eager`` once a run has settled it."""
        return self.enforce_eager is not False


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


class CurriculumConfig(Section):
    """Which prompts a run draws, by how often it has solved them itself: its pass rates change as it learns."""

    solved_reward: float = Field(1.0, description="A response with this reward, or more, has solved its prompt.")
    window: int = Field(16, ge=1, description="A prompt's last so many responses count.")
    prefer: Literal["learnable", "all"] = Field(
        "learnable",
        description="learnable: a prompt is drawn the more often, the nearer its pass rate p is to 1/2, in proportion "
        "to the expected p (1 - p); none is given up. all: as often as without.",
    )
    low: float | None = Field(
        0.0,
        ge=0,
        le=1,
        description="A prompt that is solved this often, or less, rests; null: none for this reason.",
    )
    high: float | None = Field(
        1.0,
        ge=0,
        le=1,
        description="A prompt that is solved this often, or more, rests; null: none for this reason.",
    )
    min_responses: int = Field(8, ge=1, description="With fewer responses to a prompt it does not rest.")
    rest_steps: int = Field(
        20, ge=1, description="Steps for which a prompt rests; then it is drawn again, and rests on or not."
    )

    @model_validator(mode="after")
    def _can_work(self) -> Self:
        if self.low is not None and self.high is not None and self.low >= self.high:
            raise ValueError(f"low ({self.low:g}) must be less than high ({self.high:g})")
        if self.min_responses > self.window:
            raise ValueError(f"min_responses ({self.min_responses}) is more than the window has ({self.window})")
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
    curriculum: CurriculumConfig | None = Field(
        None,
        description="Draw prompts, of traffic too, by how often the run itself has solved them lately, and let rest "
        "those that it solves always or never; null: all alike. {} has the defaults.",
    )
    traffic_share: float = Field(
        0.0,
        ge=0,
        le=1,
        description="Share of prompts_per_step whose responses are logged ones, with the rewards that scoring gave, in "
        "place of fresh ones. 1: nothing is sampled.",
    )
    sessions: Literal["episodes", "responses"] = Field(
        "episodes",
        description="What logged responses of one session_id are. episodes: those that continue each other are one "
        "episode of several turns, whole or not at all. responses: each is by itself.",
    )
    session_reward: Literal["mean", "sum"] = Field(
        "mean",
        description="What such an episode is worth: the mean, or the sum, of the rewards that its turns have.",
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


class RestartsConfig(Section):
    """What becomes of a run of which a process dies or hangs, or whose machine goes: it goes on by itself.

    It does so from its last checkpoint. Not started again is what would fail in the same way: settings, files or
    versions that don't fit, a lack of memory, an exception before the first step, or one at the same step twice.
    """

    attempts: int = Field(
        3,
        ge=0,
        description="How often, at most, within window_s, and from one and the same checkpoint however long that "
        "takes; 0: never.",
    )
    window_s: float = Field(3600.0, gt=0, description="Seconds that attempts counts in.")
    backoff_s: float = Field(
        2.0, ge=0, description="Seconds before the first restart; twice that before the next one, at most 60."
    )
    silence_s: float = Field(
        120.0,
        ge=1,
        description="A rank or the driver that has given no sign of life for so many seconds, as one that is stopped "
        "(SIGSTOP), counts as hung. What waits for another rank gives signs: it is found by train.step_timeout_s.",
    )
    wait_s: float = Field(
        300.0,
        ge=0,
        description="On a cluster, how many seconds a restart waits for room for all ranks, or for the cluster itself, "
        "before it takes fewer ranks, or gives up.",
    )
    min_ranks: int | None = Field(
        1,
        ge=1,
        description="The fewest ranks, of each pool, with which a run on a cluster goes on where a machine does not "
        "come back. Other numbers of ranks come to other weights in the last digits. null: never on fewer.",
    )
