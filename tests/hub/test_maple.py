"""Maple, a mixture of experts: its formats on disk, conversions, and what is refused."""

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlx_mmfree.errors import CheckpointError, UnsupportedModelError
from mlx_mmfree.generation import batch_generate, generate
from mlx_mmfree.hub import (
    convert,
    load,
    load_model,
    needed_bytes,
    open_checkpoint,
    save_model,
)
from mlx_mmfree.hub.publish.runtimes import opening
from mlx_mmfree.layers import PackedLinear
from mlx_mmfree.layers.linear import Float32Linear
from mlx_mmfree.layers.lora import adapted_layers, add_adapters
from mlx_mmfree.layers.matrix import parameters
from mlx_mmfree.models import Decoder, find
from tests.hub.checkpoints import GOLDENS, edit_json, edit_tensors, golden_checkpoint
from tests.tolerances import TOLERANCE, relative_error

CASES = ("maple_hf", "maple_mlx_2bit", "gguf_maple_q2_0")
FLOAT32 = TOLERANCE[mx.float32]
TOKENS = mx.array([[1, 7, 3, 39, 0, 12, 5, 22, 9]])


def ternary(**options: Any) -> Decoder:
    """A model whose attention and experts are ternary by row, in bfloat16."""
    architecture = find("maple")
    sizes = {"vocab_size": 520, "hidden_size": 256, "moe_intermediate_size": 256, "head_dim": 64}
    mx.random.seed(5)
    config = {**architecture.tiny, **sizes, "initializer_range": 0.1, **options}
    model: Decoder = architecture.build(architecture.config.from_hub(config))
    for path, module in model.named_modules():
        if path.endswith("_proj"):
            trits = mx.random.randint(-1, 2, module.weight.shape).astype(mx.float32)
            scales = mx.random.uniform(0.02, 0.1, (len(trits), 1)).astype(mx.float16)
            module.weight = trits * scales.astype(mx.float32)
    model.set_dtype(mx.float16)
    return model


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("maple") / "m"
    save_model(folder, ternary(), GOLDENS / "tokenizer_bpe")
    return folder


def logits(model: Decoder) -> mx.array:
    return model(TOKENS)[0]


def packed_bytes(model: Decoder) -> int:
    return sum(array.nbytes for array in parameters(model).values())


@pytest.mark.parametrize("case", CASES)
def test_experts_are_packed_in_one_matrix(case: str, tmp_path: Path) -> None:
    model = load_model(GOLDENS / case)
    config = model.config
    count = sum(isinstance(module, PackedLinear) for module in model.modules())
    assert count == 7 * config.num_hidden_layers
    mixer = model.blocks[0].channel_mixer
    rows = config.num_experts * config.moe_intermediate_size
    assert mixer.gate_proj.scale.shape == (rows,) and mixer.router.weight.dtype == mx.float32
    save_model(tmp_path / "again", model)
    again = load_model(tmp_path / "again")
    assert again.config == config
    assert mx.array_equal(logits(again), logits(model))


def test_a_packed_file_takes_what_it_is_in_memory() -> None:
    """Words and scales are read as they are: memory is the file and 10 % at most."""
    plan = needed_bytes(open_checkpoint(GOLDENS / "maple_hf"))
    assert 0.9 <= plan / packed_bytes(load_model(GOLDENS / "maple_hf")) <= 1.1
    file = GOLDENS / "maple_mlx_2bit"
    size = (file / "model.safetensors").stat().st_size
    model = load_model(file)
    assert needed_bytes(open_checkpoint(file)) <= 1.1 * size
    assert packed_bytes(model) <= 1.1 * size


@pytest.mark.exhaustive
@pytest.mark.parametrize("to", ["mlx", "q2_0", "tq2_0"])
def test_conversions_keep_every_value(source: Path, tmp_path: Path, to: str) -> None:
    options: dict[str, Any] = {} if to == "mlx" else {"to": "gguf", "gguf_type": to}
    report = convert(open_checkpoint(source), tmp_path / "m", **options)
    assert report.is_lossless and report.openings[0].opens is False
    model, _ = load(tmp_path / "m", dtype=mx.float32)
    want = load_model(source, dtype=mx.float32)
    assert model.config.layer_types == want.config.layer_types
    assert model.config.rotary_dims == 32 and model.config.sliding_window == 4
    assert relative_error(logits(model), logits(want)) <= FLOAT32
    router = model.blocks[1].channel_mixer.router.weight
    assert mx.array_equal(router, want.blocks[1].channel_mixer.router.weight)


