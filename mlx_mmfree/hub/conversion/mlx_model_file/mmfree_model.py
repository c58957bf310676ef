"""Models for mlx-lm that it does not know: MatMul-free ones, ternary transformers and hybrids of mixers.

mlx-lm runs this file from a model's folder (`--trust-remote-code`). It needs only mlx and mlx-lm.
Ternary weights are in MLX's affine 2-bit format; those with five trits a byte are unpacked to it as they
are loaded. Activations stay in floating point.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.base import (
    BaseModelArgs,
    create_attention_mask,
    create_ssm_mask,
    scaled_dot_product_attention,
)
from mlx_lm.models.cache import ArraysCache, KVCache, RotatingKVCache
from mlx_lm.models.rope_utils import initialize_rope

CHUNK = 16
TRITS_PER_BYTE, LARGEST_BYTE = 5, 242
SCALE = ".weight_scale"

PROJECTIONS = ("query_proj", "key_proj", "value_proj", "output_proj")
PLAIN_PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")
"""The linears of attention, in a hybrid and in a plain transformer."""


@dataclass
class ModelArgs(BaseModelArgs):
    model_type: str
    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    intermediate_size: int
    rms_norm_eps: float
    tie_word_embeddings: bool = False
    quantization_config: dict[str, Any] | None = None
    # of transformers
    hidden_act: str = ""
    num_attention_heads: int = 0
    num_key_value_heads: int = 0
    head_dim: int = 0
    max_position_embeddings: int = 0
    rope_theta: float = 0.0
    rope_scaling: dict[str, Any] | None = None
    architectures: list[str] | None = None
    attention_bias: bool = False
    mlp_bias: bool = False
    # of MiniCPM
    scale_emb: float = 1.0
    scale_depth: float = 0.0
    dim_model_base: float = 0.0
    # of hybrids, which have a mixer for each layer
    token_mixer: list[Any] | None = None
    base_model_type: str = ""
    base_architectures: list[str] | None = None
    rope_parameters: dict[str, Any] | None = None
    # of MatMul-free models
    expand_ratio: float = 1.0
    use_lower_bound: bool = False
    use_short_conv: bool = False
    conv_size: int = 0
    share_conv_kernel: bool = False
    linear_class: str = "ternary"

    @property
    def is_matmul_free(self) -> bool:
        return self.model_type == "hgrn_bit"

    @property
    def is_hybrid(self) -> bool:
        return self.token_mixer is not None

    @property
    def base_type(self) -> str:
        """The model type of the transformer whose parts this one has."""
        return self.base_model_type or self.model_type

    @property
    def sub_norm_names(self) -> tuple[str, str]:
        """Norms before the last projection of attention and feed-forward; empty if there are none."""
        is_one_bit = "BitnetForCausalLM" in (self.base_architectures or self.architectures or ())
        if self.is_hybrid:
            is_normed = self.base_type == "bitnet" or is_one_bit
            return ("output_norm", "hidden_norm") if is_normed else ("", "")
        if self.base_type == "bitnet":
            return "attn_sub_norm", "ffn_sub_norm"
        return ("inner_attn_ln", "ffn_layernorm") if is_one_bit else ("", "")

    @property
    def linear_norm(self) -> tuple[str, float] | None:
        """Name and epsilon of a norm inside each ternary linear; `None` if there is none."""
        if self.is_matmul_free:
            return "norm", 1e-6
        described = self.quantization_config or {}
        if not described.get("use_rms_norm"):
            return None
        return "norm" if self.is_hybrid else "rms_norm", described.get("rms_norm_eps", 1e-6)

    @property
    def branch_scale(self) -> float:
        """The factor of each branch. The residual stream is held divided by it."""
        return self.scale_depth / self.num_hidden_layers**0.5 if self.scale_depth else 1.0

    @property
    def stream_norm(self) -> partial[nn.RMSNorm]:
        """Makes a norm of the residual stream."""
        return partial(nn.RMSNorm, self.hidden_size, eps=self.rms_norm_eps / self.branch_scale**2)

    @property
    def head_scale(self) -> float:
        """The factor of the head's input."""
        return self.dim_model_base / self.hidden_size if self.dim_model_base else 1.0

    @property
    def rope(self) -> tuple[float, dict[str, Any] | None]:
        """The base of the rotation, and how it is scaled."""
        if self.rope_parameters is not None:
            return self.rope_parameters["rope_theta"], self.rope_parameters
        return self.rope_theta, self.rope_scaling

    @property
    def block_names(self) -> tuple[str, str, str]:
        """The mixer of a block, and the norms before it and before the feed-forward."""
        if self.is_matmul_free:
            return "attn", "attn_norm", "mlp_norm"
        mixer = "token_mixer" if self.is_hybrid else "self_attn"
        return mixer, "input_layernorm", "post_attention_layernorm"

    @property
    def has_head(self) -> bool:
        """True if the head is a matrix of its own, as one that is ternary is stored."""
        is_ternary = self.is_matmul_free and self.linear_class == "ternary"
        return is_ternary or not self.tie_word_embeddings


