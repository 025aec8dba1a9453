"""Two servers in one home have two names."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from feedback.config import FeedbackConfig
from serve import app
from serve.config import ServeConfig
from serve.policies.store import PolicyError


def test_a_second_server_of_a_name_is_refused_with_the_process_and_address_of_the_first(tmp_path: Path) -> None:
    def config(**changed: object) -> ServeConfig:
        folders = {name: str(tmp_path / name) for name in ("policies", "replicas", "keys")}
        return ServeConfig(**folders, **changed)  # type: ignore[arg-type]

    with app._held_name(config(port=8123)):
        with pytest.raises(app.NameTaken) as refused:
            app.run(config(port=0), FeedbackConfig())
        assert f"replica-0 of this home runs already, as process {os.getpid()} at 127.0.0.1:8123" in str(refused.value)
        with pytest.raises(PolicyError, match="no serving policy"):  # which it looks for under a name of its own
            app.run(config(port=0, replica_name="second"), FeedbackConfig())
    with pytest.raises(PolicyError, match="no serving policy"):
        app.run(config(port=0), FeedbackConfig())