@pytest.mark.parametrize("case", ["maple_hf", "maple_mlx_2bit"])
def test_the_format_of_its_own_program_has_a_tensor_for_each_expert(
    case: str, tmp_path: Path
) -> None:
    golden = mx.load(str(GOLDENS / case / "golden.safetensors"))
    report = convert(open_checkpoint(GOLDENS / case), tmp_path / "m", to="hf")
    assert report.groups["ternary matrices"].difference == 0.0
    written = mx.load(str(tmp_path / "m" / "model.safetensors"))
    assert not any("switch_mlp" in name for name in written)
    if case == "maple_hf":
        source = mx.load(str(GOLDENS / case / "model.safetensors"))
        assert written.keys() == source.keys()
        assert all(mx.array_equal(written[name], array) for name, array in source.items())
    got = load_model(tmp_path / "m", dtype=mx.float32)(golden["input_ids"])[0]
    # a head and an embedding of 4 bits are rounded to bfloat16 where they are written out
    bound = FLOAT32 if case == "maple_hf" else TOLERANCE[mx.bfloat16]
    assert relative_error(got, golden["logits"]) <= bound


@pytest.mark.interop
def test_llama_cpp_reads_what_is_written(source: Path, tmp_path: Path) -> None:
    llama_cpp = pytest.importorskip("llama_cpp", reason="needs llama-cpp-python")
    report = convert(open_checkpoint(source), tmp_path / "m", to="gguf", gguf_type="q2_0")
    answer = opening(report.openings, "llama.cpp")
    assert answer is not None and answer.opens
    file, tokens = next((tmp_path / "m").glob("*.gguf")), TOKENS[0].tolist()
    theirs = llama_cpp.Llama(str(file), n_ctx=16, logits_all=True, verbose=False)
    theirs.eval(tokens)
    got = mx.array(np.array(theirs.scores[: len(tokens)]))
    # activations have 8 bits there
    want = logits(load_model(tmp_path / "m", dtype=mx.float32))[0]
    assert relative_error(got, want) < 0.05


def test_experts_may_lie_in_several_files(tmp_path: Path) -> None:
    folder = golden_checkpoint("maple_hf", tmp_path / "m")
    want = logits(load_model(folder))
    tensors = dict(mx.load(str(folder / "model.safetensors")))
    names = sorted(tensors)
    shards = {"model-00001-of-00002.safetensors": names[::2]}
    shards["model-00002-of-00002.safetensors"] = names[1::2]
    for file, own in shards.items():
        mx.save_safetensors(str(folder / file), {name: tensors[name] for name in own})
    where = {name: file for file, own in shards.items() for name in own}
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    assert mx.array_equal(logits(load_model(folder)), want)


def test_a_window_is_not_off_by_one(source: Path) -> None:
    """A token sees itself and 3 before it where the window is 4; layers without one see all."""
    model = load_model(source, dtype=mx.float32)
    mixers = [block.token_mixer for block in model.blocks]
    assert ["rope" in mixer for mixer in mixers] == [True, True, True, False]
    for mixer, window in zip(mixers, (4, 4, 4, None), strict=True):
        x = mx.random.normal((1, 9, 256))
        seen = mx.grad(lambda x, mixer=mixer: mx.sin(mixer(x)[0][0, 8]).sum())(x)
        reached = (mx.abs(seen[0]).max(axis=1) > 0).tolist()
        assert reached == [window is None or n > 8 - window for n in range(9)]


def test_generates_as_it_reads(source: Path) -> None:
    model, tokenizer = load(source, dtype=mx.float32)
    prompts = ["Hello there", "One two three four five six"]
    alone = [generate(model, tokenizer, prompt, max_tokens=8) for prompt in prompts]
    together = batch_generate(model, tokenizer, prompts, max_tokens=8)
    assert together.texts == alone


@pytest.mark.parametrize("case", CASES)
def test_adapters_on_attention_and_experts_learn(case: str) -> None:
    model = load_model(GOLDENS / case, dtype=mx.float32)
    names = add_adapters(model, lambda path, _: path.endswith("_proj"), rank=2)
    assert len(names) == 7 * model.config.num_hidden_layers

    def loss_of(parameters: Any) -> mx.array:
        model.update(parameters)
        return mx.logsumexp(model(TOKENS[:, :5])[0], axis=-1).sum()

    loss, gradient = mx.value_and_grad(loss_of)(model.trainable_parameters())
    before = loss.item()
    assert set(adapted_layers(model)) == set(names)
    stepped = {
        name: array - 1e-5 * grad
        for (name, array), grad in zip(
            parameters_of(model.trainable_parameters()), values_of(gradient), strict=True
        )
    }
    model.load_weights(list(stepped.items()), strict=False)
    after = mx.logsumexp(model(TOKENS[:, :5])[0], axis=-1).sum().item()
    assert after < before


def parameters_of(tree: Any) -> list[tuple[str, mx.array]]:
    from mlx.utils import tree_flatten

    return list(tree_flatten(tree))


