"""Times training steps of the same Llama model in PyTorch, with its fused operations."""

import time
from dataclasses import asdict
from typing import Any

import torch
import torch.nn.functional as F
from training import BETAS, CLIP_NORM, EPS, LEARNING_RATE, WARM_UP, WEIGHT_DECAY, Run, Setup

Weights = dict[str, Any]
_NORM_EPS = 1e-6


def run(setup: dict[str, Any], program: str, threads: int) -> dict[str, Any]:
    """Trains the dense model and times each step."""
    given = Setup(**setup)
    torch.set_num_threads(threads)
    weights = {
        name: torch.nn.Parameter(torch.from_numpy(given.weight(name, shape)))
        for name, shape in _shapes(given).items()
    }
    optimizer = torch.optim.AdamW(
        weights.values(),
        lr=LEARNING_RATE,
        betas=BETAS,
        eps=EPS,
        weight_decay=WEIGHT_DECAY,
        fused=True,
    )
    rotation = _rotation(given)
    result = Run([], [], [])
    for number in range(given.steps + WARM_UP):
        start = time.perf_counter(), time.process_time()
        rows = torch.from_numpy(given.rows(number)).long()
        optimizer.zero_grad()
        logits = _logits(weights, given, rows[:, :-1], rotation)
        loss = F.cross_entropy(logits.view(-1, given.vocab_size), rows[:, 1:].reshape(-1))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(weights.values(), CLIP_NORM)
        optimizer.step()
        result.losses.append(loss.item())
        if number >= WARM_UP:
            result.seconds.append(time.perf_counter() - start[0])
            result.processor_seconds.append(time.process_time() - start[1])
    return asdict(result)


def _shapes(setup: Setup) -> dict[str, tuple[int, ...]]:
    dims, hidden = setup.hidden_size, setup.intermediate_size
    kv_dims = dims // setup.heads * setup.kv_heads
    block: dict[str, tuple[int, ...]] = {
        "token_norm": (dims,),
        "token_mixer.query_proj": (dims, dims),
        "token_mixer.key_proj": (kv_dims, dims),
        "token_mixer.value_proj": (kv_dims, dims),
        "token_mixer.output_proj": (dims, dims),
        "channel_norm": (dims,),
        "channel_mixer.gate_proj": (hidden, dims),
        "channel_mixer.up_proj": (hidden, dims),
        "channel_mixer.down_proj": (dims, hidden),
    }
    shapes: dict[str, tuple[int, ...]] = {"embed.weight": (setup.vocab_size, dims)}
    for layer in range(setup.layers):
        shapes |= {f"blocks.{layer}.{name}.weight": shape for name, shape in block.items()}
    return shapes | {"norm.weight": (dims,), "head.weight": (setup.vocab_size, dims)}


def _rotation(setup: Setup) -> tuple[Any, Any]:
    """Cosines and sines, `(L, K)`."""
    dims = setup.hidden_size // setup.heads
    wavelengths = 10000.0 ** (torch.arange(0, dims, 2) / dims)
    angles = torch.arange(setup.length)[:, None] / wavelengths
    angles = torch.cat([angles, angles], dim=-1)
    return angles.cos(), angles.sin()


def _logits(weights: Weights, setup: Setup, tokens: Any, rotation: tuple[Any, Any]) -> Any:
    x = F.embedding(tokens, weights["embed.weight"])
    for layer in range(setup.layers):
        own = {
            name.removeprefix(prefix): weight
            for prefix in [f"blocks.{layer}."]
            for name, weight in weights.items()
            if name.startswith(prefix)
        }
        x = x + _attend(own, setup, _norm(x, own["token_norm.weight"]), rotation)
        y = _norm(x, own["channel_norm.weight"])
        gate = F.silu(F.linear(y, own["channel_mixer.gate_proj.weight"]))
        up = F.linear(y, own["channel_mixer.up_proj.weight"])
        x = x + F.linear(gate * up, own["channel_mixer.down_proj.weight"])
    return F.linear(_norm(x, weights["norm.weight"]), weights["head.weight"])


def _norm(x: Any, weight: Any) -> Any:
    return F.rms_norm(x, weight.shape, weight, _NORM_EPS)


def _attend(own: Weights, setup: Setup, x: Any, rotation: tuple[Any, Any]) -> Any:
    def heads(name: str, count: int) -> Any:
        y = F.linear(x, own[f"token_mixer.{name}.weight"])
        return y.view(*x.shape[:2], count, -1).transpose(1, 2)

    query = _rotated(heads("query_proj", setup.heads), rotation)
    key = _rotated(heads("key_proj", setup.kv_heads), rotation)
    value = heads("value_proj", setup.kv_heads)
    y = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
    return F.linear(y.transpose(1, 2).flatten(2), own["token_mixer.output_proj.weight"])


def _rotated(x: Any, rotation: tuple[Any, Any]) -> Any:
    cosines, sines = rotation
    a, b = x.chunk(2, dim=-1)
    return x * cosines + torch.cat([-b, a], dim=-1) * sines
