"""From a trained scorer to a version in the store of reward models, once per run; and whether it is to reward.

The store is a policy store of its own, ``train.reward_models``, and its pointer names the version that rewards. A
version is transformers' sequence-classification model with one label and the tokenizer beside it, as
``feedback.scoring.model`` reads it. Its scores are calibrated (``train.run.calibration``), so that those of one version
mean what those of another do.

It rewards only if it agrees with held-out feedback no worse than the version before, which is asked about the same.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import pyarrow as pa

from evaluation.statistics.intervals import paired_bootstrap, wilson
from feedback.config import ModelConfig
from feedback.files import link_or_copy
from feedback.scoring.sources.reward_model import CALIBRATION, RewardModel
from feedback.tokenizers import load_tokenizer
from feedback.trusted_code import code_files, trusted
from serve.policies.store import Policy, PolicyStore, StalePointer
from train.config.training import TrainConfig
from train.context import JobContext, RunStart
from train.controller.worker_group import WorkerGroup
from train.data.feedback_items import JudgedRow, OfflineData
from train.observe.progress import say
from train.run.calibration import Judged, agreement, calibrate
from train.run.publish import export_aside, lineage_of, metrics_of

_OF_A_POLICY: Final = ("config.json", "generation_config.json", "policy.json")
_CONFIDENCE: Final = 0.95


def publish_reward_model(
    store: PolicyStore,
    parent: Policy,
    scorer: WorkerGroup,
    config: TrainConfig,
    context: JobContext,
    start: RunStart,
    history: list[dict[str, float]],
    data: OfflineData,
    erased: Mapping[str, int],
) -> Policy:
    """Write weights, config, tokenizer and calibration aside, and have the store make a version of it.

    Args:
        store: of reward models.
        parent: the policy whose body it has.
        erased: as of ``train.run.publish.publish``.

    Raises:
        OSError: the disk refuses.
    """
    exported = export_aside(scorer, parent, context, _OF_A_POLICY)
    folder = exported.folder
    read_as_trained(folder)
    judged = ask(folder, data.held_out_rows)
    pointer = store.serving()
    before = None if pointer is None or store.get(pointer.version).marked else pointer.version
    agreed = [] if before is None else agreement(ask(store.get(before).path, data.held_out_rows))
    configuration = json.loads((folder / "config.json").read_text())
    line = configuration[CALIBRATION] = calibrate(judged, config.algorithm.vote_noise)
    (folder / "config.json").write_text(json.dumps(configuration, indent=2))
    code = {"model": {"code": code_files(folder)}} if trusted(folder) else {}
    version = store.publish(
        lambda aside: shutil.copytree(folder, aside, dirs_exist_ok=True, copy_function=link_or_copy),
        parent=before,
        lineage=lineage_of(config, context, start, data, erased) | {"policy": parent.version} | code,
        metrics=metrics_of(history)
        | verdict(agreement(judged, line), before, agreed, decides=config.data.holdout_side == "slice"),
        written=exported.written,
    )
    shutil.rmtree(folder)
    return version


def verdict(
    agrees: Sequence[float], before: int | None, agreed: Sequence[float], *, decides: bool = False
) -> dict[str, Any]:
    """{agreement, compared, keep, why}: how many held-out judgements agree with the scores, and whether these reward.

    Args:
        agrees: per held-out judgement 1, 0, or 0.5 for equal scores.
        before: the version that rewards, if there is one.
        agreed: what ``agrees`` is of that version; empty if there is none.
        decides: the gate scores by it, so that it must be shown to be better than a coin.
    """
    found: dict[str, Any] = {"agreement": None, "compared": None, "keep": before is None and not decides}
    if not agrees:
        first = "" if decides or before else "the first one; "
        found["why"] = f"{first}nothing was held out to compare by"
        return found
    _, low, high = wilson(round(sum(agrees)), len(agrees), confidence=_CONFIDENCE)
    mean = sum(agrees) / len(agrees)
    good = low > 0.5 if decides else high >= 0.5
    found["keep"] = before is None and good
    found["agreement"] = {"value": mean, "low": low, "high": high, "judgements": len(agrees)}
    found["why"] = f"agrees with {mean:.1%} [{low:.1%}, {high:.1%}] of {len(agrees)} held-out judgements"
    if not good:
        found["why"] += ": not shown to be better than a coin" if decides else ": worse than a coin"
    if agreed:
        difference, low, high = paired_bootstrap(agrees, agreed, confidence=_CONFIDENCE, resamples=2000, seed=1)
        found["compared"] = {"version": before, "difference": difference, "low": low, "high": high}
        found["keep"] = good and high >= 0
        worse = ": worse" if high < 0 else ""
        found["why"] += f", {difference:+.1%} [{low:+.1%}, {high:+.1%}] against version {before}{worse}"
    return found


def keep(store: PolicyStore, version: int) -> bool:
    """Have the version reward from now on, if its verdict says so and no newer one was looked at since; whether so."""
    model, pointer = store.get(version), store.serving()
    if not model.metrics["keep"]:
        return False
    if pointer is None or pointer.version < version:
        try:
            pointer = store.promote(version, expected=pointer, who="train", why=model.metrics["why"])
        except StalePointer:  # another run was quicker
            return keep(store, version)
        say(f"reward model {version} rewards from now on: {model.metrics['why']}")
    return pointer.version == version


def ask(folder: Path, rows: Sequence[JudgedRow]) -> list[Judged]:
    """Have a reward model score what people judged, as scoring would. What it can't read is left out."""
    asked = [
        {"prompt": row["prompt"], "messages": row["messages"], "response": text}
        for row, responses in rows
        for _, text, _ in responses
    ]
    if not asked:
        return []
    model = RewardModel(ModelConfig(name=str(folder), activation="none"))
    scores = iter(model.by_row(pa.Table.from_pylist(asked))[0])
    judged = []
    for row, responses in rows:
        found = [next(scores) for _ in responses]
        vote = responses[0][2] if len(responses) == 1 else 1.0
        judged.append(Judged(tuple(found), vote, row.get("weight", 1.0)))
    return judged


def read_as_trained(folder: Path) -> None:
    """Have transformers read a response from this folder as it was read in training.

    Its padding token is the tokenizer's, and token types, which some architectures add to their embeddings and no
    policy was trained with, are not made.
    """
    from transformers import AutoConfig

    tokenizer = load_tokenizer(folder)
    if tokenizer.pad_token_id is not None:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=trusted(folder))
        config.get_text_config().pad_token_id = tokenizer.pad_token_id
        config.save_pretrained(folder)
    settings = folder / "tokenizer_config.json"
    kept = json.loads(settings.read_text()) if settings.exists() else {}
    settings.write_text(json.dumps({**kept, "model_input_names": ["input_ids", "attention_mask"]}, indent=2))
