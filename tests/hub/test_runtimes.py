"""Compares what `convert` reports of other programs with those programs, by family and format."""

from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlx_mmfree.hub import convert, load_model, open_checkpoint, save_model
from mlx_mmfree.hub.conversion.to_folder import FloatFormats
from mlx_mmfree.hub.publish.runtimes import Opening, opening
from mlx_mmfree.models.parts.rotation import Rotation
from mlx_mmfree.models.parts.ternary_linears import TernaryLinears
from tests.hub.checkpoints import GOLDENS, tiny_model, tiny_transformer, weight_only
from tests.tolerances import TOLERANCE, relative_error

# mlx-lm compiles its activations
pytestmark = pytest.mark.usefixtures("unfused")

TOKENS = [[1, 7, 3, 39, 0, 12, 5]]
SIZES: dict[str, Any] = {
    "vocab_size": 520,
    "hidden_size": 256,
    "intermediate_size": 512,
    "head_dim": 64,
    "initializer_range": 0.05,
}
YARN = Rotation(scaling="yarn", factor=4.0, trained_length=64, attention_factor=1.138629436)
LONGROPE = Rotation(
    scaling="longrope", trained_length=2048, factors=tuple(1 + n / 8 for n in range(32))
)
SCALES = {"scale_emb": 12.0, "scale_depth": 1.4, "dim_model_base": 64.0}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "MMfreeLM": ("hgrn_bit", {}),
    "2B-4T": ("bitnet", {"tie_word_embeddings": True}),
    "1bitLLM": ("llama", {"has_sub_norms": True, "tie_word_embeddings": True}),
    "1bitLLM-wide-heads": ("llama", {"has_sub_norms": True, "head_dim": 128}),
    "Llama3-1.58": ("llama", {}),
    "norm-inside": ("llama", {"linears": TernaryLinears(norm_eps=1e-6)}),
    "dense-llama": ("llama", {"linears": None}),
    "dense-yarn": ("llama", {"linears": None, "rotation": YARN}),
    "dense-llama3": (
        "llama",
        {"linears": None, "rotation": Rotation(scaling="llama3", factor=8.0, trained_length=8)},
    ),
    "dense-dynamic": (
        "llama",
        {
            "linears": None,
            "rotation": Rotation(scaling="dynamic", factor=2.0, trained_length=64),
            "max_position_embeddings": 64,
        },
    ),
    "sharp-yarn": (
        "llama",
        {
            "linears": None,
            "rotation": Rotation(
                scaling="yarn", factor=4.0, trained_length=4, attention_factor=3.0
            ),
        },
    ),
    "yarn-of-other-betas": (
        "llama",
        {
            "linears": None,
            "rotation": Rotation(
                scaling="yarn",
                factor=16.0,
                trained_length=64,
                attention_factor=1.277258872,
                beta_fast=4.0,
                beta_slow=0.25,
            ),
        },
    ),
    "qwen3": ("qwen3", {}),
    "qwen3-of-128": ("qwen3", {"head_dim": 128}),
    "biased-qwen3": ("qwen3", {"attention_bias": True}),
    "biased-dense-qwen3": ("qwen3", {"attention_bias": True, "linears": None}),
    "minicpm": ("minicpm", SCALES | {"linears": None}),
    "stretched-minicpm": ("minicpm", SCALES | {"linears": None, "rotation": LONGROPE}),
    "tied-minicpm": ("minicpm", SCALES | {"linears": None, "tie_word_embeddings": True}),
    "ternary-minicpm": ("minicpm", SCALES),
    "wholly-biased-qwen3": ("qwen3", {"attention_bias": True, "mlp_bias": True}),
}


def source(folder: Path, family: str, dtype: mx.Dtype = mx.float32) -> Path:
    model_type, options = FAMILIES[family]
    if model_type == "hgrn_bit":
        model = tiny_model(vocab_size=520, hidden_size=64)
    else:
        model = tiny_transformer(model_type, **SIZES | options)
    mx.random.seed(9)
    for module in model.modules():
        if "bias" in module:
            module.bias = mx.random.normal(module.bias.shape)
    model.set_dtype(dtype)
    save_model(folder, model, GOLDENS / "tokenizer_bpe")
    return folder


