"""Settings of the data plane: the journal, the lake, what feedback there may be, and how it becomes a reward."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, Final, Literal, Self

from pydantic import AfterValidator, Field, SecretStr, field_validator, model_validator

from feedback.settings_base import FUNCTION, Address, FunctionName, Identifier, MemorySize, Secret, Section

DEFAULT_SCALE: Final = "stars"
"""The scale of a rating that names none, where several are declared."""


READY_REDACTIONS: Final = ("email", "phone", "card")
"""What ``capture.redact`` may name without a module."""

_CREDENTIAL: Final = re.compile(r"key|secret|token|sas|password|credential", re.IGNORECASE)
"""In the name of an object store's option that must not be seen."""

_SHORTEST: Final = 6  # characters of a credential; what is shorter stands by chance in any text


def without_credentials(text: str, options: Mapping[str, SecretStr]) -> str:
    """A text without the keys and tokens that are among an object store's options."""
    for name, secret in options.items():
        value = secret.get_secret_value()
        if len(value) >= _SHORTEST and _CREDENTIAL.search(name):
            text = text.replace(value, str(secret))
    return text


class JournalConfig(Section):
    """The durable append log that every answer and feedback is written to before it is acknowledged."""

    folder: str = Field(
        default="journal", description="Folder of the journal's segments, on a local disk that honours fsync."
    )
    segment_bytes: int = Field(
        default=32 << 20,
        gt=0,
        description="A segment is closed once it holds this many bytes, beside what it repeats of open streams.",
    )
    segment_seconds: float = Field(
        default=2.0,
        gt=0,
        description="A segment is closed once it is this old, in seconds; only closed segments are sealed. Up to 30 s "
        "later while it takes long to repeat open streams in the next.",
    )
    max_queued_rows: int = Field(
        default=4096,
        gt=0,
        description="Rows that may wait for the disk; past it callers wait, and are refused in the end.",
    )
    append_timeout_s: float = Field(
        default=2.0, gt=0, description="Longest wait for room in the queue, in seconds, before a row is refused."
    )
    commit_timeout_s: float = Field(
        default=30.0,
        gt=0,
        description="Longest wait for the disk, in seconds, before the journal is held to be broken.",
    )
    probe_seconds: float = Field(
        default=1.0, gt=0, description="Seconds between two tries to prove a disk that has refused a write."
    )


def _redact_name(value: str) -> str:
    if value not in READY_REDACTIONS and not FUNCTION.fullmatch(value):
        known = ", ".join(READY_REDACTIONS)
        raise ValueError(f"{value!r} is neither a ready one ({known}) nor a function; write 'module:name'")
    return value


class CaptureConfig(Section):
    """What is kept of the texts of requests, responses and feedback."""

    redact: list[Annotated[str, AfterValidator(_redact_name)]] = Field(
        default_factory=list,
        description="Functions that every text passes, in this order, before it is recorded: email, phone and card are "
        "ready; your own, text -> text, as module:name. A row whose text they change has no token ids and no logprobs, "
        "and is not trained on. If one fails, nothing is recorded, and the request fails with 503.",
    )
    redact_timeout_s: float = Field(
        default=5.0,
        gt=0,
        description="Longest time that the functions may take for the texts of a request, in seconds.",
    )


