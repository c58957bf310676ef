"""Converts a checkpoint to another form, one tensor at a time, and compares the result."""

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Literal

from tqdm import tqdm

from ..errors import CheckpointError
from .checkpoint import CONFIG_FILE, SCALES_FILE, Checkpoint, open_checkpoint
from .folder_plan import FloatForms, FolderPlan
from .model_card import ModelCard, write_model_card
from .parameter_reader import ParameterReader
from .safetensors_writer import PlannedTensors, write_safetensors, write_shards
from .target_folder import (
    check_space,
    check_target,
    copy_files,
    replacing_folder,
    token_ids,
    tokenizer_files,
    write_json,
)
from .verify import Report, take_stock, verify
from .write_hf import plan_hf
from .write_mlx import MODEL_FILES, plan_mlx

Target = Literal["mlx", "hf", "gguf"]
GGUFType = Literal["tq2_0", "tq1_0", "i2_s"]


def convert(
    source: Checkpoint,
    path: str | os.PathLike[str],
    *,
    to: Target = "mlx",
    gguf_type: GGUFType = "tq2_0",
    forms: FloatForms | None = None,
    check: bool = True,
    overwrite: bool = False,
    show_progress: bool = False,
    card: ModelCard | None = None,
) -> Report:
    """Writes a checkpoint in another form; ternary weights stay what they are, bit for bit.

    Tensors are read, converted and written one after the other. The folder appears under its name
    only when it is complete and, with `check`, equal to its source.

    Args:
        source: The checkpoint.
        path: The folder to make.
        to: The form: MLX's, transformers', or GGUF.
        gguf_type: Type of ternary tensors in GGUF.
        forms: What becomes of weights that are stored as floats. Default: they stay.
        check: Read the result again, compare every tensor, and the logits of a fixed sequence.
        overwrite: Replace an existing checkpoint folder.
        show_progress: Show a progress bar with bytes on stderr.
        card: What the model card says of the source; the rest is filled in. `None` writes none.

    Returns:
        What was written and how it compares.

    Raises:
        CheckpointError: The source is damaged, the target exists, the disk is full, or the result
            differs from its source.
        UnsupportedModelError: The form does not exist for this model.
    """
    forms = forms or FloatForms()
    target = Path(path).expanduser().resolve()
    check_target(target, overwrite, "convert")
    reader = ParameterReader(source)
    plan = _PLANS[to](reader, forms)
    copied = tokenizer_files(source.folder)
    config = {**token_ids(copied.pop(CONFIG_FILE, None)), **plan.config}
    needed = sum(group.nbytes for group in plan.tensors)
    needed += sum(file.stat().st_size for file in copied.values())
    if plan.model_file:
        copied[plan.model_file] = MODEL_FILES / plan.model_file
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        check_space(target.parent, needed)
        with replacing_folder(target) as folder:
            write_json(folder / CONFIG_FILE, config)
            copy_files(copied, folder)
            _write_tensors(folder, plan, show_progress)
            written = ParameterReader(open_checkpoint(folder))
            report = verify(reader, written, forms) if check else take_stock(reader, written)
            if card is not None:
                write_model_card(folder, _filled(card, to, plan, report))
    except (OSError, RuntimeError) as error:
        raise CheckpointError(f"[convert] '{target}' cannot be written: {error}.") from error
    return report


def _filled(card: ModelCard, to: Target, plan: FolderPlan, report: Report) -> ModelCard:
    runs_in: Literal["built-in", "model_file"] = "model_file" if plan.model_file else "built-in"
    return replace(
        card,
        format=to,
        verification={**card.verification, **report.figures()},
        mlx_lm=runs_in if to == "mlx" else None,
    )


_PLANS: dict[Target, Callable[[ParameterReader, FloatForms], FolderPlan]] = {
    "mlx": plan_mlx,
    "hf": plan_hf,
}


def _write_tensors(folder: Path, plan: FolderPlan, show_progress: bool) -> None:
    total = sum(group.nbytes for group in plan.tensors)
    with tqdm(
        total=total, unit="B", unit_scale=True, desc="writing", disable=not show_progress
    ) as bar:
        write_shards(folder, plan.tensors, bar.update)
    if plan.scales:
        exact = [PlannedTensors.of(*item) for item in plan.scales.items()]
        write_safetensors(folder / SCALES_FILE, exact)
