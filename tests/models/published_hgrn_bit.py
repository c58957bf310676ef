"""The published forward pass of MatMul-free language models (`hgrn_bit`) in NumPy and float64.

Written from the released code's mathematics (arXiv 2406.02528): a norm inside every linear, 8-bit codes
whose ties go away from zero, one scale for each matrix, an output gate that is normed.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

Array = np.ndarray
EPS = 1e-6


def logits(
    weights: Mapping[str, Array], tokens: Array, layers: int
) -> tuple[Array, dict[str, tuple[Array, Array]]]:
    """`(L, V)` for one sequence of tokens, from the tensors by their names on the Hub.

    With them the activation codes of each linear, by its name, and the scale that they divide by.
    """
    seen: dict[str, tuple[Array, Array]] = {}

    def vector(name: str) -> Array:
        return weights[name].astype(np.float64)

    def linear(name: str, x: Array) -> Array:
        x = rms_norm(x, vector(f"{name}.norm.weight"))
        step = np.maximum(np.abs(x).max(axis=-1, keepdims=True), 1e-5) / 127
        codes = np.sign(x) * np.floor(np.abs(x) / step + 0.5)
        seen[name] = codes, 1 / step
        weight = weights[f"{name}.weight"]
        scale = max(np.abs(weight).sum(dtype=np.float64) / weight.size, 1e-5)
        trits = np.clip(np.round(weight / np.float64(scale)), -1, 1).astype(np.float32)
        # whole numbers below 2 ** 24: exact in float32
        return (codes.astype(np.float32) @ trits.T).astype(np.float64) * scale * step

    bounds = np.exp(vector("model.lower_bounds"))
    bounds = np.cumsum(bounds / bounds.sum(axis=0), axis=0)
    bounds -= bounds[0].copy()
    h = weights["model.embeddings.weight"][tokens].astype(np.float64)
    for n in range(layers):
        at = f"model.layers.{n}."
        x = rms_norm(h, vector(f"{at}attn_norm.weight"))
        f = sigmoid(linear(f"{at}attn.f_proj", x))
        f = bounds[n] + (1 - bounds[n]) * f
        i = silu(linear(f"{at}attn.i_proj", x)) * (1 - f)
        state, states = np.zeros(i.shape[1]), []
        for gate, value in zip(f, i, strict=True):
            state = gate * state + value
            states.append(state)
        o = np.stack(states)
        g = rms_norm(linear(f"{at}attn.g_proj", x), vector(f"{at}attn.g_norm.weight"))
        h = h + linear(f"{at}attn.o_proj", g * silu(o))
        x = rms_norm(h, vector(f"{at}mlp_norm.weight"))
        gate, up = np.split(linear(f"{at}mlp.gate_proj", x), 2, axis=-1)
        h = h + linear(f"{at}mlp.down_proj", silu(gate) * up)
    return linear("lm_head", rms_norm(h, vector("model.norm.weight"))), seen


def linears(layers: int) -> list[str]:
    """Their names, in the order of our models' work."""
    names = [f"attn.{name}_proj" for name in "ifgo"] + ["mlp.gate_proj", "mlp.down_proj"]
    return [f"model.layers.{n}.{name}" for n in range(layers) for name in names] + ["lm_head"]


def checkpoint(
    dims: int, inner: int, layers: int, vocabulary: int
) -> tuple[dict[str, Any], dict[str, tuple[int, ...]]]:
    """A configuration, and the shapes of its tensors by their names on the Hub."""
    config = {
        "architectures": ["HGRNBitForCausalLM"],
        "model_type": "hgrn_bit",
        "attn_mode": "fused_recurrent",
        "bos_token_id": 1,
        "eos_token_id": 2,
        "expand_ratio": 1,
        "hidden_act": "swish",
        "hidden_ratio": 4,
        "hidden_size": dims,
        "intermediate_size": inner,
        "max_position_embeddings": 2_048,
        "num_heads": 1,
        "num_hidden_layers": layers,
        "rms_norm_eps": EPS,
        "share_conv_kernel": True,
        "tie_word_embeddings": False,
        "use_lower_bound": True,
        "use_short_conv": False,
        "vocab_size": vocabulary,
    }
    shapes: dict[str, tuple[int, ...]] = {
        "model.embeddings.weight": (vocabulary, dims),
        "model.lower_bounds": (layers, dims),
        "model.norm.weight": (dims,),
    }
    own = {
        "lm_head": (vocabulary, dims),
        "gate_proj": (2 * inner, dims),
        "down_proj": (dims, inner),
    }
    for name in linears(layers):
        shape = own.get(name.rpartition(".")[2], (dims, dims))
        shapes |= {f"{name}.weight": shape, f"{name}.norm.weight": shape[1:]}
    for n in range(layers):
        for name in ("attn_norm", "mlp_norm", "attn.g_norm"):
            shapes[f"model.layers.{n}.{name}.weight"] = (dims,)
    return config, shapes


def rms_norm(x: Array, weight: Array) -> Array:
    return x / np.sqrt(np.square(x).mean(axis=-1, keepdims=True) + EPS) * weight


def sigmoid(x: Array) -> Array:
    return 1 / (1 + np.exp(-x))


def silu(x: Array) -> Array:
    return x * sigmoid(x)
