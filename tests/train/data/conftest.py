"""What tests of training data share."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import Qwen3Config

from serve.policies.store import MANIFEST
from tests.evaluation.suites.chat_rows import make_tokenizer


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Config and tokenizer of a model that chats; reading needs no weights."""
    folder = tmp_path_factory.mktemp("policy")
    tokenizer = make_tokenizer()
    tokenizer.save_pretrained(folder)
    Qwen3Config(vocab_size=len(tokenizer), max_position_embeddings=256).save_pretrained(folder)
    (folder / MANIFEST).write_text(json.dumps({"version": 1}))
    return folder
