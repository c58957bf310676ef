"""Whole numbers of the JSON files of models: each is taken or refused in one line."""

import json
from collections.abc import Callable
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any, get_args

import mlx.core as mx
import pytest

from mlx_mmfree import embed, generate
from mlx_mmfree.generation.sampling import make_processors, make_sampler
from mlx_mmfree.generation.suggested import suggested_sampling
from mlx_mmfree.hub import load, load_model, save_model
from mlx_mmfree.hub.adapters.adapter import attach
from mlx_mmfree.hub.adapters.adapter_folder import read_adapter, write_adapter, write_peft_adapter
from mlx_mmfree.models import Decoder, find, known_model_types
from mlx_mmfree.training.fine_tuning.fine_tune import adapt_layers
from tests.hub.checkpoints import GOLDENS, golden_checkpoint, tiny_of, tiny_transformer
from tests.hub.embedder_folder import embedder_folder
from tests.whole_numbers import faults_of_file, paths_of_integers


def _use(folder: Path) -> None:
    model = load_model(folder)
    if isinstance(model, Decoder):
        mx.eval(model(mx.array([[0, 1, 2]])))


@pytest.mark.sample(6)
@pytest.mark.parametrize("name", known_model_types())
def test_descriptions(name: str, tmp_path: Path) -> None:
    save_model(tmp_path / "m", tiny_of(name))
    declared = [
        each for each in fields(find(name).config) if int in (each.type, *get_args(each.type))
    ]
    keys = {(*each.metadata.get("names", ()), each.name)[0] for each in declared}
    file = tmp_path / "m" / "config.json"
    assert faults_of_file(file, partial(_use, tmp_path / "m"), sorted(keys)) == []


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "name",
    ["maple_mlx_2bit", "mlx_qwen3_1bit_g128", "prism_schema2", "bitnet_packed", "hf_reformer"],
)
def test_descriptions_of_others(name: str, tmp_path: Path) -> None:
    """Descriptions of packed weights name the format in which these are stored."""
    folder = golden_checkpoint(name, tmp_path / "m")
    for file in folder.glob("*.json"):
        assert faults_of_file(file, partial(_use, folder)) == []


def _write(folder: Path) -> None:
    model, tokenizer = load(folder)
    values: dict[str, Any] = dict(suggested_sampling(model, folder).values)
    repeats = {name: values.pop(name) for name in [*values] if name.startswith("repetition_")}
    generate(
        model,
        tokenizer,
        "a b",
        max_tokens=2,
        sampler=make_sampler(**values),
        processors=make_processors(**repeats),
    )


@pytest.mark.exhaustive
def test_tokenizers_and_sampling(tmp_path: Path) -> None:
    save_model(tmp_path / "m", tiny_transformer(vocab_size=518), GOLDENS / "tokenizer_bpe")
    vocabulary = tmp_path / "m" / "tokenizer.json"
    values = json.loads(vocabulary.read_text())
    # one token stands for all
    values["truncation"] = {"direction": "Right", "max_length": 9, "strategy": "LongestFirst"}
    values["truncation"] |= {"stride": 0}
    vocabulary.write_text(json.dumps(values))
    sampled = {"temperature": 1, "top_p": 1, "top_k": 5, "min_p": 0, "repetition_penalty": 2}
    sampled |= {"penalty_last_n": 4, "xtc_probability": 1, "xtc_threshold": 0}
    ids = {"bos_token_id": 0, "eos_token_id": [1, 2], "pad_token_id": 3, "max_length": 20}
    ids |= {"max_new_tokens": 4, "num_beams": 1, "forced_eos_token_id": 4}
    (tmp_path / "m" / "generation_config.json").write_text(
        json.dumps(ids | sampled | {"do_sample": True})
    )
    use = partial(_write, tmp_path / "m")
    use()
    for name in ("generation_config.json", "tokenizer_config.json"):
        assert faults_of_file(tmp_path / "m" / name, use) == []
    chosen = [path for path in paths_of_integers(values) if path[:2] != ("model", "vocab")]
    assert faults_of_file(vocabulary, use, [*chosen, ("model", "vocab", "!")]) == []


@pytest.mark.parametrize("write", [write_adapter, write_peft_adapter])
def test_adapters(write: Callable[..., object], tmp_path: Path) -> None:
    model = tiny_transformer(vocab_size=518)
    adapt_layers(model, kind="lora", rank=4, scale=2.0)
    last = {"model": "m"} if write is write_adapter else "m"
    write(tmp_path / "a", model, last)

    def use() -> None:
        attach(model, None)
        attach(model, read_adapter(tmp_path / "a")).eval()
        mx.eval(model(mx.array([[0, 1, 2]])))

    use()
    file = tmp_path / "a" / "adapter_config.json"
    more = ["rank", "num_layers", "r", "lora_alpha", "scale"]
    assert faults_of_file(file, use, more) == []


def test_embedders(tmp_path: Path) -> None:
    folder = embedder_folder(tmp_path / "m", pooling="mean_tokens", max_length=12)

    def use() -> None:
        embed(*load(folder), ["a b"])

    use()
    for file in [*folder.glob("*.json"), *folder.glob("*/*.json")]:
        if file.name not in ("tokenizer.json", "config.json"):
            assert faults_of_file(file, use, ["word_embedding_dimension"]) == []
