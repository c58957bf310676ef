"""Mistakes in Python are answered with what to write instead."""

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from mlx_mmfree import (
    GQA,
    MLGRU,
    BitLinear,
    SwiGLU,
    batch_generate,
    demo,
    fuse,
    generate,
    load,
    lora,
    save_model,
    stream_generate,
)
from mlx_mmfree.errors import UnsupportedModelError
from mlx_mmfree.models import Decoder


class Foreign:
    """Stands for an array of a library that is not installed."""

    ndim, shape = 3, (1, 1, 64)

    def numpy(self) -> np.ndarray:
        return np.ones(self.shape, np.float32)


@pytest.fixture(scope="module")
def model() -> Decoder:
    return load(demo.path())[0]


@pytest.mark.parametrize("layer", [MLGRU(64), GQA(64), SwiGLU(64), BitLinear(64, 8)], ids=str)
def test_arrays_of_other_libraries(layer: Any) -> None:
    caller = type(layer).__name__
    with pytest.raises(TypeError, match=rf"\[{caller}\] 'x' .* numpy.ndarray\. .*: mx\.array\(x\)"):
        layer(np.ones((1, 1, 64), np.float32))
    with pytest.raises(TypeError, match=r"got .*Foreign\. Convert it: mx\.array\(x\.numpy\(\)\)"):
        layer(Foreign())
    with pytest.raises(TypeError, match="got list"):
        layer([[[1.0] * 64]])


def test_a_packed_layer_names_arrays_of_other_libraries() -> None:
    with pytest.raises(TypeError, match=r"must be an mx\.array but got numpy\.ndarray"):
        BitLinear(8, 8).to_packed()(np.ones((1, 8), np.float32))  # type: ignore[arg-type]


def test_the_state_of_another_mixer() -> None:
    x = mx.ones((1, 1, 64))
    gru, attention = MLGRU(64), GQA(64)
    for mixer, other in ((gru, attention), (attention, gru)):
        with pytest.raises(TypeError, match=r"'state' must be one .*Begin with state=None"):
            mixer(x, other(x)[1])
    with pytest.raises(ValueError, match=r"\[MLGRU\] 'state' must have the shapes"):
        gru(x, MLGRU(32)(mx.ones((1, 1, 32)))[1])
    for mixer in (gru, attention):
        _, state = mixer(x)
        assert mixer(x, state)[0].shape == x.shape


def test_the_state_of_another_model(model: Decoder) -> None:
    tokens = mx.array([[1]])
    _, state = model(tokens)
    for wrong in ("x", state[0], state[1:], [*state]):
        with pytest.raises(TypeError, match="must be one that this model returned, a tuple of 4"):
            model(tokens, wrong)  # type: ignore[arg-type]
    foreign = tuple(GQA(8)(mx.ones((1, 1, 8)))[1] for _ in state)
    with pytest.raises(TypeError, match="of MLGRUState, but got KeyValueState"):
        model(tokens, foreign)
    assert model(tokens, state)[0].shape == (1, 1, model.vocab_size)


def test_lists_of_ids_are_taken_and_checked(model: Decoder) -> None:
    assert mx.array_equal(model([[1, 2]])[0], model(mx.array([[1, 2]]))[0])
    for wrong, words in (
        ([1, 2], r"as \[\[1, 2\]\]"),
        ([[1], [2, 3]], "Pad shorter ones"),
        ([], "must be lists of ids of one length"),
        ([[1, 2048]], "vocabulary, 0 to 2047, but got 2048"),
        ([[-1]], "but got -1"),
        ([[1.5]], "must be whole numbers"),
        ([["a"]], "must be whole numbers"),
    ):
        with pytest.raises(ValueError, match=words):
            model(wrong)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"'tokens' must be an mx\.array but got numpy"):
        model(np.array([[1, 2]]))  # type: ignore[arg-type]


@pytest.mark.parametrize("made", [MLGRU, GQA, SwiGLU])
def test_linears_by_name(made: Any) -> None:
    with pytest.raises(TypeError, match=r"such as BitLinear or Linear .*but got 'bit'"):
        made(64, linear="bit")
    with pytest.raises(ValueError, match=r"must hold what makes '\w+' but holds 'x'"):
        made(64, linear={"x": BitLinear})


@pytest.mark.parametrize("function", [generate, stream_generate, batch_generate])
def test_options_of_samplers_are_reported_where_they_belong(function: Any, model: Decoder) -> None:
    for given, words in (
        ({"temp": 0.7}, r"'temp' must be given as sampler=make_sampler\(temp=\.\.\.\)"),
        ({"temperature": 0.7}, r"'temperature' must be given as sampler=make_sampler\(temp="),
        ({"top_p": 0.7}, r"sampler=make_sampler\(top_p="),
        ({"repetition_penalty": 1.1}, r"processors=make_processors\(repetition_penalty="),
    ):
        with pytest.raises(TypeError, match=rf"\[{function.__name__}\] .*{words}"):
            function(model, None, "a", **given)


def test_a_network_of_ones_own_is_not_saved_as_a_model(tmp_path: Path) -> None:
    network: Any = nn.Sequential(BitLinear(8, 8))
    with pytest.raises(UnsupportedModelError, match=r"Sequential has none\. .*model\.save_weights"):
        save_model(tmp_path / "own", network)
    assert not (tmp_path / "own").exists()


def test_an_unknown_architecture_is_reported_before_missing_weights(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "falcon9"}))
    with pytest.raises(UnsupportedModelError, match=r"'model_type' must be one of .*'falcon9'"):
        load(tmp_path)


def test_formats_and_settings_of_another_kind(model: Decoder) -> None:
    with pytest.raises(
        ValueError, match=r"'format' must be one of 'dense', 'ternary' but got 'dens'"
    ):
        fuse(model, "dens")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"must be FineTuneSettings but got dict\. Make them"):
        lora(*load(demo.path()), {"data": "data"})  # type: ignore[arg-type]
