"""Training runs that are killed at random moments: they end as whole ones do, bit for bit.

Each case has one option of `mmfree train`, `lora` or `distil`, and some others beside it.
"""

import json
import os
import random
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_mmfree.hub import load_model, save_model
from mlx_mmfree.models import find
from tests.fuzz.case import command_class
from tests.fuzz.commands import apart
from tests.fuzz.training_options import image_model
from tests.fuzz.training_runs import Refused, draw_case, kill_and_compare
from tests.process_group import ROOT
from tests.training.conftest import write_corpus

TOKENIZER = ROOT / "tests/data/goldens/tokenizer_bpe"
_SIZES = {"vocab_size": 518, "hidden_size": 16, "num_hidden_layers": 2, "intermediate_size": 32}
_MODELS: dict[str, dict[str, Any]] = {
    "teacher": {"model_type": "llama", "num_attention_heads": 2},
    "wide": {"model_type": "llama", "num_attention_heads": 2}
    | {"hidden_size": 64, "intermediate_size": 64},
    "masters": {"model_type": "hgrn_bit"},
    "latent": {
        "model_type": "llama",
        "num_attention_heads": 2,
        "quantization_config": {"quant_method": "bitnet", "linear_class": "autobitlinear"},
    },
}


def make_sources(folder: Path) -> None:
    apart(lambda: write_files(folder), folder)


def mutate(sources: Path, target: Path, rng: random.Random) -> str:
    """Draws the options of a run, and when it is killed."""
    shutil.copytree(sources, target, symlinks=True)
    seed = rng.getrandbits(64)
    (target / "seed.txt").write_text(str(seed))
    return str(draw_case(random.Random(seed))[0])


def exercise(folder: Path, rng: random.Random) -> None:
    """Kills the run; if its options do not go together, with one of them alone."""
    draw = random.Random(int((folder / "seed.txt").read_text()))
    case, alone = draw_case(draw)
    try:
        kill_and_compare(case, folder, draw)
    except Refused:
        kill_and_compare(alone, folder, draw)


def write_files(folder: Path) -> None:
    """The texts, samples, tokenizer and models that the cases name."""
    for number, name in enumerate(("train.txt", "more.txt", "valid.txt")):
        write_corpus(folder / name, number, documents=40 if number < 2 else 8)
    (folder / "tokenizer").symlink_to(TOKENIZER)
    (folder / "rewards.py").write_text(_REWARD)
    draw = random.Random(5)
    for name, features in _DATA.items():
        (folder / name).mkdir()
        for split, count in (("train", 12), ("valid", 4), ("test", 4)):
            lines = [json.dumps(_sample(features, draw)) for _ in range(count)]
            (folder / name / f"{split}.jsonl").write_text("\n".join(lines))
    mx.random.seed(3)
    for name, values in _MODELS.items():
        architecture = find(values["model_type"])
        model = architecture.build(architecture.config.from_hub(_SIZES | values))
        save_model(folder / name, model, TOKENIZER)
    save_model(folder / "packed", load_model(folder / "masters", packed=True), TOKENIZER)
    # samples to learn from alone
    (folder / "unsplit").mkdir()
    shutil.copy(folder / "data" / "train.jsonl", folder / "unsplit")
    (folder / "template.jinja").write_text(_TEMPLATE)
    _write_images(folder)
    _write_adapter(folder)


def _write_images(folder: Path) -> None:
    """Images of three classes, and a model of other classes."""
    (folder / "images").mkdir()
    draw = np.random.default_rng(5)
    for split, count in (("train", 24), ("valid", 6), ("test", 6)):
        labels = np.arange(count) % 3
        images = draw.integers(0, 60, (count, 32, 32), np.uint8)
        images += (60 * labels)[:, None, None].astype(np.uint8)
        np.savez(folder / "images" / f"{split}.npz", images=images, labels=labels)
    architecture = find("swiftformer")
    save_model(folder / "classes", architecture.build(architecture.config.from_hub(image_model())))


def _write_adapter(folder: Path) -> None:
    flags = {"model": "masters", "data": "data", "adapter-path": "adapters", "iters": "1"}
    words = [word for name, value in flags.items() for word in (f"--{name}", value)]
    command = [sys.executable, "-m", "mlx_mmfree", "lora", "--train", *words]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    subprocess.run(command, cwd=folder, env=environment, check=True, stdout=subprocess.DEVNULL)


_TEMPLATE = "{% for message in messages %}[{{ message.content }}]{% endfor %}"
_REWARD = """
def short(completions):
    return [-len(text) for text in completions]
"""

_DATA = {
    "data": ("prompt", "completion"),
    "renamed": ("question", "answer"),
    "pairs": ("prompt", "chosen", "rejected"),
    "problems": ("prompt", "answer"),
    "solved": ("prompt", "solution"),
    "renamed_pairs": ("prompt", "a", "b"),
    "talks": ("talk",),
    "lines": ("line",),
    "labelled": ("line", "kind"),
}


def _sample(features: tuple[str, ...], draw: random.Random) -> dict[str, object]:
    def text() -> str:
        return " ".join(draw.choices(["the", "cat", "dog", "sat", "ran"], k=draw.randint(2, 8)))

    if features == ("talk",):
        roles = ("user", "assistant")
        return {"talk": [{"role": role, "content": text()} for role in roles]}
    return {name: draw.randrange(2) if name == "kind" else text() for name in features}


CLASS = command_class(make_sources, mutate, exercise, refusals=())
