"""The files of an adapter's upload: its tensors, a configuration without local paths, and a card."""

import shlex
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...errors import DownloadError, UploadError
from ...files.checkpoint_files import ADAPTER_CONFIG_FILE, ADAPTER_FILE, PEFT_ADAPTER_FILE
from ...files.reading import expanded, json_text, read_json_object
from ..adapters.adapter_folder import read_adapter
from ..remote.download import REPOSITORY_NAME
from ..remote.source import find_source
from .model_card import CARD_PATTERNS, ModelCard, SourceCard, model_card, read_source_card

_PEFT_BASE = "base_model_name_or_path"
_TEXTS = ("fine_tune_type", "optimizer", "train_mode", "dtype")
"""Texts of a configuration that say how an adapter was trained, and name nothing of a machine."""


@dataclass(frozen=True)
class AdapterFiles:
    """The files of an adapter for the Hub.

    Attributes:
        weights: The name of the file of tensors, which is sent as it is.
        config: The text of `adapter_config.json`.
        card: The text of `README.md`.
    """

    weights: str
    config: str
    card: str


def adapter_files(folder: Path, repository: str, base_model: str | None) -> AdapterFiles:
    """Reads an adapter of this library, of mlx-lm or of PEFT for an upload.

    Args:
        folder: The folder of the adapter, which may be the one of a run.
        repository: The repository `owner/name` that it is sent to.
        base_model: The repository of the base model. `None` takes the one that the adapter names.

    Raises:
        CheckpointError: The adapter is damaged.
        UploadError: It names no repository of a base model.
    """
    adapter = read_adapter(folder)
    config = read_json_object(folder / ADAPTER_CONFIG_FILE)
    is_peft = "peft_type" in config
    named = config.get(_PEFT_BASE if is_peft else "model")
    path = expanded(named) if isinstance(named, str) and named else None
    is_local = path is not None and path.is_dir()
    if base_model is None and isinstance(named, str) and not is_local:
        base_model = named
    if base_model is None or not REPOSITORY_NAME.fullmatch(base_model):
        raise UploadError(
            "[upload] 'base_model' must be the Hub repository 'owner/name' of the model that the "
            f"adapter in '{folder}' was trained on but got {base_model or named!r:.200}. Name it with "
            "--base-model."
        )
    source = SourceCard()
    if is_local and path is not None:
        source = read_source_card(path)
    else:
        # without it the card asks the reader to find the licence
        with suppress(DownloadError):
            source = read_source_card(find_source(base_model).fetch(CARD_PATTERNS))
    rank = max(parts["lora_a"].shape[1] for parts in adapter.tensors.values())
    card = ModelCard(
        name=repository,
        format="adapter",
        command=shlex.join(
            ["mmfree", "upload", "--model", folder.name, "--upload-repo", repository]
        ),
        base_model=base_model,
        relation="adapter",
        source=SourceCard(source.metadata, license=source.license),
        training=f"## Adapter\n\n{adapter.kind} of {len(adapter.tensors)} layers, of rank {rank} and "
        f"scale {adapter.scale:g}.",
    )
    described = {**config, _PEFT_BASE: base_model} if is_peft else _public(config, base_model)
    text = json_text(described, indent=4, sort_keys=True) + "\n"
    return AdapterFiles(PEFT_ADAPTER_FILE if is_peft else ADAPTER_FILE, text, model_card(card))


def _public(config: Mapping[str, Any], base_model: str) -> dict[str, Any]:
    """A configuration without the paths of the machine that trained the adapter."""
    plain = {
        key: value
        for key, value in config.items()
        if key in _TEXTS or value is None or isinstance(value, bool | int | float)
    }
    return {**plain, "lora_parameters": config["lora_parameters"], "model": base_model}
