"""Writes `tests/data/defaults.json`: what programs take for keys that a configuration leaves out.

    python -m tests.models.make_defaults [--fla FOLDER] [--mmfree FOLDER]

It needs transformers and timm; the folders are clones of flash-linear-attention and of matmulfreellm.
Without one, what the file says of that program stays.
"""

import argparse
import ast
import json
import subprocess
from dataclasses import asdict
from pathlib import Path
from typing import Any

FILE = Path(__file__).parents[1] / "data" / "defaults.json"

_HEADS: dict[str, Any] = {"hidden_size": 640, "num_attention_heads": 160}
_NO_HEADS = {"num_key_value_heads": None, "hidden_size": 640, "num_attention_heads": 20}
GIVEN: dict[str, list[dict[str, Any]]] = {
    # mlx-lm takes another base where none is given, and so it must be given
    "bitnet": [{"rope_theta": 1e6} | given for given in ({}, _HEADS, _NO_HEADS)],
    "llama": [{}, _HEADS, _NO_HEADS | {"head_dim": None}],
    "qwen3": [{}, _HEADS, _NO_HEADS],
    # other models of this type are refused
    "qwen3_moe": [{"norm_topk_prob": True}, _HEADS | {"norm_topk_prob": True}],
    "gemma3_text": [{}],
    "qwen3_5_text": [{"rope_parameters": {"rope_type": "default", "rope_theta": 1e7}}],
    "big_bird": [{}],
    "fnet": [{}],
    "longformer": [{}],
    "mamba2": [{}],
    "marian": [{}, {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4}],
    # an encoder is not read, nor is a number of buckets that follows from the first text
    "reformer": [{"is_decoder": True, "num_buckets": 64}],
}
"""By architecture of transformers: configurations of few keys."""

PROCESSORS = ("DeiT", "PoolFormer", "ViT")
"""Image processors of transformers."""


def of_transformers() -> dict[str, Any]:
    """These configurations as transformers reads them."""
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    read = {
        name: [
            {"given": given, "read": CONFIG_MAPPING[name](**given).to_dict()} for given in all_given
        ]
        for name, all_given in GIVEN.items()
    }
    processors = {
        name: getattr(transformers, f"{name}ImageProcessor")().to_dict() for name in PROCESSORS
    }
    found = {"configurations": read, "processors": processors}
    return {"version": transformers.__version__, **json.loads(json.dumps(found))}


def of_timm() -> dict[str, Any]:
    """How timm prepares pictures where its file does not say it."""
    import timm
    from timm.data import resolve_data_config
    from timm.models import PretrainedCfg

    prepared = resolve_data_config(pretrained_cfg={"url": "of a file without further keys"})
    whole = asdict(PretrainedCfg())
    assert all(tuple(prepared[key]) == tuple(whole[key]) for key in ("input_size", "mean", "std"))
    prepared["num_classes"] = whole["num_classes"]
    return {"version": timm.__version__, "pretrained_cfg": json.loads(json.dumps(prepared))}


def of_clone(folder: Path, configurations: dict[str, str]) -> dict[str, Any]:
    """The default of each argument of the configurations of a program, by their files in its clone."""

    def git(*arguments: str) -> str:
        return subprocess.run(
            ["git", "-C", folder, *arguments], check=True, capture_output=True, text=True
        ).stdout.strip()

    read = {}
    for name, file in configurations.items():
        [made] = [
            node
            for node in ast.walk(ast.parse(git("show", f"HEAD:{file}")))
            if isinstance(node, ast.FunctionDef) and node.name == "__init__"
        ]
        arguments = [each.arg for each in made.args.args[1:]]
        values = map(ast.literal_eval, made.args.defaults)
        read[name] = [{"given": {}, "read": dict(zip(arguments, values, strict=True))}]
    return {"version": git("rev-parse", "HEAD"), "configurations": read}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--fla", type=Path)
    parser.add_argument("--mmfree", type=Path)
    args = parser.parse_args()
    found = json.loads(FILE.read_text()) if FILE.exists() else {}
    found |= {"transformers": of_transformers(), "timm": of_timm()}
    if args.fla is not None:
        files = {
            name: f"fla/models/{name}/configuration_{name}.py"
            for name in (
                "delta_net",
                "gated_deltanet",
                "gla",
                "hgrn",
                "hgrn2",
                "kda",
                "retnet",
                "rwkv7",
            )
        }
        found["flash-linear-attention"] = of_clone(args.fla, files)
    if args.mmfree is not None:
        file = "mmfreelm/models/hgrn_bit/configuration_hgrn_bit.py"
        found["matmulfreellm"] = of_clone(args.mmfree, {"hgrn_bit": file})
    FILE.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
