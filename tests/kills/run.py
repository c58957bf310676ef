"""Kills training runs at random moments and compares them with whole ones, bit for bit.

`python -m tests.kills.run --count 50` goes on until so many starts were killed. Each option has its
turn, and each run is killed at least once. `--all` goes on until every option had its turn.
`--first 12 --seed 3 --count 1` runs one case again.
"""

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from tqdm import tqdm

from mlx_mmfree.hub import load_model, save_model
from mlx_mmfree.models import find
from tests.kills.case import TURNS, Refused, alone, draw_case, kill_and_compare
from tests.kills.options import image_model
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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=50, help="kills")
    parser.add_argument("--all", action="store_true", help="go on until every option had its turn")
    parser.add_argument("--first", type=int, default=0, help="number of the first case")
    parser.add_argument("--seed", type=int, default=0, help="seed of moments and combinations")
    arguments = parser.parse_args()
    turns = len(TURNS) if arguments.all else 0
    kills, cases, refused, faults = 0, 0, 0, []
    with tempfile.TemporaryDirectory() as name, tqdm(total=arguments.count, unit="kill") as bar:
        folder = Path(name)
        write_files(folder)
        while kills < arguments.count or cases < turns:
            new, found, is_refused = _turn(arguments.first + cases, arguments.seed, folder)
            kills, cases, refused = kills + new, cases + 1, refused + is_refused
            faults += found
            for fault in found:
                tqdm.write(fault)
            bar.update(new)
    print(
        f"{cases} runs were killed {kills} times; {refused} combinations were refused; "
        f"{len(faults)} differences."
    )
    return int(bool(faults))


def _turn(number: int, seed: int, folder: Path) -> tuple[int, list[str], bool]:
    """The kills and faults of a case, and whether its option had to go alone."""
    draw = random.Random(f"{seed} {number}")
    case = draw_case(number, draw)
    for each in (case, alone(number, case)):
        try:
            kills, found = kill_and_compare(each, folder, draw)
            return kills, [f"case {number}: {each}: {text}" for text in found], each is not case
        except Refused as refusal:
            reason = str(refusal)
        finally:
            for run in ("whole", "killed"):
                shutil.rmtree(folder / run, ignore_errors=True)
    return 0, [f"case {number}: {each} is refused: {reason}"], True


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


if __name__ == "__main__":
    sys.exit(main())
