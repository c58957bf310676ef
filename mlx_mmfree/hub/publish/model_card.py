"""Writes the model card of a folder: `README.md` with the front matter that the Hub reads."""

import json
import re
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import yaml

from ...files.checkpoint_files import CONFIG_FILE
from ...files.reading import read_file, read_json_object
from ...files.writing import new_file, writing
from ...files.yaml_text import parse_yaml
from ...models.parts.architecture import Pipeline, find_described
from ...version import REPOSITORY, __version__
from ..checkpoint.save import copy_files
from ..checkpoint.weight_format import formats_of
from ..remote.download import REPOSITORY_NAME
from .runtimes import MLX_LM, Opening, opening


def table(head: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """A table with a head, and a line of as many cells for each of `lines`."""
    rule = f"|{'---|' * len(head)}"
    return "\n".join([_line(head), rule, *map(_line, lines)])


def rows(metrics: Mapping[str, str]) -> str:
    """A table of names and values."""
    return table(("", ""), metrics.items())


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(map(_cell, cells))} |"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


_PYTHON: dict[Pipeline, str] = {
    "text-generation": "from mlx_mmfree import generate, load\n\n"
    "model, tokenizer = load({0})\n"
    'print(generate(model, tokenizer, "Once upon a time"))',
    "image-classification": "from mlx_mmfree import load\n\n"
    "model, processor = load({0})\n"
    'print(model(processor(["picture.jpg"])).argmax(axis=-1))',
}
_COMMANDS: dict[Pipeline, str] = {
    "feature-extraction": 'mmfree embed --model {0} --text "A text to embed."',
    "fill-mask": 'mmfree fill --model {0} --text "A text with the tokenizer\'s mask token in it."',
    "text-classification": 'mmfree classify --model {0} --text "A text to classify."',
    "translation": 'mmfree translate --model {0} --text "A text to translate."',
}
_SECTION = re.compile(r"^## Usage$.*?(?=^## |\Z)", re.MULTILINE | re.DOTALL)
_MARK = re.compile(r"^Made from .+ with mlx_mmfree \S+:$", re.MULTILINE)
# a text of Python, or a word of the shell
_NAME = re.compile(
    r"""(?<=\bload\()"(?:[^"\\\n]|\\.)*"(?=\))"""
    r"""|(?<=--model )(?:'[^'\n]*'|"[^"\n]*"|[^\s'"`])+"""
)


def usage(name: str, pipeline: Pipeline, openings: tuple[Opening, ...]) -> str:
    """How a model is used, with this library and with others.

    Args:
        name: The repository `owner/name` or the folder under which a user loads the model.
        pipeline: What the model does.
        openings: Which programs open the folder; empty if that is not known.
    """
    if pipeline in _PYTHON:
        language, code = "python", _PYTHON[pipeline].format(json.dumps(name))
    else:
        language, code = "bash", _COMMANDS[pipeline].format(shlex.quote(name))
    text = (
        f"## Usage\n\nWith [mlx_mmfree]({REPOSITORY}), which computes as the model was trained, with "
        f"8-bit activations where it has them:\n\n```{language}\n{code}\n```"
    )
    if not openings:
        return text
    text += f"\n\nOther programs:\n\n{rows({o.runtime: str(o) for o in openings})}"
    mlx_lm = opening(openings, MLX_LM)
    if mlx_lm is None or not mlx_lm.opens:
        return text
    flag = " --trust-remote-code" if "--trust-remote-code" in mlx_lm.note else ""
    text += (
        "\n\nWith mlx-lm:\n\n"
        f"```bash\nmlx_lm.generate --model {shlex.quote(name)}{flag} "
        '--prompt "Once upon a time"\n```'
    )
    if flag:
        text += (
            "\n\nmlx-lm has no such architecture of its own: the flag lets it run the model's Python "
            "file that lies in this repository."
        )
    return text


