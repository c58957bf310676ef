"""The loss of the next token, with all logits at once and in blocks."""

from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten

from mlx_mmfree.layers import BitLinear
from mlx_mmfree.layers.linear import TiedBitLinear
from mlx_mmfree.layers.lora import LoRALinear
from mlx_mmfree.models import Decoder, find
from mlx_mmfree.training.batches import Batch
from mlx_mmfree.training.losses import loss as module
from mlx_mmfree.training.losses.loss import batch_logits, next_token_loss
from tests.tolerances import GRADIENT_TOLERANCE, relative_error

VOCABULARY = 101


def build(tied: bool = False, vocab_size: int = VOCABULARY) -> Decoder:
    mx.random.seed(1)
    config = {
        "model_type": "llama",
        "vocab_size": vocab_size,
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 24,
        "tie_word_embeddings": tied,
    }
    architecture = find("llama")
    model: Decoder = architecture.build(architecture.config.from_hub(config))
    return model.train()


def with_head(kind: str) -> Decoder:
    model = build(tied=kind == "tied")
    if kind == "ternary":
        model.head = BitLinear(16, VOCABULARY, norm_eps=1e-6)
    elif kind == "tied ternary":
        model.head = TiedBitLinear(model.embed, norm_eps=None)
    elif kind == "LoRA with dropout":
        model.head = LoRALinear(model.head, rank=2, dropout=0.5)
        model.head.lora_b = mx.random.normal(model.head.lora_b.shape)
    return model


def batch(rows: int = 3, length: int = 10, vocab_size: int = VOCABULARY) -> Batch:
    rng = np.random.default_rng(2)
    made = Batch.of_rows(rng.integers(0, vocab_size, (rows, length + 1), dtype=np.int32))
    made.weights[:, ::3] = 0
    return made


def in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Computes 30 tokens in blocks of 7."""
    monkeypatch.setattr(module, "_WHOLE", 0)
    monkeypatch.setattr(module, "_BLOCK", 7 * VOCABULARY + 1)


def loss_and_gradients(model: Decoder, given: Batch) -> tuple[mx.array, list[tuple[str, Any]]]:
    mx.random.seed(7)
    loss, gradients = nn.value_and_grad(model, next_token_loss)(model, given)
    mx.eval(loss, gradients)
    return loss, tree_flatten(gradients)


def test_the_loss_is_the_weighted_sum_of_cross_entropies() -> None:
    model, given = build(), batch()
    logits = np.array(batch_logits(model, given), np.float64)
    shares = np.exp(logits) / np.exp(logits).sum(axis=-1, keepdims=True)
    of_targets = np.take_along_axis(shares, given.targets[..., None], axis=-1)[..., 0]
    want = -(given.weights * np.log(of_targets)).sum()
    assert next_token_loss(model, given).item() == pytest.approx(want, rel=1e-6)


@pytest.mark.parametrize("kind", ["dense", "tied", "ternary", "tied ternary"])
def test_blocks_give_the_same_loss_and_gradients(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = with_head(kind)
    want, gradients = loss_and_gradients(model, batch())
    in_blocks(monkeypatch)
    loss, blocked = loss_and_gradients(model, batch())
    assert relative_error(loss, want) <= 1e-6
    assert [name for name, _ in blocked] == [name for name, _ in gradients]
    for (name, own), (_, other) in zip(blocked, gradients, strict=True):
        assert relative_error(own, other) <= GRADIENT_TOLERANCE, name


def test_dropout_in_the_head_is_the_same_in_both_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    model = with_head("LoRA with dropout")
    in_blocks(monkeypatch)
    model.head.lora_a = mx.random.normal(model.head.lora_a.shape)
    _, gradients = loss_and_gradients(model, batch())
    gradient = dict(gradients)["head.lora_b"]
    before, step = mx.array(model.head.lora_b), 1e-2
    ends = []
    for sign in (1, -1):
        model.head.lora_b = before + sign * step * gradient / mx.linalg.norm(gradient)
        ends.append(loss_and_gradients(model, batch())[0].item())
    slope = (ends[0] - ends[1]) / (2 * step)
    assert slope == pytest.approx(mx.linalg.norm(gradient).item(), rel=1e-2)


def test_logits_are_never_held_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build(vocab_size=5003)
    given = batch(1, 2048, 5003)
    mx.eval(model.parameters())
    peaks = []
    for whole in (2**25, 0):
        monkeypatch.setattr(module, "_WHOLE", whole)
        monkeypatch.setattr(module, "_BLOCK", 2**16)
        mx.reset_peak_memory()
        before = mx.get_active_memory()
        loss_and_gradients(model, given)
        peaks.append(mx.get_peak_memory() - before)
    # one copy of all logits takes 41 MB
    assert peaks[0] > 41e6 > 1.5 * peaks[1]


def test_a_token_outside_of_the_vocabulary_is_no_loss() -> None:
    given = batch()
    given.inputs[0, 3] = VOCABULARY
    assert mx.isnan(next_token_loss(build(), given))


@pytest.mark.interop
@pytest.mark.parametrize("label_smoothing", [0.0, 0.1, 0.9])
def test_smoothing_is_that_of_torch(label_smoothing: float) -> None:
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(3)
    logits = (5 * rng.standard_normal((6, 7, 1000))).astype(np.float32)
    targets = rng.integers(0, 1000, (6, 7))

    def ours(logits: mx.array) -> mx.array:
        return module.smoothed_cross_entropy(logits, mx.array(targets), label_smoothing).sum()

    got, gradient = mx.value_and_grad(ours)(mx.array(logits))
    theirs = torch.tensor(logits).double().requires_grad_()
    want = torch.nn.functional.cross_entropy(
        theirs.reshape(-1, 1000),
        torch.tensor(targets).reshape(-1),
        label_smoothing=label_smoothing,
        reduction="sum",
    )
    want.backward()
    assert got.item() == pytest.approx(want.item(), rel=1e-6)
    wanted = mx.array(theirs.grad.numpy().astype(np.float32))
    assert relative_error(gradient, wanted) <= GRADIENT_TOLERANCE


@pytest.mark.parametrize("model_type", ["fnet", "marian", "metaformer"])
def test_heads_learn_as_a_whole_in_blocks(monkeypatch: pytest.MonkeyPatch, model_type: str) -> None:
    """A head may have parameters of its own: biases, or a layer before it."""
    mx.random.seed(1)
    architecture = find(model_type)
    model = architecture.build(architecture.config.from_hub(architecture.tiny))
    dims = model.dims
    hidden = mx.random.normal((3, 10, dims))
    made = batch(vocab_size=60)

    def loss(model: Any) -> mx.array:
        return module.target_losses(model, hidden, made, 0.1).sum()

    whole = dict(tree_flatten(nn.value_and_grad(model, loss)(model)[1]))
    in_blocks(monkeypatch)
    parts = dict(tree_flatten(nn.value_and_grad(model, loss)(model)[1]))
    changed = [name for name, gradient in whole.items() if mx.abs(gradient).max() > 0]
    assert changed
    for name in changed:
        assert relative_error(parts[name], whole[name]) <= GRADIENT_TOLERANCE, name
