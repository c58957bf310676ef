"""Saved prompts: the same text as without, for every kind of state; what is refused."""

import json
import os
import struct
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten

from mlx_mmfree.errors import CheckpointError
from mlx_mmfree.generation import (
    PromptCache,
    cache_prompt,
    generate_tokens,
    load_prompt_cache,
    prefill,
    save_prompt_cache,
    with_key_values,
)
from mlx_mmfree.generation.prompt_cache import read_settings
from mlx_mmfree.generation.states import fingerprint
from mlx_mmfree.models import Decoder
from tests.generation.models import MODELS, SETTINGS, VOCABULARY, alone, attention, recurrent

PROMPT = [n * n % VOCABULARY for n in range(17)]
REST = [4, 2]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "prompt.safetensors"


def continued(model: Decoder, state: Any) -> list[int]:
    return list(generate_tokens(model, REST, state=state, max_tokens=6))


@pytest.mark.sample(2)
@pytest.mark.equal_bits
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("length", [1, 12, 17])
def test_the_text_goes_on_as_if_it_had_been_read_now(name: str, length: int, file: Path) -> None:
    model, prompt = MODELS[name](1), PROMPT[:length]
    cache = cache_prompt(model, prompt, prefill_step_size=5)
    save_prompt_cache(file, model, cache)
    loaded = load_prompt_cache(file, MODELS[name](1))
    assert loaded.tokens == prompt
    for (_, got), (_, want) in zip(
        tree_flatten(loaded.state), tree_flatten(cache.state), strict=True
    ):
        assert got.dtype == want.dtype and mx.array_equal(got, want)
    want = continued(model, prefill(model, mx.array([prompt]), step_size=5))
    assert continued(model, loaded.state) == want
    assert want == alone(model, [*prompt, *REST], 6)


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16], ids=str)
@pytest.mark.parametrize("build", [recurrent, attention])
def test_dtype_of_the_state_is_kept(build: Any, dtype: mx.Dtype, file: Path) -> None:
    model = build(1, dtype)
    cache = cache_prompt(model, PROMPT)
    save_prompt_cache(file, model, cache)
    loaded = load_prompt_cache(file, model)
    pairs = zip(tree_flatten(loaded.state), tree_flatten(cache.state), strict=True)
    assert all(a.dtype == b.dtype and mx.array_equal(a, b) for (_, a), (_, b) in pairs)


def test_size_does_not_hold_the_space_after_the_text(file: Path) -> None:
    model = attention(1)
    cache = cache_prompt(model, PROMPT)
    # two blocks, keys and values of one head of 32 float32, and an int32 position
    assert cache.nbytes == 2 * len(PROMPT) * (2 * 32 * 4 + 4)
    save_prompt_cache(file, model, cache)
    assert cache.nbytes < file.stat().st_size < cache.nbytes + 2500
    small = cache_prompt(with_key_values(model, kv_bits=8), PROMPT)
    assert small.nbytes == 2 * len(PROMPT) * (2 * (32 + 8) + 4)
    long = cache_prompt(recurrent(1), PROMPT * 9)
    assert long.nbytes == cache_prompt(recurrent(1), PROMPT).nbytes


@pytest.mark.parametrize("name", SETTINGS)
def test_settings_are_reported_before_the_model_is_made(name: str, file: Path) -> None:
    model, settings = MODELS[name](1), SETTINGS[name]
    save_prompt_cache(file, model, cache_prompt(model, PROMPT), settings)
    assert read_settings(file) == (settings, len(PROMPT))


def test_a_state_of_generation_can_be_saved(file: Path) -> None:
    """A state with capacity and one read in chunks are trimmed."""
    model = attention(1)
    _, state = model(mx.array([PROMPT[:5]]))
    _, state = model(mx.array([PROMPT[5:]]), state)
    save_prompt_cache(file, model, PromptCache(PROMPT, state))
    assert continued(model, load_prompt_cache(file, model).state) == continued(model, state)


