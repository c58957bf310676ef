"""HGRN-bit, the MatMul-free language model (arXiv 2406.02528), for mlx-lm.

mlx-lm runs this file from a model's folder (`--trust-remote-code`). It needs only mlx and mlx-lm.
Ternary weights are in MLX's affine 2-bit form; activations stay in floating point.
"""

from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.base import BaseModelArgs, create_ssm_mask
from mlx_lm.models.cache import ArraysCache

LINEAR_NORM_EPS = 1e-6


@dataclass
class ModelArgs(BaseModelArgs):
    model_type: str
    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    intermediate_size: int
    expand_ratio: float
    rms_norm_eps: float
    use_lower_bound: bool
    use_short_conv: bool
    conv_size: int
    share_conv_kernel: bool
    tie_word_embeddings: bool
    linear_class: str = "ternary"

    @property
    def convolutions(self) -> tuple[str, ...]:
        if not self.use_short_conv:
            return ()
        return ("h_conv1d",) if self.share_conv_kernel else ("i_conv1d", "f_conv1d")


class TernaryLinear(nn.Module):
    """An RMSNorm and a linear in the 2-bit form, whose rows are padded to a multiple of 32 inputs.

    It is not an `nn.QuantizedLinear`, since the adapters that mlx-lm puts on those would read the input
    of the norm. LoRA reads the normed input here, and DoRA is refused.
    """

    def __init__(self, input_dims: int, output_dims: int, group_size: int, bits: int):
        super().__init__()
        self._padding, self._group_size, self._bits = -input_dims % 32, group_size, bits
        columns = input_dims + self._padding
        self.weight = mx.zeros((output_dims, columns * bits // 32), mx.uint32)
        self.scales = mx.ones((output_dims, columns // group_size))
        self.biases = mx.zeros((output_dims, columns // group_size))
        self.norm = nn.RMSNorm(input_dims, eps=LINEAR_NORM_EPS)

    def product(self, x: mx.array) -> mx.array:
        """The linear without its norm, applied to normed inputs."""
        dtype = x.dtype
        if self._padding:
            x = mx.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, self._padding)])
        if mx.default_device() == mx.cpu:
            # MLX sums 16-bit quantised products in 16 bits there
            x = x.astype(mx.float32)
        return mx.quantized_matmul(
            x,
            self.weight,
            self.scales,
            self.biases,
            group_size=self._group_size,
            bits=self._bits,
        ).astype(dtype)

    def __call__(self, x: mx.array) -> mx.array:
        return self.product(self.norm(x))

    def to_lora(self, r: int = 8, scale: float = 20.0, dropout: float = 0.0) -> nn.Module:
        return AdaptedLinear(self, r, scale, dropout)


class AdaptedLinear(nn.Module):
    """A ternary linear and a low-rank one that reads the same normed input (LoRA)."""

    def __init__(self, linear: TernaryLinear, rank: int, scale: float, dropout: float):
        super().__init__()
        (input_dims,), (output_dims, _) = linear.norm.weight.shape, linear.weight.shape
        bound = input_dims**-0.5
        self.linear = linear
        self.scale = scale
        self.dropout = nn.Dropout(dropout)
        self.lora_a = mx.random.uniform(-bound, bound, (input_dims, rank))
        self.lora_b = mx.zeros((rank, output_dims))

    def __call__(self, x: mx.array) -> mx.array:
        x = self.linear.norm(x)
        y = self.linear.product(x)
        change = (self.dropout(x) @ self.lora_a) @ self.lora_b
        return y + (self.scale * change).astype(y.dtype)

    def fuse(self, dequantize: bool = False) -> nn.Module:
        raise ValueError("A ternary matrix plus an adapter is not ternary: use 'mmfree fuse'.")


class Linear(nn.Linear):
    """A dense linear, or the place of a ternary one until mlx-lm asks for its quantised form."""

    def __init__(self, input_dims: int, output_dims: int):
        super().__init__(input_dims, output_dims, bias=False)

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
        return TernaryLinear(input_dims, output_dims, group_size, bits)


class ShortConvolution(nn.Module):
    """A causal depthwise convolution and SiLU, which carries the last inputs."""

    def __init__(self, dims: int, size: int):
        super().__init__()
        self.weight = mx.zeros((dims, 1, size))

    def __call__(
        self,
        x: mx.array,
        carried: mx.array | None,
        mask: mx.array | None,
        lengths: mx.array | None,
    ) -> tuple[mx.array, mx.array]:
        batch, length, dims = x.shape
        size = self.weight.shape[-1]
        if mask is not None:
            x = mx.where(mask[..., None], x, 0)
        if carried is None:
            carried = mx.zeros((batch, size - 1, dims), x.dtype)
        window = mx.concatenate([carried, x], axis=1)
        taps = (self.weight[:, 0, n] * window[:, n : n + length] for n in range(size))
        y = nn.silu(sum(taps))
        if lengths is None:
            return y, window[:, length:]
        # each row carries the inputs before its padding
        ends = mx.clip(lengths, 0, length)[:, None] + mx.arange(size - 1)
        return y, mx.take_along_axis(window, ends[..., None], axis=1)


def scan(f: mx.array, i: mx.array, hidden: mx.array | None) -> mx.array:
    """Computes `h[t] = f[t] * h[t - 1] + i[t]` along axis 1, in float32, in log2 of the length steps."""
    f, h = f.astype(mx.float32), i.astype(mx.float32)
    if hidden is not None:
        first = h[:, :1] + f[:, :1] * hidden[:, None]
        h = mx.concatenate([first, h[:, 1:]], axis=1)
    step = 1
    while step < f.shape[1]:
        # each position takes in what the `step` positions before it gathered
        gathered = h[:, step:] + f[:, step:] * h[:, :-step]
        h = mx.concatenate([h[:, :step], gathered], axis=1)
        f = mx.concatenate([f[:, :step], f[:, step:] * f[:, :-step]], axis=1)
        step *= 2
    return h


class Attention(nn.Module):
    def __init__(self, args: ModelArgs):
        super().__init__()
        dims, hidden_dims = args.hidden_size, int(args.hidden_size * args.expand_ratio)
        self.i_proj = Linear(dims, hidden_dims)
        self.f_proj = Linear(dims, hidden_dims)
        self.g_proj = Linear(dims, hidden_dims)
        self.o_proj = Linear(hidden_dims, dims)
        self.g_norm = nn.RMSNorm(hidden_dims, eps=args.rms_norm_eps)
        for name in args.convolutions:
            width = dims if name == "h_conv1d" else hidden_dims
            self[name] = ShortConvolution(width, args.conv_size)

    def __call__(
        self, x: mx.array, lower_bound: mx.array | None, mask: mx.array | None, cache: Any
    ) -> mx.array:
        carried = [None] * 3 if cache is None else [*cache.cache, None, None]
        lengths = None if cache is None else cache.lengths
        if "h_conv1d" in self:
            x, carried[1] = self.h_conv1d(x, carried[1], mask, lengths)
        i, f = self.i_proj(x), self.f_proj(x)
        if "i_conv1d" in self:
            i, carried[1] = self.i_conv1d(i, carried[1], mask, lengths)
            f, carried[2] = self.f_conv1d(f, carried[2], mask, lengths)
        f = mx.sigmoid(f)
        if lower_bound is not None:
            f = lower_bound + (1 - lower_bound) * f
        i = nn.silu(i) * (1 - f)
        if mask is not None:
            f, i = mx.where(mask[..., None], f, 1), mx.where(mask[..., None], i, 0)
        h = scan(f, i, carried[0])
        if cache is not None:
            carried[0] = h[:, -1]
            for n in range(len(cache.cache)):
                cache[n] = carried[n]
            cache.advance(x.shape[1])
        return self.o_proj(self.g_norm(self.g_proj(x)) * nn.silu(h.astype(x.dtype)))


class FeedForward(nn.Module):
    def __init__(self, args: ModelArgs):
        super().__init__()
        self.gate_proj = Linear(args.hidden_size, 2 * args.intermediate_size)
        self.down_proj = Linear(args.intermediate_size, args.hidden_size)

    def __call__(self, x: mx.array) -> mx.array:
        gate, up = mx.split(self.gate_proj(x), 2, axis=-1)
        return self.down_proj(nn.silu(gate) * up)


class Block(nn.Module):
    def __init__(self, args: ModelArgs):
        super().__init__()
        self.attn = Attention(args)
        self.mlp = FeedForward(args)
        self.attn_norm = nn.RMSNorm(args.hidden_size, eps=args.rms_norm_eps)
        self.mlp_norm = nn.RMSNorm(args.hidden_size, eps=args.rms_norm_eps)

    def __call__(
        self, x: mx.array, lower_bound: mx.array | None, mask: mx.array | None, cache: Any
    ) -> mx.array:
        x = x + self.attn(self.attn_norm(x), lower_bound, mask, cache)
        return x + self.mlp(self.mlp_norm(x))


class Decoder(nn.Module):
    def __init__(self, args: ModelArgs):
        super().__init__()
        self.embeddings = nn.Embedding(args.vocab_size, args.hidden_size)
        self.layers = [Block(args) for _ in range(args.num_hidden_layers)]
        self.norm = nn.RMSNorm(args.hidden_size, eps=args.rms_norm_eps)
        if args.use_lower_bound:
            self.lower_bounds = mx.zeros((args.num_hidden_layers, args.hidden_size))

    def _bounds(self, dtype: mx.Dtype) -> list[mx.array | None]:
        """The lower bound of the forget gate of each block; `None` for the first one."""
        if "lower_bounds" not in self:
            return [None] * len(self.layers)
        shares = mx.softmax(self.lower_bounds.astype(mx.float32), axis=0)
        bounds = (mx.cumsum(shares, axis=0) - shares[:1]).astype(dtype)
        return [None, *(bounds[n] for n in range(1, len(self.layers)))]

    def __call__(self, x: mx.array, cache: Any) -> mx.array:
        mask = create_ssm_mask(x, cache[0])
        for layer, bound, layer_cache in zip(
            self.layers, self._bounds(x.dtype), cache, strict=True
        ):
            x = layer(x, bound, mask, layer_cache)
        return self.norm(x)


class Model(nn.Module):
    def __init__(self, args: ModelArgs):
        super().__init__()
        self.args = args
        self.model_type = args.model_type
        self.model = Decoder(args)
        # a tied ternary head is stored as a matrix of its own
        if args.linear_class == "ternary" or not args.tie_word_embeddings:
            self.lm_head = Linear(args.hidden_size, args.vocab_size)

    def __call__(
        self, inputs: mx.array, cache: Any = None, input_embeddings: mx.array | None = None
    ) -> mx.array:
        x = self.model.embeddings(inputs) if input_embeddings is None else input_embeddings
        x = self.model(x, [None] * len(self.layers) if cache is None else cache)
        if "lm_head" in self:
            return self.lm_head(x)
        return self.model.embeddings.as_linear(x)

    @property
    def layers(self) -> list[Block]:
        return self.model.layers

    def make_cache(self) -> list[ArraysCache]:
        size = 1 + len(self.args.convolutions)
        return [ArraysCache(size) for _ in self.layers]
