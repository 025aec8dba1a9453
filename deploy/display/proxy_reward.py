"""What the reward model says of the policies, beside what is true: on held-out answers, which no training saw.

A policy that rises by the reward model and falls by the truth has learned to please the model. The two stand side by
side in the report.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from deploy.config.root import Settings
from evaluation.config import JUDGING
from evaluation.evaluate import load_scorer, score, scorer_batch
from evaluation.results import Interval
from evaluation.statistics.intervals import wilson
from evaluation.suites import answers
from evaluation.suites.suite import Suite, SuiteError
from feedback.config import TRAINED, ClassifierConfig
from feedback.scoring.sources.reward_model import RewardModel


@dataclass(frozen=True)
class ProxyReward:
    """``means``: by policy, the mean over the suite of the probability that people find its answer good.

    ``agreement``: the share of all those answers on which the reward model (above or below one half) and the scorer of
    the evaluation say the same, with its Wilson interval; None if the scorer has no score for any, or knows
    no right answers.
    """

    version: int
    means: dict[int, float] = field(default_factory=dict)
    agreement: Interval | None = None
    answers: int = 0


def measure(settings: Settings) -> ProxyReward | None:
    """By the reward model that rewards now; None without one, or a suite. Policies never evaluated are left out.

    Raises RewardModelError if it can't be run.
    """
    resolved, stores = settings.resolved(), settings.stores()
    pointer, config = stores.reward_models.serving(), resolved.evaluation
    try:
        suite = Suite.load(config.suite)
    except SuiteError:
        return None
    if pointer is None:
        return None
    trained = resolved.feedback.scoring.human.model or ClassifierConfig(name=TRAINED)
    folder = str(stores.reward_models.get(pointer.version).path)
    model = RewardModel(trained.model_copy(update={"name": folder}))
    scorer = None if config.scorer in JUDGING else load_scorer(config)
    means: dict[int, float] = {}
    same = []
    for version in stores.policies.versions():
        table = answers.cached(stores.policies.get(version), suite, config, config.folder)
        if table is None:
            continue
        good = model.by_row(scorer_batch(suite, table))[0]
        if known := [value for value in good if value is not None]:
            means[version] = sum(known) / len(known)
        if scorer is None:
            continue
        pairs = zip(good, score(suite, table, scorer), strict=True)
        same += [(value > 0.5) == (truth > 0.5) for value, truth in pairs if value is not None and truth == truth]
    agreement = Interval.of(wilson(sum(same), len(same), confidence=config.gate.confidence)) if same else None
    return ProxyReward(pointer.version, means, agreement, len(same))
