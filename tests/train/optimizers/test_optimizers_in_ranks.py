"""Optimizers and the settings of FSDP in two ranks and in one, over gloo: weights, checkpoints, what has an effect."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from transformers import Qwen3ForCausalLM

from tests.train.ranks import run_ranks
from tests.train.tiny_models import own_part, qwen3, some_batch
from train.checkpoint.folders import CheckpointError, aside_of, begin_aside, make_whole, name_of
from train.config.training import TrainConfig
from train.model.fsdp import build, token_log_probs
from train.model.hf_io import held, plain_name, whole_tensor
from train.model.mesh import mesh_sizes
from train.optimizers.build import body_matrices
from train.workers.actor import ActorWorker

STEPS = 3
RATE, DECAY = 1e-3, 0.1
HERE = __name__


class SignDescent(torch.optim.Optimizer):
    """The signs of momentum (Lion, arXiv 2302.06675), as a user may write it."""

    def __init__(self, params: Any, lr: float, beta: float) -> None:
        super().__init__(params, {"lr": lr, "beta": beta, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if not self.state[p]:
                    self.state[p]["momentum"] = self.new(p)
                self.state[p]["momentum"].lerp_(p.grad, 1 - group["beta"])
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.add_(self.state[p]["momentum"].sign(), alpha=-group["lr"])

    def new(self, p: nn.Parameter) -> Tensor:
        return torch.zeros_like(p)


class OfLocals(SignDescent):
    """Its state is of this rank alone, and nothing says so."""

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["momentum"] = p.to_local().detach().clone()


def attention_and_mlp(model: nn.Module) -> Iterable[nn.Module]:
    """What to shard by, as a user may write it."""
    return [module for name, module in model.named_modules() if name.endswith((".self_attn", ".mlp"))]


OPTIMIZERS: dict[str, dict[str, Any]] = {
    "adamw": {"optimizer": {"name": "adamw"}},
    "sgd": {"optimizer": {"name": "sgd"}},
    "muon": {"optimizer": {"name": "muon"}},
    "muon, tensor-parallel": {"optimizer": {"name": "muon"}, "fsdp": {"tensor_parallel": 2}},
    "own": {"optimizer": {"name": f"{HERE}:SignDescent", "options": {"beta": 0.9}}},
}
SHARDINGS: dict[str, dict[str, Any]] = {
    "kept after forward": {"reshard_after_forward": False},
    "prefetched": {"prefetch_layers": 2},
    "by own modules": {"layers": f"{HERE}:attention_and_mlp"},
    "compiled": {"compile_layers": "aot_eager"},
    "offloaded optimizer": {"offload_optimizer": True},
}


# ----------------------------------------------------------------------------------------------- in the ranks


def in_two_ranks(rank: int, folder: Path, policy: Path) -> dict[str, Any]:
    return {
        "trained": {name: trained(policy, name, save_to=policy.parent) for name in OPTIMIZERS},
        "sharded": {name: sharded(policy, **options) for name, options in SHARDINGS.items()},
        "refused": refused(policy),
    }


def in_one_rank(rank: int, folder: Path, policy: Path) -> dict[str, Any]:
    return {"trained": {name: trained(policy, name, go_on_from=policy.parent) for name in OPTIMIZERS}}


def trained(policy: Path, name: str, *, save_to: Path | None = None, go_on_from: Path | None = None) -> dict[str, Any]:
    """Some steps; and the last one again, from a checkpoint that two ranks made before it."""
    actor = new_actor(policy, **OPTIMIZERS[name])
    gradients: list[dict[str, Tensor]] = []

    def keep(*_: Any) -> None:
        gradients.append({n: whole(p.grad) for n, p in actor.model.named_parameters()})

    actor.optimizer.register_step_pre_hook(keep)
    found: dict[str, Any] = {"before": weights(actor), "matrices": matrices(actor)}
    metrics = []
    for step in range(STEPS):
        if step == STEPS - 1 and save_to is not None:
            save(actor, save_to / name)
        metrics.append(update(actor))
    found |= {"metrics": metrics, "gradients": gradients, "after": weights(actor), "state": state(actor)}
    again = new_actor(policy, **OPTIMIZERS[name])
    again.load_checkpoint((save_to or go_on_from) / name / name_of(1), part="actor")  # type: ignore[operator]
    found["again"] = [update(again), weights(again), state(again)]
    return found


def sharded(policy: Path, **options: Any) -> dict[str, Any]:
    torch._dynamo.utils.counters.clear()
    actor = new_actor(policy, fsdp=options)
    for _ in range(2):
        update(actor)
    after = weights(actor)
    units = [m for m in actor.model.modules() if isinstance(m, FSDPModule)]
    token_log_probs(actor.model.train(), some_batch())
    return {
        "after": after,
        "units": [type(m).__name__ for m in units],
        "whole after forward": not isinstance(next(units[1].parameters()), DTensor),
        # torch has no public way to see it
        "prefetched": [len(m._get_fsdp_state()._states_to_forward_prefetch) for m in units],
        "graphs": torch._dynamo.utils.counters["stats"]["unique_graphs"],
    }


def eight_bit(rank: int, folder: Path, policy: Path) -> dict[str, Any]:
    """Steps by torchao's 8-bit AdamW, its kernels not compiled, with a checkpoint before the last; or why not."""
    torch.compiler.set_stance("force_eager")
    settings = {"optimizer": {"name": "adamw_8bit"}}
    kept = policy.parent / "8 bits"
    if torch.distributed.get_world_size() == 1:
        try:
            new_actor(policy, **settings).load_checkpoint(kept / name_of(1), part="actor")
        except CheckpointError as error:
            return {"refused": str(error)}
        return {}
    actor = new_actor(policy, **settings)
    losses = [update(actor)["loss"] for _ in range(STEPS)]
    save(actor, kept)
    losses.append(update(actor)["loss"])
    again = new_actor(policy, **settings)
    again.load_checkpoint(kept / name_of(1), part="actor")
    moments = [v.to_local() for of in actor.optimizer.state.values() for v in of.values() if isinstance(v, DTensor)]
    return {
        "losses": losses,
        "again": update(again)["loss"],
        "same": same(weights(actor), weights(again)),
        "kinds": {type(moment).__name__ for moment in moments},
    }