@pytest.mark.parametrize("build", [recurrent, attention])
def test_another_model_is_refused(build: Any, file: Path) -> None:
    model = build(1)
    save_prompt_cache(file, model, cache_prompt(model, PROMPT))
    others = {"seed": build(2), "dtype": build(1, mx.bfloat16), "kind": attention(3)}
    changed = build(1)
    weight = changed.blocks[1].channel_mixer.down_proj.weight
    changed.blocks[1].channel_mixer.down_proj.weight = mx.where(
        mx.arange(weight.size).reshape(weight.shape) == 7, weight * 1.0001, weight
    )
    others["one weight"] = changed
    for name, other in others.items():
        with pytest.raises(CheckpointError, match="must come from the model that goes on with it"):
            load_prompt_cache(file, other)
        assert fingerprint(other) != fingerprint(model), name


@pytest.mark.parametrize(
    "settings", [{"kv_bits": 8}, {"max_kv_size": 9}, {"kv_bits": 4, "max_kv_size": 9}], ids=str
)
def test_other_settings_are_refused(settings: dict[str, int], file: Path) -> None:
    model = attention(1)
    save_prompt_cache(file, model, cache_prompt(model, PROMPT))
    with pytest.raises(CheckpointError, match="settings for keys and values that it was made with"):
        load_prompt_cache(file, with_key_values(model, **settings))


@pytest.mark.parametrize("build", [recurrent, attention])
def test_states_of_other_texts_are_not_saved(build: Any, file: Path) -> None:
    model = build(1)
    batch = prefill(model, mx.array([PROMPT, PROMPT]))
    wrong = [
        PromptCache(PROMPT, batch),
        PromptCache(PROMPT, model.init_state(1)[:1]),
        PromptCache(
            PROMPT,
            MODELS["attention" if build is recurrent else "recurrent"](1)(mx.array([PROMPT]))[1],
        ),
    ]
    if build is attention:
        valid = mx.arange(len(PROMPT) + 2)[None] >= 2
        padded = model(mx.array([[0, 0, *PROMPT]]), None, valid)[1]
        short = model(mx.array([PROMPT[:-1]]))[1]
        wrong += [PromptCache(PROMPT[:-1], padded[:1]), PromptCache([*PROMPT, 1] * 30, short)]
    for cache in wrong:
        with pytest.raises(ValueError, match="must hold the state that the model has after its"):
            save_prompt_cache(file, model, cache)
    assert len(tree_flatten(batch)) == len(tree_flatten(model.init_state(1)))
    assert not list(file.parent.iterdir())


def test_tokens_are_checked(file: Path) -> None:
    model = recurrent(1)
    state = cache_prompt(model, PROMPT).state
    for tokens in ([VOCABULARY], [-1]):
        with pytest.raises(ValueError, match="within the model's vocabulary"):
            save_prompt_cache(file, model, PromptCache(tokens, state))
        with pytest.raises(ValueError, match="within the model's vocabulary"):
            cache_prompt(model, tokens)
    with pytest.raises(ValueError, match="at least one id"):
        cache_prompt(model, [])


def rewritten(file: Path, change: Any) -> None:
    """Changes tensors and metadata of a file."""
    tensors, metadata = mx.load(str(file), return_metadata=True)
    tensors, metadata = dict(tensors), dict(metadata)
    change(tensors, metadata)
    mx.save_safetensors(str(file), tensors, metadata)


def _set(name: str, value: mx.array) -> Any:
    return lambda tensors, metadata: tensors.update({name: value})


def _say(name: str, value: str) -> Any:
    return lambda tensors, metadata: metadata.update({name: value})


