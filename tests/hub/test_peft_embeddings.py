"""PEFT's adapters of embeddings and heads, on models that share one matrix for both and on others.

The logits were computed by PEFT 0.21.2 with transformers 5.24.0 and torch 2.14.1 in float32, for weights
and adapters that follow a formula.
"""

import json
import zlib
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from mlx_mmfree.errors import CheckpointError
from mlx_mmfree.hub import convert, load_model, open_checkpoint
from mlx_mmfree.hub.adapters.adapter import attach
from mlx_mmfree.hub.adapters.adapter_folder import read_adapter, write_adapter, write_peft_adapter
from mlx_mmfree.hub.conversion.fuse import fuse
from mlx_mmfree.hub.conversion.to_folder import FloatFormats
from tests.hub.test_adapters import LLAMA, TOKENS, change
from tests.tolerances import TOLERANCE, relative_error

# mlx-lm lets MLX fuse its operations
pytestmark = pytest.mark.usefixtures("unfused")

VOCABULARY, DIMS, RANK = LLAMA["vocab_size"], LLAMA["hidden_size"], 4
LORA = {
    "embed_tokens": {
        "model.embed_tokens.lora_embedding_A": (RANK, VOCABULARY),
        "model.embed_tokens.lora_embedding_B": (DIMS, RANK),
    },
    "lm_head": {
        "lm_head.lora_A.weight": (RANK, DIMS),
        "lm_head.lora_B.weight": (VOCABULARY, RANK),
    },
    "q_proj": {
        f"model.layers.{n}.self_attn.q_proj.lora_{part}.weight": shape
        for n in (0, 1)
        for part, shape in (("A", (RANK, DIMS)), ("B", (DIMS, RANK)))
    },
}
MAGNITUDES = {
    "lm_head": {"lm_head.lora_magnitude_vector": (VOCABULARY,)},
    "q_proj": {f"model.layers.{n}.self_attn.q_proj.lora_magnitude_vector": (DIMS,) for n in (0, 1)},
}
BASE = ("model.embed_tokens", "lm_head")


def values(name: str, shape: tuple[int, ...], scale: float) -> np.ndarray:
    """Numbers within ±`scale` that depend on a name alone."""
    steps = np.arange(np.prod(shape)) + zlib.crc32(name.encode()) % 100_003
    return (scale * np.sin(steps * steps % 9973.0)).astype(np.float32).reshape(shape)


