"""Writes Qwen3.5 with rotated weights as Bonsai 2 has them, and the same model without a rotation.

MLX itself has the transform, and NumPy packs the trits. The library only reads the header of a GGUF file
whose types are to change.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_mmfree.files.gguf_file import read_gguf
from tests.hub.gguf_files import write_gguf

GROUP = 128
PACKING = "hadamard_packing.json"


@dataclass(frozen=True)
class Shape:
    """The sizes of a twin: one linear and, unless it is left out, one full layer.

    Attributes:
        dims, hidden, block: Dims, inner dims and inputs that are rotated together.
        keys, values: Heads of the linear layer.
        is_tied: Whether the head is the embedding.
        layers: The number of layers, 1 or 2.
    """

    dims: int
    hidden: int
    block: int
    keys: int = 2
    values: int = 4
    is_tied: bool = False
    vocabulary: int = 48
    layers: int = 2

    @property
    def config(self) -> dict[str, Any]:
        width = self.value_width // self.values
        return {
            "model_type": "qwen3_5_text",
            "architectures": ["Qwen3_5ForCausalLM"],
            "vocab_size": self.vocabulary,
            "hidden_size": self.dims,
            "intermediate_size": self.hidden,
            "num_hidden_layers": self.layers,
            "layer_types": ["linear_attention", "full_attention"][: self.layers],
            "full_attention_interval": 2,
            "num_attention_heads": self.value_width // 64,
            "num_key_value_heads": 1,
            "head_dim": 64,
            "linear_num_key_heads": self.keys,
            "linear_num_value_heads": self.values,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": width,
            "linear_conv_kernel_dim": 4,
            "rms_norm_eps": 1e-6,
            "hidden_act": "silu",
            "max_position_embeddings": 512,
            "tie_word_embeddings": self.is_tied,
            "attn_output_gate": True,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1e7,
                "partial_rotary_factor": 0.25,
            },
        }

    @property
    def value_width(self) -> int:
        return max(self.block, 256)

    def matrices(self) -> dict[str, tuple[int, int]]:
        """The rotated matrices by their Hub names, the embedding and the head among them."""
        dims, inner, keys = self.dims, self.value_width, 2 * self.keys * 16
        linear, full = "model.layers.0.linear_attn", "model.layers.1.self_attn"
        found = {
            f"{linear}.in_proj_qkv": (keys + inner, dims),
            f"{linear}.in_proj_z": (inner, dims),
            f"{linear}.out_proj": (dims, inner),
            "model.embed_tokens": (self.vocabulary, dims),
        }
        if self.layers > 1:
            found |= {f"{full}.q_proj": (2 * inner, dims), f"{full}.o_proj": (dims, inner)}
            found |= {f"{full}.{name}_proj": (64, dims) for name in "kv"}
        for layer in range(self.layers):
            for name in ("gate", "up"):
                found[f"model.layers.{layer}.mlp.{name}_proj"] = (self.hidden, dims)
            found[f"model.layers.{layer}.mlp.down_proj"] = (dims, self.hidden)
        return found if self.is_tied else {**found, "lm_head": (self.vocabulary, dims)}

    def others(self) -> dict[str, tuple[int, ...]]:
        linear, full = "model.layers.0.linear_attn", "model.layers.1.self_attn"
        channels = 2 * self.keys * 16 + self.value_width
        layers, kinds = range(self.layers), ("input", "post_attention")
        norms = [f"model.layers.{n}.{kind}_layernorm" for n in layers for kind in kinds]
        heads = {f"{full}.{name}_norm.weight": (64,) for name in "qk"} if self.layers > 1 else {}
        return {
            **{f"{name}.weight": (self.dims,) for name in (*norms, "model.norm")},
            **heads,
            f"{linear}.norm.weight": (self.value_width // self.values,),
            f"{linear}.conv1d.weight": (channels, 1, 4),
            f"{linear}.in_proj_a.weight": (self.values, self.dims),
            f"{linear}.in_proj_b.weight": (self.values, self.dims),
            f"{linear}.A_log": (self.values,),
            f"{linear}.dt_bias": (self.values,),
        }


def signs_of(width: int) -> np.ndarray:
    return np.random.default_rng(width).choice(np.array([-1.0, 1.0], np.float32), width)


def rotated_back(matrix: np.ndarray, block: int) -> np.ndarray:
    """`H(Q) * s`, by rows."""
    rows, width = matrix.shape
    turned = mx.hadamard_transform(mx.array(matrix.astype(np.float32)).reshape(rows, -1, block))
    return np.array(turned).reshape(rows, width) * signs_of(width)


def draw(shape: Shape) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """The rotated matrices, float16 and ternary in groups, and all other tensors, float32."""
    rng = np.random.default_rng(7)
    rotated = {}
    for name, (rows, columns) in shape.matrices().items():
        trits = rng.integers(-1, 2, (rows, columns // GROUP, GROUP))
        scales = rng.uniform(0.5, 1.5, (rows, columns // GROUP, 1)) * (1.5 / columns) ** 0.5
        rotated[name] = (
            (trits * scales.astype(np.float16)).astype(np.float16).reshape(rows, columns)
        )
    others = {}
    for name, size in shape.others().items():
        values = rng.normal(0, 0.1, size).astype(np.float32)
        if name.endswith("linear_attn.norm.weight"):
            values += 1
        others[name] = values.astype(np.float16).astype(np.float32)
    return rotated, others


def save(folder: Path, config: dict[str, Any], tensors: dict[str, np.ndarray]) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    arrays = {name: mx.array(values) for name, values in tensors.items()}
    mx.save_safetensors(str(folder / "model.safetensors"), arrays, {"format": "pt"})
    return folder


def write_plain(folder: Path, shape: Shape) -> Path:
    """The model without its rotation, in float32."""
    rotated, others = draw(shape)
    plain = {f"{name}.weight": rotated_back(q, shape.block) for name, q in rotated.items()}
    return save(folder, {**shape.config, "dtype": "float32"}, plain | others)


def packing(shape: Shape, schema: int | None = None) -> dict[str, Any]:
    """The content of `hadamard_packing.json`."""
    schema = schema or (3 if shape.is_tied else 1)
    names = shape.matrices()
    roles = {True: "inverse-after-lookup", False: "fold-before-matmul"}
    return {
        "schema_version": schema,
        "kind": "hadamard-weight-fold",
        "status": "requires-matching-runtime",
        "transform": {
            "name": "normalized-signed-sylvester-walsh-hadamard",
            "block_size": shape.block,
            "sign_mode": "explicit",
        },
        "signs": {
            str(width): signs_of(width).astype(int).tolist()
            for width in sorted({columns for _, columns in names.values()})
        },
        "tensors": [
            {"name": f"{name}.weight", "axis": -1, "role": roles[name.endswith("embed_tokens")]}
            for name in names
        ],
        **({"tied_output": True} if schema == 3 else {}),
    }


def write_folded(folder: Path, shape: Shape, schema: int | None = None) -> Path:
    """The rotated weights in 16 bits, as PrismML's converter takes them."""
    rotated, others = draw(shape)
    folded = {f"{name}.weight": q for name, q in rotated.items()}
    save(folder, {**shape.config, "dtype": "float16"}, folded | others)
    (folder / PACKING).write_text(json.dumps(packing(shape, schema)))
    return folder


