"""The reward component ``model``: the score that a Hugging Face sequence-classification model gives a response.

The model reads the conversation by its tokenizer's chat template, if the request had messages and there is a template;
else the pair (prompt, response), as the tokenizer joins a pair. The reward is the logit of one label, brought into
0..1 by the activation in the settings; that of a model which Millrace trained is first made log odds. What the model
can't read (too long, no prompt text, no memory) is missing.

torch and transformers are imported when the first response is scored.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
from collections.abc import Iterator, Mapping
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, Final

import pyarrow as pa

from feedback.config import ClassifierConfig
from feedback.files import ERASURES
from feedback.scoring.sources.rules import Reasons, Values
from feedback.tokenizers import encodes_in_rust, load_tokenizer, rust_part
from feedback.trusted_code import trusted

log = logging.getLogger(__name__)

NAME: Final = "model"
CALIBRATION: Final = "reward_calibration"
"""Of a model that Millrace trained, in its config.json: {scale, shift} of the line from its logit to log odds."""
BATCH_ROWS: Final = 1024  # small, so that progress is seen; large, so that rows of like length come together
_FILES: Final = ("*.json", "*.safetensors", "*.model", "*.txt", "*.jinja", "*.py")
_MOST_QUOTED: Final = 300
_NO_LIMIT: Final = 10**9  # a tokenizer without a limit has a huge number

Inputs = dict[str, list[int]]
"""What the tokenizer makes of a response: ``input_ids`` and, for some, ``token_type_ids``."""


class RewardModelError(RuntimeError):
    """The reward model can't be loaded, or not be run at all. The message names it."""


