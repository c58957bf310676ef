"""Tiny runs of the tasks that are no causal language models, on generated files."""

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mlx_mmfree.training import Settings, trainer
from mlx_mmfree.training.corpus.mixture import Stage
from tests.training.conftest import WORDS, write_corpus

TASKS = ("masked_lm", "classifier", "encoder_decoder")
_FILES = {"causal_lm": "txt", "masked_lm": "txt", "classifier": "jsonl", "encoder_decoder": "tsv"}

MODEL: dict[str, Any] = {
    "model_type": "metaformer",
    "vocab_size": 280,
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "intermediate_size": 24,
    "token_mixer": {"name": "multi_head_attention", "num_heads": 2},
    "positions": "sinusoidal",
}


def write_samples(folder: Path, name: str, seed: int, count: int) -> None:
    """Labelled texts, and texts with their words in the opposite order."""
    draw = random.Random(seed)
    texts = [draw.choices(WORDS, k=draw.randint(2, 6)) for _ in range(count)]
    lines = [{"text": " ".join(t), "label": "pet" if "cat" in t else "none"} for t in texts]
    (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, lines)))
    pairs = [f"{' '.join(text)}\t{' '.join(reversed(text))}" for text in texts]
    (folder / f"{name}.tsv").write_text("\n".join(pairs))


@pytest.fixture
def settings_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Settings]:
    """Makes the settings of a run of a task, with its files in `tmp_path`."""
    monkeypatch.setattr(trainer, "plot_run", lambda *_: True)
    for number, (name, count) in enumerate((("train", 40), ("more", 30), ("valid", 9))):
        write_corpus(tmp_path / f"{name}.txt", number, documents=count // 3)
        write_samples(tmp_path, name, number, count)

    def make(task: str, model: dict[str, Any] | None = None, **values: Any) -> Settings:
        kind = _FILES[task]
        labels = {"labels": ["none", "pet"]} if task == "classifier" else {}
        stages = (
            Stage(0.5, {f"train.{kind}": 1, f"more.{kind}": 2}),
            Stage(1, {f"more.{kind}": 1}),
        )
        given: dict[str, Any] = {
            "output": "run",
            "model": MODEL | {"task": task} | labels | (model or {}),
            "stages": stages,
            "valid": (f"valid.{kind}",),
            "valid_tokens": 64,
            "steps": 6,
            "batch_size": 4,
            "sequence_length": 24,
            "learning_rate": 1e-2,
            "warmup_steps": 2,
            "steps_per_report": 1,
            "steps_per_eval": 3,
            "save_every": 2,
            "root": tmp_path,
        }
        return Settings(**(given | values))

    return make