def values_of(tree: Any) -> list[mx.array]:
    return [array for _, array in parameters_of(tree)]


# planted faults: each changes the logits by much more than rounding


def swapped_experts(folder: Path) -> None:
    file = folder / "model.safetensors"
    tensors = dict(mx.load(str(file)))
    first, second = (f"model.layers.0.mlp.experts.{n}.up_proj.weight" for n in (0, 1))
    edit_tensors(file, **{first: tensors[second], second: tensors[first]})


def scaled_row(folder: Path) -> None:
    file = folder / "model.safetensors"
    name = "model.layers.1.self_attn.v_proj.weight"
    weight = mx.load(str(file))[name]
    edit_tensors(file, **{name: weight * mx.where(mx.arange(len(weight)) == 3, 2, 1)[:, None]})


FAULTS: dict[str, Any] = {
    "experts swapped": swapped_experts,
    "scale of a row": scaled_row,
    "no clamp": {"swiglu_limit": 1e6},
    "window one longer": {"sliding_window": 7},
    "window one shorter": {"sliding_window": 5},
    "rotation of all": {"partial_rotary_factor": 1.0},
    "positions in all layers": {"layer_types": ["sliding_attention"] * 4, "sliding_window": 99},
    "one expert": {"num_experts_per_tok": 1},
    "all experts": {"num_experts_per_tok": 5},
}


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_faults_are_found(fault: str, tmp_path: Path) -> None:
    folder, plant = golden_checkpoint("maple_hf", tmp_path / "m"), FAULTS[fault]
    if callable(plant):
        plant(folder)
    else:
        edit_json(folder / "config.json", **plant)
    golden = mx.load(str(folder / "golden.safetensors"))
    got = load_model(folder, dtype=mx.float32)(golden["input_ids"])[0]
    assert relative_error(got, golden["logits"]) > 10 * FLOAT32


def test_a_router_of_16_bits_would_be_found(monkeypatch: pytest.MonkeyPatch) -> None:
    golden = mx.load(str(GOLDENS / "maple_mlx_2bit" / "golden.safetensors"))
    model = load_model(GOLDENS / "maple_mlx_2bit", dtype=mx.float32)

    def in_16_bits(self: Float32Linear, x: mx.array) -> mx.array:
        y = x.astype(mx.bfloat16) @ self.weight.astype(mx.bfloat16).T
        return y.astype(mx.float32)

    monkeypatch.setattr(Float32Linear, "__call__", in_16_bits)
    assert relative_error(model(golden["input_ids"])[0], golden["logits"]) > 10 * FLOAT32


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layer_types": None}, "'layer_types' must name the kind of each of the 4 layers"),
        ({"layer_types": ["full_attention"]}, "'layer_types' must name the kind of each"),
        ({"layer_types": ["chunked"] * 4}, "must be sliding_attention or full_attention but"),
        ({"num_experts_per_tok": 6}, "'num_experts_per_tok' must be at most 'num_experts'"),
        ({"partial_rotary_factor": 0.3}, "'partial_rotary_factor' must give an even number"),
        ({"num_shared_experts": 1}, "'num_shared_experts' must be 0"),
        ({"norm_topk_prob": False}, "'norm_topk_prob' must be True"),
        ({"nope_on_global_attention": False}, "'nope_on_global_attention' must be True"),
        ({"moe_router_enable_expert_bias": True}, "'moe_router_enable_expert_bias' must be False"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "'rope_scaling' must be absent"),
        ({"num_experts": 6}, "must have shape"),
    ],
    ids=str,
)
def test_refused(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    folder = golden_checkpoint("maple_hf", tmp_path / "m")
    edit_json(folder / "config.json", **change)
    with pytest.raises((CheckpointError, UnsupportedModelError), match=message):
        load_model(folder)


@pytest.mark.parametrize("kind", ["missing", "other shape", "other dtype", "twice"])
def test_experts_that_are_not_alike_are_refused(kind: str, tmp_path: Path) -> None:
    folder = golden_checkpoint("maple_hf", tmp_path / "m")
    file, stem = folder / "model.safetensors", "model.layers.2.mlp"
    name = f"{stem}.experts.3.down_proj.weight"
    weight = mx.load(str(file))[name]
    changes = {
        "missing": {name: None},
        "other shape": {name: weight.T},
        "other dtype": {name: weight.astype(mx.float32)},
        "twice": {f"{stem}.switch_mlp.down_proj.weight": mx.stack([weight] * 5)},
    }
    edit_tensors(file, **changes[kind])
    with pytest.raises(
        CheckpointError, match="of one shape and dtype, numbered from 0 without a gap"
    ):
        load_model(folder)
