"""Code that comes with a model: what is allowed runs, and nothing else, whoever loads the model."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path

import pytest

from feedback.trusted_code import UntrustedCode, code_files, consent_to, consented, trusted
from tests.paths import ROOT

CODE = "from transformers import LlamaConfig\n\nclass Config(LlamaConfig):\n    model_type = 'coded'\n"


@pytest.fixture(autouse=True)
def no_consent() -> Iterator[None]:
    consent_to({})
    yield
    consent_to({})


def coded(folder: Path, auto_map: object = None, name: str = "config.json") -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "coded.py").write_text(CODE)
    (folder / "config.json").write_text(json.dumps({"model_type": "coded"}))
    content = {"model_type": "coded", "auto_map": auto_map or {"AutoConfig": "coded.Config"}}
    (folder / name).write_text(json.dumps(content))
    return folder


def test_a_model_without_code_needs_no_consent(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    (tmp_path / "convert.py").write_text("a script that nothing names")
    assert trusted(tmp_path) is False
    assert trusted(tmp_path / "nothing there") is False


def test_code_without_consent_is_refused_and_the_error_has_what_to_set(tmp_path: Path) -> None:
    folder = coded(tmp_path / "model")
    with pytest.raises(UntrustedCode) as refused:
        trusted(folder)
    digest = sha256(CODE.encode()).hexdigest()
    assert "coded.py is not named" in str(refused.value)
    assert f'set train.model.trusted_code to {{"coded.py": "{digest}"}}' in str(refused.value)
    consent_to({"coded.py": [digest]})
    assert trusted(folder) is True
    assert trusted(folder / "config.json") is True


def test_a_file_that_has_changed_is_refused(tmp_path: Path) -> None:
    folder = coded(tmp_path / "model")
    consent_to({name: [digest] for name, digest in code_files(folder).items()})
    assert trusted(folder)
    (folder / "coded.py").write_text(CODE + "\n")
    with pytest.raises(UntrustedCode, match=r"coded\.py has changed"):
        trusted(folder)


def test_a_file_that_the_code_could_import_needs_consent_too(tmp_path: Path) -> None:
    folder = coded(tmp_path / "model")
    consent_to({name: [digest] for name, digest in code_files(folder).items()})
    (folder / "layers").mkdir()
    (folder / "layers" / "more.py").write_text("")
    with pytest.raises(UntrustedCode, match=r"layers/more\.py is not named"):
        trusted(folder)


def test_a_file_may_have_several_contents_as_before_and_after_a_change(tmp_path: Path) -> None:
    old, new = coded(tmp_path / "old"), coded(tmp_path / "new")
    (new / "coded.py").write_text(CODE + "\n")
    hashes = [code_files(folder)["coded.py"] for folder in (old, new)]
    consent_to({"coded.py": hashes})
    assert trusted(old)
    assert trusted(new)
    assert consented() == {"coded.py": sorted(hashes)}


@pytest.mark.parametrize("name", ["tokenizer_config.json", "processor_config.json"])
def test_code_of_a_tokenizer_or_a_processor_needs_consent(tmp_path: Path, name: str) -> None:
    folder = coded(tmp_path / "model", {"AutoTokenizer": [None, "coded.Tokens"]}, name)
    with pytest.raises(UntrustedCode, match=r"coded\.py is not named"):
        trusted(folder)


def test_code_of_another_repository_is_refused_whatever_was_allowed(tmp_path: Path) -> None:
    folder = coded(tmp_path / "model", {"AutoConfig": "somebody/theirs--coded.Config"})
    consent_to({name: [digest] for name, digest in code_files(folder).items()})
    with pytest.raises(UntrustedCode, match=r"somebody/theirs--coded\.Config, which may change at any time"):
        trusted(folder)


def test_code_that_is_not_there_is_refused_by_name(tmp_path: Path) -> None:
    folder = coded(tmp_path / "model", {"AutoConfig": "elsewhere.Config"})
    with pytest.raises(UntrustedCode, match=r"not in the folder: elsewhere\.py"):
        trusted(folder)


def test_a_part_of_a_config_may_name_code_too(tmp_path: Path) -> None:
    (folder := tmp_path / "model").mkdir()
    (folder / "coded.py").write_text(CODE)
    (folder / "config.json").write_text(json.dumps({"text_config": {"auto_map": {"AutoConfig": "coded.Config"}}}))
    with pytest.raises(UntrustedCode):
        trusted(folder)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("speculators_config", {"verifier": {"name_or_path": "owner/other"}}),
        ("configuration_files", ["config.5.0.0.json"]),
    ],
)
def test_a_config_that_leads_to_another_model_or_config_is_refused(tmp_path: Path, key: str, value: object) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", key: value}))
    for model in (tmp_path, tmp_path / "config.json"):
        with pytest.raises(UntrustedCode, match=rf"config\.json has {key}"):
            trusted(model)


def test_code_behind_a_link_to_a_folder_is_refused(tmp_path: Path) -> None:
    folder, elsewhere = coded(tmp_path / "model"), tmp_path / "elsewhere"
    consent_to({name: [digest] for name, digest in code_files(folder).items()})
    elsewhere.mkdir()
    (folder / "custom_generate").symlink_to(elsewhere)
    with pytest.raises(UntrustedCode, match="custom_generate is a link"):
        trusted(folder)


MODEL = """from transformers import LlamaForCausalLM
from .coded import Config

class Model(LlamaForCausalLM):
    config_class = Config
    which = {which!r}
"""


def test_code_that_has_changed_and_is_allowed_runs_and_not_what_ran_before(tmp_path: Path) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    folder = coded(tmp_path / "again", {"AutoConfig": "coded.Config", "AutoModelForCausalLM": "modeling.Model"})
    sizes = {"vocab_size": 8, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
    sizes |= {"num_attention_heads": 1, "num_key_value_heads": 1}
    config = folder / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | sizes))
    for which in ("first", "second"):
        (folder / "modeling.py").write_text(MODEL.format(which=which))
        consent_to({name: [digest] for name, digest in code_files(folder).items()})
        made = AutoConfig.from_pretrained(folder, trust_remote_code=trusted(folder))
        model = AutoModelForCausalLM.from_config(made, trust_remote_code=trusted(folder))
        assert type(model).which == which


def test_processes_that_begin_together_import_whole_files(tmp_path: Path) -> None:
    folder = coded(tmp_path / "model")
    (folder / "coded.py").write_text(CODE + f"FILLED = {'1' * 4000}\n" * 500)
    (digest,) = code_files(folder).values()
    code = (
        "from feedback.trusted_code import consent_to, trusted\nfrom transformers import AutoConfig\n"
        f"consent_to({{'coded.py': ['{digest}']}})\nfolder = {str(folder)!r}\n"
        "print(type(AutoConfig.from_pretrained(folder, trust_remote_code=trusted(folder))).__name__)"
    )
    environment = {"PYTHONPATH": str(ROOT), "HF_HOME": str(tmp_path / "hub"), "PATH": "/usr/bin:/bin"}
    started = [
        subprocess.Popen([sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    assert [process.communicate(timeout=120)[0].strip() for process in started] == ["Config", "Config"]