class LakeConfig(Section):
    """The Delta Lake tables that hold interactions, feedback and rewards."""

    uri: Address = Field(default="lake", description="Folder, or s3://, gs:// or az:// address, of the Delta tables.")
    storage_options: dict[str, Secret] = Field(
        default_factory=dict,
        description="Options of the object store (region, endpoint, keys), as deltalake names them; masked wherever "
        "settings are shown. A command line shows in `ps`: give keys in the file or the environment. Two writers can't "
        "overwrite each other's commits because the store refuses to write a name that is there (aws_conditional_put, "
        "which is etag unless it is set; leave it). An S3-compatible server needs aws_endpoint_url, and without TLS "
        "aws_allow_http: 'true'.",
    )
    seal_seconds: float = Field(
        default=5.0, gt=0, description="Seconds between two seals (closed journal segments become files of the lake)."
    )
    seal_bytes: int = Field(
        default=64 << 20, gt=0, description="Most bytes of journal segments that one commit to the lake takes."
    )
    lock_timeout_s: float = Field(
        default=60.0, gt=0, description="Longest wait, in seconds, for another process that seals or commits."
    )
    memory_limit: MemorySize = Field(
        default="1GB", description="Memory that DuckDB may use for a query before it spills."
    )
    threads: int = Field(default=2, gt=0, description="Threads that DuckDB may use for a query.")
    compact_target_bytes: int = Field(
        default=128 << 20,
        gt=0,
        description="Size of the files that compaction makes; files of less than half of it are merged.",
    )
    retain_days: int | None = Field(
        default=None,
        gt=0,
        description="Keep rows of today (UTC) and this many days before it, by a row's own date; null: keep all.",
    )
    retain_bytes: int | None = Field(
        default=None,
        gt=0,
        description="Most bytes of the three tables together: the oldest dates are dropped, never today; null: no "
        "limit. Files that a vacuum has yet to remove do not count.",
    )
    erasure_key: str | None = Field(
        default=None,
        description="File of the key by which the registry of erasures hashes names; created when it is first needed, "
        "for its owner only. Machines that share a lake need the same key: copy the file. null: erasure.key in home.",
    )
    retain_gap_days: int | None = Field(
        default=7,
        gt=0,
        description="retain_days drops nothing while the newest rows from before yesterday are more days back than "
        "this (or than retain_days): the clock may have run ahead. null: believe the clock.",
    )
    vacuum_hours: int = Field(
        default=72,
        gt=0,
        description="Versions of the tables can be read for this long after they were replaced. Scoring, training runs "
        "and readers that name a version must be done within it. Each 1,000 commits that it keeps cost about 3 ms "
        "whenever a table is opened.",
    )
    orphan_hours: int = Field(
        default=24,
        gt=0,
        description="A data file that no version names is removed when it is this old: a killed writer left it. "
        "Longer than any write takes.",
    )

    @property
    def store_options(self) -> dict[str, str]:
        """``storage_options`` in clear, for the object store's client."""
        return {name: secret.get_secret_value() for name, secret in self.storage_options.items()}

    def redact(self, text: str) -> str:
        """A text of the object store's client without the keys and tokens that are among its options."""
        return without_credentials(text, self.storage_options)

    @model_validator(mode="after")
    def _a_living_writers_file_is_no_orphan(self) -> Self:
        if self.orphan_hours * 3600 <= self.lock_timeout_s:
            raise ValueError(
                f"orphan_hours ({self.orphan_hours}) must be longer than lock_timeout_s ({self.lock_timeout_s:g} s): a "
                "writer that waits for a lock would lose its file"
            )
        return self


class RatingConfig(Section):
    """A rating scale: its values go from low to high, ends included."""

    low: float = Field(description="The worst rating.")
    high: float = Field(description="The best rating.")

    @model_validator(mode="after")
    def _low_is_below_high(self) -> Self:
        _check_range(self.low, self.high)
        return self


class MetricConfig(Section):
    """Something that is measured of a response, such as a click or a latency."""

    type: Literal["number", "boolean"] = Field(
        default="number", description="number: any from low to high; boolean: true and false, or 1 and 0."
    )
    low: float = Field(default=0.0, description="The smallest value.")
    high: float = Field(default=1.0, description="The greatest value.")
    direction: Literal["higher", "lower"] = Field(default="higher", description="Which values are the better ones.")
    description: str = Field(default="", description="What is measured.")

    @model_validator(mode="after")
    def _its_range_fits_its_type(self) -> Self:
        _check_range(self.low, self.high)
        if self.type == "boolean" and (self.low, self.high) != (0.0, 1.0):
            raise ValueError(f"a boolean goes from 0 to 1, not from {self.low:g} to {self.high:g}")
        return self


