"""What ``millrace plan`` predicts against what training takes on this machine: ``make bench-plan``.

Real workers (actor, reference, critic) train models with random weights over gloo, in one process per rank, and each
configuration's second step is measured: memory as the growth of a rank's resident memory from before its models were
built to its peak, where freed blocks go back to the system at once; seconds as the median of the steps after it.
``memory_error`` and ``time_error`` are predicted over measured, less one. The machine's rates are measured by the same
ranks in turns with the steps, as its speed drifts; what is predicted is the geometric mean over the turns. There is no
mixture among them: torch's grouped matrix products on a CPU keep memory for every new shape, so that a process grows
with each step whatever training does. The last line printed is one JSON object.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor
from transformers import PretrainedConfig

from deploy.examples.bench.training.reshard import (
    device_type,
    exact_resident_memory,
    join_torchruns_ranks,
    most,
    peak_memory,
    resident,
    timed,
)
from feedback.processes.freed_memory import keep_freed_memory
from train import algorithms
from train.batch.packed import PackedBatch, Rollout
from train.config.training import TrainConfig
from train.model.mesh import batch_parts, mesh_sizes
from train.planner.cpu_rates import measure_cpu
from train.planner.machine import PRESETS, Machine
from train.planner.model_shape import models_of, read_config
from train.planner.plan import Workload, plan
from train.workers.actor import ActorWorker
from train.workers.critic import CriticWorker
from train.workers.reference import ReferenceWorker

BARS: Final = {"memory_error_max": 0.10, "time_error_max": 0.25}
TIMEOUT_S: Final = 1800
RATES: Final = (
    "flops",
    "float32_share",
    "parameter_s",
    "touched",
    "operation_s",
    "unit_s",
    "wait_s",
    "again_share",
    "bandwidth",
    "link",
)
TURNS, STEPS = 2, 3  # timed: so many turns of so many steps
LENGTHS: Final[dict[str, Any]] = {"prompt_tokens": 32, "response_tokens": 97, "group_size": 4}
PROMPTS: Final = 4  # of a rank's batch
FEWER_PROMPTS: Final = {"qwen3-370M": 1}
"""On a CPU, where its weights, gradients and moments are what takes memory, and a step of four takes half a minute."""

_SMALL: Final = {"vocab_size": 4096, "hidden_size": 192, "intermediate_size": 512, "num_hidden_layers": 4}
_MIDDLE: Final = {"vocab_size": 8192, "hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 6}
_LARGE: Final = {"vocab_size": 16384, "hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 8}
_GROUPED: Final = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}
MODELS: Final[dict[str, tuple[str, dict[str, Any]]]] = {
    "qwen3-2M": ("qwen3", {**_SMALL, **_GROUPED, "tie_word_embeddings": True}),
    "llama-9M": ("llama", {**_MIDDLE, "num_attention_heads": 4, "num_key_value_heads": 2}),
    "gemma2-7M": ("gemma2", {**_MIDDLE, **_GROUPED, "query_pre_attn_scalar": 64, "sliding_window": 512}),
    "gpt2-7M": ("gpt2", {"vocab_size": 8192, "n_embd": 256, "n_layer": 6, "n_head": 4, "n_positions": 512}),
    "qwen3-370M": (
        "qwen3",
        {
            **{"vocab_size": 32768, "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 24},
            **{"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 64},
        },
    ),
    "qwen3-42M": ("qwen3", {**_LARGE, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64}),
}

_UNSAMPLED: Final[dict[str, Any]] = {"data": {"traffic_share": 1.0}}  # no engine: what it takes is set, not predicted
_ONE: Final[dict[str, Any]] = {"micro_batch_tokens": 4096}
_PARTS: Final[dict[str, Any]] = {"micro_batch_tokens": 420}  # a prompt and its responses
_RECOMPUTED: Final[dict[str, Any]] = {"activation_checkpointing": True}
_REDUCED: Final[dict[str, Any]] = {**_PARTS, "fsdp": {"reduce_every_micro_batch": True}}
_LORA: Final[dict[str, Any]] = {"lora": {"rank": 8}}
_NF4: Final[dict[str, Any]] = {"lora": {"rank": 8, "base": "nf4"}}
_SLICED: Final[dict[str, Any]] = {"fsdp": {"tensor_parallel": 2}}
_SHARED: Final[dict[str, Any]] = {"fsdp": {"sequence_parallel": 2}}
_COPIES: Final[dict[str, Any]] = {"fsdp": {"replicas": 2}}
_MUON: Final[dict[str, Any]] = {"optimizer": {"name": "muon"}}
_SGD: Final[dict[str, Any]] = {"optimizer": {"name": "sgd", "momentum": 0.9}}
_KEPT: Final[dict[str, Any]] = {"fsdp": {"reshard_after_forward": False}}
_PPO: Final[dict[str, Any]] = {"algorithm": {"name": "ppo"}}
_PPO_LORA: Final[dict[str, Any]] = _LORA | {"algorithm": {"name": "ppo", "critic": {"lora": {"rank": 8}}}}
CASES: Final[list[tuple[str, int, dict[str, Any]]]] = [
    ("qwen3-2M", 1, _ONE),
    ("qwen3-2M", 2, _PARTS),
    ("llama-9M", 1, _ONE),
    ("llama-9M", 1, _ONE | _RECOMPUTED),
    ("llama-9M", 1, _PARTS | _LORA),
    ("llama-9M", 2, _ONE | {"dtype": "float32"}),
    ("llama-9M", 2, _PARTS | _PPO),
    ("llama-9M", 2, _PARTS | _PPO_LORA),
    ("gemma2-7M", 1, _ONE),
    ("gemma2-7M", 2, _REDUCED | _RECOMPUTED),
    ("gpt2-7M", 1, _PARTS),
    ("gpt2-7M", 2, _ONE),
    ("gpt2-7M", 1, _ONE | _RECOMPUTED),
    ("gemma2-7M", 2, _PARTS | _LORA),
    ("qwen3-42M", 1, _ONE),
    ("qwen3-42M", 1, _PARTS | _RECOMPUTED),
    ("qwen3-42M", 1, _ONE | _LORA),
    ("qwen3-42M", 1, _PARTS | {"dtype": "float32"}),
    ("qwen3-42M", 2, _ONE),
    ("qwen3-42M", 2, _REDUCED | _RECOMPUTED),
    ("qwen3-42M", 2, _ONE | _LORA | _RECOMPUTED),
    ("qwen3-42M", 1, _PARTS | _NF4),
    ("qwen3-42M", 2, _PARTS | _NF4),
    ("llama-9M", 2, _PARTS | _SLICED),
    ("qwen3-42M", 2, _ONE | _SLICED | _RECOMPUTED),
    ("qwen3-42M", 2, _ONE | _MUON),
    ("llama-9M", 2, _PARTS | _SHARED),
    ("qwen3-42M", 2, _ONE | _SHARED | _RECOMPUTED),
    ("llama-9M", 2, _PARTS | _COPIES),
    ("llama-9M", 2, _PARTS | _SGD),
    ("qwen3-42M", 2, _ONE | _KEPT | _RECOMPUTED),
    ("qwen3-370M", 1, _ONE | _RECOMPUTED),
]
"""(model, ranks, settings of train)"""

_LONGER: Final[dict[str, Any]] = {"micro_batch_tokens": 16384}
CASES_OF_GPUS: Final[list[tuple[str, int, dict[str, Any]]]] = [
    ("qwen3-370M", 1, _LONGER),
    ("qwen3-370M", 1, _LONGER | _RECOMPUTED),
    ("qwen3-370M", 1, _PARTS | _LORA),
    ("qwen3-370M", 1, _PARTS | _NF4),
    ("qwen3-370M", 1, _LONGER | {"fsdp": {"cpu_offload": True}}),
    ("qwen3-370M", 1, _LONGER | {"fsdp": {"offload_optimizer": True}}),
    ("qwen3-370M", 2, _LONGER),
    ("qwen3-370M", 2, _LONGER | _SLICED | _RECOMPUTED),
]
"""As ``CASES``, of as many ranks as there are GPUs; a small model would be lost beside what kernels take once."""


def main() -> None:
    """Measure, print, and exit 1 if a bar is missed."""
    parser = argparse.ArgumentParser(description="What a plan predicts against what training takes.")
    parser.add_argument("--only", default="", help="run the cases whose line has this in it")
    parser.add_argument("--skip", type=int, default=0, metavar="N", help="leave the first N of them out")
    parser.add_argument("--in-rank", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.in_rank is not None:
        in_rank(arguments.in_rank)
        return
    chosen = [case for case in cases_here() if arguments.only in title(*case)][arguments.skip :]
    if not chosen:
        parser.error(f"--only {arguments.only!r} --skip {arguments.skip} leave no case")
    found = list(run_cases(chosen))
    result = {
        "memory_error_max": max(abs(case["memory_error"]) for case in found),
        "time_error_max": max(abs(case["time_error"]) for case in found),
        "configurations": len(found),
    }
    missed = [f"{name} {result[name]} over {bar}" for name, bar in BARS.items() if result[name] > bar]
    for text in missed:
        print(f"missed: {text}", flush=True)
    print(json.dumps({**result, "missed": missed, "cases": found}))
    if missed:
        raise SystemExit(1)


def cases_here() -> list[tuple[str, int, dict[str, Any]]]:
    """Those of this machine's GPUs, if it has any."""
    if device_type() == "cpu":
        return CASES
    return [case for case in CASES_OF_GPUS if case[1] <= torch.cuda.device_count()]