def base_tensors(is_tied: bool) -> dict[str, np.ndarray]:
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens": (VOCABULARY, DIMS)}
    if not is_tied:
        shapes["lm_head"] = (VOCABULARY, DIMS)
    for n in (0, 1):
        layer = f"model.layers.{n}"
        for name, rows in (("q", DIMS), ("k", DIMS // 2), ("v", DIMS // 2), ("o", DIMS)):
            shapes[f"{layer}.self_attn.{name}_proj"] = (rows, DIMS)
        shapes[f"{layer}.mlp.gate_proj"] = shapes[f"{layer}.mlp.up_proj"] = (48, DIMS)
        shapes[f"{layer}.mlp.down_proj"] = (DIMS, 48)
        for name in ("input_layernorm", "post_attention_layernorm"):
            shapes[f"{layer}.{name}"] = (DIMS,)
    shapes["model.norm"] = (DIMS,)
    return {
        f"{name}.weight": values(name, shape, 0.3) + (1.0 if len(shape) == 1 else 0.0)
        for name, shape in shapes.items()
    }


def base_folder(folder: Path, is_tied: bool) -> Path:
    folder.mkdir()
    tensors = {name: mx.array(array) for name, array in base_tensors(is_tied).items()}
    mx.save_safetensors(str(folder / "model.safetensors"), tensors, {"format": "pt"})
    config = {**LLAMA, "architectures": ["LlamaForCausalLM"], "tie_word_embeddings": is_tied}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def adapter_tensors(targets: tuple[str, ...], *, is_dora: bool = False) -> dict[str, np.ndarray]:
    shapes: dict[str, tuple[int, ...]] = {}
    for target in targets:
        shapes |= LORA[target]
        if is_dora:
            shapes |= MAGNITUDES[target]
    return {
        name: values(name, shape, 0.3) + (1.0 if len(shape) == 1 else 0.0)
        for name, shape in shapes.items()
    }


def adapter_folder(
    folder: Path,
    targets: tuple[str, ...],
    whole: dict[str, np.ndarray] | None = None,
    **options: object,
) -> Path:
    """An adapter in PEFT's files, with whole tensors beside it as PEFT saves them."""
    folder.mkdir()
    tensors = adapter_tensors(targets, is_dora=bool(options.get("use_dora")))
    if options.get("ensure_weight_tying"):
        tensors["lm_head.lora_A.weight"] = tensors["model.embed_tokens.lora_embedding_B"].T
        tensors["lm_head.lora_B.weight"] = tensors["model.embed_tokens.lora_embedding_A"].T
    named = {
        f"base_model.model.{name}": mx.array(a) for name, a in {**tensors, **(whole or {})}.items()
    }
    mx.save_safetensors(str(folder / "adapter_model.safetensors"), named, {"format": "pt"})
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": RANK, "lora_alpha": 2 * RANK}
    config |= {"target_modules": list(targets), "base_model_name_or_path": None, **options}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def whole(is_tied: bool, dtype: mx.Dtype = mx.float32, factor: float = 1.0) -> dict[str, mx.array]:
    """The embedding and the head of the base, by the names under which PEFT saves them."""
    tensors = base_tensors(is_tied)
    return {
        f"{name}.base_layer.weight": (
            mx.array(tensors.get(f"{name}.weight", tensors["model.embed_tokens.weight"])) * factor
        ).astype(dtype)
        for name in BASE
    }


def last_logits(base: Path, adapter: Path) -> mx.array:
    return attach(load_model(base), read_adapter(adapter)).eval()(TOKENS)[0][0, -1, :6]


UNTIED = [
    (("embed_tokens",), {}, [-1.08901, -1.83575, 1.14496, -1.19194, 0.86348, -1.83508]),
    (("lm_head",), {}, [-0.66752, 1.74332, 0.66881, 2.80577, -1.17561, 1.54454]),
    (("embed_tokens", "lm_head"), {}, [-0.27048, -2.24735, -0.31882, -3.0519, 0.86538, -2.31546]),
    (
        ("embed_tokens", "lm_head", "q_proj"),
        {},
        [-0.22223, 1.1447, -0.06538, -0.30741, -2.64763, -0.98814],
    ),
    (
        ("lm_head", "q_proj"),
        {"use_dora": True},
        [-1.23259, -0.51917, 0.42953, 1.63925, -1.21586, -0.57212],
    ),
]
TIED = [
    (("embed_tokens",), [0.29984, 0.7849, 0.12739, 1.81216, -1.8203, -0.32435]),
    (("embed_tokens", "q_proj"), [0.31196, 2.50567, -2.23976, 2.5993, -1.0697, -1.60392]),
]


@pytest.mark.parametrize("has_whole", [False, True], ids=["alone", "with the base's"])
@pytest.mark.parametrize(("targets", "options", "want"), UNTIED)
def test_heads_of_their_own(
    tmp_path: Path, targets: tuple[str, ...], options: dict, want: list[float], has_whole: bool
) -> None:
    base = base_folder(tmp_path / "base", is_tied=False)
    tensors = whole(is_tied=False) if has_whole else None
    adapter = adapter_folder(tmp_path / "adapter", targets, tensors, **options)
    assert relative_error(last_logits(base, adapter), mx.array(want)) <= 2e-5


@pytest.mark.parametrize("has_whole", [False, True], ids=["alone", "with the base's"])
@pytest.mark.parametrize("is_declared", [False, True], ids=["equal tensors", "ensure_weight_tying"])
@pytest.mark.parametrize(("targets", "want"), TIED)
def test_a_head_that_is_the_embedding_changes_with_it(
    tmp_path: Path, targets: tuple[str, ...], want: list[float], is_declared: bool, has_whole: bool
) -> None:
    base = base_folder(tmp_path / "base", is_tied=True)
    tensors = whole(is_tied=True) if has_whole else None
    adapter = adapter_folder(tmp_path / "adapter", targets, tensors, ensure_weight_tying=True)
    file = adapter / "adapter_config.json"
    config = json.loads(file.read_text()) | {"ensure_weight_tying": is_declared}
    file.write_text(json.dumps(config | {"target_modules": [*targets, "lm_head"]}))
    assert relative_error(last_logits(base, adapter), mx.array(want)) <= 2e-5


@pytest.mark.parametrize(
    ("targets", "reason"),
    [
        (("embed_tokens",), "changes 'model.embed_tokens' alone"),
        (("embed_tokens", "q_proj"), "changes 'model.embed_tokens' alone"),
        (("lm_head",), "changes 'lm_head' alone"),
        (("embed_tokens", "lm_head"), "changes each of them otherwise"),
    ],
)
def test_half_of_a_shared_matrix_is_refused(
    tmp_path: Path, targets: tuple[str, ...], reason: str
) -> None:
    base = base_folder(tmp_path / "base", is_tied=True)
    with pytest.raises(CheckpointError, match=reason):
        last_logits(base, adapter_folder(tmp_path / "adapter", targets))


@pytest.mark.parametrize("targets", [("embed_tokens",), ("embed_tokens", "q_proj")])
def test_what_is_written_for_a_shared_matrix_says_so(
    tmp_path: Path, targets: tuple[str, ...]
) -> None:
    base = base_folder(tmp_path / "base", is_tied=True)
    read = adapter_folder(tmp_path / "read", targets, ensure_weight_tying=True)
    model = attach(load_model(base), read_adapter(read))
    write_peft_adapter(tmp_path / "peft", model)
    config = json.loads((tmp_path / "peft/adapter_config.json").read_text())
    assert config["ensure_weight_tying"] is True
    names = {"model.embed_tokens": "embed_tokens", "lm_head": "lm_head"}
    targeted = {names.get(name, "q_proj") for name in config["target_modules"]}
    assert targeted == {*targets, "lm_head"}
    files = (tmp_path / "peft", read)
    written, given = (mx.load(str(folder / "adapter_model.safetensors")) for folder in files)
    assert written.keys() == given.keys()
    assert all(mx.array_equal(written[name], given[name]) for name in given)
    write_adapter(tmp_path / "mlx", model, {})
    for folder in ("peft", "mlx"):
        got = last_logits(base, tmp_path / folder)
        assert mx.array_equal(got, model.eval()(TOKENS)[0][0, -1, :6])


def test_an_embedding_with_a_head_beside_it_is_written_alone(tmp_path: Path) -> None:
    base = base_folder(tmp_path / "base", is_tied=False)
    read = adapter_folder(tmp_path / "read", ("embed_tokens",))
    write_peft_adapter(tmp_path / "peft", attach(load_model(base), read_adapter(read)))
    config = json.loads((tmp_path / "peft/adapter_config.json").read_text())
    assert config["ensure_weight_tying"] is False
    assert config["target_modules"] == ["model.embed_tokens"]


def test_merged_into_a_shared_matrix(tmp_path: Path) -> None:
    base = base_folder(tmp_path / "base", is_tied=True)
    model = attach(
        load_model(base),
        read_adapter(adapter_folder(tmp_path / "a", ("embed_tokens",), ensure_weight_tying=True)),
    )
    assert relative_error(fuse(model, "dense")(TOKENS)[0][0, -1, :6], mx.array(TIED[0][1])) <= 2e-5


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
def test_whole_tensors_may_be_rounded(tmp_path: Path, dtype: mx.Dtype) -> None:
    base = base_folder(tmp_path / "base", is_tied=False)
    targets, options, want = UNTIED[2]
    adapter = adapter_folder(tmp_path / "a", targets, whole(is_tied=False, dtype=dtype), **options)
    assert relative_error(last_logits(base, adapter), mx.array(want)) <= 2e-5


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    "name",
    [
        "lm_head.base_layer.weight",
        "model.embed_tokens.base_layer.weight",
        "model.embed_tokens.base_layer.base_layer.weight",
        "model.embed_tokens.original_module.weight",
        "model.embed_tokens.modules_to_save.weight",
        "model.embed_tokens.weight",
        "model.norm.weight",
    ],
)
@pytest.mark.parametrize("is_tied", [False, True], ids=["untied", "tied"])
def test_whole_tensors_must_be_the_models_own(tmp_path: Path, name: str, is_tied: bool) -> None:
    base = base_folder(tmp_path / "base", is_tied=is_tied)
    layer = "model.norm" if "norm" in name else BASE["lm_head" in name]
    tensors = base_tensors(is_tied)
    own = tensors.get(f"{layer}.weight", tensors["model.embed_tokens.weight"])
    good = adapter_folder(tmp_path / "good", ("q_proj",), {name: own})
    bare = adapter_folder(tmp_path / "bare", ("q_proj",))
    assert mx.array_equal(last_logits(base, good), last_logits(base, bare))
    changed = np.where(np.arange(own.size).reshape(own.shape) == 7, own * 1.01, own)
    for number, other in enumerate((changed, own[:-1], own * np.nan)):
        bad = adapter_folder(tmp_path / f"bad{number}", ("q_proj",), {name: other})
        with pytest.raises(
            CheckpointError, match=f"{layer}.weight' of the adapter must be the mod"
        ):
            last_logits(base, bad)


def test_whole_tensors_of_layers_that_the_model_lacks_are_refused(tmp_path: Path) -> None:
    base = base_folder(tmp_path / "base", is_tied=False)
    other = {"model.layers.7.self_attn.q_proj.base_layer.weight": values("w", (32, 32), 1.0)}
    with pytest.raises(CheckpointError, match="must be the model's own but is not"):
        last_logits(base, adapter_folder(tmp_path / "a", ("q_proj",), other))


@pytest.mark.parametrize("bits", [4, 8])
def test_whole_tensors_of_a_quantised_base(tmp_path: Path, bits: int) -> None:
    plain = base_folder(tmp_path / "base", is_tied=False)
    formats = FloatFormats(embed_bits=bits, head_bits=bits)
    convert(open_checkpoint(plain), tmp_path / "mlx", formats=formats, check=False)
    targets = ("embed_tokens", "lm_head")
    adapter = adapter_folder(tmp_path / "a", targets, whole(is_tied=False))
    bare = adapter_folder(tmp_path / "bare", targets)
    assert mx.array_equal(
        last_logits(tmp_path / "mlx", adapter), last_logits(tmp_path / "mlx", bare)
    )
    other = adapter_folder(tmp_path / "other", targets, whole(is_tied=False, factor=1.1))
    with pytest.raises(CheckpointError, match="must be the model's own but is not"):
        last_logits(tmp_path / "mlx", other)


def test_dora_of_an_embedding_is_refused(tmp_path: Path) -> None:
    length = {"model.embed_tokens.lora_magnitude_vector": np.ones(DIMS, np.float32)}
    adapter = adapter_folder(tmp_path / "a", ("embed_tokens",), length)
    file = adapter / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"use_dora": True}))
    with pytest.raises(CheckpointError, match="must not be an embedding with PEFT's DoRA"):
        read_adapter(adapter)


@pytest.mark.parametrize("is_dora", [False, True], ids=["lora", "dora"])
def test_mlx_lm_reads_a_shared_matrix_alike(tmp_path: Path, is_dora: bool) -> None:
    from mlx_lm.tuner.utils import load_adapters
    from mlx_lm.utils import load_model as load_with_mlx_lm

    base = base_folder(tmp_path / "base", is_tied=True)
    model = load_model(base)
    kind = "dora" if is_dora else "lora"
    write_adapter(tmp_path / "adapter", change(model, kind, ("embed",)), {})
    theirs, _ = load_with_mlx_lm(base)
    theirs = load_adapters(theirs, str(tmp_path / "adapter"))
    theirs.eval()
    want = model.eval()(TOKENS)[0]
    assert relative_error(theirs(TOKENS), want) <= TOLERANCE[mx.float32]
    assert relative_error(load_model(base)(TOKENS)[0], want) > 0.01