def write_prism(folder: Path, shape: Shape) -> Path:
    """Bonsai 2's own format for MLX: codes of 2 bits, with schema 1."""
    rotated, others = draw(shape)
    tensors: dict[str, np.ndarray] = {}
    for name, q in rotated.items():
        groups = q.reshape(len(q), -1, GROUP)
        scales = np.abs(groups).max(axis=-1)
        codes = (np.sign(q).astype(np.int8) + 1).astype(np.uint32).reshape(len(q), -1, 16)
        tensors[f"{name}.weight"] = (codes << np.arange(0, 32, 2, dtype=np.uint32)).sum(
            axis=-1, dtype=np.uint32
        )
        tensors |= {f"{name}.scales": scales, f"{name}.biases": -scales}
        tensors[f"{name}.signs"] = signs_of(q.shape[1])
    for name, values in others.items():
        if "conv1d" in name:
            values = values.swapaxes(1, 2)
        elif "norm" in name and "linear_attn" not in name:
            values = 1 + values
        tensors[name] = values
    modules = [
        {
            "path": name,
            "embedding": name.endswith("embed_tokens"),
            "block": shape.block,
            "dtype": "float16",
        }
        for name in rotated
    ]
    config = {
        "model_type": "prism_hadamard_qwen35",
        "base_model_type": "qwen3_5",
        "schema_version": 1,
        "tensor_namespace": "mlx-lm-text",
        "gdn_activation_layout": "grouped",
        "quantization": {"bits": 2, "group_size": 128, "mode": "affine"},
        "modules": modules,
        "text_config": shape.config,
        "tie_word_embeddings": shape.is_tied,
    }
    return save(folder, config, tensors)


