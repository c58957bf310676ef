"""Writes golden files of attention with biases by distance, as transformers has them.

    python -m tests.goldens.mixers.make_position_bias OUTPUT [SEED]

The extra `interop` is needed.
"""

import json
import sys
from pathlib import Path
from typing import Any

import mlx.core as mx
import torch
import transformers
from transformers.models.bloom.configuration_bloom import BloomConfig
from transformers.models.bloom.modeling_bloom import BloomAttention, build_alibi_tensor
from transformers.models.t5.configuration_t5 import T5Config
from transformers.models.t5.modeling_t5 import T5Attention

BATCH, LENGTH, HEAD_DIM = 2, 23, 4
Tensors = dict[str, torch.Tensor]


def drawn(layer: torch.nn.Module, dims: int, seed: int) -> torch.Tensor:
    """Draws the weights of a layer, and an input."""
    random = torch.Generator().manual_seed(seed)
    for parameter in layer.parameters():
        parameter.copy_(0.5 * torch.randn(parameter.shape, generator=random))
    return torch.randn(BATCH, LENGTH, dims, generator=random)


def causal_mask() -> torch.Tensor:
    later = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)
    return torch.zeros(1, 1, LENGTH, LENGTH).masked_fill(later, -torch.inf)


def alibi(seed: int) -> tuple[Tensors, dict[str, Any], str]:
    heads = 6
    dims = heads * HEAD_DIM
    layer = BloomAttention(BloomConfig(hidden_size=dims, n_head=heads), layer_idx=0).eval()
    x = drawn(layer, dims, seed)
    bias = build_alibi_tensor(torch.ones(BATCH, LENGTH), heads, torch.float32)
    y, _ = layer(x, torch.zeros_like(x), bias, causal_mask())
    tensors = {f"w.{name}": value for name, value in layer.named_parameters()}
    # of the first row, since rows do not differ without padding
    tensors |= {"in.x": x, "out.bias": bias[:heads], "out.y": y}
    return tensors, {"heads": heads, "dims": dims}, "BloomAttention, build_alibi_tensor"


def relative_bias(seed: int) -> tuple[Tensors, dict[str, Any], str]:
    options = {
        "d_model": 12,
        "num_heads": 3,
        "relative_attention_num_buckets": 8,
        "relative_attention_max_distance": 16,
    }
    tensors: Tensors = {}
    for is_decoder in (False, True):
        config = T5Config(d_kv=HEAD_DIM, is_decoder=is_decoder, **options)
        config._attn_implementation = "eager"
        layer = T5Attention(config, has_relative_attention_bias=True, layer_idx=0).eval()
        # both kinds have the same parameters
        x = drawn(layer, options["d_model"], seed)
        kind = "causal" if is_decoder else "bidirectional"
        tensors |= {f"w.{name}": value for name, value in layer.named_parameters()}
        mask = causal_mask() if is_decoder else None
        tensors |= {"in.x": x, f"out.bias_{kind}": layer.compute_bias(LENGTH, LENGTH)}
        tensors |= {f"out.y_{kind}": layer(x, mask=mask)[0]}
    return tensors, options | {"head_dim": HEAD_DIM, "scale": 1.0}, "T5Attention"


FILES = {"alibi__bloom": alibi, "relative_bias__t5": relative_bias}


def main(output: str, seed: str = "0") -> None:
    for name, make in FILES.items():
        with torch.no_grad():
            tensors, hyper, symbol = make(int(seed))
        version = transformers.__version__
        source = {"package": "transformers", "version": version, "symbol": symbol}
        metadata = {
            "golden": name,
            "kind": "third-party",
            "hyper": json.dumps(hyper),
            "source": json.dumps(source),
            "note": "written by tests/goldens/mixers/make_position_bias.py",
            "computed_in": "float32",
        }
        arrays = {key: mx.array(value.detach().numpy().copy()) for key, value in tensors.items()}
        mx.save_safetensors(str(Path(output) / f"{name}.safetensors"), arrays, metadata)


if __name__ == "__main__":
    main(*sys.argv[1:])
