"""The root configuration: what each package's own config.py says, composed.

Highest first: dotted options on the command line (``--serve.port 8001``), the environment
(``MILLRACE__SERVE__PORT=8001``), a YAML file, the defaults. An unknown key in any of them is an error.
Imports no torch, vLLM, Ray or DuckDB: every command starts here.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar
from urllib.parse import urlsplit

from pydantic import (
    ConfigDict,
    Discriminator,
    Field,
    PositiveFloat,
    PositiveInt,
    SecretStr,
    StringConstraints,
    Tag,
    ValidationError,
    field_validator,
    model_validator,
)

from deploy.config import describe
from deploy.config.sources import (
    ENV_PREFIX,
    ConfigError,
    Layer,
    explain,
    from_environment,
    from_file,
    from_options,
    merged,
    overlaid,
)
from evaluation.config import EvaluationConfig
from feedback.config import TRAINED, ClassifierConfig, FeedbackConfig, ScoringConfig
from feedback.files import read_key, replace_file
from feedback.settings_base import IN_CLEAR, Secret, Section
from serve.config import ServeConfig
from serve.middleware.api_keys import local_file
from train.config.algorithms import DISTILL
from train.config.training import TrainConfig

if TYPE_CHECKING:
    from evaluation.decisions.ledger import Ledger
    from evaluation.judging import Sources
    from feedback.lake.tables import Lake
    from serve.policies.store import PolicyStore
    from train.run.recovery.run_store import RunStore
    from train.run.recovery.unfinished import Stores

__all__ = ["ConfigError", "ScheduleConfig", "Settings", "child_environment", "load"]


Classifier = TypeVar("Classifier", bound=ClassifierConfig)
_shared_stores: dict[tuple[str, str], PolicyStore] = {}


class RecipeStage(Section):
    """One stage of a recipe: what it trains, and with which settings."""

    stage: Literal["train", "reward-model"] = Field(
        description="train: a policy, from the one before. reward-model: what rewards the responses of later stages."
    )
    name: str | None = Field(
        None, pattern=r"^[a-z0-9][a-z0-9_-]{0,31}$", description="Tells it from others that train the same."
    )
    set: dict[str, Any] = Field(
        {}, description="Settings of train that this stage has in place of the others'. Another algorithm has its own."
    )

    @property
    def label(self) -> str:
        """Its name in the cycle's record, and in the names of its run and its log."""
        return self.stage if self.name is None else f"{self.stage}-{self.name}"


RecipeName = Literal["auto", "rlvr", "rlhf", "rlaif", "offline"]
Recipe = Annotated[
    Annotated[RecipeName, Tag("(name)")] | Annotated[list[RecipeStage], Tag("(stages)")],
    Discriminator(lambda value: "(stages)" if isinstance(value, list) else "(name)"),
]
"""Told apart by what stands there, so that an error is about that alone."""


