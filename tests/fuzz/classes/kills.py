"""Commands that are killed at any moment, or whose disk is full, and that are started again."""

import json
import random
import resource
import shutil
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from mlx_mmfree.hub import load_model, save_model
from tests.fuzz.base_model import make_base
from tests.fuzz.case import command_class
from tests.fuzz.commands import CommandRefused, Running, apart, contents, run, start
from tests.hub.checkpoints import GOLDENS, tiny_transformer

_MODELS = {
    "convert": "run",
    "fuse": "run",
    "lora": "model",
    "train": "run/model",
    "distil": "run/model",
    "ternarize": "run/model",
    "calibrate": "run/model",
}
"""The folder of a model that each command leaves whole."""
_WHOLE = ("convert", "fuse")
"""Commands that write one folder, which there is or is not."""
_PLANS = (
    *((command, "killed") for command in ("convert", "fuse", "train", "lora")),
    *((command, "killed") for command in ("ternarize", "calibrate")),
    *((command, "killed as it writes") for command in ("convert", "fuse", "distil")),
    *((command, "killed as it writes") for command in ("ternarize", "calibrate")),
    *((command, "full disk") for command in ("train", "lora", "distil", "calibrate")),
)
_MOST_BYTES = 60_000
"""More than the largest file that a run of training writes."""
_WORDS = "the cat dog sat ran on a mat hill and saw red blue sun moon".split()  # noqa: SIM905
_OFTEN = {"steps_per_report": 1, "steps_per_eval": 3, "save_every": 1}
_SHORT = {"valid_tokens": 64, "batch_size": 2, "sequence_length": 16, **_OFTEN}
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
    "steps": 6,
    "warmup_steps": 1,
    **_SHORT,
}
_TEXTS = {"output": "run", "model": "dense", "data": ["text.txt"], "valid": ["text.txt"], **_SHORT}
_DISTIL = {"to": ["mlgru"], **dict.fromkeys(("mixers_steps", "hidden_steps"), 2)}
_DISTIL |= {"logits_steps": 2, "text_steps": 0}
_YAML: Mapping[str, dict[str, Any]] = {
    "train": _TRAIN,
    "distil": _TEXTS | _DISTIL,
    "ternarize": _TEXTS | {"scales": "bitnet", "steps": 3, "text_steps": 0},
    "calibrate": {
        **{name: _TEXTS[name] for name in ("output", "data")},
        **{"model": "wide", "samples": 8, "valid_samples": 2, "length": 16, "batch_size": 2},
        **{"epochs": 2, "window": 2, "stride": 1, "group_size": 32},
    },
}
_LORA = (
    *("--train", "--iters", "4", "--batch-size", "2", "--steps-per-report", "1"),
    *("--steps-per-eval", "2", "--save-every", "1"),
)


def make_sources(folder: Path) -> None:
    """The files that the commands need, and their results and seconds when nobody kills them."""
    needs = folder / "needs"
    needs.mkdir()
    apart(lambda: make_base(needs / "model", "hgrn"), folder)
    apart(partial(_write_dense, needs / "dense", 16, 2), folder)
    apart(partial(_write_dense, needs / "wide", 32, 4), folder)
    rng = random.Random(0)
    text = "\n<|endoftext|>\n".join(" ".join(rng.choices(_WORDS, k=60)) for _ in range(30))
    (needs / "text.txt").write_text(text)
    for command, values in _YAML.items():
        (needs / f"{command}.yaml").write_text(yaml.safe_dump(values))
    (needs / "data").mkdir()
    for name in ("train", "valid"):
        lines = [{"text": " ".join(rng.choices(_WORDS, k=20))} for _ in range(4)]
        (needs / "data" / f"{name}.jsonl").write_text("\n".join(map(json.dumps, lines)))
    run(_arguments("lora", needs, "adapter"), folder)
    seconds = {}
    for command in _MODELS:
        shutil.copytree(needs, folder / command)
        started = time.monotonic()
        running = start(_arguments(command, folder / command), folder)
        began = _is_writing(command, folder / command)
        running.wait(0.0, began)
        written = time.monotonic()
        running.finish()
        seconds[command] = {
            "killed": time.monotonic() - started,
            "killed as it writes": time.monotonic() - written,
            "full disk": time.monotonic() - started,
        }
    (folder / "seconds.json").write_text(json.dumps(seconds))


