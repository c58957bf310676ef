"""Adapters on every family that loads: trained, saved, attached and fused, beside packed weights."""

from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_unflatten

from mlx_mmfree.errors import CheckpointError
from mlx_mmfree.hub import Tokenizer, convert, load_model, open_checkpoint
from mlx_mmfree.hub.adapters.adapter import attach
from mlx_mmfree.hub.adapters.adapter_folder import (
    read_adapter,
    why_not_in_mlx_lm,
    write_adapter,
    write_peft_adapter,
)
from mlx_mmfree.hub.conversion.fuse import save_with_adapter
from mlx_mmfree.hub.conversion.to_folder import FloatFormats
from mlx_mmfree.layers.lora import adapted_layers, add_adapters, remove_adapters
from mlx_mmfree.layers.matrix import matrices
from mlx_mmfree.models import Decoder
from mlx_mmfree.training.fine_tuning.fine_tune import adapt_layers, fine_tune, prepare
from mlx_mmfree.training.fine_tuning.preferences import Pair, with_reference
from mlx_mmfree.training.fine_tuning.settings import FineTuneSettings
from mlx_mmfree.training.results import read_log
from mlx_mmfree.training.samples import Sample, Samples
from tests.tolerances import TOLERANCE, relative_error

pytestmark = pytest.mark.usefixtures("without_curve")

GOLDENS = Path(__file__).parents[1] / "data" / "goldens"
FAMILIES = {
    "hgrn": "hgrn_default",
    "bitnet": "bitnet_packed",
    "ternary llama": "llama_autobit_offline",
    "1-bit llama": "onebit_llama_fp16",
    "1-bit qwen3": "mlx_qwen3_1bit_g128",
    "1-bit qwen3, gguf": "gguf_qwen3_q1_0/model.gguf",
    "2-bit qwen3, gguf": "gguf_qwen3_q2_0/model.gguf",
    "bitcpm": "bitcpm_llama_bin",
    "minicpm": "bitcpm_minicpm",
    "experts": "maple_hf",
    "2-bit experts": "maple_mlx_2bit",
    "qwen3.5": "qwen35_hub",
    "2-bit qwen3.5": "mlx_qwen35_2bit_g128",
    "rotated": "prism_schema1",
    "rotated, schema 2": "prism_schema2",
    "rotated, gguf": "gguf_qwen35_pq2_0_rotated/model.gguf",
    "gated deltanet": "fla_gated_deltanet",
    "kda": "fla_kda",
    "mamba2": "mamba2",
    "rwkv7": "fla_rwkv7",
    "retnet": "fla_retnet",
}
WAYS: dict[str, dict[str, Any]] = {
    "lora": {},
    "dora, dpo": {"fine_tune_type": "dora", "train_mode": "dpo"},
    "lora, dpo": {"train_mode": "dpo"},
    "dora": {"fine_tune_type": "dora"},
    "orpo": {"train_mode": "orpo"},
}
_SLOWNESS = {"lora": (), "dora, dpo": ()}
TOKENS = mx.array([[3, 1, 4, 1, 5, 9, 2, 6]])


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_folder(GOLDENS / "tokenizer_bpe")


def _loaded(family: str, dtype: mx.Dtype | None = None) -> Decoder:
    model: Decoder = load_model(GOLDENS / FAMILIES[family], dtype=dtype)
    model.eval()
    return model


def _samples(model: Decoder, settings: FineTuneSettings) -> dict[str, Samples[Any]]:
    draw = np.random.default_rng(0)
    texts = [
        Sample(draw.integers(0, min(60, model.vocab_size), 9).astype(np.int32), 3) for _ in range(8)
    ]
    if settings.train_mode == "sft":
        return {"train": Samples(texts)}
    pairs = [Pair(*both) for both in zip(texts[::2], texts[1::2], strict=True)]
    data = {"train": Samples(pairs)}
    return with_reference(data, model) if settings.train_mode == "dpo" else data


