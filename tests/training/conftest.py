"""A training run of seconds on a made-up corpus."""

import random
from pathlib import Path
from typing import Any

import pytest
import yaml

from mlx_mmfree.training import trainer

WORDS = [
    "the",
    "cat",
    "dog",
    "sat",
    "ran",
    "on",
    "a",
    "mat",
    "hill",
    "and",
    "saw",
    "red",
    "blue",
    "sun",
    "moon",
]


def write_corpus(path: Path, seed: int, documents: int = 40) -> None:
    """Documents of simple sentences over a small vocabulary."""
    draw = random.Random(seed)
    texts = [" ".join(draw.choices(WORDS, k=draw.randint(20, 60))) + "." for _ in range(documents)]
    path.write_text("\n<|endoftext|>\n".join(texts))


@pytest.fixture
def run_values(tmp_path: Path) -> dict[str, Any]:
    """The YAML values of a tiny run whose files lie in `tmp_path`."""
    write_corpus(tmp_path / "train.txt", 0)
    write_corpus(tmp_path / "more.txt", 1)
    write_corpus(tmp_path / "valid.txt", 2, documents=8)
    return {
        "output": "run",
        "model": {
            "model_type": "hgrn_bit",
            "vocab_size": 300,
            "hidden_size": 16,
            "num_hidden_layers": 2,
            "intermediate_size": 32,
        },
        "stages": [
            {"until": 0.5, "weights": {"train.txt": 1, "more.txt": 2}},
            {"until": 1, "weights": {"more.txt": 1}},
        ],
        "valid": ["valid.txt"],
        "valid_tokens": 128,
        "steps": 6,
        "batch_size": 2,
        "sequence_length": 16,
        "learning_rate": 1e-2,
        "warmup_steps": 2,
        "steps_per_report": 1,
        "steps_per_eval": 3,
        "save_every": 2,
    }


@pytest.fixture
def config(tmp_path: Path, run_values: dict[str, Any]) -> Path:
    """The YAML file of the tiny run."""
    path = tmp_path / "train.yaml"
    path.write_text(yaml.safe_dump(run_values))
    return path


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The current folder has the run's YAML file."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def without_curve(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs draw no curve, since drawing takes longer than the run."""
    monkeypatch.setattr(trainer, "plot_run", lambda *_: True)
