"""A ternary transformer for mlx-lm: Llama, Qwen3 and BitNet b1.58 with further norms.

mlx-lm runs this file from a model's folder (`--trust-remote-code`). It needs only mlx and mlx-lm.
Ternary weights are in MLX's affine 2-bit form; activations stay in floating point.
"""

from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.base import (
    BaseModelArgs,
    create_attention_mask,
    scaled_dot_product_attention,
)
from mlx_lm.models.rope_utils import initialize_rope

LINEAR_NORM = "rms_norm"


@dataclass
class ModelArgs(BaseModelArgs):
    model_type: str
    hidden_act: str
    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    max_position_embeddings: int
    architectures: list[str]
    quantization_config: dict[str, Any] | None = None
    rope_scaling: dict[str, Any] | None = None
    attention_bias: bool = False
    mlp_bias: bool = False
    tie_word_embeddings: bool = False

    @property
    def sub_norm_names(self) -> tuple[str, str]:
        """Norms before the last projection of attention and feed-forward; empty if there are none."""
        if self.model_type == "bitnet":
            return "attn_sub_norm", "ffn_sub_norm"
        if "BitnetForCausalLM" in self.architectures:
            return "inner_attn_ln", "ffn_layernorm"
        return "", ""

    @property
    def linear_norm_eps(self) -> float | None:
        """Epsilon of a norm inside each ternary linear; `None` if there is none."""
        described = self.quantization_config or {}
        return described.get("rms_norm_eps", 1e-6) if described.get("use_rms_norm") else None


def ternary_product(linear: nn.Module, x: mx.array) -> mx.array:
    """The product of a linear in the 2-bit form. Inputs are padded with zeros to its width."""
    dtype = x.dtype
    if padding := linear.scales.shape[1] * linear.group_size - x.shape[-1]:
        x = mx.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, padding)])
    if mx.default_device() == mx.cpu:
        # MLX sums 16-bit quantised products in 16 bits there
        x = x.astype(mx.float32)
    y = mx.quantized_matmul(
        x,
        linear.weight,
        linear.scales,
        linear.biases,
        group_size=linear.group_size,
        bits=linear.bits,
    )
    return (y + linear.bias if "bias" in linear else y).astype(dtype)


class TernaryLinear(nn.QuantizedLinear):
    """A linear in the 2-bit form, whose rows are padded to a multiple of 32 inputs."""

    def __init__(self, input_dims: int, output_dims: int, bias: bool, group_size: int, bits: int):
        super().__init__(input_dims + -input_dims % 32, output_dims, bias, group_size, bits)
        self.input_dims = input_dims

    def __call__(self, x: mx.array) -> mx.array:
        return ternary_product(self, x)

    def to_lora(self, r: int = 8, scale: float = 20.0, dropout: float = 0.0) -> nn.Module:
        return AdaptedLinear(self, r, scale, dropout)


