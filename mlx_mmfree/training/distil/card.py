"""The model card of a student: its teacher, its mixers, the texts, the stages and the figures."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path

from ...hub.checkpoint.checkpoint import RUN_MODEL, open_checkpoint
from ...hub.checkpoint.load import MASTERS_FOLDER
from ...hub.checkpoint.parameter_reader import ParameterReader
from ...hub.publish.model_card import ModelCard, table, write_model_card
from ...hub.publish.runtimes import openings
from ...models.parts.mixers import MixerChoice
from .settings import MEASURED, STAGES, DistilSettings

Figures = Mapping[str, Mapping[str, float]]


def write_cards(
    card: ModelCard, settings: DistilSettings, mixers: Sequence[MixerChoice], figures: Figures
) -> None:
    """Writes the card and the teacher's licence files beside the student, and beside its masters.

    Args:
        card: What is said of the teacher and of the command.
        settings: The run.
        mixers: The mixer of each layer of the student.
        figures: By stage, the bits per byte of each held-out text.

    Raises:
        CheckpointError: A file cannot be written.
    """
    path = Path(settings.path).resolve()
    for name in (RUN_MODEL, MASTERS_FOLDER):
        if not (path / name).exists():
            continue
        reader = ParameterReader(open_checkpoint(path / name))
        is_ternary = reader.model.config.linears is not None
        of_student = replace(
            card,
            name=path.name if name == RUN_MODEL else f"{path.name}-{name}",
            format="hf",
            relation="finetune",
            openings=openings(reader, "hf", ""),
            is_ternary=is_ternary,
            tags=("distillation",),
            training=training_section(settings, mixers, figures, is_ternary=is_ternary),
        )
        write_model_card(path / name, of_student)


def training_section(
    settings: DistilSettings,
    mixers: Sequence[MixerChoice],
    figures: Figures,
    *,
    is_ternary: bool,
) -> str:
    """How the student came about, in Markdown."""
    linears = " The linears of its blocks are ternary." if is_ternary else ""
    read = settings.rows * settings.sequence_length
    held_out = f" Held out: {_names(settings.valid)}." if settings.valid else ""
    texts = list(next(iter(figures.values()), {}))
    lines = [
        (
            words,
            *(_schedule(settings, name) if name in STAGES else ("", "")),
            *(f"{figures[name][text]:.4f}" for text in texts),
        )
        for name, words in MEASURED.items()
        if name in figures and (texts or name in STAGES)
    ]
    head = ("after", "steps", "learning rate", *(text.replace("/", ", ") for text in texts))
    return (
        "## Distillation\n\nThis model learned from its base model, stage by stage. The token mixers of "
        f"its layers: {_counted(mixers)}.{linears}\n\nTexts: {_names(settings.data)}.{held_out} A step "
        f"reads {read:,} tokens.\n\n{table(head, lines)}"
    )


def _schedule(settings: DistilSettings, stage: str) -> tuple[str, str]:
    return f"{getattr(settings, f'{stage}_steps')}", f"{getattr(settings, f'{stage}_rate'):g}"


def _names(files: Sequence[str]) -> str:
    """File names alone: a card is public, local folders are not."""
    return ", ".join(f"`{Path(file).name}`" for file in files)


def _counted(mixers: Sequence[MixerChoice]) -> str:
    """The mixers from the first layer to the last, such as `mlgru` x 3, `attention`."""
    runs = ((name, len(list(run))) for name, run in groupby(choice.name for choice in mixers))
    return ", ".join(f"`{name}`" if count == 1 else f"`{name}` x {count}" for name, count in runs)
