"""How a model's texts are sampled, as its `generation_config.json` or its GGUF metadata say."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mlx_mmfree.errors import CheckpointError
from mlx_mmfree.tokenizer.sampling_defaults import (
    LONGEST,
    read_sampling,
    sampling_of_gguf,
    sampling_to_gguf,
)


def written(folder: Path, **values: Any) -> Path:
    (folder / "generation_config.json").write_text(json.dumps(values))
    return folder


@pytest.mark.parametrize(
    ("values", "want"),
    [
        ({}, {}),
        ({"eos_token_id": [1, 2], "max_new_tokens": 9, "bos_token_id": 0}, {}),
        (
            {"do_sample": True, "temperature": 1.0, "top_k": 20, "top_p": 0.95},
            {"temp": 1.0, "top_k": 20, "top_p": 0.95},
        ),
        ({"temperature": 0.6, "top_p": None}, {"temp": 0.6}),
        ({"temperature": 0}, {"temp": 0}),
        ({"do_sample": True}, {"temp": 1.0}),
        ({"do_sample": None, "min_p": 0.05}, {"min_p": 0.05}),
        ({"do_sample": False, "temperature": 0.7, "top_p": 0.8}, {"temp": 0.0, "top_p": 0.8}),
        ({"top_k": -1}, {"top_k": 0}),
        (
            {"repetition_penalty": 1.1},
            {"repetition_penalty": 1.1, "repetition_context_size": LONGEST},
        ),
        (
            {"repetition_penalty": 1.1, "penalty_last_n": 64},
            {"repetition_penalty": 1.1, "repetition_context_size": 64},
        ),
        ({"repetition_penalty": 1.1, "penalty_last_n": 0}, {}),
        ({"xtc_probability": 0.5, "xtc_threshold": 0.6}, {"xtc_probability": 0.0}),
    ],
    ids=str,
)
def test_what_the_file_says(tmp_path: Path, values: dict[str, Any], want: dict[str, Any]) -> None:
    assert read_sampling(written(tmp_path, **values)) == want


def test_no_file_says_nothing(tmp_path: Path) -> None:
    assert read_sampling(tmp_path) == {} and sampling_to_gguf(tmp_path) == {}


WRONG = [
    ("temperature", "1.0"),
    ("temperature", True),
    ("temperature", -0.1),
    ("top_p", 0),
    ("top_p", 1.5),
    ("top_p", [0.9]),
    ("top_k", 20.0),
    ("top_k", -2),
    ("top_k", "20"),
    ("min_p", -0.1),
    ("min_p", 1.1),
    ("repetition_penalty", 0),
    ("repetition_penalty", {}),
    ("xtc_probability", 2),
    ("penalty_last_n", 0.5),
    ("do_sample", 1),
    ("do_sample", "false"),
]


@pytest.mark.parametrize(("key", "value"), WRONG)
def test_wrong_values_are_refused_by_name(tmp_path: Path, key: str, value: Any) -> None:
    folder = written(tmp_path, **{key: value})
    for read in (read_sampling, sampling_to_gguf):
        with pytest.raises(CheckpointError, match=rf"generation_config.json\] '{key}' must be"):
            read(folder)


NAMES = {"temperature": "temp", "repetition_penalty": "penalty_repeat"}


@pytest.mark.parametrize(("key", "value"), WRONG[:-2])
def test_wrong_metadata_are_refused_by_name(key: str, value: Any) -> None:
    name = f"general.sampling.{NAMES.get(key, key)}"
    with pytest.raises(CheckpointError, match=rf"\[GGUF\] '{name}' must be"):
        sampling_of_gguf({name: value})


def test_metadata_become_the_keys_of_transformers() -> None:
    metadata = {
        "general.name": "m",
        "general.sampling.temp": float(np.float32(0.7)),
        "general.sampling.top_k": 20,
        "general.sampling.top_p": float(np.float32(0.95)),
        "general.sampling.penalty_repeat": float(np.float32(1.05)),
        "general.sampling.sequence": "topk",
        "general.sampling.mirostat": 0,
        "general.sampling.mirostat_tau": 5.0,
    }
    values, unread = sampling_of_gguf(metadata)
    assert values == {
        "do_sample": True,
        "temperature": 0.7,
        "top_k": 20,
        "top_p": 0.95,
        "repetition_penalty": 1.05,
        "penalty_last_n": 64,
    }
    assert unread == tuple(
        f"general.sampling.{name}" for name in ("mirostat", "mirostat_tau", "sequence")
    )


@pytest.mark.parametrize(
    "values",
    [
        {"do_sample": True, "temperature": 0.7, "top_k": 20, "top_p": 0.8, "min_p": 0.05},
        {"do_sample": False},
        {"repetition_penalty": 1.2},
        {"repetition_penalty": 1.2, "penalty_last_n": 64},
        {"xtc_probability": 0.5, "xtc_threshold": 0.1, "do_sample": True, "temperature": 1.0},
    ],
    ids=str,
)
def test_both_ways_say_the_same(tmp_path: Path, values: dict[str, Any]) -> None:
    metadata = sampling_to_gguf(written(tmp_path, **values))
    # as the file holds them
    stored = {
        key: int(value) if isinstance(value, np.int32) else float(np.float32(value))
        for key, value in metadata.items()
    }
    want = read_sampling(tmp_path)
    again, _ = sampling_of_gguf(stored)
    assert read_sampling(written(tmp_path, **again)) == want