def _check_range(low: float, high: float) -> None:
    if low >= high:
        raise ValueError(f"low ({low:g}) must be less than high ({high:g})")
    if not math.isfinite(high - low):
        raise ValueError(f"from {low:g} to {high:g} is too far for a double")


class KindsConfig(Section):
    """The feedback that a response may get beyond thumbs and texts: the rating scales and metrics by name."""

    ratings: dict[Identifier, RatingConfig] = Field(
        default_factory=lambda: {DEFAULT_SCALE: RatingConfig(low=1, high=5)},
        description="Rating scales by name, each {low, high}; a rating that names none means the only one, or 'stars'.",
    )
    metrics: dict[Identifier, MetricConfig] = Field(
        default_factory=dict,
        description="Metrics by name, each {type: number or boolean, low, high, direction: higher or lower, "
        "description}; a metric that is not declared is refused.",
    )

    @property
    def default_scale(self) -> str | None:
        """The scale of a rating that names none; None if it must name one."""
        if len(self.ratings) == 1:
            return next(iter(self.ratings))
        return DEFAULT_SCALE if DEFAULT_SCALE in self.ratings else None


RESERVED_NAMES: Final = ("human", "model", "judge")
"""Components that are no rule."""

PLACEHOLDER: Final = re.compile(r"\{(prompt|response|metadata\.[^{}\s]+)\}")
"""What a rubric may leave open."""

COMPARED: Final = re.compile(r"\{(prompt|first|second)\}")
"""The same in a question about two answers."""

_WORD_IN_BRACES: Final = re.compile(r"\{[A-Za-z_][\w.\-]*\}")
_RULE_NAME: Final = re.compile(r"[a-z][a-z0-9_]{0,63}")

_PARAMETERS: Final[dict[str, tuple[str, ...]]] = {
    "exact_match": ("reference",),
    "numeric_equality": ("reference", "tolerance"),
    "regex": ("pattern",),
    "json_schema": ("json_schema",),
    "length_penalty": ("target_tokens", "max_tokens"),
    "repetition_penalty": ("ngram",),
}
_REQUIRED: Final = ("pattern", "json_schema", "target_tokens", "max_tokens")


def _rule_name(name: str) -> str:
    if name in RESERVED_NAMES:
        raise ValueError(f"a rule can't be called {name!r}: that is another source's component")
    if not _RULE_NAME.fullmatch(name):
        raise ValueError(
            f"{name!r} is no name for a rule: lower-case letters, digits and underscores, a letter first, at most 64"
        )
    return name


RuleName = Annotated[str, AfterValidator(_rule_name)]
"""The name of a rule, which is that of its component."""

ComponentName = Annotated[str, AfterValidator(lambda name: name if name in RESERVED_NAMES else _rule_name(name))]
"""The name of a component of the reward: a rule's, or one of ``RESERVED_NAMES``."""

Weight = Annotated[float, Field(ge=0, le=1e9, allow_inf_nan=False)]


TRAINED: Final = "trained"
"""For a model's name: the version that the store of reward models points at."""


class ClassifierConfig(Section):
    """A sequence-classification model that scores responses."""

    name: str = Field(
        min_length=1,
        description="Folder or Hugging Face name of the model; trained: the one that Millrace trained on people's "
        "feedback, as soon as there is one.",
    )
    revision: str | None = Field(default=None, description="Branch, tag or commit on the hub.")
    label: int = Field(default=0, ge=0, description="Index of the label whose logit is the reward.")
    activation: Literal["sigmoid", "softmax", "none"] = Field(
        default="sigmoid",
        description="sigmoid or softmax (over the labels) bring the logit into 0..1, where the other sources lie.",
    )
    device: str = Field(default="auto", description="auto (cuda if there is one), cpu, cuda, cuda:1 …")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        default="auto", description="Type of the weights; auto takes the model's own."
    )
    max_length: int | None = Field(
        default=None, ge=1, description="Longest prompt and response together, in tokens; null: the model's own limit."
    )
    batch_tokens: int = Field(default=16384, ge=1, description="Tokens in one forward pass, padding included.")

    def resolved(self, path: Callable[[str], Path]) -> Self:
        """The same with an absolute folder, if there is one of that name; else it is a name on the hub."""
        folder = path(self.name)
        return self.model_copy(update={"name": str(folder)}) if folder.is_dir() else self


