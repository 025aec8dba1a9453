"""Input and result of a training job."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from pydantic import BaseModel, ConfigDict, Field, SecretStr

from feedback.config import LakeConfig, ScoringConfig
from feedback.files import private
from feedback.settings_base import IN_CLEAR
from serve.config import PolicyStoreConfig

if TYPE_CHECKING:
    from serve.policies.store import Policy
    from train.config.training import TrainConfig

RUN_NAME: Final = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$"
"""It is a folder's name, and not a path out of ``runs``."""


RESULT: Final = "result.json"
"""In a run's folder, what came of it."""


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
    policy_store: PolicyStoreConfig = Field(default_factory=PolicyStoreConfig)
    reward_models: Path
    lake_uri: str
    lake: LakeConfig = Field(default_factory=LakeConfig)
    reward: str | ScoringConfig | None = Field(
        None,
        description="What rewards rollouts: module:function, or sources, of which it is the weighted mean. Unset if "
        "nothing is sampled.",
    )
    parent: int | None = Field(None, description="Policy to start from; the serving one if unset.")
    python_path: list[str] = Field(default_factory=list, description="Folders that the reward's module is found in.")
    lineage: dict[str, Any] = Field(default_factory=dict, description="More to keep in the policy's manifest.")

    @property
    def folder(self) -> Path:
        return self.runs / self.run


class JobResult(BaseModel):
    """The result of a job; ``candidate`` is None when no policy was published, and ``reason`` says why.

    ``reward_model``: the version of one that was trained in place of a policy, in its store. ``stopped``: the run was
    ended for its health; if it was not and has neither, there was nothing to learn from. ``work``: seconds of what its
    steps did and of ``publish``, by part, and of no start or wait. ``restarts``: how often it was started again
    by itself.
    """

    run: str
    candidate: int | None
    reward_model: int | None = None
    parent: int
    steps: int
    reason: str | None
    stopped: bool = False
    metrics: dict[str, float]
    seconds: float
    work: dict[str, float] = {}
    restarts: int = 0

    @classmethod
    def of_published(cls, published: Policy, trains_policy: bool, **run: Any) -> JobResult:
        """That of a run that has published a policy, or a reward model."""
        if trains_policy:
            return cls(candidate=published.version, reason=None, **run)
        why = f"reward model {published.version}: {published.metrics['why']}"
        return cls(candidate=None, reward_model=published.version, reason=why, **run)

    @property
    def published(self) -> str:
        """What the run has published."""
        return f"policy {self.candidate}" if self.reward_model is None else f"reward model {self.reward_model}"


JUDGE_KEY: Final = "MILLRACE__FEEDBACK__SCORING__JUDGE__API_KEY"
"""The variable by which a job has the judge's key, which no file of a run has."""


TEACHER_KEY: Final = "MILLRACE__TRAIN__ALGORITHM__TEACHER__API_KEY"
"""Likewise, the teacher's."""


def api_keys(config: TrainConfig, context: JobContext) -> dict[str, str]:
    """What a job has in its environment: the keys of its judge and its teacher, where they have one."""
    judge = context.reward.judge if isinstance(context.reward, ScoringConfig) else None
    apis = {JUDGE_KEY: judge, TEACHER_KEY: config.algorithm.teacher}
    return {name: api.api_key.get_secret_value() for name, api in apis.items() if api and api.api_key}


def with_judge_key(context: JobContext, key: str | None) -> JobContext:
    """The same with another key of its judge, if it has one."""
    if not isinstance(context.reward, ScoringConfig) or context.reward.judge is None:
        return context
    judge = context.reward.judge.model_copy(update={"api_key": None if key is None else SecretStr(key)})
    return context.model_copy(update={"reward": context.reward.model_copy(update={"judge": judge})})


def with_teacher_key(config: TrainConfig, key: str | None) -> TrainConfig:
    """The same with another key of its teacher, if it has one."""
    if config.algorithm.teacher is None:
        return config
    teacher = config.algorithm.teacher.model_copy(update={"api_key": None if key is None else SecretStr(key)})
    return config.model_copy(update={"algorithm": config.algorithm.model_copy(update={"teacher": teacher})})


def write_job(config: TrainConfig, context: JobContext) -> Path:
    """The file of a job, in its folder. It has the lake's credentials in clear, so only its user may read it."""
    parts = {"config": with_teacher_key(config, None), "context": with_judge_key(context, None)}
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
    scorer: str | None = None
    """What identifies the reward: the sources, and a hash of all that decides their values."""
    config: dict[str, Any]
    max_model_len: int | None = None
    """Of rollouts, in tokens; a machine with less memory goes on with the same."""
    prompt_files: dict[str, str] = {}
    """The sha256 of each file or folder of train.data.prompts."""
    suites: dict[str, str] = {}
    """The sha256 of each suite whose prompts were left out, by its path."""
    class_sha256: str | None = None
    """Of the file of train.model.class."""
