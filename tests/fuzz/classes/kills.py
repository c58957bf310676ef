"""Conversions, training runs and fine-tuning runs killed at any moment and started again."""

import json
import random
import shutil
import time
from functools import partial
from pathlib import Path

import yaml

from mlx_mmfree.hub import load_model
from tests.fuzz.base_model import make_base
from tests.fuzz.case import command_class
from tests.fuzz.commands import apart, contents, run, start

_COMMANDS = ("convert", "convert", "train", "lora")
_MODELS = {"convert": "run", "train": "run/model", "lora": "model"}
_RESULTS = {"train": "run/model/model.safetensors", "lora": "run/adapters.safetensors"}
_WORDS = "the cat dog sat ran on a mat hill and saw red blue sun moon".split()  # noqa: SIM905
_TRAIN = {
    "output": "run",
    "model": {
        "model_type": "hgrn_bit",
        "vocab_size": 280,
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "intermediate_size": 16,
    },
    "stages": [{"until": 1, "weights": {"text.txt": 1}}],
    "valid": ["text.txt"],
    "valid_tokens": 64,
    "steps": 6,
    "batch_size": 2,
    "sequence_length": 16,
    "warmup_steps": 1,
    "steps_per_report": 1,
    "steps_per_eval": 3,
    "save_every": 1,
}


def make_sources(folder: Path) -> None:
    """What the commands need, and what they give when nobody kills them, in how many seconds."""
    needs = folder / "needs"
    needs.mkdir()
    apart(lambda: make_base(needs / "model", "hgrn"), folder)
    rng = random.Random(0)
    text = "\n<|endoftext|>\n".join(" ".join(rng.choices(_WORDS, k=60)) for _ in range(30))
    (needs / "text.txt").write_text(text)
    (needs / "train.yaml").write_text(yaml.safe_dump(_TRAIN))
    (needs / "data").mkdir()
    for name in ("train", "valid"):
        lines = [{"text": " ".join(rng.choices(_WORDS, k=20))} for _ in range(4)]
        (needs / "data" / f"{name}.jsonl").write_text("\n".join(map(json.dumps, lines)))
    seconds = {}
    for command in sorted(set(_COMMANDS)):
        shutil.copytree(needs, folder / command)
        started = time.monotonic()
        run(_arguments(command, folder / command), folder)
        seconds[command] = time.monotonic() - started
    (folder / "seconds.json").write_text(json.dumps(seconds))


def _arguments(command: str, folder: Path) -> list[str]:
    if command == "convert":
        return [command, "--model", str(folder / "model"), "--mlx-path", str(folder / "run")]
    if command == "train":
        return [command, "--config", str(folder / "train.yaml")]
    flags = ["--model", str(folder / "model"), "--data", str(folder / "data"), "--train"]
    flags += ["--adapter-path", str(folder / "run"), "--iters", "4", "--batch-size", "2"]
    return [
        command,
        *flags,
        "--steps-per-report",
        "1",
        "--steps-per-eval",
        "2",
        "--save-every",
        "1",
    ]


def mutate(sources: Path, target: Path, rng: random.Random) -> str:
    """Chooses a command and the moments of its deaths."""
    command = rng.choice(_COMMANDS)
    shutil.copytree(sources / "needs", target / "place")
    seconds = json.loads((sources / "seconds.json").read_text())[command]
    delays = [rng.uniform(0, 1.1) * seconds for _ in range(rng.choice((1, 1, 2)))]
    (target / "plan.json").write_text(json.dumps([command, delays]))
    (target / "whole").symlink_to(sources / command)
    return f"{command} killed after {', '.join(f'{delay:.3f} s' for delay in delays)}"


def exercise(folder: Path, rng: random.Random) -> None:
    """Kills, looks at what is left, and runs to the end: the result is what it always is."""
    command, delays = json.loads((folder / "plan.json").read_text())
    place = folder / "place"
    arguments = _arguments(command, place)
    for delay in delays:
        start(arguments, folder).kill(delay)
        model = place / _MODELS[command]
        if model.exists():
            apart(partial(load_model, model), folder)
    is_whole = command == "convert" and (place / "run").exists()
    run([*arguments, *["--overwrite"] * is_whole], folder)
    names = [name for name in contents(place) if Path(name).parts[0].startswith(".")]
    names += [name for name in contents(place / "run") if "new" in name or ".tmp" in name]
    if names:
        raise AssertionError(f"{command} left {names[:4]} after a second run")
    whole = (folder / "whole").resolve() / "run"
    if command == "convert":
        if _weights(place / "run") != _weights(whole):
            raise AssertionError("the second conversion differs")
        return
    name = _RESULTS[command].partition("/")[2]
    if (place / "run" / name).read_bytes() != (whole / name).read_bytes():
        raise AssertionError(f"{command} resumed to another result in {name}")


def _weights(folder: Path) -> dict[str, bytes | str]:
    """All files but the card, which names its folder."""
    return {name: data for name, data in contents(folder).items() if name != "README.md"}


CLASS = command_class(make_sources, mutate, exercise, refusals=())