class ModelConfig(ClassifierConfig):
    """The reward component `model`: the score of a sequence-classification model."""

    weight: Weight = Field(default=1.0, description="Weight of the model in the reward; 0 leaves it out.")


class HumanConfig(Section):
    """The reward component `human`: feedback on a response, from users and from what measures for them."""

    weight: Weight = Field(default=1.0, description="Weight of the votes in the reward; 0 leaves them out.")
    thumbs: Weight = Field(default=1.0, description="Weight of thumbs among a source's votes; 0 leaves them out.")
    ratings: Weight = Field(default=1.0, description="Weight of ratings among a source's votes.")
    preferences: Weight = Field(default=1.0, description="Weight of preferences among a source's votes.")
    metrics: Weight = Field(default=1.0, description="Weight of metrics among a source's votes.")
    sessions: Literal["last", "equal", "discounted"] = Field(
        default="last",
        description="What feedback on a session says of its responses. last: a vote on the last one alone; equal: the "
        "same vote on each; discounted: on the last one the vote, on each before it one nearer to 0.5.",
    )
    session_discount: float = Field(
        default=0.9,
        gt=0,
        lt=1,
        description="discounted: k responses before the last, a vote v counts as 0.5 + session_discount^k (v - 0.5).",
    )
    model: ClassifierConfig | None = Field(
        default=None,
        description="A reward model trained on the votes. It gives this component to the responses that training "
        "samples, which have no votes; null: those go without it.",
    )

    @model_validator(mode="after")
    def _some_kind_counts(self) -> Self:
        if self.weight > 0 and not (self.thumbs or self.ratings or self.preferences or self.metrics):
            raise ValueError("no kind of vote has a weight: set weight to 0 to leave the votes out")
        return self


class RuleConfig(Section):
    """A reward component that a function, a SQL expression or a ready rule gives."""

    weight: Weight = Field(default=1.0, description="Weight of the rule in the reward; 0 leaves it out.")
    function: FunctionName | None = Field(
        default=None, description="Python function over an Arrow table of responses, as module:name."
    )
    sql: str | None = Field(
        default=None,
        min_length=1,
        description="DuckDB expression over prompt, messages, response, response_token_ids and metadata: a number, "
        "a boolean, or NULL for no reward.",
    )
    ready: (
        Literal["exact_match", "numeric_equality", "regex", "json_schema", "length_penalty", "repetition_penalty"]
        | None
    ) = Field(default=None, description="A rule that is there already.")
    reference: str | None = Field(
        default=None,
        min_length=1,
        description="exact_match, numeric_equality: the metadata key of the right answer (default: 'answer').",
    )
    tolerance: float | None = Field(
        default=None,
        ge=0,
        allow_inf_nan=False,
        description="numeric_equality: largest difference, as a share of the reference or of 1 if that is more (1e-9).",
    )
    pattern: str | None = Field(default=None, description="regex: what the response must contain, in RE2's syntax.")
    json_schema: dict[str, Any] | None = Field(
        default=None, description="json_schema: the JSON Schema that the response must meet."
    )
    target_tokens: int | None = Field(
        default=None, ge=0, description="length_penalty: responses of at most this many tokens get 1."
    )
    max_tokens: int | None = Field(
        default=None, ge=1, description="length_penalty: responses of at least this many tokens get 0."
    )
    ngram: int | None = Field(default=None, ge=1, le=16, description="repetition_penalty: tokens in a sequence (4).")

    @model_validator(mode="after")
    def _is_one_rule(self) -> Self:
        present = [name for name in ("function", "sql", "ready") if getattr(self, name) is not None]
        if len(present) != 1:
            raise ValueError(
                f"a rule has exactly one of function, sql and ready, not {' and '.join(present) or 'none'}"
            )
        taken = _PARAMETERS.get(self.ready or "", ())
        what = f"ready rule {self.ready!r}" if self.ready else f"a rule by {present[0]}"
        for name in {name for names in _PARAMETERS.values() for name in names}:
            if getattr(self, name) is not None and name not in taken:
                raise ValueError(f"{what} takes no {name!r}")
            if getattr(self, name) is None and name in taken and name in _REQUIRED:
                raise ValueError(f"{what} needs {name!r}")
        if self.ready == "length_penalty" and not (self.target_tokens or 0) < (self.max_tokens or 0):
            raise ValueError(f"target_tokens ({self.target_tokens}) must be less than max_tokens ({self.max_tokens})")
        return self

    @field_validator("pattern")
    @classmethod
    def _is_a_pattern(cls, value: str | None) -> str | None:
        try:
            re.compile(value or "")
        except re.error as error:
            raise ValueError(f"no regular expression: {error}") from error
        return value

    @field_validator("json_schema")
    @classmethod
    def _is_a_schema(cls, value: dict[str, Any] | None) -> dict[str, Any] | None:
        if value is not None:
            from jsonschema.exceptions import SchemaError
            from jsonschema.validators import validator_for

            try:
                validator_for(value).check_schema(value)
            except SchemaError as error:
                raise ValueError(f"no JSON Schema: {error.message} (at {error.json_path})") from error
        return value


