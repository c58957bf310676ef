"""The model card that a distilled student comes with."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from mlx_mmfree.cli import main
from mlx_mmfree.hub import convert, open_checkpoint
from mlx_mmfree.hub.publish.model_card import ModelCard, read_source_card
from mlx_mmfree.hub.publish.upload import plan_upload
from mlx_mmfree.training.distil.distil import Distillation
from tests.training.test_distil import settings_of, teacher_folder, without_curve

__all__ = ["teacher_folder", "without_curve"]

CARD = """---
license: apache-2.0
language: [en]
datasets: [some/corpus]
---

# Teacher

It was trained on texts.
"""


def card_in(folder: Path) -> tuple[dict[str, Any], str]:
    _, metadata, body = (folder / "README.md").read_text(encoding="utf-8").split("---\n", 2)
    return yaml.safe_load(metadata), body


@pytest.fixture
def published_teacher(teacher_folder: Path) -> Path:
    (teacher_folder / "README.md").write_text(CARD)
    (teacher_folder / "LICENSE").write_text("The terms of the teacher.")
    return teacher_folder


def test_it_names_teacher_data_stages_and_metrics(published_teacher: Path) -> None:
    settings = settings_of(published_teacher, "student", ternary=True, hidden_steps=0)
    source = read_source_card(published_teacher)
    given = ModelCard("", "mlx", "mmfree distil", base_model="me/teacher", source=source)
    report = Distillation(settings).run(card=given)
    path = Path(settings.output)
    for name, title in (("model", "# student\n"), ("masters", "# student-masters\n")):
        metadata, body = card_in(path / name)
        assert metadata["base_model"] == "me/teacher"
        assert metadata["base_model_relation"] == "finetune"
        assert metadata["license"] == "apache-2.0" and metadata["datasets"] == ["some/corpus"]
        assert metadata["library_name"] == "mlx_mmfree"
        assert metadata["tags"] == ["mlx_mmfree", "distillation", "ternary"]
        assert title in body and "(https://huggingface.co/me/teacher)" in body
        assert "`mlgru` x 2. The linears of its blocks are ternary." in body
        assert "Texts: `train.txt`. Held out: `valid.txt`. A step reads 32 tokens." in body
        cells = [
            [cell.strip() for cell in line.strip("|").split("|")]
            for line in body.splitlines()
            if line.startswith("|") and "valid, bits_per_byte" not in line and line.count("|") == 5
        ]
        metrics = [f"{each['valid/bits_per_byte']:.4f}" for each in report["metrics"].values()]
        assert cells[1:] == [
            ["teacher", "", "", metrics[0]],
            ["student before it learns", "", "", metrics[1]],
            ["each mixer by itself", "4", "0.01", metrics[2]],
            ["all weights, by the teacher", "4", "0.001", metrics[3]],
            ["all weights, by the texts", "4", "0.0003", metrics[4]],
        ]
        assert "## Card of the source\n\n# Teacher" in body
        assert str(path.parent) not in body
        assert (path / name / "LICENSE").read_text() == "The terms of the teacher."
        plan = plan_upload(path / name, "me/student")
        assert plan.card is not None and "me/student" in plan.card
        assert {"README.md", "LICENSE"} <= set(plan.files)
    convert(open_checkpoint(path / "model"), path / "mlx")
    assert (path / "mlx" / "mmfree_model.py").exists()


def test_the_command_writes_it(published_teacher: Path) -> None:
    folder = published_teacher.parent
    flags = ["--model", str(published_teacher), "--output", str(folder / "run"), "--to", "same"]
    flags += ["mlgru", "--data", str(folder / "train.txt"), "--mixers-steps", "1"]
    flags += ["--hidden-steps", "0", "--logits-steps", "0", "--sequence-length", "16"]
    for _ in range(2):
        # the second time as a run that was stopped just before the end
        assert main(["distil", *flags, "--batch-size", "2"]) == 0
        metadata, body = card_in(folder / "run" / "model")
        assert "base_model" not in metadata and metadata["license"] == "apache-2.0"
        assert metadata["tags"] == ["mlx_mmfree", "distillation"]
        assert "mmfree distil --model teacher --output run --to same mlgru" in body
        assert "its layers: `attention`, `mlgru`.\n" in body
        assert "Held out" not in body and "| teacher |" not in body
        assert "| each mixer by itself | 1 | 0.01 |" in body
    flags = ["--model", str(folder / "run" / "model"), "--mlx-path", str(folder / "mlx")]
    assert main(["convert", *flags]) == 0
    _, body = card_in(folder / "mlx")
    assert "## Card of the source\n\n# run" in body and "## Distillation" in body
    assert (
        json.loads((folder / "mlx" / "config.json").read_text())["model_file"] == "mmfree_model.py"
    )
