"""Declarations of token mixers about themselves, for every mixer found in the package."""

import inspect
import pkgutil

import mlx.core as mx
import pytest

import mlx_mmfree.token_mixers as package
from tests.token_mixers.contract.cases import (
    ALL,
    BOUNDED,
    DIMS,
    LENGTH,
    MAX_LENGTH,
    MIXERS,
    Case,
    beside,
    by_case,
    sequence,
)


def test_each_file_holds_a_mixer() -> None:
    files = {entry.name for entry in pkgutil.iter_modules(package.__path__)}
    assert {mixer.__module__.rpartition(".")[2] for mixer in MIXERS.values()} == files


@pytest.mark.parametrize("name", MIXERS)
def test_capabilities_are_declared(name: str) -> None:
    mixer = MIXERS[name]
    assert mixer.causal or mixer.bidirectional
    assert mixer.length_bound == ("max_length" in inspect.signature(mixer.__init__).parameters)
    for line in (mixer.equation, mixer.complexity, mixer.paper):
        assert line and "\n" not in line


@by_case(ALL)
def test_only_what_is_declared_is_taken(case: Case) -> None:
    mixer, x = case.mixer, sequence()
    others = {"memory": mixer.cross, "starts": mixer.packs_samples}
    for name in (name for name, takes in others.items() if not takes):
        with pytest.raises(TypeError, match=f"'{name}' must be left out"):
            mixer(x, **{name: mx.zeros((3, LENGTH), mx.bool_)})
    if mixer.cross:
        memory = beside(mixer)["memory"]
        assert not mx.array_equal(mixer(x, memory=memory)[0], mixer(x, memory=memory + 1)[0])


@by_case(BOUNDED)
def test_longer_sequences_are_refused(case: Case) -> None:
    with pytest.raises(ValueError, match="max_length"):
        case.mixer(mx.zeros((1, 1 + MAX_LENGTH, DIMS)))


@by_case(ALL)
def test_dtype_is_kept(case: Case) -> None:
    mixer, x = case.build(), sequence()
    for dtype in (mx.float32, mx.float16, mx.bfloat16):
        mixer.set_dtype(dtype)
        given = {name: array.astype(dtype) for name, array in beside(mixer).items()}
        y = mixer(x.astype(dtype), **given)[0]
        assert y.dtype == dtype
        assert mx.isfinite(y).all()
