"""Writes golden cases of whole models of flash-linear-attention.

    python -m tests.goldens.make_fla_models CHECKOUT OUTPUT

As in `mixers.make_fla`, the models are the library's with the formats in plain torch that it
keeps beside its kernels, which need a GPU. Where it has no such format, for the last step of SwiGLU and
for attention, torch's own functions stand in. They compute in float64, since what they round to float32
is patched to stay.
"""

import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch.nn import functional as F

from tests.goldens.mixers.make_fla import load as load_layers

SIZES = {
    "vocab_size": 48,
    "hidden_size": 16,
    "num_hidden_layers": 3,
    "intermediate_size": 24,
    "initializer_range": 0.3,
}
WINDOWED = {"layers": [1], "num_heads": 4, "num_kv_heads": 2, "qkv_bias": True, "window_size": 5}
FULL = {"layers": [0], "num_heads": 2, "rope_theta": 500.0}
CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "fla_hgrn": ("hgrn", "HGRN", {}),
    "fla_hgrn_expand2_tied": (
        "hgrn",
        "HGRN",
        {"expand_ratio": 2, "use_lower_bound": False, "tie_word_embeddings": True},
    ),
    "fla_hgrn2": ("hgrn2", "HGRN2", {"expand_ratio": 4}),
    "fla_hgrn2_hybrid": ("hgrn2", "HGRN2", {"expand_ratio": 8, "attn": [WINDOWED, FULL]}),
    "fla_gla": ("gla", "GLA", {"num_heads": 2}),
    "fla_gla_unfused": ("gla", "GLA", {"expand_k": 1.0, "expand_v": 2.0, "fuse_norm": False}),
    "fla_retnet": ("retnet", "RetNet", {"num_heads": 2}),
}
PROMPT, GREEDY = 8, 16


def load(checkout: Path) -> None:
    """Like `make_fla`'s for layers, and for what lies around them."""
    load_layers(checkout)
    from fla.layers import attn, gla
    from fla.modules import layernorm, mlp

    def rms_norm(
        x: Any, weight: Any, bias: Any, residual: Any, eps: float, prenorm: bool, **_: Any
    ) -> Any:
        return layernorm.rms_norm_ref(x, weight, bias, residual, eps, prenorm)

    def attention(q: Any, k: Any, v: Any, window_size: tuple[int, int], **_: Any) -> Any:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        position = torch.arange(q.shape[2])
        distance = position[:, None] - position
        seen = distance >= 0
        if window_size[0] >= 0:
            seen &= distance <= window_size[0]
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=seen, enable_gqa=True)
        return y.transpose(1, 2)

    torch.Tensor.float = torch.Tensor.double  # type: ignore[method-assign]
    layernorm.rms_norm = rms_norm
    gla.ACT2FN = {"swish": F.silu}
    mlp.swiglu_linear = lambda gate, up, weight, bias: F.linear(F.silu(gate) * up, weight, bias)
    attn.flash_attn_func = attention


def build(name: str, seed: int) -> Any:
    module, kind, options = CASES[name]
    models = __import__(f"fla.models.{module}", fromlist=[kind])
    torch.manual_seed(seed)
    is_tied = options.get("tie_word_embeddings", False)
    config = getattr(models, f"{kind}Config")(**SIZES | options | {"tie_word_embeddings": False})
    model = getattr(models, f"{kind}ForCausalLM")(config)
    if is_tied:
        # newer versions of transformers do not understand how the library asks for it
        config.tie_word_embeddings = True
        model.lm_head.weight = model.model.embeddings.weight
    with torch.no_grad():
        for parameter in model.parameters():
            # norms, biases and lower bounds too
            parameter += 0.2 * torch.randn_like(parameter)
    return model.eval()


def outputs(model: Any, seed: int) -> dict[str, torch.Tensor]:
    """Rows of which all but the first are padded on the left, each with what it gives alone."""
    random = torch.Generator().manual_seed(seed)
    length, size = 21, SIZES["vocab_size"]
    ids = torch.randint(0, size, (3, length), generator=random)
    mask = torch.arange(length) >= torch.tensor([[0], [4], [13]])
    logits = torch.zeros(3, length, size, dtype=torch.float64)
    prenorm: list[torch.Tensor] = []
    hook = model.model.norm.register_forward_pre_hook(lambda _, given: prenorm.append(given[0]))
    with torch.no_grad():
        for row, valid in enumerate(mask):
            result = model(ids[row, valid][None], use_cache=False, output_hidden_states=True)
            logits[row, valid] = result.logits[0]
            if row == 0:
                hidden = {f"hidden_{n}": x[0] for n, x in enumerate(result.hidden_states)}
    hook.remove()
    found = {"input_ids": ids, "attention_mask": mask, "logits": logits, **hidden}
    return found | {"hidden_prenorm": prenorm[0][0]} | greedy(model, ids[0, :PROMPT])


def greedy(model: Any, prompt: torch.Tensor) -> dict[str, torch.Tensor]:
    ids, gaps = prompt, []
    with torch.no_grad():
        for _ in range(GREEDY):
            best = model(ids[None], use_cache=False).logits[0, -1].topk(2)
            gaps.append(best.values[0] - best.values[1])
            ids = torch.cat([ids, best.indices[:1]])
    return {"greedy_prompt": prompt, "greedy_ids": ids[PROMPT:], "greedy_gap": torch.stack(gaps)}


def gradients(model: Any, ids: torch.Tensor) -> dict[str, torch.Tensor]:
    logits = model(ids, use_cache=False).logits[:, :-1]
    loss = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
    loss.backward()
    found = {f"grad.{name}": each.grad for name, each in model.named_parameters()}
    return found | {"loss": loss.detach()[None]}


def main(checkout: str, output: str) -> None:
    load(Path(checkout))
    for seed, name in enumerate(CASES):
        folder = Path(output) / name
        model = build(name, seed)
        model.config.architectures = [type(model).__name__]
        model.config.save_pretrained(folder)
        weights = {key: each.detach() for key, each in model.named_parameters()}
        save_file(weights, folder / "model.safetensors", {"format": "pt"})
        model.double()
        tensors = outputs(model, seed)
        if tensors["greedy_gap"].min() < 1e-3:
            raise ValueError(f"{name}: two tokens are as good as each other; take another seed")
        tensors |= gradients(model, tensors["input_ids"])
        plain = {
            key: x.detach().to(torch.float32 if x.is_floating_point() else torch.int32).contiguous()
            for key, x in tensors.items()
        }
        save_file(plain, folder / "golden.safetensors")


if __name__ == "__main__":
    main(*sys.argv[1:])
