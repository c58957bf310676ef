"""Writes golden cases of Reformer by Transformers, in float64.

    python -m tests.goldens.make_reformer OUTPUT

It draws the directions of its hash anew in each call; here it is given this library's. Of the
two biases of the head, version 5 applies the decoder's, and stored files have the other one alone.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch.nn import functional as F
from transformers import ReformerConfig, ReformerModelWithLMHead

from mlx_mmfree.token_mixers.reformer import draw_rotations

SIZES: dict[str, Any] = {
    "vocab_size": 40,
    "hidden_size": 16,
    "attention_head_size": 8,
    "num_attention_heads": 2,
    "feed_forward_size": 24,
    "axial_pos_shape": [6, 8],
    "axial_pos_embds_dim": [4, 12],
    "max_position_embeddings": 48,
    "attn_layers": ["local", "lsh", "local", "lsh"],
    "local_attn_chunk_length": 4,
    "lsh_attn_chunk_length": 8,
    "num_buckets": [2, 4],
    "hash_seed": 5,
    "initializer_range": 0.4,
    "is_decoder": True,
    "hidden_dropout_prob": 0.0,
    "local_attention_probs_dropout_prob": 0.0,
}
CASES: dict[str, dict[str, Any]] = {
    "hf_reformer": {},
    "hf_reformer_rounds": {
        "attn_layers": ["lsh", "local", "lsh"],
        "num_hashes": 3,
        "num_buckets": 6,
        "axial_pos_embds": False,
        "max_position_embeddings": 64,
        "hidden_act": "gelu",
    },
}
PROMPT, GREEDY = 5, 43


@contextmanager
def directions(seed: int) -> Iterator[None]:
    """Transformers hashes by the directions that this library draws from a seed."""
    before = torch.randn

    def randn(shape: tuple[int, ...], dtype: torch.dtype, **_: Any) -> torch.Tensor:
        heads, dims, rounds, half = shape
        drawn = draw_rotations(heads, dims, rounds, (2 * half,), seed)
        return torch.tensor(np.array(drawn)).to(dtype)

    torch.randn = randn  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.randn = before


def build(seed: int, options: dict[str, Any]) -> ReformerModelWithLMHead:
    """A model whose norms and biases are random too."""
    torch.manual_seed(seed)
    model = ReformerModelWithLMHead(ReformerConfig(**SIZES | options)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
        model.lm_head.decoder.bias.copy_(model.lm_head.bias)
    return model


def logits_of(model: ReformerModelWithLMHead, ids: torch.Tensor, **options: Any) -> Any:
    """The logits, and what the model gives besides."""
    output = model(ids, **options)
    return output.logits, output


def outputs(model: ReformerModelWithLMHead, seed: int) -> dict[str, torch.Tensor]:
    """Of whole texts, and tokens that follow each other by the state."""
    random = torch.Generator().manual_seed(seed)
    # one token more than whole chunks, where there are positions for it
    length = 48 if model.config.axial_pos_embds else 49
    ids = torch.randint(0, SIZES["vocab_size"], (2, length), generator=random)
    with torch.no_grad():
        logits, _ = logits_of(model, ids, use_cache=False)
        prompt = ids[:1, :PROMPT]
        following, output = logits_of(model, prompt, use_cache=True)
        tokens, gaps = [], []
        for _ in range(GREEDY):
            best = following[0, -1].topk(2)
            tokens.append(best.indices[:1])
            gaps.append(best.values[0] - best.values[1])
            state = output.past_buckets_states
            following, output = logits_of(
                model, tokens[-1][None], use_cache=True, past_buckets_states=state
            )
    return {
        "input_ids": ids,
        "logits": logits,
        "greedy_prompt": prompt[0],
        "greedy_ids": torch.cat(tokens),
        "greedy_gap": torch.stack(gaps),
    }


def gradients(model: ReformerModelWithLMHead, ids: torch.Tensor) -> dict[str, torch.Tensor]:
    model.train()
    logits, _ = logits_of(model, ids[:, :-1], use_cache=False)
    loss = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
    loss.backward()
    found = {f"grad.{name}": each.grad for name, each in model.named_parameters()}
    found["grad.lm_head.bias"] = found.pop("grad.lm_head.decoder.bias")
    return found | {"loss": loss.detach()[None]}


def main(output: str) -> None:
    for seed, (name, options) in enumerate(CASES.items()):
        folder = Path(output) / name
        model = build(seed, options)
        model.config.architectures = [type(model).__name__]
        model.config.save_pretrained(folder)
        weights = {key: each.detach().clone() for key, each in model.named_parameters()}
        del weights["lm_head.decoder.bias"]
        save_file(weights, folder / "model.safetensors", {"format": "pt"})
        with directions(SIZES["hash_seed"]):
            tensors = outputs(model.double(), seed)
            if not model.config.axial_pos_embds:
                tensors |= gradients(model, tensors["input_ids"])
        if tensors["greedy_gap"].min() < 1e-3:
            raise ValueError(f"{name}: two tokens are as good as each other; take another seed")
        plain = {
            key: x.detach().to(torch.float32 if x.is_floating_point() else torch.int32).contiguous()
            for key, x in tensors.items()
        }
        save_file(plain, folder / "golden.safetensors")


if __name__ == "__main__":
    main(*sys.argv[1:])
