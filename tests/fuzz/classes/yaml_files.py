"""Settings in YAML: aliases, merges, tags, dates, depth and odd values."""

import random
from pathlib import Path
from typing import Any

import yaml

from mlx_mmfree.training.fine_tuning.settings import fine_tune_settings
from mlx_mmfree.training.run_settings import read_mapping
from mlx_mmfree.training.settings import read_settings
from tests.fuzz.case import OUTSIDE, FuzzClass
from tests.fuzz.hostile import CONTROLS, ODD_VALUES, damage_bytes, odd_entry
from tests.fuzz.yaml_grammar import hostile_yaml

_TRAIN: dict[str, Any] = {
    "output": "run",
    "model": {"model_type": "hgrn_bit", "hidden_size": 16, "vocab_size": 64},
    "stages": [{"until": 0.5, "weights": {"a.txt": 1}}, {"until": 1.0, "weights": {"a.txt": 1}}],
    "order": "epochs",
    "valid": ["b.txt"],
    "steps": 10,
    "warmup_steps": 1,
    "learning_rate": 1e-3,
    "betas": [0.9, 0.95],
}
_LORA: dict[str, Any] = {
    "data": "data",
    "iters": 10,
    "lora_parameters": {"rank": 4, "scale": 2.0, "dropout": 0.0, "keys": ["self_attn.q_proj"]},
    "lr_schedule": {"name": "cosine_decay", "arguments": [1e-4, 10]},
    "optimizer_config": {"adamw": {"weight_decay": 0.1}},
    "learning_rate": "1e-5",
}
_SCALARS = (
    *(
        "1e400",
        ".nan",
        ".inf",
        "-.inf",
        "2024-01-01",
        "2024-01-01 12:00:00",
        "9" * 5000,
        "0x" + "f" * 9,
    ),
    *("1:30:00", "!!python/object/apply:os.system [id]", "!!binary aGFsbG8=", "!!set {a, b}", "~"),
    *(
        "!!omap [a: 1]",
        "!odd a",
        "yes",
        "'a",
        "[1, 2",
        "{a: 1",
        "&a [*a]",
        "*absent",
        "0o17",
        "1_000",
    ),
    *("|\n    text\n    more", "? a", "- 1", "1e5", "-1", "0", "null", "[]", "{}", '"\\ud800"'),
)


def make_sources(folder: Path) -> None:
    """Makes nothing, since the settings are in this file."""


def mutate(sources: Path, target: Path, rng: random.Random) -> str:
    """Writes settings of a training run, with an odd value, hostile YAML, or damage."""
    target.mkdir()
    name = rng.choice(("train.yaml", "lora.yaml"))
    values = dict(_TRAIN if name == "train.yaml" else _LORA)
    kind = rng.choice(("scalar", "scalar", "value", "yaml", "yaml", "damage", "file"))
    text = yaml.safe_dump(values)
    if kind == "scalar":
        key = rng.choice((*values, "seed", "clip_norm", "valid_tokens", "dropout", "odd"))
        values.pop(key, None)
        text = yaml.safe_dump(values) + f"{key}: {rng.choice(_SCALARS)}\n"
    elif kind == "value":
        key = rng.choice((*values, "seed", "batch_size", "save_every", CONTROLS))
        values[key] = rng.choice((*ODD_VALUES, float("nan"), {1: 2}, [None], CONTROLS))
        text = yaml.safe_dump(values)
    elif kind == "yaml":
        hostile = hostile_yaml(rng)
        text = hostile if rng.random() < 0.5 else text + hostile
    data = text.encode(rng.choice(("utf-8", "utf-8", "utf-8", "utf-16", "latin-1")), "replace")
    if kind == "damage":
        data = damage_bytes(data, rng)
    (target / name).write_bytes(data)
    what = f"{kind} in {name}: {text[-160:]!r}"
    return (
        odd_entry(target / name, target.parent / OUTSIDE / "secret.txt", rng)
        if kind == "file"
        else what
    )


def exercise(folder: Path, rng: random.Random) -> None:
    """Reads the settings as the commands do."""
    if (folder / "lora.yaml").is_symlink() or (folder / "lora.yaml").exists():
        fine_tune_settings(read_mapping(folder / "lora.yaml", "lora"), "'lora.yaml'")
    else:
        read_settings(folder / "train.yaml")


CLASS = FuzzClass(make_sources, mutate, exercise, batch=200)
