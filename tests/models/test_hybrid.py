"""A transformer whose attention gives way to other mixers, layer by layer."""

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from mlx_mmfree.cli import main
from mlx_mmfree.errors import CheckpointError, MMFreeError, UnsupportedModelError
from mlx_mmfree.hub import load_model, save_model
from mlx_mmfree.layers import PackedBitLinear
from mlx_mmfree.layers.matrix import parameters
from mlx_mmfree.models import Decoder, architectures, find
from mlx_mmfree.models.parts.architecture import bases
from mlx_mmfree.models.parts.transformer import TransformerConfig
from mlx_mmfree.token_mixers import GQA, MLGRU
from tests.hub.checkpoints import GOLDENS
from tests.tolerances import TOLERANCE, relative_error

TOKENS = mx.array([[1, 7, 3, 39, 0, 5, 5, 9]])
TINY = dict(find("hybrid").tiny)


KEYS: dict[str, dict[str, Any]] = {
    "bitnet": {"hidden_act": "relu2", "rope_theta": 5e5},
    "minicpm": {"scale_emb": 12.0, "scale_depth": 1.4, "dim_model_base": 16.0},
}


def built(**changes: Any) -> Decoder:
    hybrid = find("hybrid")
    mx.random.seed(0)
    model: Decoder = hybrid.build(hybrid.config.from_hub({**TINY, **changes}))
    return model


def test_each_transformer_is_a_base_or_says_why_not() -> None:
    assert bases() == ["bitnet", "llama", "minicpm", "qwen3"]
    usual = find("hgrn_bit").why_no_base
    for name, record in architectures().items():
        if issubclass(record.config, TransformerConfig) and name not in bases():
            assert record.why_no_base not in (None, usual)
            with pytest.raises(UnsupportedModelError, match=f"but got '{name}': it"):
                built(base_model_type=name)


@pytest.mark.parametrize("base", ["bitnet", "llama", "minicpm", "qwen3"])
def test_with_attention_everywhere_it_is_the_base(base: str) -> None:
    keys = KEYS.get(base, {})
    model = built(base_model_type=base, token_mixer="attention", **keys)
    mx.random.seed(0)
    record = find(base)
    of_base = record.build(record.config.from_hub({**TINY, "model_type": base, **keys}))
    assert mx.array_equal(model(TOKENS)[0], of_base(TOKENS)[0])


def test_its_class_is_its_own_and_that_of_the_base_is_kept() -> None:
    of_base = built(base_architectures=["BitnetForCausalLM"]).config
    written = of_base.to_hub()
    assert written["architectures"] == ["HybridForCausalLM"]
    assert written["base_architectures"] == ["BitnetForCausalLM"]
    assert type(of_base).from_hub(written) == of_base
    assert of_base.base.has_sub_norms and not built().config.base.has_sub_norms


def test_each_layer_has_its_mixer() -> None:
    mixers = [block.token_mixer for block in built().blocks]
    assert [type(mixer) for mixer in mixers] == [MLGRU, GQA]
    window = {"name": "sliding_window_attention", "num_heads": 4, "window": 3}
    model = built(token_mixer=["mlgru", window])
    whole = model(TOKENS)[0]
    state, parts = None, []
    for n in range(TOKENS.shape[1]):
        logits, state = model(TOKENS[:, n : n + 1], state)
        parts.append(logits)
    assert relative_error(mx.concatenate(parts, axis=1), whole) < TOLERANCE[mx.float32]


@pytest.mark.parametrize(
    ("mixer", "base"),
    [
        ("mlgru", "llama"),
        ("gla", "llama"),
        ("hgrn2", "llama"),
        ("sliding_window_attention", "llama"),
        ("mlgru", "minicpm"),
    ],
)
def test_it_is_written_and_read(mixer: str, base: str, tmp_path: Path) -> None:
    model = built(base_model_type=base, token_mixer=[mixer, "attention"], **KEYS.get(base, {}))
    save_model(tmp_path / "masters", model)
    back = load_model(tmp_path / "masters", packed=False)
    own, read = parameters(model), parameters(back)
    assert own.keys() == read.keys()
    assert all(mx.array_equal(own[name], read[name]) for name in own)
    packed = load_model(tmp_path / "masters")
    assert any(
        isinstance(module, PackedBitLinear) for module in packed.blocks[0].token_mixer.modules()
    )
    save_model(tmp_path / "packed", packed)
    assert mx.array_equal(load_model(tmp_path / "packed")(TOKENS)[0], packed(TOKENS)[0])


def test_it_generates_and_is_converted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = built(vocab_size=520)
    save_model(tmp_path / "model", model, GOLDENS / "tokenizer_bpe")
    flags = ["--model", str(tmp_path / "model")]
    assert main(["generate", *flags, "-p", "The dog", "-m", "5"]) == 0
    assert capsys.readouterr().out.strip()
    assert main(["convert", *flags, "--mlx-path", str(tmp_path / "mlx")]) == 0
    want = load_model(tmp_path / "model")(TOKENS)[0]
    assert mx.allclose(load_model(tmp_path / "mlx")(TOKENS)[0], want, atol=1e-4)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"base_model_type": "gpt2"}, UnsupportedModelError, "'base_model_type' must be one of"),
        ({"token_mixer": ["mlgru"] * 3}, CheckpointError, "each of the 2 layers but names 3"),
        ({"token_mixer": []}, CheckpointError, "at least one mixer but is empty"),
        ({"token_mixer": "fnet"}, UnsupportedModelError, "must be causal but fnet cannot be"),
        ({"token_mixer": "nothing"}, UnsupportedModelError, "nothing"),
        (
            {"token_mixer": {"name": "attention", "num_heads": 2}},
            UnsupportedModelError,
            "attention",
        ),
    ],
)
def test_what_does_not_fit_is_refused(
    changes: dict[str, Any], error: type[MMFreeError], message: str, tmp_path: Path
) -> None:
    described = {"model_type": "hybrid", **TINY, **changes}
    (tmp_path / "config.json").write_text(json.dumps(described))
    save_model(tmp_path / "model", built())
    (tmp_path / "model" / "config.json").write_text(json.dumps(described))
    with pytest.raises(error, match=message):
        load_model(tmp_path / "model")