def run_cases(cases: list[tuple[str, int, dict[str, Any]]]) -> Iterator[dict[str, Any]]:
    """What was predicted and measured of each, which is printed as a line."""
    with tempfile.TemporaryDirectory() as folder:
        for name in {name for name, _, _ in cases}:
            make_model(name, Path(folder) / name)
        for model, ranks, settings in cases:
            spec: dict[str, Any] = {
                "title": title(model, ranks, settings),
                "ranks": ranks,
                "policy": str(Path(folder) / model),
            }
            file = Path(folder) / "case.json"
            spec |= {"train": {"ranks": ranks, **_UNSAMPLED, **settings}}
            module = "deploy.examples.bench.training.plan"
            file.write_text(json.dumps(spec))
            case = measured_in_ranks(module, ranks, ["--in-rank", str(file)], file.read_text())
            print(line(case), flush=True)
            yield case


def title(model: str, ranks: int, settings: dict[str, Any]) -> str:
    return f"{model}, {ranks} rank{'s' * (ranks > 1)}, {json.dumps(settings)}"


def line(case: dict[str, Any]) -> str:
    memory = f"{case['memory_predicted'] / 2**20:.1f} MiB of {case['memory'] / 2**20:.1f} ({case['memory_error']:+.1%})"
    seconds = f"{case['seconds_predicted']:.2f} s of {case['seconds']:.2f} ({case['time_error']:+.1%})"
    return f"{case['title']}: {memory}, {seconds}"