def usage_of_adapter(name: str, base: str) -> str:
    """How an adapter that is alone in its repository is used."""
    words = ["mmfree", "generate", "--model", base, "--adapter-path", name, "--prompt", "Hello"]
    return (
        "## Usage\n\n[mlx_mmfree](" + REPOSITORY + ") puts the adapter on its base model:\n\n"
        f"```bash\n{shlex.join(words)}\n```"
    )


def adapter_usage(name: str, pipeline: Pipeline) -> str:
    """How a base model is used with the adapter that lies beside it."""
    return usage(name, pipeline, ()) + (
        "\n\nThe adapter lies beside the base model, and mlx_mmfree puts it on. Other programs see the "
        "base model alone."
    )


def with_name(card: str, name: str) -> str:
    """A model card of this library whose heading and commands name another path; others stay.

    Args:
        card: The text of the card.
        name: The repository `owner/name` or the folder under which a user loads the model.
    """
    mark, section = _MARK.search(card), _SECTION.search(card)
    if mark is None or section is None or mark.start() > section.start():
        return card
    found = _NAME.search(section[0])
    if found is None:
        return card
    try:
        old = json.loads(found[0]) if found[0].startswith('"') else shlex.split(found[0])[0]
    except ValueError:
        return card
    heading, new_heading = (f"\n# {last_part(each)}\n" for each in (old, name))
    head = card[: section.start()].replace(heading, new_heading, 1)
    named = _NAME.sub(
        lambda each: json.dumps(name) if each[0].startswith('"') else shlex.quote(name), section[0]
    )
    return head + named + card[section.end() :]


def last_part(name: str) -> str:
    """The last part of a repository's name or of a path."""
    return name.rstrip("/").rpartition("/")[2]


CARD_FILE = "README.md"
CARD_PATTERNS = (CARD_FILE, "LICENSE*", "LICENCE*", "NOTICE*")

MAX_CARD_BYTES = 1_000_000
_LIBRARIES = {
    "mlx": "mlx",
    "hf": "transformers",
    "gguf": "gguf",
    "adapter": "mlx_mmfree",
}
_FRONT_MATTER = re.compile(r"\A\ufeff?---[ \t]*\r?\n(.*?)^---[ \t]*(?:\r?\n|\Z)", re.DOTALL | re.M)

_LICENSE_TEXTS = (
    ("apache-2.0", re.compile(r"Apache License\s+Version 2\.0, January 2004")),
    ("mit", re.compile(r"Permission is hereby granted, free of charge, to any person obtaining")),
)


@dataclass(frozen=True)
class SourceCard:
    """The source of a model as it describes itself.

    Attributes:
        metadata: The front matter of its card.
        body: The text of its card.
        license: The identifier of its licence; `None` if it is not known.
        license_files: Its licence and notice files, which every copy must include.
        problem: Why its card or the front matter of its card was not read; `None` if both were.
    """

    metadata: Mapping[str, Any] = field(default_factory=dict)
    body: str = ""
    license: str | None = None
    license_files: tuple[Path, ...] = ()
    problem: str | None = None


@dataclass(frozen=True)
class ModelCard:
    """The contents of a model card.

    Attributes:
        name: The repository `owner/name` or the folder under which a user loads the model.
        format: The layout of the weights: `mlx`, `hf` or `gguf`; `adapter` for an adapter alone.
        command: The command that made the folder.
        base_model: The repository `owner/name` of the source; `None` if it is a local folder.
        base_revision: The revision of the source; `None` if it is the main one.
        relation: What the model is to its source, in the Hub's words.
        source: What the source says about itself.
        verification: The metrics of the comparison with the source, by name; empty if there was none.
        losses: Nats a token of a text, by the name of what was measured.
        training: How the model was trained, a section in Markdown; then there is none of the comparison.
        openings: Which programs open the folder; empty if that is not known.
        is_ternary: Whether the model has a ternary matrix.
        tags: Tags in addition to those that follow from the rest.
        certify: Gives the certificate of the model in a folder, a section in Markdown or nothing; `None`
            leaves it out.
        pipeline: What the model does, in the Hub's words.
        storage: How its ternary weights are stored, as text, where that is not the usual format.
    """

    name: str
    format: Literal["mlx", "hf", "gguf", "adapter"]
    command: str
    base_model: str | None = None
    base_revision: str | None = None
    relation: Literal["quantized", "finetune", "adapter"] | None = "quantized"
    source: SourceCard = field(default_factory=SourceCard)
    verification: Mapping[str, str] = field(default_factory=dict)
    losses: Mapping[str, float] = field(default_factory=dict)
    training: str = ""
    openings: tuple[Opening, ...] = ()
    is_ternary: bool = False
    tags: tuple[str, ...] = ()
    certify: Callable[[Path], str] | None = None
    pipeline: Pipeline = "text-generation"
    storage: str = ""

    @property
    def is_of_images(self) -> bool:
        return self.pipeline == "image-classification"