class CycleConfig(Section):
    """One turn of the loop: score, train, evaluate, promote."""

    recipe: Recipe | None = Field(
        None,
        description="What policies learn from. rlhf: people's feedback trains a reward model, which rewards fresh "
        "responses. rlvr: rules reward them. rlaif: a judge does. offline: feedback itself, by dpo, kto or sft, "
        "whichever it has most of. auto: rlhf or offline, by how much feedback of which kind there is when a cycle has "
        "scored; rules and a judge also reward, where they are set. null: what the other settings say. Or a list of "
        "stages of your own, each with stage (train or reward-model), name, and set (settings of train, for this "
        "stage).",
    )
    folder: Path = Field(Path("cycles"), description="Where each cycle's record is kept, one JSON file a cycle.")
    min_new_rewards: int = Field(
        1,
        ge=0,
        description="Train only when at least this many rewards (with an offline algorithm: feedbacks) are new since "
        "the last training; else skip.",
    )
    min_on_policy_feedback: int = Field(
        0,
        ge=0,
        description="Train only when at least this many feedbacks are on responses of the policy that serves; else "
        "skip. A reward model that has seen no feedback on it doesn't know its mistakes, and the cycle after a "
        "promotion has little to gain.",
    )
    score_ahead: bool = Field(
        True,
        description="Score what has come meanwhile while the candidate is evaluated: the next cycle has less to score "
        "before it trains. Not where feedback.scoring.model computes on a GPU, which the evaluation has then.",
    )
    score_timeout_s: PositiveFloat = Field(3600.0, description="Scoring that takes longer is stopped (seconds).")
    train_timeout_s: PositiveFloat = Field(86400.0, description="Training that takes longer is stopped (seconds).")
    evaluate_timeout_s: PositiveFloat = Field(14400.0, description="Evaluation that takes longer is stopped (seconds).")
    swap_timeout_s: PositiveFloat = Field(
        300.0, description="How long the running server may take to serve a promoted policy (seconds)."
    )
    stop_grace_s: PositiveFloat = Field(
        10.0, description="How long a stage that must stop may take before it is killed (seconds)."
    )

    @property
    def stages(self) -> list[RecipeStage]:
        """What a cycle trains, in order."""
        if isinstance(self.recipe, list):
            return self.recipe
        train = RecipeStage(stage="train")
        return [RecipeStage(stage="reward-model"), train] if self.recipe == "rlhf" else [train]

    @property
    def trains_reward_model(self) -> bool:
        """Whether a cycle may train one; `auto` may turn out to."""
        return self.recipe == "auto" or any(stage.stage == "reward-model" for stage in self.stages)

    @model_validator(mode="after")
    def _stages_can_work(self) -> CycleConfig:
        labels = [stage.label for stage in self.stages]
        if twice := next((label for label in labels if labels.count(label) > 1), None):
            raise ValueError(f"cycle.recipe has more than one stage {twice}: give each a name of its own")
        if all(stage.stage != "train" for stage in self.stages):
            raise ValueError("cycle.recipe has no stage that trains a policy: add {stage: train}")
        return self


class LoopMetricsConfig(Section):
    """``GET /metrics`` of the scheduler: what the loop has on record, for Prometheus."""

    port: int | None = Field(
        None, ge=1, le=65535, description="Port on which the scheduler shows its metrics; null: it shows none."
    )
    host: str = Field(
        "127.0.0.1",
        min_length=1,
        description="Address to listen on. As the server's own, it is a loopback address while there are no keys.",
    )
    lake_seconds: PositiveFloat = Field(
        60.0, description="Seconds between two reads of the lake for rewards and feedback, if something is new in it."
    )


EventKind = Literal["promoted", "refused", "rolled_back", "failed"]
"""What webhooks are told of."""


class WebhookConfig(Section):
    """An address that is told what the loop does."""

    url: Secret = Field(
        description="Where to send it, http or https. Masked wherever settings are shown: who has a Slack address can "
        "post there."
    )
    form: Literal["generic", "slack"] = Field(
        "generic", description="generic: a JSON object with all that is known. slack: a text, as Slack takes it."
    )
    events: list[EventKind] = Field(
        ["promoted", "refused", "rolled_back", "failed"], min_length=1, description="What it is told of."
    )
    secret_variable: str = Field(
        "MILLRACE_WEBHOOK_SECRET",
        pattern=r"^[A-Z][A-Z0-9_]{0,99}$",
        description="Environment variable with the secret that requests are signed with; unset: they aren't. The "
        "secret itself is no setting, so that no snapshot of settings has it.",
    )
    timeout_s: PositiveFloat = Field(10.0, le=300, description="An attempt may take this long (seconds).")
    attempts: PositiveInt = Field(
        5, le=20, description="Attempts to deliver an event, ever longer apart; then it is on record as failed."
    )

    @field_validator("secret_variable")
    @classmethod
    def _is_no_setting(cls, name: str) -> str:
        if name.startswith(ENV_PREFIX):
            raise ValueError(f"{name} would be a setting: take a name that does not begin with {ENV_PREFIX}")
        return name

    @field_validator("url")
    @classmethod
    def _is_an_address(cls, url: SecretStr) -> SecretStr:
        import httpx

        text = url.get_secret_value()
        parts = urlsplit(text)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError("this is no http or https address")
        try:
            httpx.Request("POST", text)  # else nothing is ever delivered, as with the newline of a secret's file
        except (httpx.InvalidURL, UnicodeError):
            raise ValueError("this is no http or https address: look for spaces and line ends in it") from None
        if parts.username is not None or parts.password is not None:
            raise ValueError("a user name or password in the address is not sent: take it out")
        return url


