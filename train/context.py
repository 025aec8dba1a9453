"""Input and result of a training job."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from pydantic import BaseModel, ConfigDict, Field

from feedback.config import LakeConfig, RuleConfig
from feedback.files import private
from feedback.settings_base import IN_CLEAR

if TYPE_CHECKING:
    from train.config.training import TrainConfig

RUN_NAME: Final = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$"
"""It is a folder's name, and not a path out of ``runs``."""


class TrainingStopped(RuntimeError):
    """Training ended early for its health; nothing was published."""


class NothingToLearn(TrainingStopped):
    """It ended for want of anything to learn from; nothing went wrong."""


class RowsErased(TrainingStopped):
    """Rows that the run learned from were erased meanwhile; nothing was published, and nothing went wrong."""


class JobContext(BaseModel):
    """Where a job finds and leaves things. Paths are absolute, and on a cluster shared by its machines."""

    model_config = ConfigDict(hide_input_in_errors=True)

    run: str = Field(
        pattern=RUN_NAME,
        description="Name of the run: its folder under runs. The same name again goes on with the run.",
    )
    runs: Path
    policies: Path
    lake_uri: str
    lake: LakeConfig = Field(default_factory=LakeConfig)
    reward: str | dict[str, RuleConfig] = Field(
        description="What rewards rollouts: module:function, or rules by name, of which it is the weighted mean. "
        "Empty if nothing is sampled."
    )
    parent: int | None = Field(None, description="Policy to start from; the serving one if unset.")
    python_path: list[str] = Field(default_factory=list, description="Folders that the reward's module is found in.")
    lineage: dict[str, Any] = Field(default_factory=dict, description="More to keep in the policy's manifest.")

    @property
    def folder(self) -> Path:
        return self.runs / self.run


class JobResult(BaseModel):
    """The result of a job; ``candidate`` is None when no policy was published, and ``reason`` says why.

    ``artifact``: the folder of a reward model, trained in place of a policy. ``stopped``: the run was ended for
    its health; if it was not and has no candidate, there was nothing to learn from.
    """

    run: str
    candidate: int | None
    artifact: Path | None = None
    parent: int
    steps: int
    reason: str | None
    stopped: bool = False
    metrics: dict[str, float]
    seconds: float

    @classmethod
    def of_published(cls, published: int | Path, **run: Any) -> JobResult:
        """That of a run that has published a policy (its version), or a reward model (its folder)."""
        if isinstance(published, int):
            return cls(candidate=published, reason=None, **run)
        reason = f"a reward model was trained, and no policy: {published}"
        return cls(candidate=None, artifact=published, reason=reason, **run)

    @property
    def published(self) -> str:
        """What the run has published."""
        return f"policy {self.candidate}" if self.artifact is None else f"reward model {self.artifact}"


def write_job(config: TrainConfig, context: JobContext) -> Path:
    """The file of a job, in its folder. It has the lake's credentials in clear, so only its user may read it."""
    parts = {"config": config, "context": context}
    spec = context.folder / "job.json"
    with open(spec, "w", opener=private) as file:
        json.dump({name: part.model_dump(mode="json", context=IN_CLEAR) for name, part in parts.items()}, file)
    return spec


class RunStart(BaseModel):
    """What a run was started with; it stays that when the run goes on."""

    model_config = ConfigDict(frozen=True)

    id: str
    parent: int
    parent_sha256: str
    lake_versions: dict[str, int]
    reward: Any
    config: dict[str, Any]
    max_model_len: int | None = None
    """Of rollouts, in tokens; a machine with less memory goes on with the same."""
    prompt_files: dict[str, str] = {}
    """The sha256 of each file or folder of train.data.prompts."""