def pipeline_of(folder: Path) -> Pipeline:
    """The task of the model in a folder, by its `config.json`; without one, it continues texts."""
    file = folder / CONFIG_FILE
    if not file.exists():
        return "text-generation"
    config = read_json_object(file)
    architecture = find_described(config)
    return architecture.pipeline(architecture.config.from_hub(config))


def storage_of(folder: Path) -> str:
    """How the ternary weights in a folder are stored, by its `config.json`; empty if as usual."""
    file = folder / CONFIG_FILE
    found = formats_of(read_json_object(file)).values() if file.exists() else ()
    return " ".join(format.words for format, _ in found if format.words)


def read_source_card(folder: Path) -> SourceCard:
    """Reads the card and the licence files of a source folder.

    A card that is missing or cannot be read counts as empty, and `problem` says why. For a repository of
    the Hub, download them first: `find_source(name).fetch(CARD_PATTERNS)`.
    """
    metadata: dict[str, Any] = {}
    body, problem = "", None
    try:
        metadata, body, problem = _parse_card(_text(folder / CARD_FILE))
    except FileNotFoundError:
        pass
    except OSError as error:
        problem = str(error)
    found = {path for pattern in CARD_PATTERNS[1:] for path in folder.glob(pattern)}
    files = tuple(sorted(file for file in found if _read_text(file)))
    known = metadata.get("license")
    if isinstance(known, str) and known.strip():
        identifier: str | None = known.strip().lower()
    else:
        texts = [_read_text(file) for file in files]
        names = (name for text in texts for name, rule in _LICENSE_TEXTS if rule.search(text))
        identifier = next(names, None)
    return SourceCard(metadata, body.strip(), identifier, files, problem)


def model_card(card: ModelCard, certificate: str = "") -> str:
    """The text of `README.md`, with a certificate if there is one."""
    parts = [
        f"---\n{yaml.safe_dump(_metadata(card), sort_keys=False, allow_unicode=True)}---",
        f"# {last_part(card.name)}",
        _provenance(card),
        *([card.storage] if card.storage else []),
        _result(card),
        _usage(card),
    ]
    if certificate:
        parts.insert(-1, certificate)
    if card.source.license is None:
        parts.append(
            "## Licence\n\nThe source does not say under which licence it is published. Ask its "
            "authors before you pass this model on."
        )
    if card.source.body:
        parts.append(f"## Card of the source\n\n{card.source.body}")
    return "\n\n".join(parts) + "\n"


def _usage(card: ModelCard) -> str:
    if card.format == "adapter":
        return usage_of_adapter(card.name, card.base_model or "")
    if card.relation == "adapter":
        return adapter_usage(card.name, card.pipeline)
    return usage(card.name, card.pipeline, card.openings)