def ternary_product(linear: nn.Module, x: mx.array) -> mx.array:
    """The product of a linear in the 2-bit format. Inputs are padded with zeros to its width."""
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
    """A linear in the 2-bit format, whose rows are padded to a multiple of 32 inputs."""

    def __init__(self, input_dims: int, output_dims: int, bias: bool, group_size: int, bits: int):
        super().__init__(input_dims + -input_dims % 32, output_dims, bias, group_size, bits)
        self.input_dims = input_dims

    def __call__(self, x: mx.array) -> mx.array:
        return ternary_product(self, x)

    def to_lora(self, r: int, scale: float, dropout: float) -> nn.Module:
        return AdaptedLinear(self, r, scale, dropout)


class NormedTernaryLinear(nn.Module):
    """An RMSNorm and a linear in the 2-bit format.

    It is not an `nn.QuantizedLinear`, since the adapters that mlx-lm puts on those would read the input
    of the norm. LoRA reads the normed input here, and DoRA is refused.
    """

    def __init__(
        self,
        input_dims: int,
        output_dims: int,
        bias: bool,
        norm: tuple[str, float],
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
        self._norm, eps = norm
        self[self._norm] = nn.RMSNorm(input_dims, eps=eps)

    def normed(self, x: mx.array) -> mx.array:
        y: mx.array = self[self._norm](x)
        return y

    def __call__(self, x: mx.array) -> mx.array:
        return ternary_product(self, self.normed(x))

    def to_lora(self, r: int, scale: float, dropout: float) -> nn.Module:
        return AdaptedLinear(self, r, scale, dropout)


class AdaptedLinear(nn.Module):
    """A ternary linear and a low-rank one (LoRA) that reads the same input, after the norm if any."""

    def __init__(self, linear: nn.Module, rank: int, scale: float, dropout: float):
        super().__init__()
        bound = linear.input_dims**-0.5
        self.linear = linear
        self.scale = scale
        self.dropout = nn.Dropout(dropout)
        self.lora_a = mx.random.uniform(-bound, bound, (linear.input_dims, rank))
        self.lora_b = mx.zeros((rank, linear.weight.shape[0]))

    def __call__(self, x: mx.array) -> mx.array:
        if isinstance(self.linear, NormedTernaryLinear):
            x = self.linear.normed(x)
        y = ternary_product(self.linear, x)
        change = (self.dropout(x) @ self.lora_a) @ self.lora_b
        return y + (self.scale * change).astype(y.dtype)

    def fuse(self, dequantize: bool = False) -> nn.Module:
        raise ValueError("A ternary matrix plus an adapter is not ternary: use 'mmfree fuse'.")


class Linear(nn.Linear):
    """A dense linear, or what stands for a ternary one until mlx-lm asks for its quantised variant."""

    def __init__(
        self,
        input_dims: int,
        output_dims: int,
        bias: bool = False,
        norm: tuple[str, float] | None = None,
    ):
        super().__init__(input_dims, output_dims, bias)
        self._norm = norm

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
        bias = "bias" in self
        if self._norm is None:
            return TernaryLinear(input_dims, output_dims, bias, group_size, bits)
        return NormedTernaryLinear(input_dims, output_dims, bias, self._norm, group_size, bits)


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


def gated_attention(
    q: mx.array, k: mx.array, v: mx.array, log_gate: mx.array, memory: mx.array | None
) -> tuple[mx.array, mx.array]:
    """Computes `S[t] = exp(g[t])^T * S[t - 1] + k[t]^T v[t]` and `q[t] S[t]`, in float32, in chunks.

    Queries, keys and gates are `(B, H, L, K)`, values `(B, H, L, V)`, the memory `S` `(B, H, K, V)`.
    """
    if memory is None:
        memory = mx.zeros((*k.shape[:2], k.shape[-1], v.shape[-1]))
    parts = []
    for start in range(0, q.shape[2], CHUNK):
        q_n, k_n, v_n, g_n = (x[:, :, start : start + CHUNK] for x in (q, k, v, log_gate))
        passed = mx.cumsum(g_n, axis=2)
        between = passed[:, :, :, None] - passed[:, :, None]
        is_past = mx.tri(passed.shape[2], dtype=mx.bool_)[..., None]
        decay = mx.exp(mx.where(is_past, between, -mx.inf))
        scores = (q_n[:, :, :, None] * k_n[:, :, None] * decay).sum(axis=-1)
        parts.append((q_n * mx.exp(passed)) @ memory + scores @ v_n)
        last = passed[:, :, -1:]
        written = (k_n * mx.exp(last - passed)).swapaxes(-1, -2) @ v_n
        memory = mx.exp(last).swapaxes(-1, -2) * memory + written
    return mx.concatenate(parts, axis=2), memory


def split_heads(x: mx.array, heads: int) -> mx.array:
    return mx.unflatten(x, -1, (heads, -1)).swapaxes(1, 2)


class Mixer(nn.Module):
    """Token mixing that carries arrays from token to token."""

    def _add_linears(self, args: ModelArgs, bias: bool, **sizes: tuple[int, int]) -> None:
        for name, (input_dims, output_dims) in sizes.items():
            self[name] = Linear(input_dims, output_dims, bias, args.linear_norm)

    def make_cache(self) -> Any:
        return ArraysCache(1)


class MLGRU(Mixer):
    _names = ("input_proj", "forget_proj", "gate_proj", "output_proj", "gate_norm")
    _convolution_names = ("shared_conv", "input_conv", "forget_conv")

    def __init__(
        self,
        args: ModelArgs,
        hidden_dims: int | None = None,
        bias: bool = False,
        stacking: str = "none",
        norm_eps: float = 1e-6,
        output_gate: str = "norm",
        conv_size: int = 0,
        share_conv: bool = True,
    ):
        super().__init__()
        dims = args.hidden_size
        width = hidden_dims or dims
        *inner, output, norm = self._names
        counts = {
            "none": dict.fromkeys(inner, 1),
            "recurrence": {"recurrence_proj": 2, "gate_proj": 1},
            "all": {"gates_proj": 3},
        }[stacking]
        self._inner = list(counts)
        sizes = {name: (dims, count * width) for name, count in counts.items()}
        self._add_linears(args, bias, **sizes, **{output: (width, dims)})
        if output_gate == "norm":
            self[norm] = nn.RMSNorm(width, eps=norm_eps)
        shared, *separate = self._convolution_names
        self._convolutions = ([shared] if share_conv else separate) if conv_size else []
        for name in self._convolutions:
            self[name] = ShortConvolution(dims if share_conv else width, conv_size)

    def make_cache(self) -> ArraysCache:
        return ArraysCache(1 + len(self._convolutions))

    def __call__(self, x: mx.array, cache: Any, lower_bound: mx.array | None = None) -> mx.array:
        dtype, mask = x.dtype, create_ssm_mask(x, cache)
        carried = [None] * 3 if cache is None else [*cache.cache, None, None]
        lengths = None if cache is None else cache.lengths
        shared, *separate = self._convolution_names
        if shared in self:
            x, carried[1] = self[shared](x, carried[1], mask, lengths)
        gates = mx.concatenate([self[name](x) for name in self._inner], axis=-1)
        i, f, g = mx.split(gates, 3, axis=-1)
        if separate[0] in self:
            i, carried[1] = self[separate[0]](i, carried[1], mask, lengths)
            f, carried[2] = self[separate[1]](f, carried[2], mask, lengths)
        i, f, g = (part.astype(mx.float32) for part in (i, f, g))
        i, f = nn.silu(i) * mx.sigmoid(-f), mx.sigmoid(f)
        if lower_bound is not None:
            i, f = i * (1 - lower_bound), lower_bound + (1 - lower_bound) * f
        if mask is not None:
            f, i = mx.where(mask[..., None], f, 1), mx.where(mask[..., None], i, 0)
        h = scan(f, i, carried[0])
        if cache is not None:
            carried[0] = h[:, -1]
            for n in range(len(cache.cache)):
                cache[n] = carried[n]
            cache.advance(x.shape[1])
        output, norm = self._names[-2:]
        y = self[norm](g) * nn.silu(h) if norm in self else mx.sigmoid(g) * h
        return self[output](y.astype(dtype))


class MatMulFreeMLGRU(MLGRU):
    """The MLGRU of a MatMul-free model, with its names."""

    _names = ("i_proj", "f_proj", "g_proj", "o_proj", "g_norm")
    _convolution_names = ("h_conv1d", "i_conv1d", "f_conv1d")

    def __init__(self, args: ModelArgs):
        super().__init__(
            args,
            int(args.hidden_size * args.expand_ratio),
            norm_eps=args.rms_norm_eps,
            conv_size=args.conv_size if args.use_short_conv else 0,
            share_conv=args.share_conv_kernel,
        )


class MatrixMixer(Mixer):
    """A recurrence whose state is a matrix for each head."""

    def _read(
        self, q: mx.array, k: mx.array, v: mx.array, log_gate: mx.array, cache: Any
    ) -> mx.array:
        """The results of queries `(B, L, H * K)`, in heads `(B, L, H, V)`, in float32."""
        mask = create_ssm_mask(q, cache)
        if mask is not None:
            k, log_gate = (mx.where(mask[..., None], x, 0) for x in (k, log_gate))
        q, k, v, log_gate = (
            split_heads(x.astype(mx.float32), self._heads) for x in (q, k, v, log_gate)
        )
        y, memory = gated_attention(q, k, v, log_gate, None if cache is None else cache[0])
        if cache is not None:
            cache[0] = memory
            cache.advance(y.shape[2])
        return y.swapaxes(1, 2)


class GLA(MatrixMixer):
    def __init__(
        self,
        args: ModelArgs,
        num_heads: int = 4,
        key_dims: int | None = None,
        value_dims: int | None = None,
        gate_rank: int = 16,
        gate_root: float = 16.0,
        bias: bool = False,
        norm_eps: float = 1e-5,
    ):
        super().__init__()
        dims = args.hidden_size
        keys, values = key_dims or dims // 2, value_dims or dims
        self._heads, self._gate_root = num_heads, gate_root
        self._scale = (keys // num_heads) ** -0.5
        to_keys, to_values = (dims, keys), (dims, values)
        self._add_linears(args, bias, query_proj=to_keys, key_proj=to_keys, value_proj=to_values)
        self._add_linears(args, bias, gate_proj=to_values, output_proj=(values, dims))
        self._add_linears(args, False, forget_down_proj=(dims, gate_rank))
        self._add_linears(args, True, forget_proj=(gate_rank, keys))
        self.output_norm = nn.RMSNorm(values // num_heads, eps=norm_eps)

    def __call__(self, x: mx.array, cache: Any) -> mx.array:
        f = self.forget_proj(self.forget_down_proj(x)).astype(mx.float32)
        q = self.query_proj(x).astype(mx.float32) * self._scale
        log_gate = nn.log_sigmoid(f) / self._gate_root
        y = self._read(q, self.key_proj(x), self.value_proj(x), log_gate, cache)
        g = self.gate_proj(x).astype(mx.float32)
        y = self.output_norm(y).flatten(2) * nn.silu(g)
        return self.output_proj(y.astype(x.dtype))


class HGRN2(MatrixMixer):
    def __init__(
        self,
        args: ModelArgs,
        num_heads: int = 8,
        head_dim: int | None = None,
        bias: bool = False,
        norm_eps: float = 1e-5,
        scale: float | None = None,
    ):
        super().__init__()
        dims = args.hidden_size
        head_dim = head_dim or dims // num_heads
        self._heads = num_heads
        self._scale = head_dim**-0.5 if scale is None else scale
        inner = (dims, num_heads * head_dim)
        self._add_linears(args, bias, query_proj=inner, forget_proj=inner)
        self._add_linears(args, bias, input_proj=(dims, dims), output_proj=(dims, dims))
        self.output_norm = nn.RMSNorm(dims, eps=norm_eps)

    def __call__(self, x: mx.array, cache: Any) -> mx.array:
        q, f = (self[name](x).astype(mx.float32) for name in ("query_proj", "forget_proj"))
        q, v = nn.silu(q) * self._scale, self.input_proj(x)
        y = self._read(q, mx.sigmoid(-f), v, nn.log_sigmoid(f), cache)
        return self.output_proj(self.output_norm(y.flatten(2).astype(x.dtype)))


class Attention(Mixer):
    def __init__(
        self,
        args: ModelArgs,
        window: int | None = None,
        num_heads: int = 8,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        bias: bool = False,
    ):
        super().__init__()
        dims = args.hidden_size
        self._head_dim, self._window = head_dim or dims // num_heads, window
        queries, keys = (n * self._head_dim for n in (num_heads, num_kv_heads or num_heads))
        sizes = [(dims, queries), (dims, keys), (dims, keys), (queries, dims)]
        self._projections = PROJECTIONS if args.is_hybrid else PLAIN_PROJECTIONS
        self._add_linears(args, bias, **dict(zip(self._projections, sizes, strict=True)))
        self._output_norm = ""
        (theta, scaling), longest = args.rope, args.max_position_embeddings
        self.rope = initialize_rope(self._head_dim, theta, False, scaling, longest)

    def make_cache(self) -> Any:
        return KVCache() if self._window is None else RotatingKVCache(self._window)

    def _split(self, x: mx.array, norm: str = "") -> mx.array:
        x = x.reshape(*x.shape[:2], -1, self._head_dim)
        return (self[norm](x) if norm in self else x).transpose(0, 2, 1, 3)

    def __call__(self, x: mx.array, cache: Any, mask: Any = None) -> mx.array:
        if mask is None:
            mask = create_attention_mask(x, cache, window_size=self._window)
        query, key, value, output = self._projections
        queries = self._split(self[query](x), query.replace("proj", "norm"))
        keys = self._split(self[key](x), key.replace("proj", "norm"))
        values = self._split(self[value](x))
        offset = 0 if cache is None else cache.offset
        queries, keys = self.rope(queries, offset=offset), self.rope(keys, offset=offset)
        if cache is not None:
            keys, values = cache.update_and_fetch(keys, values)
        y = scaled_dot_product_attention(
            queries, keys, values, cache=cache, scale=self._head_dim**-0.5, mask=mask
        )
        y = y.transpose(0, 2, 1, 3).flatten(2)
        return self[output](self[self._output_norm](y) if self._output_norm else y)


class BaseAttention(Attention):
    """The attention of a transformer, or of a hybrid's base, with its norms and positions."""

    def __init__(self, args: ModelArgs):
        heads = (args.num_attention_heads, args.num_key_value_heads, args.head_dim)
        super().__init__(args, None, *heads, args.attention_bias)
        eps, width = args.rms_norm_eps, args.num_attention_heads * args.head_dim
        if args.base_type == "qwen3":
            for name in self._projections[:2]:
                self[name.replace("proj", "norm")] = nn.RMSNorm(args.head_dim, eps=eps)
        self._output_norm = args.sub_norm_names[0]
        if self._output_norm:
            self[self._output_norm] = nn.RMSNorm(width, eps=eps)


MIXERS: dict[str, Any] = {
    "attention": BaseAttention,
    "matmul_free": MatMulFreeMLGRU,
    "gla": GLA,
    "hgrn2": HGRN2,
    "mlgru": MLGRU,
    "sliding_window_attention": partial(Attention, window=256),
}


def make_mixer(args: ModelArgs, choice: Any) -> Mixer:
    """A mixer by its name, or by an object with `name` and options."""
    options = {"name": choice} if isinstance(choice, str) else dict(choice)
    return MIXERS[options.pop("name")](args, **options)


class FeedForward(nn.Module):
    def __init__(self, args: ModelArgs):
        super().__init__()
        dims, hidden_dims = args.hidden_size, args.intermediate_size
        bias, norm = args.mlp_bias, args.linear_norm
        # a MatMul-free model stacks both
        stacked = 2 if args.is_matmul_free else 1
        self.gate_proj = Linear(dims, stacked * hidden_dims, bias, norm)
        if not args.is_matmul_free:
            self.up_proj = Linear(dims, hidden_dims, bias, norm)
        self.down_proj = Linear(hidden_dims, dims, bias, norm)
        self._sub_norm = args.sub_norm_names[1]
        if self._sub_norm:
            self[self._sub_norm] = nn.RMSNorm(hidden_dims, eps=args.rms_norm_eps)
        self._activation = nn.relu2 if args.hidden_act == "relu2" else nn.silu

    def __call__(self, x: mx.array) -> mx.array:
        gate = self.gate_proj(x)
        gate, up = (gate, self.up_proj(x)) if "up_proj" in self else mx.split(gate, 2, axis=-1)
        hidden = self._activation(gate) * up
        return self.down_proj(self[self._sub_norm](hidden) if self._sub_norm else hidden)


class Block(nn.Module):
    def __init__(self, args: ModelArgs, choice: Any):
        super().__init__()
        self._mixer, *self._norms = args.block_names
        self[self._mixer] = make_mixer(args, choice)
        self.mlp = FeedForward(args)
        for name in self._norms:
            self[name] = args.stream_norm()

    def make_cache(self) -> Any:
        return self[self._mixer].make_cache()

    def __call__(self, x: mx.array, cache: Any, *shared: Any) -> mx.array:
        before_mixer, before_mlp = self._norms
        x = x + self[self._mixer](self[before_mixer](x), cache, *shared)
        return x + self.mlp(self[before_mlp](x))


class Decoder(nn.Module):
    def __init__(self, args: ModelArgs):
        super().__init__()
        self._is_plain = not args.is_matmul_free and not args.is_hybrid
        self._embedding = "embeddings" if args.is_matmul_free else "embed_tokens"
        self[self._embedding] = nn.Embedding(args.vocab_size, args.hidden_size)
        usual = "matmul_free" if args.is_matmul_free else "attention"
        choices = args.token_mixer or [usual] * args.num_hidden_layers
        self.layers = [Block(args, choice) for choice in choices]
        self.norm = args.stream_norm()
        if args.use_lower_bound:
            self.lower_bounds = mx.zeros((args.num_hidden_layers, args.hidden_size))

    @property
    def embedding(self) -> nn.Embedding:
        return self[self._embedding]

    def make_cache(self) -> list[Any]:
        return [layer.make_cache() for layer in self.layers]

    def _shared(self, x: mx.array, cache: Any) -> list[tuple[Any, ...]]:
        """Arguments of each layer beside its input: the mask of all, or the bound of a forget gate."""
        if self._is_plain:
            return [(create_attention_mask(x, cache[0]),)] * len(self.layers)
        if "lower_bounds" not in self:
            return [()] * len(self.layers)
        shares = mx.softmax(self.lower_bounds.astype(mx.float32), axis=0)
        bounds = (mx.cumsum(shares, axis=0) - shares[:1]).astype(x.dtype)
        return [(), *((bounds[n],) for n in range(1, len(self.layers)))]

    def __call__(self, x: mx.array, cache: Any) -> mx.array:
        shared = self._shared(x, cache)
        for layer, layer_cache, more in zip(self.layers, cache, shared, strict=True):
            x = layer(x, layer_cache, *more)
        return self.norm(x)


def two_bits(name: str, packed: mx.array, output_dims: int, input_dims: int) -> mx.array:
    """A matrix with 16 codes of 2 bits a word, whose rows are padded to a multiple of 32 inputs."""
    shape = output_dims, -(-input_dims // TRITS_PER_BYTE)
    if packed.shape != shape or packed.dtype != mx.uint8:
        raise ValueError(
            f"Tensor '{name}' must be uint8 of shape {shape} but is {packed.dtype} of shape "
            f"{packed.shape}. Fetch the model again."
        )
    if mx.any(packed > LARGEST_BYTE).item():
        raise ValueError(
            f"Tensor '{name}' must hold no byte above {LARGEST_BYTE} but does. Fetch the model again."
        )
    powers = mx.array([3**n for n in range(TRITS_PER_BYTE)], mx.uint8)
    codes = (packed[..., None] // powers % 3).reshape(output_dims, -1)[:, :input_dims]
    padding = mx.array(1, mx.uint8)
    codes = mx.pad(codes, [(0, 0), (0, -input_dims % 32)], constant_values=padding)
    shifts = mx.arange(0, 32, 2, dtype=mx.uint32)
    return (codes.reshape(output_dims, -1, 16).astype(mx.uint32) << shifts).sum(axis=-1)


def unpack_five_trits(modules: dict[str, Any], weights: dict[str, mx.array]) -> None:
    """Turns matrices with five trits a byte to MLX's affine format, one after the other.

    Byte `j` of a row of `X.weight` holds the inputs `5 j` to `5 j + 4` as digits of base 3, the first
    one lowest. A digit is a trit + 1. The weight is the trit times `X.weight_scale`.
    """
    dtype = weights["model.norm.weight"].dtype
    found = [name.removesuffix(SCALE) for name in weights if name.endswith(SCALE)]
    for path in found:
        scale = weights.pop(f"{path}{SCALE}").astype(dtype)
        name = f"{path}.weight"
        output_dims, input_dims = modules[path].weight.shape
        words = two_bits(name, weights.pop(name), output_dims, input_dims)
        columns = words.shape[1] * 16
        # the largest group of MLX's format that divides a padded row
        group_size = next(size for size in (128, 64, 32) if columns % size == 0)
        groups = output_dims, columns // group_size
        scales = mx.contiguous(mx.broadcast_to(scale, groups))
        # what is packed is dropped before the next matrix is read
        mx.eval(words, scales)
        weights |= {name: words, f"{path}.scales": scales, f"{path}.biases": -scales}


class Model(nn.Module):
    def __init__(self, args: ModelArgs):
        super().__init__()
        self.args = args
        self.model_type = args.model_type
        self.model = Decoder(args)
        if args.has_head:
            self.lm_head = Linear(args.hidden_size, args.vocab_size, norm=args.linear_norm)
        if args.is_matmul_free or args.is_hybrid:
            # where a model makes none, mlx-lm makes caches of keys and values as its flags say
            self.make_cache = self.model.make_cache

    def __call__(
        self, inputs: mx.array, cache: Any = None, input_embeddings: mx.array | None = None
    ) -> mx.array:
        args, x = self.args, input_embeddings
        if x is None:
            x = self.model.embedding(inputs) * (args.scale_emb / args.branch_scale)
        x = self.model(x, [None] * len(self.layers) if cache is None else cache) * args.head_scale
        if "lm_head" in self:
            return self.lm_head(x)
        return self.model.embedding.as_linear(x)

    @property
    def layers(self) -> list[Any]:
        return self.model.layers

    def sanitize(self, weights: dict[str, mx.array]) -> dict[str, mx.array]:
        if any(name.endswith(SCALE) for name in weights):
            unpack_five_trits(dict(self.named_modules()), weights)
        return weights
