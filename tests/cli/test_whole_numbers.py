"""Whole numbers of YAML files and of flags: each is taken or ends a command in one line."""

import argparse
import io
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml

from mlx_mmfree.cli import main
from mlx_mmfree.cli.parts.flags import (
    gigabytes,
    integer,
    non_negative,
    positive,
    seed,
    size_bytes,
)
from mlx_mmfree.training.calibrate.settings import CalibrateSettings
from mlx_mmfree.training.distil.settings import DistilSettings, TernarizeSettings
from mlx_mmfree.training.fine_tuning.settings import FineTuneSettings
from mlx_mmfree.training.run_settings import RunSettings
from mlx_mmfree.training.settings import Settings
from tests.cli.flags_of_commands import first_name, flags, parsers
from tests.fuzz.classes.training_kills import write_files
from tests.fuzz.training_options import DISTIL, GRPO, LORA, TRAIN, Values
from tests.whole_numbers import NUMBERS, changed, fault, paths_of_integers

_SHORT = {"steps_per_report": 1, "steps_per_eval": 1, "save_every": 1}
_RUNS: dict[str, tuple[str, type[RunSettings], Values]] = {
    "train": ("train", Settings, TRAIN | _SHORT | {"steps": 1, "warmup_steps": 0, "output": "run"}),
    "lora": (
        "lora",
        FineTuneSettings,
        LORA
        | _SHORT
        | {
            "iters": 1,
            "lora_parameters": {"rank": 2, "scale": 1, "dropout": 0},
            "lr_schedule": {"name": "cosine_decay", "arguments": [1, 4], "warmup": 1},
            "optimizer": "adamw",
            "optimizer_config": {"adamw": {"weight_decay": 0, "eps": 1, "betas": [0, 0]}},
        },
    ),
    "grpo": ("lora", FineTuneSettings, LORA | GRPO | _SHORT | {"iters": 1}),
    "distil": (
        "distil",
        DistilSettings,
        DISTIL
        | _SHORT
        | dict.fromkeys(("mixers_steps", "hidden_steps", "logits_steps", "text_steps"), 1)
        | {"to": ["gla", {"name": "sliding_window_attention", "window": 8}], "keep_layers": [1]}
        | {"output": "run"},
    ),
    "ternarize": (
        "ternarize",
        TernarizeSettings,
        {name: DISTIL[name] for name in ("data", "valid", "valid_tokens", "batch_size")}
        | _SHORT
        | {"model": "wide", "scales": "group", "steps": 1, "text_steps": 0}
        | {"sequence_length": 16, "output": "run"},
    ),
    "calibrate": (
        "calibrate",
        CalibrateSettings,
        {name: DISTIL[name] for name in ("data", "valid")}
        | {"model": "wide", "output": "run", "samples": 2, "valid_samples": 1, "batch_size": 1}
        | {"length": 16, "epochs": 1, "group_size": 64},
    ),
}


_KINDS = (positive, non_negative, integer, seed, gigabytes, size_bytes)


class Refused(Exception):
    """The line with which a command ended."""


@pytest.fixture
def ends_well(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., None]:
    """Runs a command, which ends with status 0, or with status 2 and one line."""
    monkeypatch.setattr("sys.stdin", io.StringIO())

    def run(*words: str) -> None:
        try:
            status = main(words)
        finally:
            captured = capsys.readouterr()
        if status == 2:
            raise Refused(captured.err.rstrip("\n").rpartition("\nerror: ")[2])
        if status:
            raise AssertionError(f"status {status}: {captured.err[-500:]!r}")

    return run


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Texts, samples and models."""
    folder = tmp_path_factory.mktemp("files")
    write_files(folder)
    return folder


def _whole(settings: type[RunSettings]) -> list[str]:
    """The settings that are whole numbers."""
    whole = [each for each in fields(settings) if int in (each.type, *get_args(each.type))]
    return [each.metadata.get("called") or each.name for each in whole]


@pytest.mark.exhaustive
@pytest.mark.parametrize("run", _RUNS)
def test_settings(
    run: str, files: Path, ends_well: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(files)
    command, settings, values = _RUNS[run]
    key = "adapter_path" if command == "lora" else "output"
    walked = dict.fromkeys([*paths_of_integers(values), *((name,) for name in _whole(settings))])
    assert len(walked) > 15
    Path("run.yaml").write_text(yaml.safe_dump({**values, key: run}))
    ends_well(command, "-c", "run.yaml")
    found = []
    for number, path in enumerate(walked):
        for odd in NUMBERS:
            written = changed({**values, key: f"{run}-{number}-{odd}"}, path, odd)
            Path("run.yaml").write_text(yaml.safe_dump(written))
            if problem := fault(ends_well, command, "-c", "run.yaml", refusals=Refused):
                found.append(f"{'.'.join(map(str, path))}: {odd} {problem}")
    assert found == []


@pytest.mark.parametrize("parser", [*parsers()], ids=lambda parser: parser.prog)
def test_flags_of_whole_numbers_have_bounds(parser: argparse.ArgumentParser) -> None:
    for flag in flags(parser):
        kind: Any = flag.type
        for odd in NUMBERS if kind in _KINDS else ():
            try:
                value = kind(str(odd))
            except argparse.ArgumentTypeError as error:
                assert str(odd) in str(error) and "\n" not in str(error)
            else:
                assert -(2**31) < value < 2**63, (first_name(flag), odd)


_GENERATE = ("generate", "--model", "masters", "--prompt", "a", "--max-tokens", "1")
_CONVERT = ("convert", "--model", "masters", "--overwrite", "--mlx-path", "converted")
_COMMANDS = (
    *((*_GENERATE, flag) for flag in ("--seed", "--max-kv-size", "--top-k", "--num-draft-tokens")),
    *((*_GENERATE, flag) for flag in ("--memory-limit", "--cache-limit", "--wired-limit")),
    *((*_GENERATE, flag) for flag in ("--memory-margin", "--prefill-step-size", "--kv-bits")),
    *(
        (*_CONVERT, flag)
        for flag in ("--trits-per-byte", "--embed-bits", "--head-bits", "--unrotate")
    ),
    *(
        ("convert", "--model", "teacher", "--gguf", "c.gguf", flag)
        for flag in ("--split-max-size",)
    ),
    ("chat", "--model", "masters", "--seed"),
    ("audit", "--model", "masters", "--positions"),
    ("perplexity", "--model", "masters", "--data", "valid.txt", "--num-samples"),
    ("serve", "--model", "nowhere", "--max-body"),
)


@pytest.mark.parametrize("words", _COMMANDS, ids=lambda words: f"{words[0]} {words[-1]}")
def test_flags(
    words: tuple[str, ...],
    files: Path,
    ends_well: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(files)
    found = {odd: fault(ends_well, *words, str(odd), refusals=Refused) for odd in NUMBERS}
    assert not any(found.values()), found
