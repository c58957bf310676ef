"""Whole models against the reference implementation: outputs, states, tokens, gradients.

The kernels of flash-linear-attention need a GPU. Its cases, `fla_*`, are its own models on the formats
in plain torch that it keeps beside them; see `make_fla_models.py`. Those of Reformer are from
`make_reformer.py`.
"""

from collections.abc import Iterator
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten

from mlx_mmfree.hub import load_model
from mlx_mmfree.layers import PackedBitLinear
from mlx_mmfree.layers.attention.mixer import SelfAttention
from mlx_mmfree.layers.lora import DoRAEmbedding, add_adapters
from mlx_mmfree.models import Decoder, find
from mlx_mmfree.models.parts.architecture import WeightNames
from mlx_mmfree.models.parts.fused import FusedBlock
from mlx_mmfree.token_mixers import MLGRU, Mamba2State
from tests.goldens.cases import Case, golden, model_of
from tests.tolerances import GRADIENT_TOLERANCE, TOLERANCE, relative_error

FLOAT32 = TOLERANCE[mx.float32]
LOW_PRECISION_RMS = 0.1
LOOSER = ("qwen35", "prism")
"""Two implementations of Qwen3.5 in float32 differ by up to 8e-5, where others differ by 5e-5."""


def tolerance_of(case: Case) -> float:
    """That of a whole model, relative to the largest logit."""
    if not any(name in case.folder.name for name in LOOSER):
        return FLOAT32
    return 2e-4 / mx.abs(golden(case.folder)["logits"]).max().item()


@pytest.fixture
def block_outputs(monkeypatch: pytest.MonkeyPatch) -> list[mx.array]:
    """The output of each block since the test began, in order."""
    outputs: list[mx.array] = []
    call = FusedBlock.__call__

    def record(self: FusedBlock, *args: Any, **kwargs: Any) -> tuple[mx.array, Any]:
        y, state = call(self, *args, **kwargs)
        outputs.append(y)
        return y, state

    monkeypatch.setattr(FusedBlock, "__call__", record)
    return outputs


def inputs(tensors: dict[str, mx.array]) -> tuple[mx.array, mx.array]:
    tokens = tensors["input_ids"]
    mask = tensors.get("attention_mask")
    return tokens, mx.ones(tokens.shape, mx.bool_) if mask is None else mask.astype(mx.bool_)


def only_valid(x: mx.array, valid: mx.array) -> mx.array:
    """The array with zeros at positions of padding, whose values mean nothing."""
    return mx.where(valid[..., None], x, 0.0)


def greedy_tokens(model: Decoder, prompt: mx.array, count: int) -> Iterator[int]:
    logits, state = model(prompt[None])
    for _ in range(count):
        token = mx.argmax(logits[0, -1]).item()
        yield token
        logits, state = model(mx.array([[token]]), state)


def test_logits(model_case: Case, packed: bool) -> None:
    tensors, model = golden(model_case.folder), model_of(model_case.folder, packed, mx.float32)
    tokens, valid = inputs(tensors)
    logits, _ = model(tokens, None, valid)
    want = only_valid(tensors["logits"], valid)
    assert relative_error(only_valid(logits, valid), want) <= tolerance_of(model_case)


def test_logits_of_left_padded_rows(padding_case: Case, packed: bool) -> None:
    tensors, model = golden(padding_case.folder), model_of(padding_case.folder, packed, mx.float32)
    valid = tensors["pad.attention_mask"].astype(mx.bool_)
    logits, state = model(tensors["pad.input_ids"], None, valid)
    want = only_valid(tensors["pad.logits"], valid)
    assert relative_error(only_valid(logits, valid), want) <= tolerance_of(padding_case)
    for layer, own in enumerate(state):
        assert (f"pad.state.{layer}" in tensors) == hasattr(own, "memory")
        if hasattr(own, "memory"):
            assert relative_error(own.memory, tensors[f"pad.state.{layer}"]) <= FLOAT32
            assert relative_error(own.convolution, tensors[f"pad.conv.{layer}"]) <= FLOAT32


