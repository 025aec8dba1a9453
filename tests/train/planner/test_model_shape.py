"""Parameters are counted, and what is traced on meta tensors is what a CPU allocates."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.train.planner.public_configs import CONFIGS, write
from tests.train.tiny_models import gpt2, mixture, qwen3
from train.batch.prompt_rows import Span
from train.config.sections import AdapterConfig, LoraConfig
from train.model.attention.calls import Packing
from train.model.attention.packed import packed, use_packed_attention
from train.model.fsdp import training_mode
from train.model.scalar_head import with_one_output
from train.planner.model_shape import LiveBytes, ModelNotPlanned, Tracer, cut_model, read_config, run_body, shape_of
from train.planner.sizes import Batch, Operations

BATCH = Batch.of(3, 4, 5, 13)


@pytest.mark.parametrize("name", CONFIGS)
def test_a_public_model_has_as_many_parameters_as_its_files(name: str, tmp_path: Path) -> None:
    shape = shape_of(read_config(write(name, tmp_path)))
    assert shape.parameters == CONFIGS[name][0]
    assert shape.root.parameters + sum(unit.parameters for unit in shape.layers) == shape.parameters
    assert sum(shape.kinds.values()) == shape.parameters


def test_of_a_mixture_the_experts_that_a_token_goes_to_are_active(tmp_path: Path) -> None:
    shape = shape_of(read_config(write("Qwen3-30B-A3B", tmp_path)))
    assert shape.active == 3_353_032_704  # "A3B", 3.3 billion
    assert shape.kinds["experts"] == 48 * 128 * 3 * 2048 * 768


def test_what_latent_attention_caches_is_counted_once_for_all_heads_and_layers_are_traced_that_are_most(
    tmp_path: Path,
) -> None:
    """DeepSeek-V3: 61 layers of which the first three are dense; 512 values and 64 of a rotary key are cached."""
    latent = {"kv_lora_rank": 512, "q_lora_rank": 1536, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128}
    config = {"model_type": "deepseek_v3", "num_hidden_layers": 6, "first_k_dense_replace": 3, "v_head_dim": 128}
    config |= {"hidden_size": 512, "num_attention_heads": 8, "num_key_value_heads": 8, "vocab_size": 1024}
    config |= {"n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1}
    (tmp_path / "config.json").write_text(json.dumps(config | latent))
    found = read_config(tmp_path)
    shape = shape_of(found)
    assert shape.key_value_bytes(2) == shape.key_value_bytes(2, 8) == 2 * 6 * (512 + 64)
    assert shape.head_size == (128 + 64 + 128) // 2
    assert shape.active < shape.parameters - 0.7 * shape.kinds["experts"]
    *_, last = cut_model(found, 2, torch.bfloat16).model.layers
    assert sum(parameter.numel() for parameter in last.parameters()) == shape.layers[-1].parameters
    assert shape.layers[-1].parameters > shape.layers[0].parameters
    found.first_k_dense_replace = 0
    assert Tracer(read_config(tmp_path), dtype="bfloat16", device="cuda")(BATCH) == Tracer(
        found, dtype="bfloat16", device="cuda"
    )(BATCH)


def test_counting_leaves_the_random_numbers_of_a_run_as_they_are(tmp_path: Path) -> None:
    before = torch.get_rng_state()
    shape_of(read_config(write("Mistral-7B-v0.1", tmp_path, num_hidden_layers=2)), LoraConfig())
    assert torch.equal(torch.get_rng_state(), before)


def test_adapters_are_trained_and_nothing_else(tmp_path: Path) -> None:
    config = read_config(write("Mistral-7B-v0.1", tmp_path, num_hidden_layers=2))
    shape = shape_of(config, LoraConfig(rank=16))
    # Both sides of an adapter of rank 16 around each of seven projections of a layer.
    sides = 2 * (4096 + 4096) + 2 * (4096 + 1024) + 2 * (4096 + 14336) + (14336 + 4096)
    assert shape.trained == shape.kinds["adapters"] == 2 * 16 * sides
    assert shape.frozen == shape.parameters == shape_of(config).parameters


def test_of_a_critic_with_adapters_the_head_is_trained_too(tmp_path: Path) -> None:
    config = read_config(write("Mistral-7B-v0.1", tmp_path, num_hidden_layers=2))
    adapters = shape_of(config, LoraConfig(rank=16)).trained
    assert shape_of(config, AdapterConfig(rank=16), with_one_output).trained == adapters + 4096


@pytest.mark.parametrize("model", [qwen3, gpt2, mixture], ids=["qwen3", "gpt2", "mixture"])
def test_a_layer_keeps_on_a_cpu_what_its_trace_says(model: object) -> None:
    real = model().bfloat16()  # type: ignore[operator]
    training_mode(real)
    assert use_packed_attention(real)
    width = real.config.get_text_config().hidden_size
    spans, start = [], 0
    for _ in range(3):
        spans.append(Span(start, 5))
        spans += [Span(start + 5 + 12 * i, 12, start, 5) for i in range(4)]
        start += 53
    assert start == BATCH.rows
    inputs = torch.randn(1, start, width, dtype=torch.bfloat16, requires_grad=True)
    with LiveBytes() as counted, packed(Packing(spans, torch.device("cpu"))) as extra:
        hidden = real.base_model(
            inputs_embeds=inputs, position_ids=torch.arange(start)[None] % 20, use_cache=False, **extra
        ).last_hidden_state
        kept, forward_peak, ran = counted.live, counted.peak - counted.live, counted.operations
    hidden.backward(torch.ones_like(hidden))
    traced = run_body(cut_model(real.config, 2, torch.bfloat16), BATCH, "cpu")
    # A mixture's experts get as many rows as the router sends them, which a trace can't know.
    tolerance = 0.25 if model is mixture else 0.03
    assert traced.kept == pytest.approx(kept, rel=tolerance)
    assert traced.forward_peak - traced.kept == pytest.approx(forward_peak, rel=0.1, abs=20_000)
    # What attention's kernels do inside is no operation of a trace's: so much the more of so small a model's.
    assert ran.moved / 2 < traced.forward.moved < ran.moved


def test_what_is_kept_grows_with_the_tokens_and_not_with_their_square() -> None:
    trace = Tracer(qwen3().config, dtype="bfloat16", device="cuda")
    small, large = (trace(Batch.of(n, 1, 20, 30)) for n in (4, 8))
    assert large.layer == pytest.approx(2 * small.layer, rel=0.01)
    longer = trace(Batch.of(1, 1, 80, 120))
    assert longer.layer == pytest.approx(small.layer, rel=0.03)


def test_products_and_views_touch_nothing_and_all_else_what_it_reads_and_writes() -> None:
    x, weight = torch.ones(10, 20), torch.ones(30, 20)
    with LiveBytes() as counted:
        y = (x @ weight.t()).view(30, 10)
        y.exp()
        y.add_(1)
    assert counted.operations == Operations(count=5, moved=(2 + 2) * y.nbytes)


def test_what_a_pass_runs_grows_with_layers_and_rows() -> None:
    config = qwen3().config
    small, large = (Batch.of(n, 1, 20, 30) for n in (4, 8))
    deeper = type(config)(**config.to_dict() | {"num_hidden_layers": 4, "layer_types": None})
    two, four = (Tracer(of, dtype="bfloat16", device="cpu") for of in (config, deeper))
    assert two.operations(large).forward.count == two.operations(small).forward.count
    assert two.operations(large).forward.moved == pytest.approx(2 * two.operations(small).forward.moved, rel=0.1)
    again = two.operations(small).again
    assert four.operations(small).again == again * 2
    assert four.operations(small).forward.count - two.operations(small).forward.count == again.count


def test_what_is_no_model_is_refused_with_its_name(tmp_path: Path) -> None:
    with pytest.raises(ModelNotPlanned, match=r"there is no .*nothing; name a model's folder"):
        read_config(tmp_path / "nothing")
    file = tmp_path / "config.json"
    file.write_text('{"model_type": "no-such-model"}')
    with pytest.raises(ModelNotPlanned, match="no-such-model"):
        read_config(file)
    file.write_text('{"model_type": "clip"}')
    with pytest.raises(ModelNotPlanned, match="name a model that answers in text"):
        shape_of(read_config(file))
