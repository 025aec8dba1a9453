"""Settings of the data plane: the journal, the lake and scoring."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

_SIZE = re.compile(r"\d+(\.\d+)?\s*(KB|MB|GB|TB|KiB|MiB|GiB|TiB)")
_FUNCTION = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")


def _memory_size(value: str) -> str:
    if not _SIZE.fullmatch(value):
        raise ValueError(f"{value!r} is not an amount of memory; write for example '1GB' or '512MiB'")
    return value


def _function_name(value: str) -> str:
    if not _FUNCTION.fullmatch(value):
        raise ValueError(f"{value!r} does not name a function; write 'module:name', for example 'my_rewards:exact'")
    return value


MemorySize = Annotated[str, AfterValidator(_memory_size)]
"""An amount of memory as DuckDB writes it: ``1GB``, ``512MiB``."""

FunctionName = Annotated[str, AfterValidator(_function_name)]
"""``module:name`` of a Python function."""


class Section(BaseModel):
    """A group of settings; a key that is not one of them is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)


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


class LakeConfig(Section):
    """The Delta Lake tables that hold interactions, feedback and rewards."""

    uri: str = Field(default="lake", description="Folder, or s3://, gs:// or az:// address, of the Delta tables.")
    storage_options: dict[str, str] = Field(
        default_factory=dict,
        description="Options of the object store (region, endpoint, keys), as deltalake names them.",
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


class HumanConfig(Section):
    """The reward component `human`: what users said of a response."""

    weight: float = Field(default=1.0, ge=0, description="Weight of users' votes in the reward; 0 leaves them out.")


class RulesConfig(Section):
    """The reward component `rules`: what a Python function says of a response."""

    function: FunctionName | None = Field(
        default=None,
        description="Reward function, as module:name, over an Arrow table of responses. None: no rule.",
    )
    weight: float = Field(default=1.0, ge=0, description="Weight of the rule in the reward; 0 leaves it out.")


class ScoringConfig(Section):
    """The batch that turns interactions and feedback into rewards."""

    human: HumanConfig = Field(default_factory=HumanConfig, description="Users' votes.")
    rules: RulesConfig = Field(default_factory=RulesConfig, description="A rule in Python.")
    batch_rows: int = Field(default=8192, gt=0, description="Responses that are handed to the rule at a time.")
    memory_limit: MemorySize = Field(
        default="1GB", description="Memory that DuckDB may use for scoring before it spills."
    )
    threads: int = Field(default=2, gt=0, description="Threads that DuckDB may use for scoring.")


class FeedbackConfig(Section):
    """What happened: how it is recorded, kept and scored."""

    journal: JournalConfig = Field(default_factory=JournalConfig, description="The durable append log.")
    lake: LakeConfig = Field(default_factory=LakeConfig, description="The Delta tables.")
    scoring: ScoringConfig = Field(default_factory=ScoringConfig, description="From feedback to rewards.")