class RewardModel:
    """A model that is loaded when it is first used."""

    def __init__(self, config: ClassifierConfig) -> None:
        """Raises RewardModelError if its files aren't there and can't be fetched."""
        self.config = config
        self.folder = _folder(config)
        self.identity = [
            *(config.label, config.activation, config.dtype, config.max_length, files_digest(self.folder)),
        ]
        self._model: Any = None
        self._tokenizer: Any = None
        self._max_length = self._vocabulary = _NO_LIMIT
        self._line = (1.0, 0.0)

    def by_row(self, batch: pa.Table) -> tuple[Values, Reasons]:
        """(rewards, why a row has none). Raises RewardModelError if the model can't be loaded or runs on nothing."""
        if self._model is None:
            self._load()
        values: Values = [None] * batch.num_rows
        reasons: Reasons = [None] * batch.num_rows
        inputs: dict[int, Inputs] = {}
        for index, row in enumerate(batch.to_pylist()):
            try:
                encoded = encode(self._tokenizer, row)
                if (tokens := len(encoded["input_ids"])) > self._max_length:
                    raise ValueError(f"{tokens} tokens, more than the {self._max_length} that the model reads")
                if (token := max(encoded["input_ids"])) >= self._vocabulary:  # it would break a GPU for this process
                    raise ValueError(f"its tokenizer's token {token} is not one of the model's {self._vocabulary}")
                inputs[index] = encoded
            except ValueError as error:
                reasons[index] = str(error)[:_MOST_QUOTED]
        for rows in token_batches({index: len(row["input_ids"]) for index, row in inputs.items()}, self.config):
            for index, outcome in zip(rows, self._outcomes([inputs[index] for index in rows]), strict=True):
                if isinstance(outcome, str):
                    reasons[index] = outcome
                else:
                    values[index] = outcome
        return values, reasons

    def _outcomes(self, rows: list[Inputs]) -> list[float | str]:
        """A reward for each row, or why there is none: if they fail together, each half by itself."""
        try:
            rewards = self._forward(rows)
        except (RuntimeError, ValueError, IndexError, MemoryError) as error:
            self._free_memory()
            if len(rows) > 1:
                middle = len(rows) // 2
                return self._outcomes(rows[:middle]) + self._outcomes(rows[middle:])
            self._prove_that_it_runs(error)
            return [f"the model failed: {type(error).__name__}: {error}"[:_MOST_QUOTED]]
        return [reward if math.isfinite(reward) else f"the model gave {reward}" for reward in rewards]

    def _forward(self, rows: list[Inputs]) -> list[float]:
        import torch
        from torch.nn.utils.rnn import pad_sequence

        pad = self._pad_token(rows)

        def padded(lists: list[list[int]], filler: int) -> Any:
            tensors = [torch.tensor(numbers) for numbers in lists]
            return pad_sequence(tensors, batch_first=True, padding_value=filler).to(self._model.device)

        tensors = {name: padded([row[name] for row in rows], pad if name == "input_ids" else 0) for name in rows[0]}
        tensors["attention_mask"] = padded([[1] * len(row["input_ids"]) for row in rows], 0)
        self._model.config.get_text_config().pad_token_id = pad
        with torch.inference_mode():
            logits = self._model(**tensors).logits.float() * self._line[0] + self._line[1]
        if self.config.activation == "softmax":
            logits = logits.softmax(dim=-1)
        chosen = logits[:, self.config.label]
        found: list[float] = (chosen.sigmoid() if self.config.activation == "sigmoid" else chosen).tolist()
        return found

    def _pad_token(self, rows: list[Inputs]) -> int:
        """The model's padding token, or else one that is in none of the rows.

        A decoder's score is read at the last token that is no padding.
        """
        if self._tokenizer.pad_token_id is not None:
            return int(self._tokenizer.pad_token_id)
        used = {token for row in rows for token in row["input_ids"]}
        return next(token for token in range(len(used) + 1) if token not in used)

    def _load(self) -> None:
        import torch
        from transformers import AutoModelForSequenceClassification

        device = self.config.device
        if device == "auto":
            device = "cuda" if torch.cuda.is_available() else "cpu"
        if device.startswith("cuda") and not torch.cuda.is_available():
            raise RewardModelError(
                f"reward model {self.config.name}: no GPU for device {device}; set it to cpu or auto"
            )
        try:
            self._tokenizer = load_tokenizer(self.folder)
            with torch.random.fork_rng(devices=[]):  # training's random numbers are its own
                model, report = AutoModelForSequenceClassification.from_pretrained(
                    self.folder,
                    dtype=self.config.dtype,
                    use_safetensors=True,
                    output_loading_info=True,
                    trust_remote_code=trusted(self.folder),
                )
            model = model.to(device).eval()
        except Exception as error:  # a folder may hold anything, which may fail in any way
            raise RewardModelError(f"reward model {self.config.name}: {type(error).__name__}: {error}") from error
        if report["missing_keys"]:
            missing = ", ".join(sorted(report["missing_keys"])[:5])
            raise RewardModelError(
                f"reward model {self.config.name} has no weights for {missing}: is it a sequence-classification model?"
            )
        labels = int(model.config.num_labels)
        if self.config.label >= labels:
            raise RewardModelError(
                f"reward model {self.config.name} has {labels} labels, counted from 0; there is no label "
                f"{self.config.label} (the setting label)"
            )
        if line := getattr(model.config, CALIBRATION, None):
            self._line = (float(line["scale"]), float(line["shift"]))
        own = [self._tokenizer.model_max_length, getattr(model.config, "max_position_embeddings", None)]
        self._max_length = self.config.max_length or min((n for n in own if n and n < _NO_LIMIT), default=_NO_LIMIT)
        self._vocabulary = int(model.get_input_embeddings().num_embeddings)
        self._model = model
        log.info("reward model %s: %d labels, on %s", self.config.name, labels, self._model.device)

    def _prove_that_it_runs(self, error: Exception) -> None:
        """A model that fails on a single token fails on everything: that is no row's fault."""
        types = {"token_type_ids": [0]} if "token_type_ids" in self._tokenizer.model_input_names else {}
        try:
            self._forward([{"input_ids": [0], **types}])
        except (RuntimeError, ValueError, IndexError, MemoryError):
            raise RewardModelError(
                f"reward model {self.config.name} can't be run on {self._model.device}: {error}"
            ) from error

    def _free_memory(self) -> None:
        import torch

        if self._model.device.type == "cuda":
            torch.cuda.empty_cache()