class NormedTernaryLinear(nn.Module):
    """An RMSNorm and a linear in the 2-bit form.

    It is not an `nn.QuantizedLinear`, since the adapters that mlx-lm puts on those would read the input
    of the norm. LoRA reads the normed input here, and DoRA is refused.
    """

    def __init__(
        self,
        input_dims: int,
        output_dims: int,
        bias: bool,
        norm_eps: float,
        group_size: int,
        bits: int,
    ):
        super().__init__()
        self.input_dims, self.group_size, self.bits = input_dims, group_size, bits
        columns = input_dims + -input_dims % 32
        self.weight = mx.zeros((output_dims, columns * bits // 32), mx.uint32)
        self.scales = mx.ones((output_dims, columns // group_size))
        self.biases = mx.zeros((output_dims, columns // group_size))
        if bias:
            self.bias = mx.zeros((output_dims,))
        self[LINEAR_NORM] = nn.RMSNorm(input_dims, eps=norm_eps)

    def __call__(self, x: mx.array) -> mx.array:
        return ternary_product(self, self[LINEAR_NORM](x))

    def to_lora(self, r: int = 8, scale: float = 20.0, dropout: float = 0.0) -> nn.Module:
        return AdaptedLinear(self, r, scale, dropout)


class AdaptedLinear(nn.Module):
    """A ternary linear and a low-rank one (LoRA) that reads the same input, behind the norm if any."""

    def __init__(self, linear: nn.Module, rank: int, scale: float, dropout: float):
        super().__init__()
        bound = linear.input_dims**-0.5
        self.linear = linear
        self.scale = scale
        self.dropout = nn.Dropout(dropout)
        self.lora_a = mx.random.uniform(-bound, bound, (linear.input_dims, rank))
        self.lora_b = mx.zeros((rank, linear.weight.shape[0]))

    def __call__(self, x: mx.array) -> mx.array:
        if LINEAR_NORM in self.linear:
            x = self.linear[LINEAR_NORM](x)
        y = ternary_product(self.linear, x)
        change = (self.dropout(x) @ self.lora_a) @ self.lora_b
        return y + (self.scale * change).astype(y.dtype)

    def fuse(self, dequantize: bool = False) -> nn.Module:
        raise ValueError("A ternary matrix plus an adapter is not ternary: use 'mmfree fuse'.")


class Linear(nn.Linear):
    """A dense linear, or the place of a ternary one until mlx-lm asks for its quantised form."""

    def __init__(
        self,
        input_dims: int,
        output_dims: int,
        bias: bool = False,
        norm_eps: float | None = None,
    ):
        super().__init__(input_dims, output_dims, bias)
        self._norm_eps = norm_eps

    def to_quantized(
        self,
        group_size: int | None = None,
        bits: int | None = None,
        mode: str = "affine",
        quantize_input: bool = False,
    ) -> nn.Module:
        if group_size is None or bits != 2:
            return super().to_quantized(group_size, bits, mode, quantize_input)
        output_dims, input_dims = self.weight.shape
        bias, eps = "bias" in self, self._norm_eps
        if eps is None:
            return TernaryLinear(input_dims, output_dims, bias, group_size, bits)
        return NormedTernaryLinear(input_dims, output_dims, bias, eps, group_size, bits)


class Attention(nn.Module):
    def __init__(self, args: ModelArgs):
        super().__init__()
        dims, heads, kv_heads = args.hidden_size, args.num_attention_heads, args.num_key_value_heads
        bias, eps = args.attention_bias, args.linear_norm_eps
        self._head_dim = args.head_dim
        self.q_proj = Linear(dims, heads * args.head_dim, bias, eps)
        self.k_proj = Linear(dims, kv_heads * args.head_dim, bias, eps)
        self.v_proj = Linear(dims, kv_heads * args.head_dim, bias, eps)
        self.o_proj = Linear(heads * args.head_dim, dims, bias, eps)
        if args.model_type == "qwen3":
            self.q_norm = nn.RMSNorm(args.head_dim, eps=args.rms_norm_eps)
            self.k_norm = nn.RMSNorm(args.head_dim, eps=args.rms_norm_eps)
        self._sub_norm = args.sub_norm_names[0]
        if self._sub_norm:
            self[self._sub_norm] = nn.RMSNorm(heads * args.head_dim, eps=args.rms_norm_eps)
        self.rope = initialize_rope(
            args.head_dim,
            args.rope_theta,
            False,
            args.rope_scaling,
            args.max_position_embeddings,
        )

    def _heads(self, x: mx.array, norm: str = "") -> mx.array:
        x = x.reshape(*x.shape[:2], -1, self._head_dim)
        return (self[norm](x) if norm in self else x).transpose(0, 2, 1, 3)

    def __call__(self, x: mx.array, mask: Any, cache: Any) -> mx.array:
        queries = self._heads(self.q_proj(x), "q_norm")
        keys = self._heads(self.k_proj(x), "k_norm")
        values = self._heads(self.v_proj(x))
        offset = 0 if cache is None else cache.offset
        queries, keys = self.rope(queries, offset=offset), self.rope(keys, offset=offset)
        if cache is not None:
            keys, values = cache.update_and_fetch(keys, values)
        y = scaled_dot_product_attention(
            queries, keys, values, cache=cache, scale=self._head_dim**-0.5, mask=mask
        )
        y = y.transpose(0, 2, 1, 3).reshape(*x.shape[:2], -1)
        return self.o_proj(self[self._sub_norm](y) if self._sub_norm else y)


class FeedForward(nn.Module):
    def __init__(self, args: ModelArgs):
        super().__init__()
        dims, hidden_dims = args.hidden_size, args.intermediate_size
        bias, eps = args.mlp_bias, args.linear_norm_eps
        self.gate_proj = Linear(dims, hidden_dims, bias, eps)
        self.up_proj = Linear(dims, hidden_dims, bias, eps)
        self.down_proj = Linear(hidden_dims, dims, bias, eps)
        self._sub_norm = args.sub_norm_names[1]
        if self._sub_norm:
            self[self._sub_norm] = nn.RMSNorm(hidden_dims, eps=args.rms_norm_eps)
        self._activation = {"silu": nn.silu, "relu2": nn.relu2}[args.hidden_act]

    def __call__(self, x: mx.array) -> mx.array:
        hidden = self._activation(self.gate_proj(x)) * self.up_proj(x)
        return self.down_proj(self[self._sub_norm](hidden) if self._sub_norm else hidden)


class Block(nn.Module):
    def __init__(self, args: ModelArgs):
        super().__init__()
        self.self_attn = Attention(args)
        self.mlp = FeedForward(args)
        self.input_layernorm = nn.RMSNorm(args.hidden_size, eps=args.rms_norm_eps)
        self.post_attention_layernorm = nn.RMSNorm(args.hidden_size, eps=args.rms_norm_eps)

    def __call__(self, x: mx.array, mask: Any, cache: Any) -> mx.array:
        x = x + self.self_attn(self.input_layernorm(x), mask, cache)
        return x + self.mlp(self.post_attention_layernorm(x))


class Decoder(nn.Module):
    def __init__(self, args: ModelArgs):
        super().__init__()
        self.embed_tokens = nn.Embedding(args.vocab_size, args.hidden_size)
        self.layers = [Block(args) for _ in range(args.num_hidden_layers)]
        self.norm = nn.RMSNorm(args.hidden_size, eps=args.rms_norm_eps)

    def __call__(self, x: mx.array, cache: Any) -> mx.array:
        mask = create_attention_mask(x, cache[0])
        for layer, layer_cache in zip(self.layers, cache, strict=True):
            x = layer(x, mask, layer_cache)
        return self.norm(x)


class Model(nn.Module):
    def __init__(self, args: ModelArgs):
        super().__init__()
        self.args = args
        self.model_type = args.model_type
        self.model = Decoder(args)
        if not args.tie_word_embeddings:
            self.lm_head = Linear(args.hidden_size, args.vocab_size, norm_eps=args.linear_norm_eps)

    def __call__(
        self, inputs: mx.array, cache: Any = None, input_embeddings: mx.array | None = None
    ) -> mx.array:
        x = self.model.embed_tokens(inputs) if input_embeddings is None else input_embeddings
        x = self.model(x, [None] * len(self.layers) if cache is None else cache)
        if self.args.tie_word_embeddings:
            return self.model.embed_tokens.as_linear(x)
        return self.lm_head(x)

    @property
    def layers(self) -> list[Block]:
        return self.model.layers
