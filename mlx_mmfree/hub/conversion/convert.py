"""Converts a checkpoint to another format, tensor by tensor, and compares the result with its source."""

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, get_args

import mlx.core as mx

from ...arguments import check_choice, check_path, check_whole, checks_names
from ...files.checkpoint_files import CONFIG_FILE, SCALES_FILE
from ...files.gguf_file import write_parts
from ...files.reading import real_path, tokenizer_files, write_json
from ...files.tensors import PlannedTensors, write_safetensors, write_shards
from ...files.writing import new_folder, writing
from ...platform.progress import Progress
from ...tokenizer.to_gguf import compare_tokenizers
from ...version import __version__
from ..checkpoint.checkpoint import Checkpoint, open_checkpoint
from ..checkpoint.parameter_reader import ParameterReader
from ..checkpoint.save import check_target, copy_files, token_ids
from ..checkpoint.weight_format import WRITER_KEY
from ..publish.model_card import ModelCard, write_model_card
from ..publish.runtimes import openings
from .to_folder import MODEL_FILE, FloatFormats, FolderPlan, plan_hf, plan_mlx
from .to_gguf import plan_gguf
from .verify import Report, take_stock, verify

Target = Literal["mlx", "hf", "gguf"]
OnBytes = Callable[[int], object]
TritsPerByte = Literal[4, 5]
GGUFType = Literal["tq2_0", "tq1_0", "q2_0", "pq2_0", "q1_0", "i2_s"]


@checks_names
def convert(
    source: Checkpoint,
    path: str | os.PathLike[str],
    *,
    to: Target = "mlx",
    gguf_type: GGUFType | None = None,
    formats: FloatFormats | None = None,
    trits_per_byte: TritsPerByte = 4,
    max_part_bytes: int | None = None,
    check: bool = True,
    overwrite: bool = False,
    show_progress: bool = False,
    card: ModelCard | None = None,
) -> Report:
    """Writes a checkpoint in another format. Ternary weights do not change.

    Tensors are read, converted and written one after the other. The folder appears under its name only
    when it is complete and, with `check`, was found to be equal to its source.

    Args:
        source: The checkpoint.
        path: The folder to make.
        to: The format: MLX's, transformers', or GGUF.
        gguf_type: The type of ternary tensors in GGUF. Default: `i2_s` for BitNet's own architecture,
            which bitnet.cpp alone knows, and `tq2_0` for the others, or `q2_0` or `q1_0` where groups of
            inputs have scales of their own.
        formats: What becomes of weights that are stored as floats. Default: they stay.
        trits_per_byte: How many ternary weights share a byte in MLX's format: 4, which mlx-lm computes
            with, or 5, which are unpacked when they are read.
        max_part_bytes: The largest number of bytes of tensors in a file of a GGUF model, unless one
            tensor is larger. `None` writes one file.
        check: Read the result again, and compare every tensor and the logits of a fixed input.
        overwrite: Replace an existing checkpoint folder.
        show_progress: Show how much is written: a bar on a terminal, and elsewhere a line at times.
        card: What the model card says of the source; the rest is filled in. `None` writes no card.

    Returns:
        What was written, and how it compares with the source.

    Raises:
        CheckpointError: The source is damaged or holds an adapter, the target exists, the disk is full,
            or the result differs from its source.
        TypeError: The source is no opened checkpoint, or an argument is misspelt or of another type.
        UnsupportedModelError: The format does not exist for this model.
        ValueError: The format or what shares a byte is not known, or an option is for another format.

    Example:
        >>> from mlx_mmfree import demo
        >>> report = convert(open_checkpoint(demo.path()), "converted", check=False)
        >>> load_model("converted").dims
        384
    """
    check_path("convert", "path", path, "the folder to make")
    check_choice("convert", "to", to, get_args(Target))
    check_choice("convert", "trits_per_byte", trits_per_byte, get_args(TritsPerByte))
    _check_options(to, gguf_type, max_part_bytes, formats, card)
    formats = formats or FloatFormats()
    target = real_path(path)
    if not isinstance(source, Checkpoint):
        raise TypeError(
            f"[convert] 'source' must be an opened checkpoint but got {source!r:.80}. Open it: "
            "open_checkpoint(path)."
        )
    source.refuse_adapter("convert", "to be written in another format")
    files = {entry.file for entry in source.tensors.values()}
    check_target(target, overwrite, "convert", [source.folder, *files])
    reader = ParameterReader(source)
    if source.dtype is not None and formats.dtype is None:
        formats = replace(formats, dtype=source.dtype)
        reader.keep_floats()
    if to == "gguf":
        kind = gguf_type.upper() if gguf_type is not None else None
        writer = _gguf_writer(reader, target.name, kind, formats, max_part_bytes)
    else:
        plan_packed = partial(plan_mlx, trits_per_byte=trits_per_byte)
        writer = _folder_writer(reader, plan_packed if to == "mlx" else plan_hf, formats)
    made = new_folder(target, replaces=overwrite, needed_bytes=writer.nbytes)
    with writing("convert", target), made as folder:
        with Progress("writing", writer.nbytes, "B", is_shown=show_progress) as bar:
            writer.write(folder, bar.update)
        written = ParameterReader(open_checkpoint(folder))
        report = take_stock(reader, written)
        if check:
            report = verify(reader, written, formats, writer.scale_dtype)
            writer.check_files(source.folder, written.checkpoint.folder)
        report.openings = openings(written, to, writer.file_type)
        if card is not None:
            write_model_card(folder, _filled(card, to, report, written))
    return report