@pytest.mark.sample(2)
def test_hidden_states(hidden_case: Case, packed: bool, block_outputs: list[mx.array]) -> None:
    tensors, model = golden(hidden_case.folder), model_of(hidden_case.folder, packed, mx.float32)
    tokens, valid = (x[:1] for x in inputs(tensors))
    # a layer of Qwen3.5's cases enlarges what differs before it, by up to 27 times
    bound = FLOAT32 if tolerance_of(hidden_case) == FLOAT32 else 1e-4
    normed, _ = model.hidden(tokens, None, valid)
    got = [model.embed(tokens), *block_outputs[:-1], normed]
    wanted = {f"hidden_{k}": x for k, x in enumerate(got)}
    wanted["hidden_prenorm"] = block_outputs[-1]
    assert {name for name in tensors if name.startswith("hidden_")} == set(wanted)
    for name, x in wanted.items():
        want = only_valid(tensors[name][None], valid)
        assert relative_error(only_valid(x, valid), want) <= bound, name


@pytest.mark.sample(12)
def test_greedy_tokens(greedy_case: Case, packed: bool) -> None:
    tensors, model = golden(greedy_case.folder), model_of(greedy_case.folder, packed, mx.float32)
    want = tensors["greedy_ids"].tolist()
    assert list(greedy_tokens(model, tensors["greedy_prompt"], len(want))) == want


def assert_last_inputs(state: Any, want: mx.array) -> None:
    """States of a short convolution, or the last input alone, which a state of RWKV-7 holds."""
    got = state.shift[:, 0] if hasattr(state, "shift") else state.convolution
    assert relative_error(got, want) <= FLOAT32


def test_states_carried_over_chunks(chunk_case: Case, packed: bool) -> None:
    tensors, model = golden(chunk_case.folder), model_of(chunk_case.folder, packed, mx.float32)
    tokens, split = tensors["input_ids"], tensors["chunk_split"].item()
    state = None
    for number, chunk in enumerate(mx.split(tokens, [split], axis=1), 1):
        logits, state = model(chunk, state)
        want = tensors[f"logits_chunk{number}"]
        assert relative_error(logits, want) <= tolerance_of(chunk_case)
        if not any(name.startswith(f"state_chunk{number}.") for name in tensors):
            # of attention alone
            continue
        for layer, own in enumerate(model._of_blocks(state)):
            # a channel mixer that looks back has a state too
            both = isinstance(own, tuple) and type(own) is tuple
            layer_state = own[0] if both else own
            if both:
                last = tensors[f"ffn_chunk{number}.{layer}"]
                assert relative_error(own[1][:, 0], last) <= FLOAT32
            want = tensors.get(f"state_chunk{number}.{layer}")
            if want is None and isinstance(model.token_mixers[layer], SelfAttention):
                continue
            if hasattr(layer_state, "hidden"):
                got = layer_state.hidden.reshape(want.shape)
            else:
                got = layer_state.memory
                # of Mamba-2, transformers has values first
                got = got.swapaxes(2, 3) if isinstance(layer_state, Mamba2State) else got
                assert_last_inputs(layer_state, tensors[f"conv_chunk{number}.{layer}"])
            assert relative_error(got, want) <= FLOAT32, (number, layer)


def test_padded_rows_equal_rows_alone(padded_case: Case, packed: bool) -> None:
    tensors, model = golden(padded_case.folder), model_of(padded_case.folder, packed, mx.float32)
    tokens, valid = inputs(tensors)
    batch, state = model(tokens, None, valid)
    is_elementwise = all(isinstance(mixer, MLGRU) for mixer in model.token_mixers)
    for row, length in enumerate(valid.sum(axis=1).tolist()):
        alone, alone_state = model(tokens[row : row + 1, -length:])
        assert relative_error(batch[row, -length:], alone[0]) <= FLOAT32
        if is_elementwise:
            assert mx.array_equal(batch[row, -length:], alone[0])
            assert mx.array_equal(state[-1].hidden[row], alone_state[-1].hidden[0])


