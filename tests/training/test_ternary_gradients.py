"""Losses and gradients of ternary transformers, against their definition in PyTorch and float64."""

from collections.abc import Mapping
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten

from mlx_mmfree.models import find
from mlx_mmfree.training.batches import Batch
from mlx_mmfree.training.losses.loss import next_token_loss
from tests.tolerances import GRADIENT_TOLERANCE, relative_error

pytestmark = pytest.mark.interop

HEADS, KV_HEADS, LAYERS, EPS = 4, 2, 2, 1e-6
QUANTIZED = {"quant_method": "bitnet", "linear_class": "autobitlinear"}
SIZE = {
    "vocab_size": 60,
    "hidden_size": 32,
    "num_hidden_layers": LAYERS,
    "intermediate_size": 48,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "rms_norm_eps": EPS,
    "rope_theta": 10000.0,
    "initializer_range": 0.2,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", "quantization_config": QUANTIZED},
    "llama-inner-norms": {
        "model_type": "llama",
        "quantization_config": QUANTIZED | {"use_rms_norm": True, "rms_norm_eps": EPS},
    },
    "bitnet": {"model_type": "bitnet"},
}


class Definition:
    """The model in PyTorch's own operations, with quantisers that pass gradients straight through."""

    def __init__(self, weights: Mapping[str, mx.array], activation: Any):
        import torch

        self.torch = torch
        self.activation = activation
        self.weights = {
            name: torch.tensor(np.array(weight), dtype=torch.float64, requires_grad=True)
            for name, weight in weights.items()
        }

    def norm(self, x: Any, name: str) -> Any:
        if f"{name}.weight" not in self.weights:
            return x
        mean = x.square().mean(-1, keepdim=True)
        return x / (mean + EPS).sqrt() * self.weights[f"{name}.weight"]

    def linear(self, x: Any, name: str) -> Any:
        x = self.norm(x, f"{name}.norm")
        scale = 127 / x.detach().abs().amax(-1, keepdim=True)
        x = x + ((x * scale).round() / scale - x).detach()
        weight = self.weights[f"{name}.weight"]
        mean = weight.detach().abs().mean()
        weight = weight + ((weight / mean).round().clamp(-1, 1) * mean - weight).detach()
        return x @ weight.T

    def rotated(self, x: Any) -> Any:
        torch, dims = self.torch, x.shape[-1]
        wavelengths = 10000.0 ** (torch.arange(0, dims, 2) / dims).double()
        angles = torch.arange(x.shape[-2]).double()[:, None] / wavelengths
        turned = torch.view_as_complex(torch.stack(x.chunk(2, -1), -1).contiguous())
        turned = turned * torch.polar(torch.ones_like(angles), angles)
        return torch.cat([turned.real, turned.imag], -1)

    def attention(self, x: Any, name: str) -> Any:
        torch, (rows, length, dims) = self.torch, x.shape

        def heads(kind: str, count: int) -> Any:
            y = self.linear(x, f"{name}.{kind}_proj").view(rows, length, count, -1)
            return y.transpose(1, 2).repeat_interleave(HEADS // count, 1)

        query, key = self.rotated(heads("query", HEADS)), self.rotated(heads("key", KV_HEADS))
        scores = query @ key.transpose(-1, -2) / (dims // HEADS) ** 0.5
        hidden = torch.ones(length, length, dtype=torch.bool).triu(1)
        shares = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        y = (shares @ heads("value", KV_HEADS)).transpose(1, 2).reshape(rows, length, dims)
        return self.linear(self.norm(y, f"{name}.output_norm"), f"{name}.output_proj")

    def feed_forward(self, x: Any, name: str) -> Any:
        gate = self.activation(self.linear(x, f"{name}.gate_proj"))
        y = self.norm(gate * self.linear(x, f"{name}.up_proj"), f"{name}.hidden_norm")
        return self.linear(y, f"{name}.down_proj")

    def loss(self, tokens: np.ndarray) -> Any:
        ids = self.torch.tensor(tokens).long()
        x = self.weights["embed.weight"][ids[:, :-1]]
        for layer in range(LAYERS):
            block = f"blocks.{layer}"
            x = x + self.attention(self.norm(x, f"{block}.token_norm"), f"{block}.token_mixer")
            x = x + self.feed_forward(
                self.norm(x, f"{block}.channel_norm"), f"{block}.channel_mixer"
            )
        logits = self.norm(x, "norm") @ self.weights["head.weight"].T
        return self.torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="sum"
        )


@pytest.mark.parametrize("name", CONFIGS)
def test_loss_and_gradient_are_those_of_the_definition(name: str) -> None:
    import torch.nn.functional as F

    architecture = find(CONFIGS[name]["model_type"])
    mx.random.seed(3)
    model = architecture.build(architecture.config.from_hub(SIZE | CONFIGS[name]))
    tokens = np.random.default_rng(0).integers(0, 60, (3, 20)).astype(np.int32)
    loss, gradient = nn.value_and_grad(model, next_token_loss)(model, Batch.of_rows(tokens))
    activation = F.silu if name != "bitnet" else lambda x: F.relu(x) ** 2
    definition = Definition(dict(tree_flatten(model.parameters())), activation)
    want = definition.loss(tokens)
    want.backward()
    assert loss.item() == pytest.approx(want.item(), rel=1e-5)
    gradients = dict(tree_flatten(gradient))
    assert gradients.keys() == definition.weights.keys()
    for path, got in gradients.items():
        reference = mx.array(definition.weights[path].grad.numpy().astype(np.float32))
        assert relative_error(got, reference) <= GRADIENT_TOLERANCE, path