@pytest.mark.sample(1, of="family")
@pytest.mark.parametrize(
    "way", [pytest.param(way, marks=_SLOWNESS.get(way, (pytest.mark.slow,))) for way in WAYS]
)
@pytest.mark.parametrize("family", FAMILIES)
def test_trained_attached_and_fused(
    tmp_path: Path, tokenizer: Tokenizer, family: str, way: str
) -> None:
    settings = FineTuneSettings(
        data="data",
        adapter_path=str(tmp_path / "run"),
        iters=2,
        batch_size=2,
        learning_rate=1e-2,
        rank=2,
        keys=("*",),
        num_layers=-1,
        steps_per_report=1,
        **WAYS[way],
    )
    model = _loaded(family)
    plain = model(TOKENS)[0]
    packed = {path: type(each.layer) for path, each in matrices(model).items()}
    names = prepare(model, settings)
    assert len(names) > 1
    fine_tune(model, tokenizer, _samples(model, settings), settings)
    losses = [record["loss"] for record in read_log(tmp_path / "run/log.jsonl") if "loss" in record]
    assert len(losses) == 2 and np.isfinite(losses).all()
    model.eval()
    want = model(TOKENS)[0]
    assert relative_error(plain, want) > 1e-3
    for layer in adapted_layers(model).values():
        assert mx.abs(layer.lora_b).max().item() > 0
    attached = attach(_loaded(family), read_adapter(tmp_path / "run")).eval()
    assert mx.array_equal(attached(TOKENS)[0], want)
    save_with_adapter(tmp_path / "fused", attached, None)
    fused = load_model(tmp_path / "fused").eval()
    assert relative_error(fused(TOKENS)[0], want) <= TOLERANCE[want.dtype]
    # the base stays in few bits
    modules = matrices(remove_adapters(fused))
    assert {path: type(each.layer) for path, each in modules.items()} == packed


def _dense_twin(family: str) -> Decoder:
    """The same model with every matrix of codes, rotated or not, written out in float32."""
    model = _loaded(family, mx.float32)
    twins = {}
    for path, matrix in matrices(model).items():
        if matrix.holds_codes or matrix.is_rotated:
            twin = nn.Embedding(1, 1) if matrix.is_embedding else nn.Linear(1, 1, bias=False)
            twin.weight = matrix.written_out(dict(matrix.layer.items()))
            twins[path] = twin
    assert twins
    model.update_modules(tree_unflatten(list(twins.items())))
    return model


@pytest.mark.sample(2)
@pytest.mark.parametrize("kind", ["lora", "dora"])
@pytest.mark.parametrize("family", ["rotated", "rotated, schema 2", "rotated, gguf"])
def test_an_adapter_acts_on_what_is_not_rotated(family: str, kind: Any) -> None:
    """It is the adapter that the model without the rotation would have."""
    found = []
    for model in (_loaded(family, mx.float32), _dense_twin(family)):
        names = sorted(add_adapters(model, lambda *_: True, kind=kind, rank=2, scale=2.0))
        modules = dict(model.named_modules())
        for number, name in enumerate(names):
            for part in ("lora_a", "lora_b"):
                key = mx.random.key(2 * number + (part == "lora_a"))
                drawn = 0.1 * mx.random.normal(modules[name][part].shape, key=key)
                modules[name][part] = drawn
        found.append(model(TOKENS)[0])
    plain = _loaded(family, mx.float32)(TOKENS)[0]
    assert relative_error(*found) <= 10 * TOLERANCE[mx.float32]
    assert relative_error(plain, found[1]) > 1e-2


def _changed(model: Decoder, names: tuple[str, ...] = ("_proj",)) -> Decoder:
    """The model with an adapter that is not a fresh one."""
    mx.random.seed(2)
    add_adapters(model, lambda name, _: name.endswith(names), rank=2, scale=2.0)
    for layer in adapted_layers(model).values():
        layer.lora_b = 0.05 * mx.random.normal(layer.lora_b.shape)
    return model


