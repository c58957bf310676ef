"""Learning preferences: what is learned, the reference that is computed once, and exact resume."""

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten

from mlx_mmfree.errors import TrainingError
from mlx_mmfree.hub import Tokenizer
from mlx_mmfree.models import Decoder
from mlx_mmfree.training.fine_tuning import preferences
from mlx_mmfree.training.fine_tuning.data import read_data
from mlx_mmfree.training.fine_tuning.fine_tune import fine_tune, held_out_metrics, prepare
from mlx_mmfree.training.fine_tuning.preferences import (
    Pair,
    answer_log_probabilities,
    pair_batch,
    with_reference,
)
from mlx_mmfree.training.fine_tuning.settings import FineTuneSettings
from mlx_mmfree.training.results import read_log
from mlx_mmfree.training.samples import Samples
from tests.tolerances import TOLERANCE, relative_error
from tests.training.test_fine_tune import GOLDENS, _build, _Kill, _Killed, _losses, _settings

pytestmark = pytest.mark.usefixtures("without_curve")


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_folder(GOLDENS / "tokenizer_bpe")


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Questions whose good answer is a cat and whose bad one is a dog."""
    folder = tmp_path / "data"
    folder.mkdir()
    for name, first, last in (("train", 0, 7), ("valid", 20, 23), ("test", 30, 34)):
        lines = [
            {"prompt": f"Who is {n}?", "chosen": "The cat.", "rejected": "The dog."}
            for n in range(first, last)
        ]
        (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, lines)))
    return folder


def _run(
    settings: FineTuneSettings, tokenizer: Tokenizer, callbacks: Any = (), name: str = "bitnet"
) -> tuple[Decoder, dict[str, Samples[Any]]]:
    model = _build(name)
    prepare(model, settings)
    data = read_data(settings, tokenizer)
    if settings.train_mode == "dpo":
        data = with_reference(data, model, batch_size=2, folder=Path(settings.adapter_path))
    fine_tune(model, tokenizer, data, settings, callbacks=callbacks)
    return model, data


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    "options",
    [
        {"train_mode": "dpo"},
        {"train_mode": "dpo", "loss_type": "ipo"},
        {"train_mode": "dpo", "loss_type": "hinge"},
        {"train_mode": "orpo"},
    ],
    ids=["dpo", "ipo", "hinge", "orpo"],
)
def test_the_chosen_answers_are_preferred(
    data: Path, tokenizer: Tokenizer, options: dict[str, Any]
) -> None:
    settings = _settings(data, iters=12, steps_per_eval=12, **options)
    model, samples = _run(settings, tokenizer)
    before, *_, after = (r for r in read_log(data.parent / "run/log.jsonl") if "valid_loss" in r)
    assert after["valid_loss"] < before["valid_loss"]
    assert after["valid_margin"] > max(before["valid_margin"], 0)
    metrics = held_out_metrics(model, samples["test"], settings)
    assert metrics["accuracy"] == 1 and metrics["margin"] > 0


def test_dpo_begins_at_the_reference(data: Path, tokenizer: Tokenizer) -> None:
    _run(_settings(data, train_mode="dpo", iters=1, beta=0.5), tokenizer)
    first = next(r for r in read_log(data.parent / "run/log.jsonl") if "valid_loss" in r)
    assert abs(first["valid_loss"] - np.log(2)) < 1e-6
    assert abs(first["valid_margin"]) < 1e-5


@pytest.mark.exhaustive
@pytest.mark.parametrize("mode", ["dpo", "orpo"])
def test_a_killed_run_resumes_to_the_same_bits(data: Path, tokenizer: Tokenizer, mode: str) -> None:
    options: dict[str, Any] = {
        "train_mode": mode,
        "dropout": 0.3,
        "num_layers": 1,
        "grad_accumulation_steps": 2,
    }
    whole = _settings(data, adapter_path=str(data.parent / "whole"), **options)
    want, _ = _run(whole, tokenizer)
    settings = _settings(data, **options)
    for step in (3, 5):
        with pytest.raises(_Killed):
            _run(settings, tokenizer, callbacks=(_Kill(step),))
    got, _ = _run(settings, tokenizer)
    assert _losses(settings) == _losses(whole)
    wanted = dict(tree_flatten(want.parameters()))
    for name, value in tree_flatten(got.parameters()):
        assert mx.array_equal(value, wanted[name]), name


def _values(data: dict[str, Samples[Pair]]) -> list[Any]:
    return [pair.reference for samples in data.values() for pair in samples.samples]


def test_the_reference_is_computed_once(
    data: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = _settings(data, train_mode="dpo")
    pairs, model, folder = read_data(settings, tokenizer), _build("bitnet"), data.parent / "run"
    computed = with_reference(pairs, model, batch_size=2, folder=folder)
    for samples in computed.values():
        for pair in samples.samples:
            wanted = answer_log_probabilities(model, pair_batch([pair]))
            assert relative_error(mx.array(pair.reference), wanted) <= TOLERANCE[mx.float32]
    other = _build("llama_ternary")
    of_other = with_reference(pairs, other, folder=data.parent / "other")
    assert _values(of_other) != _values(computed)

    def refuse(*_: Any) -> mx.array:
        raise AssertionError("they are computed again")

    monkeypatch.setattr(preferences, "answer_log_probabilities", refuse)
    assert _values(with_reference(pairs, model, folder=folder)) == _values(computed)
    # what belongs to another model or to other pairs is not used
    for changed in ((pairs, other), ({"train": pairs["train"]}, model)):
        with pytest.raises(AssertionError, match="computed again"):
            with_reference(*changed, folder=folder)


def test_another_reference_is_another_run(data: Path, tokenizer: Tokenizer) -> None:
    settings = _settings(data, train_mode="dpo", iters=2)
    _run(settings, tokenizer)
    model = _build("bitnet")
    prepare(model, settings)
    pairs = with_reference(read_data(settings, tokenizer), _build("llama_ternary"))
    with pytest.raises(TrainingError, match="other values of reference"):
        fine_tune(model, tokenizer, pairs, settings)


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"train_mode": "ppo"}, "'train_mode' must be one of sft, dpo, orpo, grpo but got 'ppo'"),
        (
            {"train_mode": "dpo", "loss_type": "best"},
            "'loss_type' must be one of sigmoid, hinge, ipo",
        ),
        ({"train_mode": "dpo", "beta": 0.0}, "'beta' must be positive but got 0.0"),
        ({"train_mode": "dpo", "pack": True}, "'pack' must be left out with 'train_mode' dpo"),
        (
            {"train_mode": "orpo", "teacher": "x"},
            "'teacher' must be left out with 'train_mode' orpo",
        ),
        ({"train_mode": "orpo", "loss_type": "ipo"}, "'loss_type' must come with 'train_mode' dpo"),
        ({"beta": 0.5}, "'beta' must come with 'train_mode' dpo, orpo or grpo but got 'sft'"),
        ({"reference_model_path": "x"}, "'reference_model_path' must come with 'train_mode' dpo"),
    ],
)
def test_settings_that_do_not_fit(data: Path, values: dict[str, Any], reason: str) -> None:
    with pytest.raises(TrainingError, match=reason):
        _settings(data, **values)