def converted(tmp_path: Path, family: str, to: Any, **options: Any) -> tuple[Opening, ...]:
    dtype = options.pop("dtype", mx.float32)
    checkpoint = open_checkpoint(source(tmp_path / "s", family, dtype))
    return convert(checkpoint, tmp_path / "m", to=to, **options).openings


def opening_for(found: tuple[Opening, ...], runtime: str) -> Opening:
    assert [each.runtime for each in found] == ["mlx-lm", "transformers", "llama.cpp", "bitnet.cpp"]
    answer = opening(found, runtime)
    assert answer is not None and (answer.opens is not False or answer.note)
    return answer


def masters(family: str) -> FloatFormats:
    """MatMul-free models and biased ternary linears have no packed format in transformers."""
    model_type, options = FAMILIES[family]
    is_ternary = options.get("linears", ...) is not None
    needs = model_type == "hgrn_bit" or "attention_bias" in options
    return FloatFormats(keep_masters=is_ternary and needs)


@pytest.mark.sample(2)
@pytest.mark.parametrize("family", FAMILIES)
def test_mlx_lm_and_its_own_format(tmp_path: Path, family: str) -> None:
    from mlx_lm.utils import load_model as load_with_mlx_lm

    answer = opening_for(converted(tmp_path, family, "mlx"), "mlx-lm")
    needs_flag = "--trust-remote-code" in answer.note
    theirs, _ = load_with_mlx_lm(tmp_path / "m", trust_remote_code=needs_flag)
    error = relative_error(
        theirs(mx.array(TOKENS)), weight_only(tmp_path / "m")(mx.array(TOKENS))[0]
    )
    assert (error <= TOLERANCE[mx.float32]) == answer.opens
    assert answer.opens or error > 0.01
    if needs_flag:
        with pytest.raises(ValueError, match="trust_remote_code"):
            load_with_mlx_lm(tmp_path / "m")


@pytest.mark.sample(2)
@pytest.mark.parametrize("family", ["MMfreeLM", "2B-4T", "1bitLLM", "Llama3-1.58", "dense-llama"])
def test_mlx_lm_and_the_format_of_transformers(tmp_path: Path, family: str) -> None:
    from mlx_lm.utils import load_model as load_with_mlx_lm

    found = converted(tmp_path, family, "hf", formats=masters(family), dtype=mx.bfloat16)
    if opening_for(found, "mlx-lm").opens:
        theirs, _ = load_with_mlx_lm(tmp_path / "m")
        want = load_model(tmp_path / "m")(mx.array(TOKENS))[0]
        assert relative_error(theirs(mx.array(TOKENS)), want) <= TOLERANCE[mx.bfloat16]
        return
    with pytest.raises((ValueError, AssertionError, RuntimeError)):
        mx.eval(load_with_mlx_lm(tmp_path / "m")[0](mx.array(TOKENS)))


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("family", "kind", "answers"),
    [
        ("2B-4T", "i2_s", ("no", "no", "no", "not tried")),
        ("2B-4T", "tq2_0", ("no", "no", "no", "no")),
        ("1bitLLM", "tq2_0", ("no", "no", "yes", "no")),
        ("1bitLLM-wide-heads", "tq2_0", ("no", "no", "no", "no")),
        ("Llama3-1.58", "i2_s", ("no", "no", "no", "not tried")),
        ("Llama3-1.58", "tq1_0", ("no", "yes", "yes", "no")),
        ("Llama3-1.58", "q2_0", ("no", "no", "yes", "no")),
        ("dense-yarn", "tq2_0", ("no", "no", "yes", "no")),
        ("yarn-of-other-betas", "tq2_0", ("no", "no", "no", "no")),
        ("qwen3-of-128", "tq2_0", ("no", "yes", "yes", "no")),
    ],
)
def test_answers_for_gguf(tmp_path: Path, family: str, kind: Any, answers: tuple[str, ...]) -> None:
    found = converted(tmp_path, family, "gguf", gguf_type=kind)
    assert tuple(str(each).partition(":")[0] for each in found) == answers