def _write_dense(folder: Path, dims: int, layers: int) -> None:
    sizes: dict[str, Any] = {"vocab_size": 518, "hidden_size": dims, "intermediate_size": 2 * dims}
    sizes |= {"num_hidden_layers": layers, "head_dim": dims // 4}
    save_model(folder, tiny_transformer(linears=None, **sizes), GOLDENS / "tokenizer_bpe")


def _arguments(command: str, folder: Path, result: str = "run") -> list[str]:
    target = str(folder / result)
    if command in _YAML:
        return [command, "--config", str(folder / f"{command}.yaml")]
    flags = [command, "--model", str(folder / "model")]
    if command == "convert":
        return [*flags, "--mlx-path", target]
    if command == "fuse":
        return [*flags, "--adapter-path", str(folder / "adapter"), "--output", target]
    return [*flags, "--data", str(folder / "data"), "--adapter-path", target, *_LORA]


def _is_writing(command: str, output: Path) -> Callable[[], bool]:
    """Returns whether a command writes the model that it leaves."""
    target = output / _MODELS[command]
    return lambda: any(target.parent.glob(f".{target.name}.*.mmfree"))


def mutate(sources: Path, target: Path, rng: random.Random) -> str:
    """Chooses a command, what happens to it, and when."""
    command, what = rng.choice(_PLANS)
    shutil.copytree(sources / "needs", target / "place")
    seconds = json.loads((sources / "seconds.json").read_text())[command][what]
    delays = [rng.uniform(0, 1.1) * seconds for _ in range(rng.choice((1, 1, 2)))]
    (target / "plan.json").write_text(json.dumps([command, what, delays]))
    (target / "whole").symlink_to(sources / command)
    return f"{command}, {what} after {', '.join(f'{delay:.3f} s' for delay in delays)}"


def exercise(folder: Path, rng: random.Random) -> None:
    """Stops it, looks at what is left, and runs to the end: the result is what it always is."""
    command, what, delays = json.loads((folder / "plan.json").read_text())
    output = folder / "place"
    arguments = _arguments(command, output)
    is_writing = _is_writing(command, output)
    model = output / _MODELS[command]
    for delay in delays:
        again = ["--overwrite"] if command in _WHOLE and model.exists() else []
        running = start([*arguments, *again], folder)
        if what == "full disk":
            _fill_disk(running, delay, rng.randrange(_MOST_BYTES))
        elif what == "killed":
            running.kill(delay)
        else:
            running.kill(delay, is_writing)
        if model.exists():
            apart(partial(load_model, model), folder)
    run([*arguments, *["--overwrite"] * (command in _WHOLE and model.exists())], folder)
    names = [name for name in contents(output) if Path(name).parts[0].startswith(".")]
    names += [name for name in contents(output / "run") if "new" in name or ".tmp" in name]
    names += [name for name in contents(output / "run") if ".mmfree/" in name]
    if names:
        raise AssertionError(f"{command} left {names[:4]} after a second run")
    kinds = {".safetensors", ".json"} if command in _WHOLE else {".safetensors"}
    results = (output / "run", (folder / "whole").resolve() / "run")
    found, whole = (_files(each, kinds) for each in results)
    if command in _WHOLE and found.keys() != whole.keys():
        raise AssertionError(f"the second run of {command} wrote {sorted(found)}")
    for name, data in whole.items():
        if found.get(name) != data:
            raise AssertionError(f"{command} went on to another result in {name}")


def _fill_disk(running: Running, delay_s: float, most_bytes: int) -> None:
    """Lets no file grow beyond a size from some moment on. The command ends with one line, or well."""
    running.wait(delay_s)
    with suppress(ProcessLookupError):
        resource.prlimit(running.process, resource.RLIMIT_FSIZE, (most_bytes, most_bytes))
    with suppress(CommandRefused):
        running.finish()


def _files(folder: Path, kinds: Collection[str]) -> dict[str, bytes | str]:
    """The files of some kinds, without what a run keeps to go on from, which is no result of it."""
    return {
        name: data
        for name, data in contents(folder).items()
        if Path(name).suffix in kinds and not name.startswith(("checkpoint", "stages"))
    }


CLASS = command_class(make_sources, mutate, exercise, refusals=())