def refused(policy: Path) -> dict[str, str]:
    def why(call: Callable[[], Any]) -> str:
        try:
            call()
        except (ValueError, CheckpointError) as error:
            return str(error)
        return "nothing was refused"

    def named(name: str, **more: Any) -> str:
        return why(lambda: new_actor(policy, optimizer={"name": name, **more}))

    of_locals = new_actor(policy, optimizer={"name": f"{HERE}:OfLocals", "options": {"beta": 0.9}})
    update(of_locals)
    of_locals.save_checkpoint(policy.parent / "of locals", step=1)
    return {
        "wrong arguments": named(f"{HERE}:SignDescent"),
        "no optimizer": named("torch.nn:Identity"),
        "no module": named("no_such_module:Optimizer"),
        "pattern": named("adamw", groups=[{"pattern": "no_such_layer"}]),
        "backend": why(lambda: new_actor(policy, fsdp={"compile_layers": "no_such_backend"})),
        "state of one rank": str(of_locals.saved(True)[0].error),
    } | {
        what: why(lambda what=what: build_sharded_by(policy, what))  # type: ignore[misc]
        for what in ("nothing", "the_model", "nested", "tied", "foreign")
    }


def build_sharded_by(policy: Path, function: str) -> None:
    config = TrainConfig.model_validate({"fsdp": {"layers": f"{HERE}:{function}"}})
    build(policy, dtype=torch.float32, options=config.fsdp)


def nothing(model: Any) -> list[nn.Module]:
    return []


def the_model(model: Any) -> list[nn.Module]:
    return [model]


def nested(model: Any) -> list[nn.Module]:
    return [model.model.layers[0], model.model.layers[0].mlp]


def tied(model: Any) -> list[nn.Module]:
    return [model.get_input_embeddings(), *model.model.layers]


def foreign(model: Any) -> list[nn.Module]:
    return [nn.Linear(2, 2)]


def new_actor(policy: Path, **settings: Any) -> ActorWorker:
    optimizer = {
        "learning_rate": RATE,
        "weight_decay": DECAY,
        "warmup_steps": 0,
        "schedule": "linear",
        **settings.pop("optimizer", {}),
    }
    ranks = torch.distributed.get_world_size()
    sizes = {"ranks": ranks, "dtype": "float32", "micro_batch_tokens": 4096, "steps": 5}
    fsdp = settings.pop("fsdp", {})
    fsdp = fsdp if ranks > 1 else {}
    config = TrainConfig.model_validate({**sizes, "optimizer": optimizer, "fsdp": fsdp, **settings})
    return ActorWorker(policy=policy, config=config, peers={})