class ApiConfig(Section):
    """An OpenAI-compatible API, and how it is asked."""

    url: Address = Field(description="Address of an OpenAI-compatible API, such as http://127.0.0.1:8001/v1.")
    model: str = Field(min_length=1, description="Name of the model there.")
    api_key: Secret | None = Field(default=None, description="Bearer token for the API.")
    concurrency: int = Field(default=8, ge=1, le=1024, description="Most questions at once.")
    timeout_s: float = Field(default=60.0, gt=0, description="Longest wait for one answer, in seconds.")
    attempts: int = Field(default=4, ge=1, description="Attempts at a question in one run while it fails.")
    backoff_s: float = Field(
        default=0.5, gt=0, description="Wait before the second attempt, in seconds; it doubles with every further one."
    )
    max_backoff_s: float = Field(
        default=30.0, gt=0, description="Longest wait between attempts, also if the server asks for more, in seconds."
    )
    deadline_s: float = Field(
        default=1800.0,
        gt=0,
        description="Longest time that one scoring run, one step of training, or one evaluation may spend on it, in "
        "seconds.",
    )

    @field_validator("api_key")
    @classmethod
    def _can_be_sent(cls, value: SecretStr | None) -> SecretStr | None:
        if value is None:
            return None
        key = value.get_secret_value().strip()  # a mounted file ends with a line end
        if not re.fullmatch(r"[\x21-\x7e]+", key):
            raise ValueError("a key is one word of printable ASCII characters, and this one is not: put the key alone")
        return SecretStr(key)

    @field_validator("url")
    @classmethod
    def _is_http(cls, value: str) -> str:
        if not re.fullmatch(r"https?://[^\s/]+(/\S*)?", value):
            raise ValueError("the address of an API begins with http:// or https:// and a host")
        return value.rstrip("/")


