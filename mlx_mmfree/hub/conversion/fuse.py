"""Merges an adapter into its base, whose ternary weights become dense, or ternary again."""

import os
from dataclasses import replace
from typing import Any, Literal, get_args

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_unflatten

from ...arguments import check_model, checks_names
from ...errors import UnsupportedModelError
from ...files.checkpoint_files import CONFIG_FILE
from ...files.reading import read_json_object, real_path, write_json
from ...files.writing import new_folder, writing
from ...layers.lora import adapted_layers, remove_adapters
from ...layers.matrix import fixed_dtype_names, matrices, parameters
from ...models import Decoder
from ...models.parts.architecture import weight_names
from ...ops.device import FLOATS
from ...tokenizer.tokenizer import Tokenizer
from ..adapters.adapter_folder import write_adapter, write_peft_adapter
from ..checkpoint.checkpoint import ADAPTER_KEY
from ..checkpoint.save import check_target, save_model
from ..checkpoint.weight_format import WRITER_KEY
from ..publish.model_card import ModelCard, write_model_card

FusedFormat = Literal["dense", "ternary"]


@checks_names
def fuse(model: Decoder, format: FusedFormat) -> Decoder:
    r"""Merges the adapter that is on a model, in place.

    The sum :math:`W + \alpha (AB)^\top` of a ternary matrix and an adapter is not ternary. `"dense"`
    keeps it, and the layer then computes with float activations. `"ternary"` rounds it to ternary again
    (`ops.ternarize`), which loses a part of what was learned. Measure both.

    A dense layer has the dtype of the layer before; one that was packed has the embedding's.

    Args:
        model: A model with adapters.
        format: What ternary layers become. Dense and quantised layers always become dense.

    Returns:
        The model, without adapters. Its `config` describes the new layers.

    Raises:
        TypeError: The model is none, or an argument is misspelt.
        ValueError: The format is unknown, or the model has no adapter.
        UnsupportedModelError: `"dense"` was asked of an architecture whose ternary linears have a norm
            inside, of which no published format has dense linears with one; or of a ternary image
            model.

    Source: the sum is defined in LoRA (Hu et al., arXiv 2106.09685).

    Example:
        >>> from mlx_mmfree import demo, load_model
        >>> from mlx_mmfree.layers.lora import add_adapters
        >>> model = load_model(demo.path())
        >>> names = add_adapters(model, lambda name, layer: name.endswith("input_proj"))
        >>> fuse(model, "ternary").dims
        384
    """
    check_format(model, format)
    merged: dict[str, nn.Module] = {}
    now_dense = []
    for name, layer in adapted_layers(model).items():
        if layer.matrix.is_ternary and format == "ternary":
            merged[name] = layer.to_ternary()
        else:
            merged[name] = layer.to_dense(layer.matrix.dtype or _first_dtype(model))
            if layer.matrix.is_ternary:
                now_dense.append(name)
        mx.eval(merged[name].parameters())
    model.update_modules(tree_unflatten(list(merged.items())))
    if now_dense:
        model.config = _with_dense(model, now_dense)
    return model


def check_format(model: Any, format: FusedFormat) -> None:
    """Raises the error that `fuse` would raise, before anything is computed.

    Raises:
        UnsupportedModelError, ValueError: As `fuse`.
    """
    check_model("fuse", model)
    if format not in get_args(FusedFormat):
        known = ", ".join(map(repr, get_args(FusedFormat)))
        raise ValueError(f"[fuse] 'format' must be one of {known} but got {format!r:.60}.")
    adapted = adapted_layers(model)
    if not adapted:
        raise ValueError(
            "[fuse] 'model' must have an adapter on it but has none. Load it with one: "
            "load(path, adapter_path=...)."
        )
    reads_images = model.pipeline == "image-classification"
    for name, layer in adapted.items():
        if format == "dense" and layer.matrix.is_ternary and reads_images:
            raise UnsupportedModelError(
                f"[fuse] 'format' must be 'ternary' for '{name}' but got 'dense': the configuration of "
                "an image model makes all linears of its blocks ternary or none. Fuse to ternary."
            )
        if format == "dense" and layer.matrix.is_ternary and "norm" in layer.base:
            raise UnsupportedModelError(
                f"[fuse] 'format' must be 'ternary' for '{name}', which has a norm inside, but got "
                "'dense': its architecture has no dense linears with one. Fuse to ternary, or keep the "
                "adapter beside the base."
            )


def save_with_adapter(
    path: str | os.PathLike[str],
    model: Decoder,
    tokenizer: Tokenizer | None,
    *,
    card: ModelCard | None = None,
    overwrite: bool = False,
) -> None:
    """Writes a model as a checkpoint folder, with the adapter that is on it, if any, in the same folder.

    The adapter is taken off the model. `config.json` says that it belongs to the model, so that loading
    the folder puts it on again. Other programs see the base alone, and mlx-lm takes the same folder for
    the adapter's.

    Args:
        path: The folder to make. It appears under its name only when it is complete.
        model: The model.
        tokenizer: The tokenizer, whose files are copied; `None` for an image model.
        card: The model card; `None` writes none.
        overwrite: Replace an existing checkpoint folder.

    Raises:
        CheckpointError: The folder exists or cannot be written.
    """
    target = real_path(path)
    check_target(target, overwrite, "fuse", [tokenizer.folder] if tokenizer else [])
    with writing("fuse", target), new_folder(target, replaces=overwrite) as folder:
        has_adapter = bool(adapted_layers(model))
        if has_adapter:
            template = None if tokenizer is None else tokenizer.given_template
            write_adapter(folder, model, {}, template)
            remove_adapters(model)
        save_model(folder / "base", model, tokenizer)
        for file in (folder / "base").iterdir():
            file.rename(folder / file.name)
        (folder / "base").rmdir()
        if has_adapter:
            config = read_json_object(folder / CONFIG_FILE)
            config[WRITER_KEY][ADAPTER_KEY] = True
            write_json(folder / CONFIG_FILE, config)
        if card is not None:
            modules = matrices(model).values()
            is_ternary = any(each.is_ternary or each.holds_trits for each in modules)
            write_model_card(folder, replace(card, is_ternary=is_ternary))


def save_peft_adapter(
    path: str | os.PathLike[str],
    model: Decoder,
    *,
    base: str | None = None,
    chat_template: str | None = None,
    overwrite: bool = False,
) -> None:
    """Writes the adapter that is on a model as a folder in PEFT's format.

    Args:
        path: The folder to make. It appears under its name only when it is complete.
        model: The model.
        base: The repository of the base model, which the configuration names.
        chat_template: The template that it was trained with, if it is not the model's.
        overwrite: Replace an existing folder.

    Raises:
        CheckpointError: As for `write_peft_adapter`, or the folder exists.
    """
    target = real_path(path)
    check_target(target, overwrite, "fuse")
    with writing("fuse", target), new_folder(target, replaces=overwrite) as folder:
        write_peft_adapter(folder, model, base, chat_template)


def _first_dtype(model: Decoder) -> mx.Dtype:
    """The dtype of the first floats of a model, which are its embedding if it has one."""
    fixed = fixed_dtype_names(model)
    arrays = (array for name, array in parameters(model).items() if name not in fixed)
    return next(array.dtype for array in arrays if array.dtype in FLOATS)


def _with_dense(model: Decoder, names: list[str]) -> Any:
    """The configuration with these linears left out of the ternary ones."""
    config: Any = model.config
    return config.with_dense(map(weight_names(config).module_to_disk, names))
