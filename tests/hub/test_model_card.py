"""A card says where a model comes from, how it was checked and how it is used."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml
from huggingface_hub import ModelCard as HubCard

from mlx_mmfree.errors import CheckpointError
from mlx_mmfree.hub.publish.model_card import (
    ModelCard,
    SourceCard,
    model_card,
    read_source_card,
    with_name,
    write_model_card,
)
from mlx_mmfree.hub.publish.runtimes import Opening
from mlx_mmfree.models import find
from mlx_mmfree.models.parts.architecture import Pipeline

COMMAND = "mmfree convert --model ridger/MMfreeLM-370M --mlx-path out"
CARD = ModelCard("me/tiny-2bit", "mlx", COMMAND, base_model="ridger/MMfreeLM-370M", is_ternary=True)
META = {
    **find("metaformer").tiny,
    "model_type": "metaformer",
    "token_mixer": "multi_head_attention",
}
SOURCE_TEXT = """---
license: Other
license_name: falcon-llm
license_link: https://example.com/terms
language:
- en
- no
tags: [bitnet, mlx]
datasets: some/corpus
base_model: tiiuae/base
widget: [{text: hello}]
---

# Source

A table of results.
"""
MIT = "MIT License\n\nPermission is hereby granted, free of charge, to any person obtaining a copy"
APACHE = "      Apache License\n   Version 2.0, January 2004\nhttp://www.apache.org/licenses/"


def front_matter(card: ModelCard) -> dict[str, Any]:
    text = model_card(card)
    metadata: dict[str, Any] = yaml.safe_load(text.split("---\n")[1])
    assert HubCard(text).data.to_dict() == metadata
    return metadata


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "source"
    folder.mkdir()
    return folder


def test_front_matter() -> None:
    assert front_matter(CARD) == {
        "library_name": "mlx",
        "pipeline_tag": "text-generation",
        "base_model": "ridger/MMfreeLM-370M",
        "base_model_relation": "quantized",
        "tags": ["mlx", "mlx_mmfree", "ternary"],
    }
    assert front_matter(replace(CARD, is_ternary=False))["tags"] == ["mlx", "mlx_mmfree"]
    libraries = {"mlx": "mlx", "hf": "transformers", "gguf": "gguf"}
    for layout, library in libraries.items():
        assert front_matter(replace(CARD, format=layout))["library_name"] == library


def test_front_matter_of_the_source_is_carried_on(source: Path) -> None:
    (source / "README.md").write_text(SOURCE_TEXT)
    card = replace(CARD, source=read_source_card(source))
    metadata = front_matter(card)
    assert metadata["license"] == "other"
    assert metadata["license_name"] == "falcon-llm"
    assert metadata["license_link"] == "https://example.com/terms"
    # YAML reads `no` as a truth value; it is no text and is dropped
    assert metadata["language"] == ["en", "no"]
    assert metadata["datasets"] == ["some/corpus"]
    assert metadata["tags"] == ["mlx", "mlx_mmfree", "ternary", "bitnet"]
    assert metadata["base_model"] == "ridger/MMfreeLM-370M"
    assert "widget" not in metadata
    local = front_matter(replace(card, base_model=None))
    assert local["base_model"] == "tiiuae/base"
    text = model_card(card)
    assert text.endswith("## Card of the source\n\n# Source\n\nA table of results.\n")
    assert "which licence" not in text


@pytest.mark.parametrize(
    ("name", "content", "want"),
    [
        ("LICENSE", MIT, "mit"),
        ("LICENSE.txt", APACHE, "apache-2.0"),
        ("LICENCE.md", "All rights reserved", None),
        ("COPYING", MIT, None),
    ],
)
def test_licence_files(source: Path, name: str, content: str, want: str | None) -> None:
    (source / name).write_text(content)
    card = replace(CARD, source=read_source_card(source))
    assert front_matter(card).get("license") == want
    assert ("does not say under which licence" in model_card(card)) == (want is None)


def test_licence_files_go_with_the_model(source: Path, tmp_path: Path) -> None:
    (source / "LICENSE").write_text(APACHE)
    (source / "NOTICE").write_text("Made by them")
    (tmp_path / "secret").write_text("secret")
    (source / "LICENSE-2").symlink_to(tmp_path / "secret")
    target = tmp_path / "target"
    target.mkdir()
    write_model_card(target, replace(CARD, source=read_source_card(source)))
    assert {file.name for file in target.iterdir()} == {"README.md", "LICENSE", "NOTICE"}
    assert (target / "NOTICE").read_text() == "Made by them"
    assert (target / "README.md").read_text(encoding="utf-8").startswith("---\nlibrary_name: mlx\n")
    with pytest.raises(CheckpointError, match="cannot be written"):
        write_model_card(tmp_path / "secret", CARD)


def test_a_snapshot_of_the_cache_holds_links(tmp_path: Path) -> None:
    snapshot = tmp_path / "models--me--tiny" / "snapshots" / "1"
    snapshot.mkdir(parents=True)
    (tmp_path / "models--me--tiny" / "blobs").mkdir()
    (tmp_path / "models--me--tiny" / "blobs" / "1").write_text(SOURCE_TEXT)
    (snapshot / "README.md").symlink_to("../../blobs/1")
    assert read_source_card(snapshot).license == "other"


def test_verification() -> None:
    assert "was not compared with its source" in model_card(CARD)
    text = model_card(replace(CARD, verification={"tensors": "210", "a | b": "0\n1"}))
    assert "| tensors | 210 |\n| a \\| b | 0 1 |\n" in text
    assert "not compared" not in text


def test_command_and_origin() -> None:
    text = model_card(replace(CARD, base_revision="prequantized"))
    assert f"```bash\n{COMMAND}\n```" in text
    assert "](https://huggingface.co/ridger/MMfreeLM-370M) at revision `prequantized`" in text
    local = replace(CARD, base_model=None)
    assert "Made from a local model" in model_card(local)
    assert "base_model" not in front_matter(local)


def test_usage() -> None:
    assert 'load("me/tiny-2bit")' in model_card(CARD)
    assert "mlx-lm" not in model_card(CARD)
    alone = replace(CARD, openings=(Opening("mlx-lm", True), Opening("llama.cpp", False, "why")))
    assert "mlx_lm.generate --model me/tiny-2bit --prompt" in model_card(alone)
    assert "| mlx-lm | yes |\n| llama.cpp | no: why |" in model_card(alone)
    flagged = replace(CARD, openings=(Opening("mlx-lm", True, "with --trust-remote-code; x"),))
    assert "mlx_lm.generate --model me/tiny-2bit --trust-remote-code" in model_card(flagged)
    closed = replace(CARD, openings=(Opening("mlx-lm", False, "it lacks it"),))
    assert "mlx_lm.generate" not in model_card(closed)
    assert front_matter(closed)["library_name"] == "mlx_mmfree"


@pytest.mark.parametrize("pipeline", get_args(Pipeline))
@pytest.mark.parametrize("before", ["out", "my model's", "them/tiny", 'a"b'])
def test_a_card_takes_another_name(pipeline: Pipeline, before: str) -> None:
    source = SourceCard(body=f'# {before}\n\n## Usage\n\nload("{before}") --model {before}\n')
    openings = (Opening("mlx-lm", True), Opening("llama.cpp", False, "why"))
    for relation in ("quantized", "adapter"):
        card = replace(CARD, pipeline=pipeline, openings=openings, relation=relation, source=source)
        text = model_card(replace(card, name=before))
        assert with_name(text, "me/new") == model_card(replace(card, name="me/new"))
        assert with_name(text, before) == text


@pytest.mark.parametrize(
    "text",
    [
        '# out\n\n## Usage\n\nload("out") or mlx_lm.generate --model out\n',
        "",
        "Made from a local model with mlx_mmfree 0.1.0:\n\n## Use\n\n--model out\n",
        "## Usage\n\n--model out\n\nMade from a local model with mlx_mmfree 0.1.0:\n",
        "# out\n\nMade from a local model with mlx_mmfree 0.1.0:\n\n## Usage\n\nAs you like.\n",
    ],
)
def test_cards_of_others_keep_their_names(text: str) -> None:
    assert with_name(text, "me/new") == text


def test_transformers_is_named_only_where_it_opens_the_folder() -> None:
    for opens, library in ((True, "transformers"), (False, "mlx_mmfree")):
        card = replace(CARD, format="hf", openings=(Opening("transformers", opens),))
        assert front_matter(card)["library_name"] == library
        assert ("transformers" in front_matter(card)["tags"]) == opens


@pytest.mark.parametrize(
    "text",
    [
        "",
        "no front matter",
        "---\nnot closed",
        "---\n- a list\n---\nbody",
        "---\na: [\n---\nbody",
        "---\nlicense: [mit]\nbase_model: {a: b}\ntags: 5\n---\nbody",
        "---\na: !!python/object/apply:os.system [ls]\n---\nbody",
        "---\nlicense: ''\n---\nbody",
        "---\ndate: 2024-99-99\n---\nbody",
        "---\na: " + "[" * 60_000 + "\n---\nbody",
        "---\na: " + "[" * 900_000 + "\n---\nbody",
        "---\nbase_model: '../../etc'\n---\n" + "---\n" * 3,
        "\ufeff---\r\nlicense: mit\r\n---\r\nbody",
    ],
)
def test_odd_cards(source: Path, text: str) -> None:
    (source / "README.md").write_bytes(text.encode())
    found = read_source_card(source)
    metadata = front_matter(replace(CARD, base_model=None, source=found))
    assert metadata.get("license") == ("mit" if "mit\r" in text else None)
    assert "base_model" not in metadata
    assert ("body" in text) == (found.body == "body")
    # these are refused, the others have no front matter or none of use
    assert (found.problem is not None) == any(
        part in text for part in ("a list", "a: [", "!!python")
    )


def test_too_long_cards_are_left_out(source: Path) -> None:
    (source / "README.md").write_text("x" * 1_000_001)
    found = read_source_card(source)
    assert found.problem is not None and "more than the 1,000,000" in found.problem
    assert replace(found, problem=None) == SourceCard()


@pytest.mark.parametrize(
    ("config", "pipeline", "command"),
    [
        (find("fnet").tiny | {"model_type": "fnet"}, "fill-mask", "mmfree fill"),
        (find("marian").tiny | {"model_type": "marian"}, "translation", "mmfree translate"),
        (META | {"task": "masked_lm"}, "fill-mask", "mmfree fill"),
        (META | {"task": "classifier"}, "text-classification", "mmfree classify"),
        (META | {"task": "encoder_decoder"}, "translation", "mmfree translate"),
        (META | {"task": "causal_lm"}, "text-generation", "generate(model"),
    ],
)
def test_the_card_says_what_the_model_does(
    config: dict[str, Any], pipeline: str, command: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    write_model_card(tmp_path, CARD)
    card = (tmp_path / "README.md").read_text(encoding="utf-8")
    assert f"pipeline_tag: {pipeline}\n" in card and command in card