def _ptq1_0(trits: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Blocks of 128: five trits a byte in 16 and in 8 bytes, four in 2, then the scale."""
    parts, start = [], 0
    for count, digits in ((16, 5), (8, 5), (2, 4)):
        part = trits[:, start : start + count * digits].reshape(-1, digits, count) + 1
        # a byte is a fraction of 243 whose highest digit is the first trit
        number = sum(part[:, n].astype(np.int64) * 3 ** (4 - n) for n in range(digits))
        parts.append(-(-256 * number // 243))
        start += count * digits
    return np.concatenate([*parts, scales.view(np.uint8)], axis=1).astype(np.uint8)


def _q2_0(trits: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """The scale, then four codes a byte, the first in the lowest bits."""
    codes = (trits + 1).astype(np.uint8).reshape(len(trits), -1, 4)
    data = np.bitwise_or.reduce(codes << np.arange(0, 8, 2, dtype=np.uint8), axis=2)
    return np.concatenate([scales.view(np.uint8), data], axis=1)


def _packed(kind: str, trits: np.ndarray, scales: np.ndarray) -> tuple[int, np.ndarray]:
    """The number of a type, and groups of 128 trits with their scales `(groups, 1)` in it."""
    if kind == "F16":
        return 1, (trits * scales).view(np.uint8)
    if kind == "PTQ1_0":
        return 143, _ptq1_0(trits, scales)
    if kind == "Q2_0 in groups of 64":
        return 42, _q2_0(trits.reshape(-1, 64), np.repeat(scales, 2, axis=0))
    return {"Q2_0 in groups of 128": 42, "PQ2_0": 142}[kind], _q2_0(trits, scales)


def write_gguf_in(kind: str, file: Path, source: Path) -> Path:
    """A GGUF file with its PQ2_0 matrices in another type, with the same values."""
    metadata, found = read_gguf(source)
    whole = source.read_bytes()
    numbers = {"F32": 0, "F16": 1, "BF16": 30}
    tensors = {}
    for name, tensor in found.items():
        content = whole[tensor.start : tensor.stop]
        if tensor.kind.name != "PQ2_0":
            tensors[name] = numbers[tensor.kind.name], tensor.shape, content
            continue
        blocks = np.frombuffer(content, np.uint8).reshape(-1, 34)
        codes = (blocks[:, 2:, None] >> np.arange(0, 8, 2, dtype=np.uint8)) & 3
        trits = codes.reshape(len(blocks), GROUP).astype(np.int8) - 1
        number, packed = _packed(kind, trits, blocks[:, :2].copy().view(np.float16))
        tensors[name] = number, tensor.shape, packed.tobytes()
    return write_gguf(file, metadata, tensors)
