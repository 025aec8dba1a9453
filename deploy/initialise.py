"""``millrace init``: a new home, with a Hugging Face causal LM as policy 1."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

import yaml

from deploy.config import describe
from deploy.config.root import Settings
from deploy.config.sources import from_options, overlaid
from feedback.files import private, replace_file
from feedback.trusted_code import trusted
from serve.kv_cache import full_context
from serve.policies import probe
from serve.policies.store import Pointer

_CAUSAL = ("ForCausalLM", "LMHeadModel")
_CONFIG = """\
# Settings of Millrace: those that matter most. `millrace config reference` prints all others, with their defaults;
# `millrace help TOPIC` explains a group of them. To switch on what is commented out, take the # away.

home: {home}   # all that Millrace keeps; paths below are relative to it

serve:
  port: 8000   # on this machine only, until `millrace keys create` has made a key and serve.host is set

cycle:
  # What policies learn from. auto: people's feedback, by a reward model as soon as there is enough of it (rlhf), until
  # then from the thumbs, choices and corrections themselves (offline).
  recipe: auto

evaluation:
  # This share of all prompts is never trained on. What proves a new policy better comes from it alone: the prompts that
  # the gate asks, and the feedback that the gate's own reward model learns from. That model needs examples as much as
  # training does, so a small share is no saving: with little feedback the gate would be the one to wait. Lower it once
  # there are thousands of judgements.
  holdout: 0.3
  scorer: reward_model   # or a function of your own, module:name, with evaluation.suite: a file of held-out prompts

schedule:
  interval_seconds: 3600   # seconds to the next cycle, if there is enough new feedback; or cron: "0 3 * * *"

# What else may reward responses, beside people. In training these are weighed together.
# feedback:
#   scoring:
#     rules:
#       polite: {{function: my_rewards:reward}}   # your own Python function, one number per response
#     judge:                                    # any OpenAI-compatible endpoint
#       url: http://127.0.0.1:8001/v1
#       model: NAME
#       rubric: "Question: {{prompt}}\\nAnswer: {{response}}\\nHow helpful is the answer, from 0 to 10?"
"""
_WANTED = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja", "*.tiktoken", "*.py"]


class NotAModel(ValueError):
    """What was named is no causal language model that can be served; the text says what was found."""


def initialise(settings: Settings, model: str, *, revision: str | None, who: str) -> Pointer:
    """Publish ``model`` (a folder, or a name on the hub) as the first policy, and have it serve.

    Pickled weights are converted to safetensors. Raises NotAModel, serve.policies.store.PolicyError, UntrustedCode.
    """
    store = settings.policy_store()
    if pointer := store.serving():
        raise NotAModel(
            f"{settings.home} is initialised already: policy {pointer.version} serves; for another model take another "
            "--home"
        )
    from train.export.piecewise import piecewise_model
    from train.own_model.model_class import own_class

    folder, is_local = _local(model)
    if not is_local:
        folder = _download(model, revision)
    model_settings = settings.train.model
    architecture = _architecture(folder, has_own_class=model_settings.class_name is not None)
    has_safetensors = any(folder.glob("*.safetensors"))
    policy = store.publish(
        folder if has_safetensors else lambda aside: _convert(folder, aside),
        parent=None,
        lineage={
            "source": source(model),
            "revision": revision,
            "architecture": architecture,
            "converted": not has_safetensors,
        },
        metrics={},
        probe=partial(probe.measure, model_class=own_class(model_settings), piecewise=piecewise_model),
    )
    settings.lake().create()
    return store.promote(policy.version, expected=None, who=who, why=f"init from {model}")


def source(model: str) -> str:
    """What a model is called in the lineage of policy 1: the absolute path of a folder, or the name on the hub."""
    folder, is_local = _local(model)
    return str(folder.absolute()) if is_local else model


def require_made_from(settings: Settings, model: str) -> None:
    """Raise NotAModel unless what serves goes back to ``model``, whichever path leads to it.

    Raises PolicyError if that can't be known. An ``init`` that was killed has left another policy than that.
    """
    store = settings.policy_store()
    pointer = store.serving()
    assert pointer is not None, "the home is made"
    policy = store.get(pointer.version)
    while policy.parent is not None:
        policy = store.get(policy.parent)
    first = policy.lineage.get("source")
    if first is None or Path(source(model)).resolve() != Path(str(first)).resolve():
        raise NotAModel(
            f"the home {settings.home} was made from {first}, not from {model}: `millrace up` without a model goes on "
            "with it; for another model take another folder, or another --home"
        )


def has_chat_template(policy: Path) -> bool:
    """Whether a model's folder has a chat template, by the files that transformers reads one from."""
    if (policy / "chat_template.jinja").is_file() or (policy / "chat_template.json").is_file():
        return True
    try:
        return bool(json.loads((policy / "tokenizer_config.json").read_bytes()).get("chat_template"))
    except (OSError, ValueError, AttributeError):
        return False