FORMAT, KEY_VALUES = "mmfree_prompt_cache", "mmfree_key_values"
CHANGES: dict[str, tuple[Any, str]] = {
    "other format": (_say(FORMAT, "9"), "of version 1 but is '9'"),
    "no format": (lambda tensors, metadata: metadata.pop(FORMAT), "is 'another kind of file'"),
    "no tokens": (lambda tensors, metadata: tensors.pop("tokens"), "lacks its tokens"),
    "empty tokens": (_set("tokens", mx.zeros((0,), mx.int32)), "lacks its tokens"),
    "float tokens": (_set("tokens", mx.zeros((17,))), "lacks its tokens"),
    "square tokens": (_set("tokens", mx.zeros((17, 1), mx.int32)), "lacks its tokens"),
    "large tokens": (_set("tokens", mx.full((17,), 99, mx.int32)), "outside the vocabulary"),
    "negative tokens": (_set("tokens", mx.full((17,), -1, mx.int32)), "outside the vocabulary"),
    "fewer tokens": (_set("tokens", mx.zeros((16,), mx.int32)), "where the model has"),
    "more arrays": (_set("state.9.0", mx.zeros((1,))), "lacks 'state.9.0', or has it"),
    "fewer arrays": (lambda tensors, metadata: tensors.pop("state.1.1"), "lacks 'state.1.1'"),
    "other shape": (
        _set("state.0.0", mx.zeros((1, 1, 17, 31))),
        "has mlx.core.float32 (1, 1, 17, 31)",
    ),
    "more rows": (_set("state.0.0", mx.zeros((2, 1, 17, 32))), "(2, 1, 17, 32) for"),
    "other dtype": (_set("state.0.0", mx.zeros((1, 1, 17, 32), mx.int32)), "int32 (1, 1, 17, 32)"),
    "nan": (_set("state.0.0", mx.full((1, 1, 17, 32), mx.nan)), "NaN or infinity"),
    "positions": (
        _set("state.0.2", mx.full((1, 17), 2**30, mx.int32)),
        "positions that its tokens",
    ),
}


@pytest.mark.parametrize("name", CHANGES)
def test_malformed_files_are_refused(name: str, file: Path) -> None:
    model = attention(1)
    save_prompt_cache(file, model, cache_prompt(model, PROMPT))
    change, message = CHANGES[name]
    rewritten(file, change)
    with pytest.raises(CheckpointError) as error:
        load_prompt_cache(file, model)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "settings that are not JSON"),
        ("[]", "settings that are not whole numbers"),
        ('{"kv_bits": "8"}', "settings that are not whole numbers"),
        ('{"kv_bits": true}', "settings that are not whole numbers"),
        ('{"kv_bits": 8.5}', "settings that are not whole numbers"),
    ],
)
def test_malformed_settings_are_refused(text: str, message: str, file: Path) -> None:
    model = recurrent(1)
    save_prompt_cache(file, model, cache_prompt(model, PROMPT))
    rewritten(file, _say(KEY_VALUES, text))
    with pytest.raises(CheckpointError, match=message):
        read_settings(file)


def test_sizes_are_checked_before_anything_is_allocated(file: Path) -> None:
    header = json.dumps(
        {
            "__metadata__": {FORMAT: "1"},
            "tokens": {"dtype": "I32", "shape": [2**30], "data_offsets": [0, 2**32]},
        }
    ).encode()
    file.write_bytes(struct.pack("<Q", len(header)) + header + b"\0" * 64)
    with pytest.raises(CheckpointError, match="ends before tensor 'tokens'"):
        load_prompt_cache(file, recurrent(1))


def test_missing_and_cut_files(file: Path) -> None:
    model = recurrent(1)
    with pytest.raises(CheckpointError, match="there is no file"):
        load_prompt_cache(file, model)
    save_prompt_cache(file, model, cache_prompt(model, PROMPT))
    os.truncate(file, file.stat().st_size - 5)
    with pytest.raises(CheckpointError, match="ends before"):
        load_prompt_cache(file, model)


def test_a_file_is_replaced_whole_or_not_at_all(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = recurrent(1)
    save_prompt_cache(file, model, cache_prompt(model, PROMPT))
    before = file.read_bytes()

    def fail(*arguments: Any) -> None:
        raise OSError("disk is gone")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(CheckpointError, match="cannot be written: disk is gone"):
        save_prompt_cache(file, model, cache_prompt(model, REST))
    assert file.read_bytes() == before
    monkeypatch.undo()
    save_prompt_cache(file, model, cache_prompt(model, REST))
    assert load_prompt_cache(file, model).tokens == REST
    assert list(file.parent.iterdir()) == [file]