def write_model_card(folder: Path, card: ModelCard) -> None:
    """Writes `README.md` and copies the licence files of the source.

    Raises:
        CheckpointError: A file cannot be written.
    """
    card = replace(card, pipeline=pipeline_of(folder), storage=storage_of(folder))
    certificate = "" if card.certify is None else card.certify(folder)
    with writing("model card", folder):
        with new_file(folder / CARD_FILE) as file:
            file.write_text(model_card(card, certificate), encoding="utf-8")
        missing = (f for f in card.source.license_files if not (folder / f.name).exists())
        copy_files({file.name: file for file in missing}, folder)


def _metadata(card: ModelCard) -> dict[str, Any]:
    source = card.source.metadata
    metadata: dict[str, Any] = {}
    for key in ("language", "datasets"):
        if values := _texts(source.get(key)):
            metadata[key] = values
    metadata["library_name"] = _library(card)
    metadata["pipeline_tag"] = card.pipeline
    if card.source.license is not None:
        metadata["license"] = card.source.license
        for key in ("license_name", "license_link"):
            if isinstance(source.get(key), str):
                metadata[key] = source[key]
    base = [card.base_model] if card.base_model else _texts(source.get("base_model"))
    if base := [name for name in base if REPOSITORY_NAME.fullmatch(name)]:
        metadata["base_model"] = base[0] if len(base) == 1 else base
        if card.relation is not None:
            metadata["base_model_relation"] = card.relation
    kinds = (*card.tags, "ternary") if card.is_ternary else card.tags
    tags = (_library(card), "mlx_mmfree", *kinds, *_texts(source.get("tags")))
    metadata["tags"] = list(dict.fromkeys(tags))
    return metadata


def _library(card: ModelCard) -> str:
    """The library that the Hub proposes for opening the folder."""
    library = "mlx_mmfree" if card.is_of_images else _LIBRARIES[card.format]
    found = opening(card.openings, MLX_LM if library == "mlx" else library)
    return "mlx_mmfree" if found is not None and found.opens is False else library


def _provenance(card: ModelCard) -> str:
    source = "a local model"
    if card.base_model:
        source = f"[{card.base_model}](https://huggingface.co/{card.base_model})"
        if card.base_revision:
            source += f" at revision `{card.base_revision}`"
    return f"Made from {source} with mlx_mmfree {__version__}:\n\n```bash\n{card.command}\n```"


def _result(card: ModelCard) -> str:
    """The known quality of the model."""
    if card.training:
        return card.training
    return _losses(card) if card.losses else _verification(card.verification)


def _verification(metrics: Mapping[str, str]) -> str:
    if not metrics:
        return "## Verification\n\nThe result was not compared with its source."
    return (
        "## Verification\n\nThe written files were read again and compared with the source:\n\n"
        + rows(metrics)
    )


def _losses(card: ModelCard) -> str:
    metrics = {name: f"{loss:.4f}" for name, loss in card.losses.items()}
    unit = "an image" if card.is_of_images else "a token of one text"
    return f"## Loss\n\nNats {unit}, measured with mlx_mmfree:\n\n{rows(metrics)}"


def _texts(value: object) -> list[str]:
    """The texts of a front matter entry, which may be one or a list."""
    values = value if isinstance(value, list) else [value]
    return [text for text in values if isinstance(text, str) and text.strip()]


def _parse_card(text: str) -> tuple[dict[str, Any], str, str | None]:
    """The front matter of a card, its body, and why the front matter was not read."""
    match = _FRONT_MATTER.match(text)
    if match is None:
        return {}, text, None
    body = text[match.end() :]
    try:
        value = parse_yaml(match[1].encode(), has_words=True)
    except ValueError as error:
        return {}, body, str(error)
    if isinstance(value, dict):
        return value, body, None
    problem = f"its front matter must be names with values but is {type(value).__name__}"
    return {}, body, None if value is None else problem


def _text(file: Path) -> str:
    return read_file(file, MAX_CARD_BYTES, is_member=True).decode("utf-8-sig", errors="replace")


def _read_text(file: Path) -> str:
    """The text of a small file; empty if it is missing, or a link out of the source."""
    try:
        return _text(file)
    except OSError:
        return ""