def write_config(settings: Settings, file: Path, options: Sequence[tuple[str, str]] = ()) -> bool:
    """Write the few settings that matter most, and ``options``, unless there is such a file; whether it was written.

    options: (dotted key, text) of the command line, which are to count from now on. Secrets are not written.
    """
    if file.exists():
        return False
    text = _CONFIG.format(home=describe.scalar(str(settings.home)))
    given = [(key, value) for key, value in options if key != "home" and not describe.is_secret(key, Settings)]
    if all(key != "serve.port" for key, _ in given):
        given.append(("serve.port", str(settings.serve.port)))
    for section, values in from_options(Settings, given).values.items():
        text = _with_values(text, section, values)
    with open(file, "x", opener=private) as output:  # keys will be put into it
        output.write(text)
    return True


SHORT_CONTEXT: Final = "the model's context is short: responses in training and evaluation have {tokens} tokens at most"


def fit_responses(settings: Settings, file: Path) -> int | None:
    """Write into a new settings file how long responses may be, if the serving policy's context is short.

    Half of it is left to the prompt. The tokens, or None where the defaults, or what the settings say, have room.
    """
    pointer = settings.policy_store().serving()
    assert pointer is not None, "the home is made"
    folder = settings.policy_store().get(pointer.version).path
    context = full_context(json.loads((folder / "config.json").read_bytes()))
    longest = {"train": settings.train.rollout.max_tokens, "evaluation": settings.evaluation.max_tokens}
    if context is None or max(longest.values()) < context:
        return None
    text = file.read_text()
    half = max(1, context // 2)
    for section, key, value in (("train", "rollout", {"max_tokens": half}), ("evaluation", "max_tokens", half)):
        if longest[section] >= context:
            text = _with_values(text, section, {key: value})
    replace_file(file, text.encode(), private=True)
    return half


def _with_values(text: str, section: str, values: dict[str, Any]) -> str:
    """The text of a YAML file with values in one of its sections: in place of those that stand there, or at its top."""
    before = (yaml.safe_load(text) or {}).get(section) or {}
    values = {key: value for key, value in overlaid(before, values).items() if key in values}
    lines = text.splitlines(keepends=True)
    try:
        at = lines.index(f"{section}:\n") + 1
    except ValueError:
        lines += ["\n", f"{section}:\n"]
        at = len(lines)
    for key, value in values.items():
        end = next((i for i in range(at, len(lines)) if lines[i][:1] not in (" ", "\n", "#")), len(lines))
        there = next((i for i in range(at, end) if lines[i].startswith(f"  {key}:")), None)
        if there is None:
            lines.insert(at, f"  {key}: {describe.scalar(value)}\n")
        else:
            _, mark, comment = lines[there].rstrip("\n").partition("   #")
            lines[there] = f"  {key}: {describe.scalar(value)}{mark}{comment}\n"
    return "".join(lines)


def _local(model: str) -> tuple[Path, bool]:
    """The folder that a name may mean, and whether there is one."""
    folder = Path(model).expanduser()
    return folder, folder.is_dir()


def _architecture(folder: Path, *, has_own_class: bool) -> str:
    """The model's class. Raises NotAModel unless config.json names a causal language model, UntrustedCode."""
    try:
        config: dict[str, Any] = json.loads((folder / "config.json").read_bytes())
    except FileNotFoundError:
        raise NotAModel(f"{folder} has no config.json: it is no Hugging Face model folder") from None
    except ValueError as error:
        raise NotAModel(f"{folder / 'config.json'} is not JSON: {error}") from None
    names = config.get("architectures") or []
    if not names or not str(names[0]).endswith(_CAUSAL):
        raise NotAModel(f"{folder / 'config.json'} names {names or 'no architecture'}, not a causal language model")
    import transformers

    if not (trusted(folder) or has_own_class or hasattr(transformers, str(names[0]))):
        raise NotAModel(
            f"{folder / 'config.json'} names {names[0]}, which is not in transformers {transformers.__version__}; a "
            "class of your own for it is named by train.model.class"
        )
    return str(names[0])


def _download(name: str, revision: str | None) -> Path:
    """The files of a model on the hub, in the hub's own cache, safetensors only where there are any."""
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    if name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise NotAModel(f"there is no folder {name}")
    try:
        files = HfApi().list_repo_files(name, revision=revision)
        has_safetensors = any(file.endswith(".safetensors") for file in files)
        patterns = _WANTED if has_safetensors else [*_WANTED, "*.bin"]
        return Path(snapshot_download(name, revision=revision, allow_patterns=patterns))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        first_line = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise NotAModel(
            f"{name} is no folder here, and the Hugging Face hub did not give a model of that name: {first_line}"
        ) from error


def _convert(folder: Path, aside: Path) -> None:
    """Write a model whose weights are pickled as safetensors; weights_only keeps torch from running code in them."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    trust = trusted(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto", weights_only=True, trust_remote_code=trust)
    model.save_pretrained(aside)
    AutoTokenizer.from_pretrained(folder, trust_remote_code=trust).save_pretrained(aside)