class ScheduleConfig(Section):
    """When cycles run. One at a time; runs that were missed meanwhile become one."""

    cron: str | None = Field(
        None,
        description='Crontab line of five fields, local time ("*/30 * * * *"); if set, interval_seconds is unused.',
    )
    interval_seconds: PositiveFloat = Field(3600.0, description="Seconds from one cycle's start to the next one's.")
    first_after_seconds: float | None = Field(
        None, ge=0, description="Seconds to the first cycle of a scheduler; null: when the last cycle makes it due."
    )
    jitter_seconds: float = Field(0.0, ge=0, description="Shift each start by up to this many seconds, at random.")
    misfire_grace_seconds: PositiveFloat | None = Field(
        None, description="A start that is later than this is left out; null: late is better than never."
    )
    maintenance_seconds: PositiveFloat | None = Field(
        3600.0,
        description="Seconds between two runs of `millrace lake maintain` (compaction, retention, vacuum; one at a "
        "time, also beside a cycle); null: never.",
    )
    maintenance_timeout_s: PositiveFloat = Field(
        14400.0, description="Maintenance that takes longer is stopped (seconds); the next one goes on."
    )
    max_cycles: PositiveInt | None = Field(
        None, description="Stop scheduling after this many cycles (skipped ones don't count); null: go on."
    )
    metrics: LoopMetricsConfig = Field(
        default_factory=LoopMetricsConfig, description="`GET /metrics` of the scheduler, for Prometheus."
    )
    webhooks: dict[Annotated[str, StringConstraints(pattern=r"^[a-z0-9][a-z0-9_-]{0,31}$")], WebhookConfig] = Field(
        default_factory=dict, description="Addresses that the scheduler tells what the loop does, each with a name."
    )


class UpConfig(Section):
    """How ``millrace up`` treats the server and the scheduler that it starts."""

    logs: Path = Field(Path("logs"), description="Folder of the logs of all processes.")
    ready_timeout_s: PositiveFloat = Field(600.0, description="How long the server may take to be ready (seconds).")
    stop_grace_s: PositiveFloat = Field(
        45.0, description="How long a process may take to stop by itself before it is killed (seconds)."
    )


Devices = Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1)]


class DevicesConfig(Section):
    """Which of this machine's GPUs the server, training and evaluation have.

    They are numbered from 0; where CUDA_VISIBLE_DEVICES is set, they are those that it names, in its order. What runs
    on a cluster has none here.
    """

    use: Literal["auto", "own", "in_turns", "any"] = Field(
        "auto",
        description="auto: each its own where there are enough, else in turns; nothing without a GPU. own: each its "
        "own, or an error. in_turns: the server sleeps while training or evaluation has its devices, also on a CPU, "
        "where no memory is given back. any: all see all devices, as far as their memory goes.",
    )
    serve: Devices | None = Field(None, description="The server's; none: the first ones.")
    train: Devices | None = Field(None, description="Training's; none: those behind the server's.")
    evaluate: Devices | None = Field(
        None, description="Evaluation's and scoring's; none: others where there are some, else training's."
    )
    lease_s: float = Field(
        60,
        ge=5,
        le=3600,
        description="A server that sleeps wakes by itself after so many seconds without a word of who has its devices.",
    )

    @property
    def chosen(self) -> dict[str, list[int]]:
        """The devices that somebody has chosen, by role."""
        roles = {"serve": self.serve, "train": self.train, "evaluate": self.evaluate}
        return {role: numbers for role, numbers in roles.items() if numbers is not None}

    @model_validator(mode="after")
    def _can_be(self) -> DevicesConfig:
        chosen = self.chosen
        if self.use == "any" and chosen:
            raise ValueError(f"devices.use=any assigns none: take devices.{next(iter(chosen))} out, or use out")
        if twice := next((name for name, numbers in chosen.items() if len(set(numbers)) < len(numbers)), None):
            raise ValueError(f"devices.{twice} names a device twice: {', '.join(map(str, chosen[twice]))}")
        return self