def gradients_of(model: Decoder, tensors: dict[str, mx.array]) -> dict[str, mx.array]:
    """The gradient of each trainable parameter, after a look at the loss."""
    tokens = tensors["input_ids"]

    def loss_of(model: Decoder) -> mx.array:
        logits, _ = model(tokens[:, :-1])
        return nn.losses.cross_entropy(logits, tokens[:, 1:], reduction="mean")

    loss, tree = nn.value_and_grad(model, loss_of)(model)
    assert abs(loss.item() - tensors["loss"].item()) <= 1e-5
    return dict(tree_flatten(tree))


def reference_gradients(model: Decoder, tensors: dict[str, mx.array]) -> dict[str, mx.array]:
    names = WeightNames(find(model.config.to_hub()["model_type"]).weight_names)
    found = {name[5:]: value for name, value in tensors.items() if name.startswith("grad.")}
    memory = {name: names.to_memory(name) or names.second_name(name)[0] for name in found}
    return {memory[name]: value for name, value in found.items()}


def test_loss_and_gradients(gradient_case: Case, packed: bool) -> None:
    """Packed weights have no gradient; what lies before and after them has."""
    tensors, model = (
        golden(gradient_case.folder),
        model_of(gradient_case.folder, packed, mx.float32),
    )
    gradients, wanted = gradients_of(model, tensors), reference_gradients(model, tensors)
    frozen = {
        f"{name}.weight"
        for name, module in model.named_modules()
        if type(module) is PackedBitLinear
    }
    assert bool(frozen) == packed
    assert set(gradients) == set(wanted) - frozen
    for name, gradient in gradients.items():
        assert relative_error(gradient, wanted[name]) <= GRADIENT_TOLERANCE, name


@pytest.mark.sample(2)
def test_gradients_of_fresh_adapters(gradient_case: Case, packed: bool) -> None:
    r"""From the reference's gradient G of each matrix W, :math:`y = m / |W| (W x + B^T A^T x)`.

    While B is zero, the gradient of B is :math:`A^T G^T` and of m :math:`(G \odot W) 1 / |W|`. An
    adapter of a ternary layer reads other values than the codes in G, so there only m has its reference.
    """
    tensors = golden(gradient_case.folder)
    model = load_model(gradient_case.folder, packed=packed, dtype=mx.float32)
    wanted = reference_gradients(model, tensors)
    names = add_adapters(model, lambda *_: True, kind="dora", rank=4, scale=1.0)
    gradients, modules = gradients_of(model, tensors), dict(model.named_modules())
    assert len(names) > 8 and "embed" in names and ("head" in names) == ("head" in modules)
    for name in names:
        adapter, gradient = modules[name], wanted[f"{name}.weight"]
        base, is_embedding = adapter.base, type(adapter) is DoRAEmbedding
        rows = (
            base.weight
            if is_embedding
            else adapter.matrix.multiply(mx.eye(adapter.lora_a.shape[0])).T
        )
        want = (gradient * rows).sum(axis=1) / mx.linalg.norm(rows, axis=1)
        assert relative_error(gradients[f"{name}.m"], want) <= GRADIENT_TOLERANCE, name
        assert not gradients[f"{name}.lora_a"].any().item()
        if is_embedding or isinstance(base, nn.Linear):
            want = adapter.lora_a.T @ (gradient if is_embedding else gradient.T)
            assert relative_error(gradients[f"{name}.lora_b"], want) <= GRADIENT_TOLERANCE, name


def test_low_precision_logits(low_precision_case: Case, packed: bool) -> None:
    folder = low_precision_case.folder
    tensors, model = golden(folder), model_of(folder, packed, None)
    assert model.dtype in (mx.float16, mx.bfloat16)
    logits, _ = model(tensors["input_ids"])
    difference = logits.astype(mx.float32) - tensors["logits_lowp"]
    assert mx.sqrt(mx.mean(difference**2)).item() <= LOW_PRECISION_RMS