def update(actor: ActorWorker) -> dict[str, float]:
    batch = some_batch()
    return actor.update(batch.select(own_part(batch, **mesh_sizes(actor.config, actor.world_size))))


def save(actor: ActorWorker, folder: Path) -> None:
    rank = torch.distributed.get_rank()
    if rank == 0:
        begin_aside(folder, 1, "{}")
    torch.distributed.barrier()
    actor.save_checkpoint(aside_of(folder, 1) / "actor", step=1)
    assert [saved.error for saved in actor.saved(True)] == [None]
    if rank == 0:
        make_whole(folder, 1)
    torch.distributed.barrier()


def weights(actor: ActorWorker) -> dict[str, Tensor]:
    return {name: whole(tensor) for name, tensor in held(actor.model)}


def state(actor: ActorWorker) -> dict[str, Tensor]:
    """Of the optimizer, whole."""
    return {
        f"{plain_name(name)} {key}": whole(value)
        for name, parameter in actor.model.named_parameters()
        for key, value in actor.optimizer.state[parameter].items()
        if isinstance(value, Tensor)
    }


def matrices(actor: ActorWorker) -> set[str]:
    chosen = {id(p) for p in body_matrices(actor.model)}
    return {name for name, p in actor.model.named_parameters() if id(p) in chosen}


def whole(tensor: Any) -> Tensor:
    """A copy of the values, which go on changing."""
    return whole_tensor(tensor.detach()).clone()