@pytest.mark.parametrize(("family", "has_codes"), [("Llama3-1.58", True), ("dense-llama", False)])
def test_llama_cpp_rounds_activations_of_codes_alone(
    tmp_path: Path, family: str, has_codes: bool
) -> None:
    note = opening_for(converted(tmp_path, family, "gguf"), "llama.cpp").note
    assert ("rounds activations" in note) == has_codes


@pytest.mark.interop
@pytest.mark.parametrize("is_trainable", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_transformers_and_its_own_format(tmp_path: Path, family: str, is_trainable: bool) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    is_ternary = FAMILIES[family][1].get("linears", ...) is not None
    formats = FloatFormats(keep_masters=True) if is_trainable and is_ternary else masters(family)
    answer = opening_for(converted(tmp_path, family, "hf", formats=formats), "transformers")
    try:
        theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "m", dtype=torch.float32)
        with torch.no_grad():
            got = mx.array(theirs(torch.tensor(TOKENS)).logits.numpy())
    except (ValueError, KeyError, RuntimeError):
        assert answer.opens is False
        return
    want = load_model(tmp_path / "m")(mx.array(TOKENS))[0]
    assert (relative_error(got, want) <= TOLERANCE[mx.float32]) == answer.opens


@pytest.mark.interop
@pytest.mark.parametrize("family", ["Llama3-1.58", "qwen3", "qwen3-of-128", "dense-yarn", "2B-4T"])
def test_transformers_and_gguf(tmp_path: Path, family: str) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    answer = opening_for(converted(tmp_path, family, "gguf"), "transformers")
    file = next((tmp_path / "m").glob("*.gguf")).name
    try:
        theirs = AutoModelForCausalLM.from_pretrained(
            tmp_path / "m", gguf_file=file, dtype=torch.float32
        )
        with torch.no_grad():
            got = mx.array(theirs(torch.tensor(TOKENS)).logits.numpy())
    except (ValueError, KeyError, RuntimeError):
        assert answer.opens is False
        return
    want = weight_only(tmp_path / "m")(mx.array(TOKENS))[0]
    assert (relative_error(got, want) <= TOLERANCE[mx.float32]) == answer.opens


@pytest.mark.interop
@pytest.mark.parametrize("kind", ["tq1_0", "tq2_0", "q2_0", "i2_s"])
@pytest.mark.parametrize(
    "family",
    [
        "2B-4T",
        "1bitLLM",
        "1bitLLM-wide-heads",
        "Llama3-1.58",
        "dense-yarn",
        "dense-llama3",
        "yarn-of-other-betas",
        "qwen3",
        "minicpm",
        "stretched-minicpm",
        "tied-minicpm",
    ],
)
def test_llama_cpp(tmp_path: Path, family: str, kind: Any) -> None:
    llama_cpp = pytest.importorskip(
        "llama_cpp", reason="needs llama-cpp-python, which pip compiles for some minutes"
    )
    answer = opening_for(converted(tmp_path, family, "gguf", gguf_type=kind), "llama.cpp")
    file = next((tmp_path / "m").glob("*.gguf"))
    try:
        theirs = llama_cpp.Llama(str(file), n_ctx=16, logits_all=True, verbose=False)
    except ValueError:
        assert answer.opens is False
        return
    theirs.eval(TOKENS[0])
    got = np.array(theirs.scores[: len(TOKENS[0])])
    want = weight_only(tmp_path / "m")(mx.array(TOKENS))[0][0]
    # activations have 8 bits there
    assert (relative_error(mx.array(got), want) < 0.05) == answer.opens
