"""Writes golden files of whole layers of flash-linear-attention.

    python -m tests.goldens.mixers.make_fla CHECKOUT COMMIT OUTPUT [SEED]

`CHECKOUT` is a folder with the source of flash-linear-attention, whose commit is recorded; torch, triton
and einops are needed beside. Its kernels need a GPU, so that each is replaced by the format in plain
torch that the library keeps beside it: `naive.py` of its operations, `rms_norm_ref` and
`rotary_embedding_ref`.
"""

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import mlx.core as mx
import torch
from torch.nn import functional as F

DIMS, BATCH, LENGTH = 24, 2, 11
LAYERS = {
    "gla__layer": ("gla", "GatedLinearAttention", {"num_heads": 3, "gate_low_rank_dim": 5}),
    "retnet__layer": ("multiscale_retention", "MultiScaleRetention", {"num_heads": 3}),
    "hgrn__layer": ("hgrn", "HGRNAttention", {"expand_ratio": 2}),
    "hgrn2__layer": ("hgrn2", "HGRN2Attention", {"expand_ratio": 8}),
}


def load(checkout: Path) -> None:
    """Makes the library importable and puts plain torch in place of its kernels."""
    sys.path.insert(0, str(checkout))
    triton = importlib.import_module("triton")
    triton.autotune = triton.heuristics = lambda *args, **kwargs: lambda function: function
    gla, retnet, hgrn, hgrn2 = (
        importlib.import_module(f"fla.layers.{module}") for module, _, _ in LAYERS.values()
    )
    ref = importlib.import_module("fla.modules.layernorm").rms_norm_ref
    rotary = importlib.import_module("fla.modules.rotary")
    gated = importlib.import_module("fla.modules.fused_norm_gate")
    naive = {
        name: importlib.import_module(f"fla.ops.{name}.naive")
        for name in ("gla", "retention", "hgrn")
    }

    def recurrent_gla(q: Any, k: Any, v: Any, gk: Any, output_final_state: bool, **_: Any) -> Any:
        return naive["gla"].naive_recurrent_gla(q, k, v, gk, None, output_final_state)

    def recurrent_retention(q: Any, k: Any, v: Any, **_: Any) -> Any:
        heads_first = (x.transpose(1, 2) for x in (q, k, v))
        return naive["retention"].naive_retention(*heads_first).transpose(1, 2), None

    def recurrent_hgrn(x: Any, g: Any, output_final_state: bool, **_: Any) -> Any:
        return naive["hgrn"].naive_recurrent_hgrn(x, g, None, output_final_state)

    def rotate(x: Any, cos: Any, sin: Any, **_: Any) -> Any:
        return rotary.rotary_embedding_ref(x, cos[: x.shape[1]], sin[: x.shape[1]])

    gla.fused_recurrent_gla = hgrn2.fused_recurrent_gla = recurrent_gla
    retnet.fused_recurrent_retention = recurrent_retention
    hgrn.fused_recurrent_hgrn = recurrent_hgrn
    hgrn.swiglu = lambda x, y: F.silu(x) * y
    hgrn2.swish = F.silu
    hgrn2.rms_norm_linear = lambda x, norm, bias, weight, b: F.linear(ref(x, norm, bias), weight, b)
    gated.rms_norm_gated = lambda x, g, weight, bias, activation, eps, **_: (
        ref(x, weight, bias, eps=eps) * F.silu(g)
    )
    rotary.rotary_embedding = rotate


def compute(name: str, seed: int) -> tuple[dict[str, mx.array], dict[str, Any]]:
    module, kind, options = LAYERS[name]
    random = torch.Generator().manual_seed(seed)
    layer = getattr(sys.modules[f"fla.layers.{module}"], kind)(
        hidden_size=DIMS, layer_idx=1, **options
    ).eval()
    with torch.no_grad():
        for parameter in layer.parameters():
            drawn = torch.randn(parameter.shape, generator=random)
            parameter.copy_(0.4 * drawn + (parameter.ndim == 1))
        x = torch.randn(BATCH, LENGTH, DIMS, generator=random)
        tensors = {f"w.{key}": value for key, value in layer.named_parameters()}
        tensors |= {"in.x": x, "out.y": layer(x)[0]}
        if "hgrn" in name:
            bound = torch.rand(layer.f_proj.out_features, generator=random)
            y = layer(x, lower_bound=bound)[0]
            tensors |= {"in.lower_bound": bound, "out.y_lower_bound": y}
    hyper = options | {"dims": DIMS, "norm_eps": 1e-5}
    arrays = {key: mx.array(value.detach().numpy().copy()) for key, value in tensors.items()}
    return arrays, hyper


def main(checkout: str, commit: str, output: str, seed: str = "0") -> None:
    load(Path(checkout))
    for name, (module, kind, _) in LAYERS.items():
        arrays, hyper = compute(name, int(seed))
        source = {
            "repository": "fla-org/flash-linear-attention",
            "commit": commit,
            "symbol": f"layers/{module}.py::{kind} on the operations of naive.py",
        }
        metadata = {
            "golden": name,
            "kind": "third-party",
            "hyper": json.dumps(hyper),
            "source": json.dumps(source),
            "note": "written by tests/goldens/mixers/make_fla.py; computed without a GPU",
            "computed_in": "float32",
        }
        mx.save_safetensors(str(Path(output) / f"{name}.safetensors"), arrays, metadata)


if __name__ == "__main__":
    main(*sys.argv[1:])
