from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from pydantic import BaseModel, ValidationError

import feedback
from feedback.config import FeedbackConfig, JournalConfig, LakeConfig, RuleConfig

ROOT = Path(feedback.__file__).parent


def test_every_module_imports_without_torch_vllm_or_ray():
    names = [".".join(path.relative_to(ROOT.parent).with_suffix("").parts) for path in ROOT.rglob("*.py")]
    modules = [name.removesuffix(".__init__") for name in names]
    sources = {f"feedback.scoring.sources.{name}" for name in ("rules", "judge", "reward_model")}
    assert sources <= set(modules)
    code = f"""
import importlib, sys
for blocked in ("torch", "vllm", "ray", "transformers"):
    sys.modules[blocked] = None
sys.path.insert(0, {str(ROOT.parent)!r})
for module in {modules!r}:
    importlib.import_module(module)
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def models(model: type[BaseModel]) -> list[type[BaseModel]]:
    found = [model]
    for field in model.model_fields.values():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            found += models(field.annotation)
    return found


@pytest.mark.parametrize("model", models(FeedbackConfig))
def test_every_setting_has_a_meaning_and_an_unknown_one_is_refused(model):
    for name, field in model.model_fields.items():
        assert field.description, name
    with pytest.raises(ValidationError, match="surplus"):
        model(surplus=1)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: RuleConfig(function="my_rule"), "module:name"),
        (lambda: LakeConfig(memory_limit="lots"), "'lots' is not an amount of memory"),
        (lambda: JournalConfig(segment_bytes=0), "greater than 0"),
    ],
)
def test_a_value_that_can_not_work_is_refused_by_name(make, says):
    with pytest.raises(ValidationError, match=says):
        make()