# ------------------------------------------------------------------------------------------------- the tests


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("optimizers") / "policy"
    torch.manual_seed(3)
    qwen3().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def two(policy: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_ranks(2, in_two_ranks, tmp_path_factory.mktemp("ranks"), policy)


@pytest.fixture(scope="module")
def one(policy: Path, two: list[dict[str, Any]], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """After ``two``, whose checkpoints it goes on from."""
    found: dict[str, Any] = run_ranks(1, in_one_rank, tmp_path_factory.mktemp("rank"), policy)[0]
    return found


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_two_ranks_end_where_one_does(one: dict[str, Any], two: list[dict[str, Any]], name: str) -> None:
    expected = one["trained"][name]
    assert not same(expected["before"], expected["after"])
    for rank in two:
        found = rank["trained"][name]
        for ours, theirs in zip(found["metrics"], expected["metrics"], strict=True):
            assert ours == pytest.approx(theirs, abs=1e-5, rel=1e-4)
        for weight, value in expected["after"].items():
            # Muon computes in bfloat16, where what tensor parallelism sums in another order may round otherwise.
            torch.testing.assert_close(found["after"][weight], value, atol=5e-5, rtol=0, msg=weight)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_from_a_checkpoint_it_goes_on_bit_for_bit_and_on_fewer_ranks_too(
    one: dict[str, Any], two: list[dict[str, Any]], name: str
) -> None:
    for rank in two:
        found = rank["trained"][name]
        metrics, after, moments = found["again"]
        assert metrics["learning_rate"] == found["metrics"][-1]["learning_rate"] == pytest.approx(RATE * 0.5)
        assert metrics["loss"] == found["metrics"][-1]["loss"]
        assert same(after, found["after"])
        assert same(moments, found["state"])
        assert bool(moments) == (name != "sgd"), "without momentum it has no state"
    metrics, after, moments = one["trained"][name]["again"]
    for theirs, ours in ((two[0]["trained"][name]["after"], after), (two[0]["trained"][name]["state"], moments)):
        assert theirs.keys() == ours.keys()
        for key, value in theirs.items():
            torch.testing.assert_close(ours[key], value, atol=2e-5, rtol=1e-4, msg=key)


def test_eight_bit_moments_go_on_bit_for_bit_on_as_many_ranks_alone(tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    policy, config = tmp_path / "policy", qwen3().config
    config.hidden_size, config.intermediate_size = 128, 256  # torchao leaves what has less than 4096 values as it is
    Qwen3ForCausalLM(config).save_pretrained(policy)
    for seen in run_ranks(2, eight_bit, tmp_path, policy):
        assert seen["losses"][-1] < seen["losses"][0]
        assert seen["again"] == seen["losses"][-1]
        assert seen["same"]
        assert any("8bit" in kind for kind in seen["kinds"]), "of parameters that are large enough"
    [alone] = run_ranks(1, eight_bit, tmp_path / "one", policy)
    assert "8-bit moments load on as many ranks, with the same train.fsdp" in alone["refused"]


@pytest.mark.parametrize("name", ["muon", "muon, tensor-parallel"])
def test_muon_of_sharded_matrices_is_torchs_of_whole_ones(two: list[dict[str, Any]], name: str) -> None:
    found = two[0]["trained"][name]
    plain = {key: nn.Parameter(value.clone()) for key, value in found["before"].items()}
    assert len(found["matrices"]) == 14, "seven linear layers in each of two decoder layers"
    muon = torch.optim.Muon(
        [plain[key] for key in found["matrices"]], weight_decay=DECAY, momentum=0.95, adjust_lr_fn="match_rms_adamw"
    )
    others = [p for key, p in plain.items() if key not in found["matrices"]]
    vectors = {"params": [p for p in others if p.ndim == 1], "weight_decay": 0.0}
    tables = {"params": [p for p in others if p.ndim == 2], "weight_decay": DECAY}
    adamw = torch.optim.AdamW([vectors, tables], betas=(0.9, 0.95))
    for metrics, gradients in zip(found["metrics"], found["gradients"], strict=True):
        for key, gradient in gradients.items():
            plain[key].grad = gradient
        for optimizer in (muon, adamw):
            for group in optimizer.param_groups:
                group["lr"] = metrics["learning_rate"]
            optimizer.step()
    for key, value in found["after"].items():
        torch.testing.assert_close(plain[key].detach(), value, atol=1e-7, rtol=1e-6, msg=key)


def test_momentum_of_a_users_optimizer_is_sharded(two: list[dict[str, Any]]) -> None:
    found = two[0]["trained"]["own"]
    assert {key.rpartition(" ")[2] for key in found["state"]} == {"momentum"}
    for key, value in found["before"].items():
        moved = (found["after"][key] - value).abs()
        assert float(moved.max()) <= RATE * (1 + 0.75 + 0.5) * (1 + DECAY * float(value.abs().max())) + 1e-6, key


@pytest.mark.parametrize("name", SHARDINGS)
def test_however_it_is_sharded_the_weights_are_the_same(two: list[dict[str, Any]], name: str) -> None:
    plain = two[0]["sharded"]["offloaded optimizer"]
    found = two[0]["sharded"][name]
    for key, value in plain["after"].items():
        torch.testing.assert_close(found["after"][key], value, atol=1e-6, rtol=0, msg=key)
    assert found["whole after forward"] == (name == "kept after forward")
    assert found["prefetched"] == ([0, 1, 0] if name == "prefetched" else [0] * len(found["units"]))
    assert (found["graphs"] > 0) == (name == "compiled")
    assert len(found["units"]) == (5 if name == "by own modules" else 3)


@pytest.mark.parametrize(
    ("what", "why"),
    [
        ("wrong arguments", "train.optimizer.options={}: SignDescent.__init__() missing 1 required"),
        ("no optimizer", "made Identity, which is no torch.optim.Optimizer"),
        ("no module", "train.optimizer.name='no_such_module:Optimizer': the module can't be imported"),
        ("pattern", "train.optimizer.groups: no parameter in training fits no_such_layer"),
        ("backend", "train.fsdp.compile_layers='no_such_backend' is no backend of torch.compile"),
        ("state of one rank", "keeps momentum of model.embed_tokens.weight as a plain tensor"),
        ("nothing", "returned 0 modules, of which 0"),
        ("the_model", "returned the model itself"),
        ("nested", "returned model.layers.0 and model.layers.0.mlp, which is inside it"),
        ("tied", "returned model.embed_tokens, whose weight is tied to one outside it"),
        ("foreign", "returned 1 modules, of which 0"),
    ],
)
def test_what_cant_be_is_refused_with_the_reason(two: list[dict[str, Any]], what: str, why: str) -> None:
    assert why in two[0]["refused"][what]


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)
