"""Settings of the data plane: the journal, the lake and scoring."""

from __future__ import annotations

import math
import re
from typing import Final, Literal, Self

from pydantic import Field, model_validator

from feedback.scoring_config import HumanConfig, JudgeConfig, ModelConfig, RuleConfig, ScoringConfig
from feedback.settings_base import Address, FunctionName, Identifier, MemorySize, Secret, Section

__all__ = [
    "DEFAULT_SCALE",
    "FeedbackConfig",
    "FunctionName",
    "HumanConfig",
    "Identifier",
    "JournalConfig",
    "JudgeConfig",
    "KindsConfig",
    "LakeConfig",
    "MetricConfig",
    "ModelConfig",
    "RatingConfig",
    "RuleConfig",
    "ScoringConfig",
    "Section",
]

DEFAULT_SCALE: Final = "stars"
"""The scale of a rating that names none, where several are declared."""


_CREDENTIAL: Final = re.compile(r"key|secret|token|sas|password|credential", re.IGNORECASE)
"""In the name of an object store's option that must not be seen."""

_SHORTEST: Final = 6  # characters of a credential; what is shorter stands by chance in any text


class JournalConfig(Section):
    """The durable append log that every answer and feedback is written to before it is acknowledged."""

    folder: str = Field(
        default="journal", description="Folder of the journal's segments, on a local disk that honours fsync."
    )
    segment_bytes: int = Field(default=32 << 20, gt=0, description="A segment is closed once it holds this many bytes.")
    segment_seconds: float = Field(
        default=2.0,
        gt=0,
        description="A segment is closed once it is this old, in seconds; only closed segments are sealed.",
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
        for name, value in self.store_options.items():
            if len(value) >= _SHORTEST and _CREDENTIAL.search(name):
                text = text.replace(value, str(self.storage_options[name]))
        return text

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


class FeedbackConfig(Section):
    """What happened: how it is recorded, kept and scored."""

    kinds: KindsConfig = Field(default_factory=KindsConfig, description="Rating scales and metrics.")
    journal: JournalConfig = Field(default_factory=JournalConfig, description="The durable append log.")
    lake: LakeConfig = Field(default_factory=LakeConfig, description="The Delta tables.")
    scoring: ScoringConfig = Field(default_factory=ScoringConfig, description="From feedback to rewards.")
