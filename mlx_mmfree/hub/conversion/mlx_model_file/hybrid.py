"""A transformer with other token mixers in place of its attention, layer by layer, for mlx-lm.

mlx-lm runs this file from a model's folder (`--trust-remote-code`). It needs only mlx and mlx-lm.
Ternary weights are in MLX's affine 2-bit form; activations stay in floating point.
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

LINEAR_NORM = "norm"
CHUNK = 16


@dataclass
class ModelArgs(BaseModelArgs):
    model_type: str
    base_model_type: str
    token_mixer: list[Any]
    hidden_act: str
    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_parameters: dict[str, Any]
    max_position_embeddings: int
    base_architectures: list[str]
    quantization_config: dict[str, Any] | None = None
    attention_bias: bool = False
    mlp_bias: bool = False
    tie_word_embeddings: bool = False

    @property
    def sub_norm_names(self) -> tuple[str, str]:
        """Norms before the last projection of attention and feed-forward; empty if there are none."""
        if self.base_model_type == "bitnet" or "BitnetForCausalLM" in self.base_architectures:
            return "output_norm", "hidden_norm"
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
        kept = mx.exp(mx.where(is_past, between, -mx.inf))
        scores = (q_n[:, :, :, None] * k_n[:, :, None] * kept).sum(axis=-1)
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
            self[name] = Linear(input_dims, output_dims, bias, args.linear_norm_eps)

    def make_cache(self) -> Any:
        return ArraysCache(1)


class MLGRU(Mixer):
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
        inner = {
            "none": {"input_proj": 1, "forget_proj": 1, "gate_proj": 1},
            "recurrence": {"recurrence_proj": 2, "gate_proj": 1},
            "all": {"gates_proj": 3},
        }[stacking]
        self._inner = list(inner)
        sizes = {name: (dims, count * width) for name, count in inner.items()}
        self._add_linears(args, bias, **sizes, output_proj=(width, dims))
        if output_gate == "norm":
            self.gate_norm = nn.RMSNorm(width, eps=norm_eps)
        self._convolutions: list[str] = []
        if conv_size:
            self._convolutions = ["shared_conv"] if share_conv else ["input_conv", "forget_conv"]
        for name in self._convolutions:
            self[name] = ShortConvolution(dims if share_conv else width, conv_size)

    def make_cache(self) -> ArraysCache:
        return ArraysCache(1 + len(self._convolutions))

    def __call__(self, x: mx.array, cache: Any) -> mx.array:
        dtype, mask = x.dtype, create_ssm_mask(x, cache)
        carried = [None] * 3 if cache is None else [*cache.cache, None, None]
        lengths = None if cache is None else cache.lengths
        if "shared_conv" in self:
            x, carried[1] = self.shared_conv(x, carried[1], mask, lengths)
        gates = mx.concatenate([self[name](x) for name in self._inner], axis=-1)
        i, f, g = mx.split(gates, 3, axis=-1)
        if "input_conv" in self:
            i, carried[1] = self.input_conv(i, carried[1], mask, lengths)
            f, carried[2] = self.forget_conv(f, carried[2], mask, lengths)
        i, f, g = (part.astype(mx.float32) for part in (i, f, g))
        i, f = nn.silu(i) * mx.sigmoid(-f), mx.sigmoid(f)
        if mask is not None:
            f, i = mx.where(mask[..., None], f, 1), mx.where(mask[..., None], i, 0)
        h = scan(f, i, carried[0])
        if cache is not None:
            carried[0] = h[:, -1]
            for n in range(len(cache.cache)):
                cache[n] = carried[n]
            cache.advance(x.shape[1])
        y = self.gate_norm(g) * nn.silu(h) if "gate_norm" in self else mx.sigmoid(g) * h
        return self.output_proj(y.astype(dtype))


class MatrixMixer(Mixer):
    """A recurrence whose state is a matrix for each head."""

    def _read(
        self, q: mx.array, k: mx.array, v: mx.array, log_gate: mx.array, cache: Any
    ) -> mx.array:
        """What queries `(B, L, H * K)` find, in heads `(B, L, H, V)`, in float32."""
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
        to_keys = (dims, keys)
        self._add_linears(args, bias, query_proj=(dims, queries), output_proj=(queries, dims))
        self._add_linears(args, bias, key_proj=to_keys, value_proj=to_keys)
        scaling, longest = args.rope_parameters, args.max_position_embeddings
        theta = scaling["rope_theta"]
        self.rope = initialize_rope(self._head_dim, theta, False, scaling, longest)

    def make_cache(self) -> Any:
        return KVCache() if self._window is None else RotatingKVCache(self._window)

    def _split(self, x: mx.array, norm: str = "") -> mx.array:
        x = x.reshape(*x.shape[:2], -1, self._head_dim)
        return (self[norm](x) if norm in self else x).transpose(0, 2, 1, 3)

    def __call__(self, x: mx.array, cache: Any) -> mx.array:
        mask = create_attention_mask(x, cache, window_size=self._window)
        queries = self._split(self.query_proj(x), "query_norm")
        keys = self._split(self.key_proj(x), "key_norm")
        values = self._split(self.value_proj(x))
        offset = 0 if cache is None else cache.offset
        queries, keys = self.rope(queries, offset=offset), self.rope(keys, offset=offset)
        if cache is not None:
            keys, values = cache.update_and_fetch(keys, values)
        y = scaled_dot_product_attention(
            queries, keys, values, cache=cache, scale=self._head_dim**-0.5, mask=mask
        )
        y = y.transpose(0, 2, 1, 3).flatten(2)
        return self.output_proj(self.output_norm(y) if "output_norm" in self else y)


class BaseAttention(Attention):
    """The attention of the base, with its norms and positions."""

    def __init__(self, args: ModelArgs):
        heads = (args.num_attention_heads, args.num_key_value_heads, args.head_dim)
        super().__init__(args, None, *heads, args.attention_bias)
        eps, width = args.rms_norm_eps, args.num_attention_heads * args.head_dim
        if args.base_model_type == "qwen3":
            self.query_norm = nn.RMSNorm(args.head_dim, eps=eps)
            self.key_norm = nn.RMSNorm(args.head_dim, eps=eps)
        if args.sub_norm_names[0]:
            self.output_norm = nn.RMSNorm(width, eps=eps)


MIXERS: dict[str, Any] = {
    "attention": BaseAttention,
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
    def __init__(self, args: ModelArgs, choice: Any):
        super().__init__()
        self.token_mixer = make_mixer(args, choice)
        self.mlp = FeedForward(args)
        self.input_layernorm = nn.RMSNorm(args.hidden_size, eps=args.rms_norm_eps)
        self.post_attention_layernorm = nn.RMSNorm(args.hidden_size, eps=args.rms_norm_eps)

    def __call__(self, x: mx.array, cache: Any) -> mx.array:
        x = x + self.token_mixer(self.input_layernorm(x), cache)
        return x + self.mlp(self.post_attention_layernorm(x))


class Decoder(nn.Module):
    def __init__(self, args: ModelArgs):
        super().__init__()
        self.embed_tokens = nn.Embedding(args.vocab_size, args.hidden_size)
        self.layers = [Block(args, choice) for choice in args.token_mixer]
        self.norm = nn.RMSNorm(args.hidden_size, eps=args.rms_norm_eps)

    def __call__(self, x: mx.array, cache: Any) -> mx.array:
        for layer, layer_cache in zip(self.layers, cache, strict=True):
            x = layer(x, layer_cache)
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

    def make_cache(self) -> list[Any]:
        return [layer.token_mixer.make_cache() for layer in self.layers]