def _check_options(
    to: Target, gguf_type: Any, max_part_bytes: Any, formats: Any, card: Any
) -> None:
    if max_part_bytes is not None:
        check_whole("convert", max_part_bytes=max_part_bytes)
    for name, value in (("gguf_type", gguf_type), ("max_part_bytes", max_part_bytes)):
        if value is not None and to != "gguf":
            raise ValueError(
                f"[convert] '{name}' must come with to='gguf' but got {to!r}. Leave it out."
            )
    for name, value, kind in (("formats", formats, FloatFormats), ("card", card, ModelCard)):
        if value is not None and not isinstance(value, kind):
            raise TypeError(
                f"[convert] '{name}' must be {kind.__name__} or None but got {value!r:.80}."
            )


@dataclass(frozen=True)
class _Writer:
    """One planned conversion.

    Attributes:
        nbytes: The number of bytes to write.
        write: Writes the files into a folder, and calls a function with the bytes of each tensor.
        check_files: Compares the tokenizers of the source's folder and of the written one.
        scale_dtype: The dtype in which the format holds the scale of a ternary matrix.
        file_type: The type of the tensors in GGUF, and empty for other formats.
    """

    nbytes: int
    write: Callable[[Path, OnBytes], None]
    check_files: Callable[[Path, Path], None] = lambda source, target: None
    scale_dtype: mx.Dtype = mx.float32
    file_type: str = ""


def _folder_writer(
    reader: ParameterReader,
    make_plan: Callable[[ParameterReader, FloatFormats], FolderPlan],
    formats: FloatFormats,
) -> _Writer:
    plan = make_plan(reader, formats)
    copied = tokenizer_files(reader.checkpoint.folder)
    config = {**token_ids(copied.pop(CONFIG_FILE, None)), **plan.config}
    config[WRITER_KEY] = {"version": __version__}
    nbytes = sum(group.nbytes for group in plan.tensors)
    nbytes += sum(file.stat().st_size for file in copied.values())
    if "model_file" in plan.config:
        copied[MODEL_FILE.name] = MODEL_FILE

    def write(folder: Path, on_bytes: OnBytes) -> None:
        write_json(folder / CONFIG_FILE, config)
        copy_files(copied, folder)
        write_shards(folder, plan.tensors, on_bytes, metadata=plan.metadata)
        if plan.scales:
            exact = [PlannedTensors.of(*item) for item in plan.scales.items()]
            write_safetensors(folder / SCALES_FILE, exact)

    return _Writer(nbytes, write)


def _gguf_writer(
    reader: ParameterReader,
    name: str,
    kind: str | None,
    formats: FloatFormats,
    max_part_bytes: int | None,
) -> _Writer:
    plan = plan_gguf(reader, kind, formats, name)
    nbytes = sum(tensor.nbytes for tensor in plan.tensors)

    def write(folder: Path, on_bytes: OnBytes) -> None:
        stem = f"{name}-{plan.kind.name}"
        write_parts(folder, stem, plan.metadata, plan.tensors, max_part_bytes, on_bytes)

    scale_dtype = mx.float32 if plan.kind.has_one_scale else mx.float16
    return _Writer(nbytes, write, compare_tokenizers, scale_dtype, plan.kind.name)


def _filled(card: ModelCard, to: Target, report: Report, written: ParameterReader) -> ModelCard:
    return replace(
        card,
        format=to,
        verification={**card.verification, **report.metrics()},
        openings=report.openings,
        is_ternary=written.holds_ternary,
        tags=(*card.tags, *written.tags),
    )