def encode(tokenizer: Any, row: Mapping[str, Any]) -> Inputs:
    """What a model reads of a response; one that is trained to reward responses must be trained on this.

    ``row`` has ``prompt`` and ``messages``, of which one may be null, and ``response``. Raises ValueError, for the
    reader of the reward, if there is nothing to read.
    """
    if row.get("messages") is not None and tokenizer.chat_template:
        messages = [*json.loads(row["messages"]), {"role": "assistant", "content": row["response"]}]
        try:
            text = str(tokenizer.apply_chat_template(messages, tokenize=False))
            inputs = _inputs(tokenizer, text, special_tokens=False)  # a template writes them itself
        except Exception as error:  # a template is a program, which may raise anything
            raise ValueError(f"the model's chat template failed: {type(error).__name__}: {error}") from error
    elif row.get("prompt") is not None:
        texts = [row["prompt"], row["response"]] if row["response"] else [row["prompt"]]
        try:
            inputs = _inputs(tokenizer, *texts, special_tokens=True)
        except Exception as error:  # a tokenizer may lack a token for what it does not know
            raise ValueError(f"the model's tokenizer failed: {type(error).__name__}: {error}") from error
    else:
        raise ValueError("the prompt has no text")
    if not inputs["input_ids"]:
        raise ValueError("neither prompt nor response has a token")
    return inputs


def _inputs(tokenizer: Any, *texts: str, special_tokens: bool) -> Inputs:
    """As transformers makes them of one text, or of a pair."""
    rust = rust_part(tokenizer) if encodes_in_rust(tokenizer) else None
    if rust is None:
        encoded = tokenizer(*texts, add_special_tokens=special_tokens, truncation=False)
        return {name: list(encoded[name]) for name in ("input_ids", "token_type_ids") if name in encoded}
    found = rust.encode(*texts, add_special_tokens=special_tokens)
    types = {"token_type_ids": found.type_ids} if "token_type_ids" in tokenizer.model_input_names else {}
    return {"input_ids": found.ids, **types}


def token_batches(lengths: dict[int, int], config: ClassifierConfig) -> Iterator[list[int]]:
    """Rows (by their index) of like length together, so that each batch with its padding keeps to ``batch_tokens``."""
    rows: list[int] = []
    for index in sorted(lengths, key=lambda index: (-lengths[index], index)):
        if rows and lengths[rows[0]] * (len(rows) + 1) > config.batch_tokens:
            yield rows
            rows = []
        rows.append(index)
    if rows:
        yield rows


def files_digest(folder: Path) -> str:
    """SHA-256 over the names and contents of a model's files; not of the records that come later."""
    digest = hashlib.sha256()
    named = (path for path in folder.iterdir() if any(fnmatch(path.name, pattern) for pattern in _FILES))
    for path in sorted(path for path in named if path.name != ERASURES):
        with path.open("rb") as file:
            content = hashlib.file_digest(file, "sha256").hexdigest()
        digest.update(f"{path.name} {content}\n".encode())
    return digest.hexdigest()


def _folder(config: ClassifierConfig) -> Path:
    if (folder := Path(config.name)).is_dir():
        if not (folder / "config.json").is_file():
            raise RewardModelError(f"reward model {config.name}: the folder has no config.json")
        return folder
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(config.name, revision=config.revision, allow_patterns=list(_FILES)))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise RewardModelError(
            f"reward model {config.name} is no folder, and can't be fetched by that name: {error}"
        ) from error