@pytest.mark.interop
@pytest.mark.usefixtures("unfused")  # mlx-lm lets MLX fuse its operations
@pytest.mark.parametrize("names", [("_proj",), ("query_proj", "embed", "head")])
@pytest.mark.parametrize("family", ["rotated", "2-bit qwen3.5", "1-bit qwen3"])
def test_mlx_lm_puts_it_on_the_dense_twin(
    tmp_path: Path, family: str, names: tuple[str, ...]
) -> None:
    from mlx_lm.tuner.utils import load_adapters
    from mlx_lm.utils import load_model as load_with_mlx_lm

    model = _changed(_loaded(family, mx.float32), names)
    assert why_not_in_mlx_lm(model) is None
    write_adapter(tmp_path / "adapter", model, {})
    _write_twin(family, tmp_path / "twin", "mlx")
    theirs, _ = load_with_mlx_lm(tmp_path / "twin")
    plain = theirs(TOKENS)
    theirs = load_adapters(theirs, str(tmp_path / "adapter"))
    theirs.eval()
    assert relative_error(theirs(TOKENS), model(TOKENS)[0]) <= TOLERANCE[mx.float16]
    assert relative_error(plain, model(TOKENS)[0]) > 5 * TOLERANCE[mx.float16]


# peft asks transformers for a property that transformers is about to rename
@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing.:FutureWarning")
@pytest.mark.interop
@pytest.mark.parametrize("family", ["rotated", "2-bit qwen3.5", "1-bit qwen3", "qwen3.5"])
def test_peft_puts_it_on_the_dense_twin(tmp_path: Path, family: str) -> None:
    torch = pytest.importorskip("torch")
    peft = pytest.importorskip("peft")
    transformers = pytest.importorskip("transformers")
    model = _changed(_loaded(family, mx.float32))
    write_peft_adapter(tmp_path / "ours", model)
    _write_twin(family, tmp_path / "twin", "hf")
    base = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "twin", dtype=torch.float32)
    theirs = peft.PeftModel.from_pretrained(base, tmp_path / "ours").eval()
    ids = torch.tensor(TOKENS.tolist())
    with torch.no_grad():
        logits = mx.array(theirs(ids).logits.numpy())
        plain = mx.array(theirs.unload()(ids).logits.numpy())
    assert relative_error(logits, model(TOKENS)[0]) <= TOLERANCE[mx.float16]
    assert relative_error(plain, model(TOKENS)[0]) > 5 * TOLERANCE[mx.float16]
    # and back again
    back = attach(_loaded(family, mx.float32), read_adapter(tmp_path / "ours"))
    assert mx.array_equal(back(TOKENS)[0], model(TOKENS)[0])


def _write_twin(family: str, folder: Path, to: Any) -> None:
    source = open_checkpoint(str(GOLDENS / FAMILIES[family]))
    formats = FloatFormats(mx.float32, unrotate="dense")
    if not family.startswith("rotated"):
        formats = FloatFormats(mx.float32)
    convert(source, folder, to=to, formats=formats)


def test_experts_share_a_part_of_an_adapter(tmp_path: Path) -> None:
    model = _loaded("experts")
    add_adapters(model, lambda name, _: name.endswith("channel_mixer.up_proj"), rank=2)
    with pytest.raises(
        CheckpointError, match="up_proj' must be one matrix for PEFT's format but holds"
    ):
        write_peft_adapter(tmp_path, model)
    reason = why_not_in_mlx_lm(model)
    assert reason is not None and "has experts" in reason


@pytest.mark.parametrize(
    "key", ["q_proj", "self_attn.q_proj", "*.q_*", "model.layers.1.self_attn.q_proj"]
)
def test_layers_are_chosen_by_names_and_patterns(key: str) -> None:
    names = adapt_layers(_loaded("1-bit qwen3"), keys=[key])
    assert "model.layers.1.self_attn.q_proj" in names
    assert all(name.endswith(("q_proj", "q_norm")) for name in names)


def test_no_layer_is_no_adapter() -> None:
    with pytest.raises(ValueError, match="nothing would be trained"):
        add_adapters(_loaded("rotated"), lambda name, _: name == "q_proj")
