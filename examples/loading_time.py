"""Measures how long models of published sizes take to load, at the first and at the second start.

python examples/loading_time.py [--quick] [--folder /tmp]

It writes two checkpoints with random weights: a packed one in the shape of BitNet-2B-4T (1.2 GB) and a
16-bit one in the shape of MMfreeLM-1.3B (2.7 GB). It loads each of them in fresh processes and then
deletes them.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import mlx.core as mx

LOAD = """
import sys, time
start = time.perf_counter()
from mlx_mmfree.hub import load_model
from mlx_mmfree.platform.resident_memory import peak_resident_bytes
load_model(sys.argv[1])
seconds = time.perf_counter() - start
print(f"{seconds:.2f} {time.process_time():.2f} {peak_resident_bytes() / 1e9:.2f}")
"""

Shapes = dict[str, tuple[int, ...]]


def bitnet(dims: int, inner: int, layers: int, vocabulary: int) -> tuple[dict[str, Any], Shapes]:
    """The configuration and tensor shapes of a packed checkpoint, with four weights in a byte."""
    shapes: Shapes = {"embed_tokens.weight": (vocabulary, dims), "norm.weight": (dims,)}
    for n in range(layers):
        at, key_dims = f"layers.{n}.", dims // 4
        linears = {f"self_attn.{name}_proj": (dims, dims) for name in "qo"}
        linears |= {f"self_attn.{name}_proj": (key_dims, dims) for name in "kv"}
        linears |= {f"mlp.{name}_proj": (inner, dims) for name in ("gate", "up")}
        linears["mlp.down_proj"] = (dims, inner)
        for name, (rows, columns) in linears.items():
            shapes |= {f"{at}{name}.weight": (rows // 4, columns), f"{at}{name}.weight_scale": (1,)}
        for name in ("input_layernorm", "post_attention_layernorm", "self_attn.attn_sub_norm"):
            shapes[f"{at}{name}.weight"] = (dims,)
        shapes[f"{at}mlp.ffn_sub_norm.weight"] = (inner,)
    config = {
        "architectures": ["BitNetForCausalLM"],
        "model_type": "bitnet",
        "rope_theta": 500000.0,
        "num_attention_heads": 20,
        "num_key_value_heads": 5,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
        "hidden_act": "relu2",
        "quantization_config": {"quant_method": "bitnet", "linear_class": "autobitlinear"},
    }
    return config, {f"model.{name}": shape for name, shape in shapes.items()}


def mmfree(dims: int, inner: int, layers: int, vocabulary: int) -> tuple[dict[str, Any], Shapes]:
    """The configuration and tensor shapes of a checkpoint with 16-bit master weights."""
    linears = {"lm_head": (vocabulary, dims)}
    shapes: Shapes = {
        "model.embeddings.weight": (vocabulary, dims),
        "model.lower_bounds": (layers, dims),
        "model.norm.weight": (dims,),
    }
    for n in range(layers):
        at = f"model.layers.{n}."
        linears |= {f"{at}attn.{name}_proj": (dims, dims) for name in "ifgo"}
        linears |= {f"{at}mlp.gate_proj": (2 * inner, dims), f"{at}mlp.down_proj": (dims, inner)}
        for name in ("attn_norm", "mlp_norm", "attn.g_norm"):
            shapes[f"{at}{name}.weight"] = (dims,)
    for name, shape in linears.items():
        shapes |= {f"{name}.weight": shape, f"{name}.norm.weight": shape[1:]}
    return {"architectures": ["HGRNBitForCausalLM"], "model_type": "hgrn_bit"}, shapes


def write(folder: Path, config: dict[str, Any], shapes: Shapes) -> None:
    mx.random.seed(0)
    packed = {name.removesuffix("_scale") for name in shapes if name.endswith("_scale")}
    tensors = {}
    for name, shape in shapes.items():
        if name in packed:
            codes = mx.random.randint(0, 3, (4, *shape), mx.uint8)
            tensors[name] = codes[0] | codes[1] << 2 | codes[2] << 4 | codes[3] << 6
        else:
            low, high = (-0.05, 0.05) if len(shape) == 2 else (0.9, 1.1)
            tensors[name] = mx.random.uniform(low, high, shape, mx.bfloat16)
        mx.eval(tensors[name])
        mx.clear_cache()
    folder.mkdir()
    mx.save_safetensors(str(folder / "model.safetensors"), tensors, {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="use tiny models")
    parser.add_argument("--folder", help="folder with 6 GB of free space for the checkpoints")
    options = parser.parse_args()
    models = {
        "packed, BitNet-2B-4T": (bitnet, (2560, 6912, 30, 128256)),
        "16 bits, MMfreeLM-1.3B": (mmfree, (2048, 5632, 24, 32000)),
    }
    for name, (make, sizes) in models.items():
        sizes = (160, 64, 2, 128) if options.quick else sizes
        config, shapes = make(*sizes)
        keys = ("hidden_size", "intermediate_size", "num_hidden_layers", "vocab_size")
        config |= dict(zip(keys, sizes, strict=True))
        with tempfile.TemporaryDirectory(dir=options.folder) as folder:
            write(Path(folder) / "model", config, shapes)
            environment = os.environ | {"MLX_MMFREE_CACHE": f"{folder}/cache"}
            for start in ("first", "second"):
                command = [sys.executable, "-c", LOAD, f"{folder}/model"]
                output = subprocess.run(
                    command, env=environment, check=True, stdout=subprocess.PIPE, text=True
                ).stdout
                seconds, busy, gigabytes = output.split()
                print(
                    f"{name}: the {start} start took {seconds} s, {busy} s of processor time and "
                    "at most "
                    f"{gigabytes} GB of memory"
                )


if __name__ == "__main__":
    main()