def make_model(name: str, folder: Path) -> None:
    """A model with random weights, stored in bfloat16."""
    from transformers import AutoConfig, AutoModelForCausalLM

    kind, sizes = MODELS[name]
    torch.manual_seed(0)
    ends: dict[str, Any] = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": 0}
    config = AutoConfig.for_model(kind, max_position_embeddings=512, **{**ends, **sizes})
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)


def measured_in_ranks(module: str, ranks: int, options: list[str], what: str) -> dict[str, Any]:
    """The result that a bench's module prints in its ranks. ``what``: for the error.

    Raises RuntimeError with the processes' last words if they give no result.
    """
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    done = subprocess.run(
        [*torchrun, "-m", module, *options],
        env={**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    results = [text for text in done.stdout.splitlines() if text.startswith("{")]
    if not results:
        raise RuntimeError(f"{what} ended with {done.returncode}:\n{done.stderr[-4000:]}")
    found: dict[str, Any] = json.loads(results[-1])
    return found


# ----------------------------------------------------------------------------------------------------- in a rank


def in_rank(file: Path) -> None:
    """Predict and measure the case in ``file``; rank 0 prints it."""
    exact_resident_memory()
    torch.set_num_threads(1)
    join_torchruns_ranks()
    spec = json.loads(file.read_text())
    config, policy = TrainConfig.model_validate(spec["train"]), Path(spec["policy"])
    prompts = FEWER_PROMPTS.get(policy.name, PROMPTS) if device_type() == "cpu" else PROMPTS
    workload = Workload(prompts=prompts * config.data_parallel_ranks, **LENGTHS)
    models = models_of(read_config(policy), config, device_type())
    vocabulary = 4096
    part = batch_parts(spec["ranks"], **mesh_sizes(config, spec["ranks"]))[torch.distributed.get_rank()]
    warm_up = a_batch(config, 1, vocabulary, seed=part)
    run(policy, config, warm_up, warm_up=True)  # libraries and threads take memory once
    gc.collect()
    step, rose = run(policy, config, a_batch(config, prompts, vocabulary, seed=part))
    machines, taken = list[Machine](), list[float]()
    for _ in range(TURNS):
        taken += [most(timed(step)) for _ in range(STEPS)]
        machines.append(this_machine(spec["ranks"], config.dtype, read_config(policy)))
    plans = [plan(config, models, machine, workload) for machine in machines]
    predicted, rose, seconds = plans[-1], int(most(rose)), statistics.median(taken)
    expected = statistics.geometric_mean(each.seconds for each in plans)
    result = {
        "title": spec["title"],
        "phase": predicted.peak.name,
        "parts": predicted.peak.memory,
        "memory_predicted": predicted.peak.bytes,
        "memory": rose,
        "memory_error": round(predicted.peak.bytes / rose - 1, 4),
        "phases": {phase.name: round(phase.cost.seconds, 4) for phase in predicted.phases},
        "seconds_predicted": round(expected, 4),
        "seconds_predicted_each": [round(each.seconds, 4) for each in plans],
        "seconds_each": [round(each, 4) for each in taken],
        "rates": {name: [getattr(machine, name) for machine in machines] for name in RATES},
        "seconds": round(seconds, 4),
        "time_error": round(expected / seconds - 1, 4),
    }
    if torch.distributed.get_rank() == 0:
        print(json.dumps(result), flush=True)
    torch.distributed.destroy_process_group()


def this_machine(ranks: int, dtype: str, model: PretrainedConfig) -> Machine:
    """What is planned for: this machine's processors, as measured, or its GPUs, as their data sheet says."""
    if device_type() == "cpu":
        return measure_cpu(ranks, dtype=dtype, model=model)
    properties = torch.cuda.get_device_properties(0)
    preset = next((PRESETS[name] for name in PRESETS if name in properties.name), PRESETS["A100"])
    return replace(preset, name=properties.name, devices=ranks, memory=properties.total_memory)


def run(
    policy: Path, config: TrainConfig, batch: PackedBatch, *, warm_up: bool = False
) -> tuple[Callable[[], None], float]:
    """(a step, bytes by which memory rose at most in the second one)."""
    before = resident()
    peers: dict[str, Any] = {}
    actor = peers["actor"] = ActorWorker(policy=policy, config=config, peers=peers)
    reference = ReferenceWorker(policy=policy, config=config, peers=peers) if config.has_reference else None
    needs_critic = algorithms.load(config.algorithm).needs_critic
    critic = CriticWorker(policy=policy, config=config, peers=peers) if needs_critic else None

    def step() -> None:
        if reference is not None:
            reference.log_probs(batch)
        if critic is not None:
            critic.values(batch)
            critic.update(batch)
        actor.learn(batch)

    step()
    if warm_up:
        return step, 0.0
    gc.collect()
    held = resident()
    with peak_memory() as extra:
        step()
    if device_type() == "cpu":
        keep_freed_memory()
    step()
    return step, held - before + extra[0]


def a_batch(config: TrainConfig, prompts: int, vocabulary: int, *, seed: int) -> PackedBatch:
    """Responses to so many prompts, with all that the losses read."""
    generator = torch.Generator().manual_seed(seed)

    def tokens(count: int) -> list[int]:
        drawn: list[int] = torch.randint(1, vocabulary, (count,), generator=generator).tolist()
        return drawn

    rollouts = []
    for prompt in range(prompts):
        text = tokens(LENGTHS["prompt_tokens"])
        for response in range(LENGTHS["group_size"]):
            length = LENGTHS["response_tokens"]
            behaviour = (-8 - torch.rand(length, generator=generator)).tolist()
            rollouts.append(Rollout(text, tokens(length), behaviour, float(response), prompt))
    batch = PackedBatch.pack(rollouts)
    zeros: Tensor = torch.zeros(len(batch.tokens))
    known = batch.behaviour_log_probs
    batch = batch.with_(old_log_probs=known, ref_log_probs=known, values=zeros, returns=zeros)
    return batch.with_(advantages=algorithms.load(config.algorithm).advantages(batch))


if __name__ == "__main__":
    main()