class JudgeConfig(ApiConfig):
    """The reward component `judge`: the score of another language model, by HTTP."""

    rubric: str = Field(
        min_length=1,
        description="The question to the judge. {prompt}, {response} and {metadata.KEY} stand for the response's own.",
    )
    weight: Weight = Field(default=1.0, description="Weight of the judge in the reward; 0 leaves it out.")
    low: float = Field(default=0.0, description="The worst score, which becomes 0.")
    high: float = Field(default=10.0, description="The best score, which becomes 1.")
    max_tokens: int = Field(default=512, ge=1, description="Longest answer of the judge, in tokens.")
    temperature: float = Field(default=0.0, ge=0, allow_inf_nan=False, description="Sampling temperature of the judge.")
    runs: int = Field(
        default=3, ge=1, description="Scoring runs that ask for a response before its verdict is given up."
    )
    extra: dict[str, Any] = Field(
        default_factory=dict, description="More fields of the request, or null for one that must not be sent."
    )
    cache: str = Field(default="judge", description="Folder where verdicts are kept, so that none is paid twice.")

    @model_validator(mode="after")
    def _range(self) -> Self:
        if not self.low < self.high or not math.isfinite(self.high - self.low):
            raise ValueError(f"low ({self.low:g}) must be less than high ({self.high:g}), at a finite distance")
        return self

    @field_validator("rubric")
    @classmethod
    def _asks_about_the_response(cls, value: str) -> str:
        if "{response}" not in value:
            raise ValueError("a rubric needs {response} where the response is to stand")
        for word in _WORD_IN_BRACES.findall(value):
            if not PLACEHOLDER.fullmatch(word):
                raise ValueError(f"{word} stands for nothing; there are {{prompt}}, {{response}} and {{metadata.KEY}}")
        return value


class ScoringConfig(Section):
    """The batch that turns interactions and feedback into rewards."""

    human: HumanConfig = Field(default_factory=HumanConfig, description="Users' votes.")
    rules: dict[RuleName, RuleConfig] = Field(
        default_factory=dict, description="Rules by the name of their component, each with a weight."
    )
    model: ModelConfig | None = Field(default=None, description="A reward model.")
    judge: JudgeConfig | None = Field(default=None, description="A judge.")
    batch_rows: int = Field(
        default=8192, gt=0, description="Responses that are handed to Python rules, the model and the judge at a time."
    )
    memory_limit: MemorySize = Field(
        default="1GB", description="Memory that DuckDB may use for scoring before it spills."
    )
    threads: int = Field(default=2, gt=0, description="Threads that DuckDB may use for scoring.")

    def resolved(self, path: Callable[[str], Path]) -> ScoringConfig:
        """The same with every folder absolute; ``path`` makes it so. A model's name is a folder if there is one."""
        judge, model, human = self.judge, self.model, self.human
        if judge is not None:
            judge = judge.model_copy(update={"cache": str(path(judge.cache))})
        if model is not None:
            model = model.resolved(path)
        if human.model is not None:
            human = human.model_copy(update={"model": human.model.resolved(path)})
        return self.model_copy(update={"judge": judge, "model": model, "human": human})

    @property
    def for_rollouts(self) -> dict[str, float]:
        """By component, the weights of the sources that can reward a response that nobody has seen."""
        human = self.human if self.human.model is not None else None
        there = {"human": human, **self.rules, "model": self.model, "judge": self.judge}
        return {name: source.weight for name, source in there.items() if source is not None}

    def weighed(self, weights: Mapping[str, float]) -> ScoringConfig:
        """The same with other weights, by component; names that it has not are left out."""

        def heavier(name: str, source: Any) -> Any:
            known = source is not None and name in weights
            return source.model_copy(update={"weight": weights[name]}) if known else source

        parts = {name: heavier(name, getattr(self, name)) for name in RESERVED_NAMES}
        rules = {name: heavier(name, rule) for name, rule in self.rules.items()}
        return self.model_copy(update={**parts, "rules": rules})


class FeedbackConfig(Section):
    """What happened: how it is recorded, kept and scored."""

    kinds: KindsConfig = Field(default_factory=KindsConfig, description="Rating scales and metrics.")
    capture: CaptureConfig = Field(default_factory=CaptureConfig, description="What is kept of texts.")
    journal: JournalConfig = Field(default_factory=JournalConfig, description="The durable append log.")
    lake: LakeConfig = Field(default_factory=LakeConfig, description="The Delta tables.")
    scoring: ScoringConfig = Field(default_factory=ScoringConfig, description="From feedback to rewards.")