class Settings(Section):
    """Everything that can be set. Paths that are not absolute are relative to ``home``."""

    model_config = ConfigDict(validate_default=True, frozen=False)  # a recipe completes ``feedback``

    home: Path = Field(Path("home"), description="The folder that holds everything Millrace keeps.")
    feedback: FeedbackConfig = Field(
        default_factory=FeedbackConfig, description="What happened: journal, lake, rewards."
    )
    serve: ServeConfig = Field(default_factory=ServeConfig, description="The server, its engine and the swap.")
    evaluation: EvaluationConfig = Field(default_factory=EvaluationConfig, description="The suite and the gate.")
    train: TrainConfig = Field(default_factory=TrainConfig, description="Training, one run.")
    cycle: CycleConfig = Field(default_factory=CycleConfig, description="One turn of the loop.")
    schedule: ScheduleConfig = Field(default_factory=ScheduleConfig, description="When cycles run.")
    up: UpConfig = Field(default_factory=UpConfig, description="`millrace up`.")
    devices: DevicesConfig = Field(
        default_factory=DevicesConfig, description="Which GPUs the server, training and evaluation have."
    )

    @model_validator(mode="after")
    def _by_recipe(self) -> Settings:
        """What a recipe says of the other settings; a setting that contradicts it is refused."""
        recipe, scoring, algorithm = self.cycle.recipe, self.feedback.scoring, self.train.algorithm
        if self.cycle.trains_reward_model and scoring.human.model is None:
            human = scoring.human.model_copy(update={"model": ClassifierConfig(name=TRAINED)})
            scoring = scoring.model_copy(update={"human": human})
            self.feedback = self.feedback.model_copy(update={"scoring": scoring})
        if isinstance(recipe, list):
            self._check_stages(recipe)
        if recipe is None or isinstance(recipe, list):
            return self
        if recipe != "auto" and algorithm.name == DISTILL:
            raise ValueError(
                f"cycle.recipe={recipe} and train.algorithm.name=distill both say what is learned from: leave "
                "cycle.recipe at auto, or null"
            )
        if recipe not in ("offline", "auto") and algorithm.is_offline:
            raise ValueError(
                f"cycle.recipe={recipe} samples responses, and train.algorithm.name={algorithm.name} learns from "
                "feedback: set cycle.recipe to offline, or take an algorithm such as grpo"
            )
        needs = {"rlhf": scoring.human.weight, "rlaif": scoring.judge and scoring.judge.weight}
        if recipe == "rlvr" and self.train.reward is None and not any(r.weight for r in scoring.rules.values()):
            raise ValueError("cycle.recipe=rlvr: there is no rule: set feedback.scoring.rules, or train.reward")
        if recipe in needs and self.train.reward is not None:
            raise ValueError(
                f"cycle.recipe={recipe} and train.reward={self.train.reward} both say what rewards responses: take one "
                "out"
            )
        component = {"rlhf": "human", "rlaif": "judge"}.get(recipe)
        if component is not None and self.train.reward_weights.get(component) == 0:
            raise ValueError(f"cycle.recipe={recipe} rewards by {component}, and train.reward_weights.{component} is 0")
        if recipe in needs and not needs[recipe]:
            source = {"rlhf": "feedback.scoring.human.weight", "rlaif": "feedback.scoring.judge"}[recipe]
            raise ValueError(f"cycle.recipe={recipe}: {source} is not set, or has no weight")
        return self

    @model_validator(mode="after")
    def _has_what_predicts_feedback(self) -> Settings:
        outcome, scoring = self.evaluation.experiment.outcomes.feedback, self.feedback.scoring
        name = None if outcome is None else outcome.predicted_by
        sources = {**scoring.rules, "model": scoring.model, "judge": scoring.judge}
        there = sorted(one for one, source in sources.items() if source is not None and source.weight > 0)
        if name is not None and name not in there:
            raise ValueError(
                f"evaluation.experiment.outcomes.feedback.predicted_by={name}: scoring has no such component (of a "
                f"weight above 0 there are: {', '.join(there) or 'none'})"
            )
        return self

    @model_validator(mode="after")
    def _has_what_the_scorer_needs(self) -> Settings:
        scorer, scoring = self.evaluation.scorer, self.feedback.scoring
        if scorer in ("judge", "pairwise") and scoring.judge is None:
            raise ValueError(f"evaluation.scorer={scorer} needs a judge: set feedback.scoring.judge")
        if scorer == "reward_model" and self._fixed_reward_model and scoring.model is not None:
            human = scoring.human.model
            same = human is not None and self.path(human.name).resolve() == self.path(scoring.model.name).resolve()
            for name, model in {"model": "model", **({"human": "human.model"} if same else {})}.items():
                if self._rewards_training(name):
                    raise ValueError(
                        f"evaluation.scorer=reward_model: feedback.scoring.{model} rewards training too, so that the "
                        f"gate would measure what was optimised: set feedback.scoring.{name}.weight to 0, or take "
                        "another scorer"
                    )
        if scorer == "reward_model" and not self._fixed_reward_model and not self.evaluation.holdout:
            raise ValueError(
                "evaluation.scorer=reward_model scores by a reward model of feedback on prompts that no policy learned "
                "from, and evaluation.holdout is 0: set it, such as to 0.1, or set feedback.scoring.model"
            )
        return self

    @model_validator(mode="after")
    def _judges_by_another_reward_model_than_it_trains_by(self) -> Settings:
        trained, judging = self.train.reward_model.folder, self.evaluation.reward_model_folder
        if self.path(trained).resolve() == self.path(judging).resolve():
            raise ValueError(
                f"evaluation.reward_model_folder={judging} and train.reward_model.folder={trained} are one folder: the "
                "reward model that evaluation scores by would reward training too; set another"
            )
        stages = [self.of_stage(stage).train for stage in self.cycle.stages]
        if any(train.data.holdout_side != "rest" for train in (self.train, *stages)):
            raise ValueError(
                "train.data.holdout_side=slice: the reward model that evaluation scores by alone learns from the "
                "held-out slice, and `millrace train --reward-model --held-out` sees to it; take it out"
            )
        return self

    def _rewards_training(self, component: str) -> bool:
        """Whether a component of scoring that fresh responses can be rewarded by has a weight in a stage's reward."""
        weight = self.feedback.scoring.for_rollouts.get(component, 0.0)
        trains = [self.of_stage(stage).train for stage in self.cycle.stages if stage.stage == "train"]
        return self.cycle.recipe != "offline" and any(
            weight * train.reward_weights.get(component, 1.0)
            for train in trains
            if train.reward is None and not train.algorithm.is_offline
        )

    @property
    def gate_measures_what_is_optimised(self) -> str | None:
        """That the gate asks the judge that rewards training, by the same rubric; None where it doesn't."""
        if self.evaluation.scorer != "judge" or not self._rewards_training("judge"):
            return None
        return "evaluation.scorer=judge: it rewards training by the same rubric: the gate measures what is optimised"

    @property
    def _fixed_reward_model(self) -> bool:
        """Whether evaluation scores by a model that Millrace does not train."""
        model = self.feedback.scoring.model
        return model is not None and model.name != TRAINED

    @property
    def trains_reward_model_to_evaluate(self) -> bool:
        """Whether a cycle trains a reward model on the held-out slice, which evaluation scores or compares by."""
        scores = self.evaluation.scorer == "reward_model" and not self._fixed_reward_model
        return scores or self.compares_by_held_out_feedback

    @property
    def compares_by_held_out_feedback(self) -> bool:
        """Whether the guardrail ``holdout_reward`` has a use for such a model that does not score: training is rewarded
        by one of people's feedback, and there are held-out prompts."""
        wanted = self.evaluation.scorer != "reward_model" and self.evaluation.gate.guardrails.holdout_reward is not None
        return wanted and self.evaluation.holdout > 0 and self._rewards_training("human")

    def evaluation_sources(self) -> Sources:
        """The judge or reward model that evaluation scores by, and the reward model that it compares by."""
        from evaluation.judging import Sources

        scoring, store = self.resolved().feedback.scoring, self.stores().evaluation_reward_models
        scores = self.evaluation.scorer == "reward_model"
        if scores and self._fixed_reward_model:
            return Sources(reward_model=scoring.model)
        judge = Sources() if scores else Sources(judge=scoring.judge, note=self.gate_measures_what_is_optimised)
        pointer = store.serving()
        if pointer is None or store.get(pointer.version).marked:
            none = "train it: millrace train --reward-model --held-out"
            return replace(judge, none_yet=none) if scores else replace(judge, no_holdout=none)
        trained = scoring.human.model or ClassifierConfig(name=TRAINED)
        folder = str(store.get(pointer.version).path)
        model = ClassifierConfig(**trained.model_dump(exclude={"name", "revision", "label"}), name=folder)
        if not scores:  # its log odds as a probability: the margin is of what lies in 0..1
            return replace(judge, holdout=model.model_copy(update={"activation": "sigmoid"}))
        agreement = store.get(pointer.version).metrics.get("agreement")
        return Sources(reward_model=model, version=pointer.version, agreement=agreement)

    def _check_stages(self, recipe: list[RecipeStage]) -> None:
        for i, stage in enumerate(recipe):
            where, train = f"cycle.recipe.{i}.set", self.of_stage(stage).train
            if stage.stage == "train" and not train.algorithm.trains_policy:
                raise ValueError(
                    f"{where}: train.algorithm.name={train.algorithm.name} trains no policy: use stage: reward-model"
                )
            places = [(one.runs, one.run_store, one.reward_model.folder) for one in (train, self.train)]
            if places[0] != places[1]:
                raise ValueError(
                    f"{where}: train.runs, train.run_store and train.reward_model.folder are where all stages keep "
                    "things: set them outside the recipe"
                )

    def of_stage(self, stage: RecipeStage) -> Settings:
        """The settings that a stage of the recipe runs with. Raises ConfigError if they can't work."""
        own, values = stage.set.get("algorithm"), self.train.model_dump(context=IN_CLEAR)
        if isinstance(own, dict) and own.get("name", self.train.algorithm.name) != self.train.algorithm.name:
            del values["algorithm"]  # what is set there is of another algorithm
        else:  # what follows from the others' settings follows from the stage's own; a snapshot has both set
            follows = self.train.algorithm.following(self.train.rollout.max_tokens)
            values["algorithm"] = {k: v for k, v in values["algorithm"].items() if follows.get(k) != v}
        try:
            train = TrainConfig.model_validate(overlaid(values, stage.set))
            if stage.stage == "reward-model":
                train.of_reward_model()
        except ValidationError as error:
            recipe = self.cycle.recipe
            where = "cycle.recipe" if isinstance(recipe, list) else f"cycle.recipe={recipe}"
            if isinstance(recipe, list) and stage in recipe:  # the one that evaluation scores by is in none
                where += f".{recipe.index(stage)}.set"
            layers = [Layer({"train": stage.set}, where)]
            details = ({**detail, "loc": ("train", *detail["loc"])} for detail in error.errors())
            raise ConfigError("\n".join(explain(detail, layers, Settings) for detail in details)) from None
        recipe = None if isinstance(self.cycle.recipe, list) else self.cycle.recipe  # it was for all stages
        update: dict[str, Any] = {"train": train, "cycle": self.cycle.model_copy(update={"recipe": recipe})}
        if stage.stage == "reward-model":  # which evaluates nothing, and whose process can't know what rewards others
            update["evaluation"] = self.evaluation.model_copy(update={"scorer": EvaluationConfig().scorer})
        return self.model_copy(update=update)

    def path(self, relative: Path | str) -> Path:
        """The absolute path of a configured one: relative to home unless it is absolute."""
        return self.home.absolute() / relative

    def resolved(self) -> Settings:
        """The same with every path absolute, for packages that never look at ``home``.

        And where evaluation's engine is to be as the server's, with what that is.
        """
        feedback, serve, evaluation = self.feedback, self.serve, self.evaluation
        journal = feedback.journal.model_copy(update={"folder": str(self.path(feedback.journal.folder))})
        key = str(self.path(feedback.lake.erasure_key or "erasure.key"))
        uri = feedback.lake.uri if "://" in feedback.lake.uri else str(self.path(feedback.lake.uri))
        lake = feedback.lake.model_copy(update={"uri": uri, "erasure_key": key})
        scoring = self._with_reward_model(feedback.scoring.resolved(self.path))
        folders = {name: str(self.path(getattr(serve, name))) for name in ("policies", "replicas", "keys", "audit")}
        computing = {
            "dtype": serve.engine.dtype if evaluation.engine.dtype == "auto" else evaluation.engine.dtype,
            "extra": serve.engine.extra if evaluation.engine.extra is None else evaluation.engine.extra,
        }
        judged = {
            "suite": self.path(evaluation.suite),
            "suites": {
                name: of.model_copy(update={"path": self.path(of.path)}) for name, of in evaluation.suites.items()
            },
            "reward_model_folder": self.path(evaluation.reward_model_folder),
            "folder": self.path(evaluation.folder),
            "decisions": self.path(evaluation.decisions),
            "decisions_key": evaluation.decisions_key and self.path(evaluation.decisions_key),
            "engine": evaluation.engine.model_copy(update=computing),
            "harness": evaluation.harness.model_copy(
                update={name: self.path(getattr(evaluation.harness, name)) for name in ("lm_eval", "inspect")}
            ),
        }
        return self.model_copy(
            update={
                "feedback": feedback.model_copy(update={"journal": journal, "lake": lake, "scoring": scoring}),
                "serve": serve.model_copy(update=folders),
                "evaluation": evaluation.model_copy(update=judged),
                "train": self.train.resolved(self.path),
                "cycle": self.cycle.model_copy(update={"folder": self.path(self.cycle.folder)}),
                "up": self.up.model_copy(update={"logs": self.path(self.up.logs)}),
            }
        )

    def _with_reward_model(self, scoring: ScoringConfig) -> ScoringConfig:
        """With the folder of the version that rewards for ``trained``; without a model, if none does yet.

        One that an erasure has marked for retraining does not.
        """
        store = self.stores().reward_models
        pointer = store.serving()

        def found(model: Classifier | None) -> Classifier | None:
            if model is None or model.name != TRAINED:
                return model
            if pointer is None or store.get(pointer.version).marked:
                return None
            return model.model_copy(update={"name": str(store.get(pointer.version).path)})

        human = scoring.human.model_copy(update={"model": found(scoring.human.model)})
        return scoring.model_copy(update={"human": human, "model": found(scoring.model)})

    def rollout_reward(self) -> str | ScoringConfig | None:
        """What rewards rollouts: a function by name, or the sources with training's weights; None if there is none.

        A teacher, which training asks in their place, is none: it rewards what training samples, and nothing else.
        """
        if self.train.algorithm.teacher is not None:
            return None
        if self.train.reward:
            return self.train.reward
        scoring = self.resolved().feedback.scoring.weighed(self.train.reward_weights)
        return scoring if any(scoring.for_rollouts.values()) else None

    def training(self, *, reward_model: bool = False, held_out: bool = False) -> TrainConfig:
        """The settings of a run that trains a policy, or the reward model.

        The prompts of the suites that policies are judged by, and those of the held-out slice, are left out. With
        ``held_out``, a reward model to evaluate by: it learns from that slice alone, the suite's prompts included.
        """
        suite = self.path(self.evaluation.suite)
        left_out = suite if suite.is_file() and not held_out else None
        train = self.resolved().train.excluding(left_out, self.evaluation.holdout)
        self._check_choice(train, [suite, *(self.path(of.path) for of in self.evaluation.suites.values())])
        for of in self.evaluation.suites.values() if not held_out else ():
            train = train.excluding(self.path(of.path), self.evaluation.holdout)
        if not reward_model and not held_out:
            return train
        human = self.feedback.scoring.human.model_dump(mode="json", exclude={"model"}, exclude_defaults=True)
        votes = {"human": human, "kinds": self.feedback.kinds.model_dump(mode="json", exclude_defaults=True)}
        own = train.reward_model.model_copy(update={"votes": votes})
        train = train.model_copy(update={"reward_model": own}).of_reward_model()
        if held_out:
            train = train.model_copy(update={"data": train.data.model_copy(update={"holdout_side": "slice"})})
        return train

    def _check_choice(self, train: TrainConfig, judged_by: Iterable[Path]) -> None:
        """Raise ConfigError if the candidate is chosen by a prompt that policies are judged by too."""
        from evaluation.suites.suite import Suite

        if train.keep == "last" or train.evaluate_suite is None:
            return

        def prompts(suite: Path) -> set[str]:
            return {item.shown for item in Suite.load(suite).items} if suite.is_file() else {str(suite)}

        for suite in judged_by:
            if shared := prompts(train.evaluate_suite) & prompts(suite):
                raise ConfigError(
                    f"train.evaluate_suite={train.evaluate_suite} chooses the candidate (train.keep=best); {suite}, "
                    f"which policies are judged by, has {len(shared)} of its prompts: the choice would look like an "
                    "improvement. Name another suite, or set train.keep to last"
                )

    def policy_store(self) -> PolicyStore:
        from serve.policies.open_store import open_store

        config, folder = self.serve.policy_store, self.path(self.serve.policies)
        if config.uri is None:
            return open_store(folder, config)
        key = str(folder), config.model_dump_json(context=IN_CLEAR)
        if (store := _shared_stores.get(key)) is None:  # one in a process: it knows when it last looked
            store = _shared_stores[key] = open_store(folder, config)
        return store

    def ledger(self) -> Ledger:
        """Raises ConfigError if the key can't be read."""
        from evaluation.decisions.ledger import Ledger

        file, key = self.evaluation.decisions_key, None
        if file is not None:
            try:
                key = read_key(self.path(file))
            except OSError as error:
                raise ConfigError(f"evaluation.decisions_key={file} can't be read: {error.strerror}") from error
            except ValueError as error:
                raise ConfigError(f"evaluation.decisions_key: {error}") from error
        return Ledger(self.path(self.evaluation.decisions), key)

    def stores(self) -> Stores:
        """Of policies, of reward models, and of those that evaluation scores by."""
        from serve.policies.store import PolicyStore
        from train.run.recovery.unfinished import Stores

        folders = (self.train.reward_model.folder, self.evaluation.reward_model_folder)
        return Stores(self.policy_store(), *(PolicyStore(self.path(folder)) for folder in folders))

    def run_store(self) -> RunStore | None:
        """The object store that has the runs; None if they are on this machine alone."""
        if self.train.run_store.uri is None:
            return None
        from train.run.recovery.run_store import open_runs

        return open_runs(self.train.run_store)

    def lake(self) -> Lake:
        from feedback.lake.tables import Lake

        config = self.resolved().feedback.lake
        return Lake(config.uri, config)

    @property
    def server_url(self) -> str:
        """Where a client on this machine reaches the server."""
        host = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(self.serve.host, self.serve.host)
        return f"http://{host}:{self.serve.port}"

    @property
    def server_headers(self) -> dict[str, str]:
        """What a command of this home shows the server, so that it may ask for more than a stranger may."""
        try:
            return {"X-API-Key": local_file(self.path(self.serve.keys)).read_text().strip()}
        except OSError:  # no keys, or not this user's: the server says whether it wants one
            return {}

    def snapshot(self) -> Path:
        """Write these settings, whole, to ``home/configs/<hash>.yaml``, for child processes; return the file.

        Secrets stand in it in clear, so only this user may read it.
        """
        import hashlib

        text = describe.to_yaml(self, secrets=True)
        path = self.path("configs") / f"{hashlib.sha256(text.encode()).hexdigest()[:16]}.yaml"
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            replace_file(path, text.encode(), private=True, durable=False)
        return path


def load(
    file: Path | None = None,
    options: Iterable[tuple[str, str]] = (),
    environment: Mapping[str, str] | None = None,
) -> Settings:
    """The settings from all sources, with ``home`` absolute.

    file: a YAML file that must exist; None reads ``millrace.yaml`` of the working directory if there is one.
    options: (dotted key, text) from the command line, the later of two equal keys wins.
    environment: os.environ if None.
    Raises ConfigError that names every unknown key (and the nearest right one), bad value, and its source.
    """
    environment = os.environ if environment is None else environment
    layers = [
        from_options(Settings, options),
        from_environment(Settings, environment),
        from_file(Settings, file),
    ]
    try:
        loaded = Settings.model_validate(merged(layers))
    except ValidationError as error:
        raise ConfigError("\n".join(explain(detail, layers, Settings) for detail in error.errors())) from None
    return loaded.model_copy(update={"home": loaded.home.expanduser().absolute()})


def child_environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment of a child that reads a snapshot: ours without the settings, which the snapshot holds."""
    kept = {key: value for key, value in os.environ.items() if not key.upper().startswith(ENV_PREFIX)}
    return kept | dict(extra or {})
