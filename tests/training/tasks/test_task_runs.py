"""Runs of each task: they learn, go on after a kill to the same bits, and refuse wrong files."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten

from mlx_mmfree import load
from mlx_mmfree.errors import TrainingError, UnsupportedModelError
from mlx_mmfree.training import Settings, train_model
from mlx_mmfree.training.corpus.mixture import Stage
from mlx_mmfree.training.corpus.vocabulary import tokenizer_folder
from mlx_mmfree.training.data_parallel import DataParallel
from mlx_mmfree.training.first_model import FirstModel, task_of
from mlx_mmfree.training.loop import plan_training
from mlx_mmfree.training.optimizer_step import checkpoint_blocks
from mlx_mmfree.training.results import Callback, read_log
from mlx_mmfree.training.tasks.corpus import Task
from tests.tolerances import GRADIENT_TOLERANCE, TOLERANCE, relative_error
from tests.training.tasks.conftest import MODEL, TASKS

Make = Callable[..., Settings]


class _Kill(Exception):
    pass


class _Killer(Callback):
    def on_train(self, record: Any) -> None:
        if record["step"] == 5:
            raise _Kill


def _result(settings: Settings, run: str) -> tuple[bytes, list[dict[str, float]]]:
    names = ("loss", "valid_loss", "valid_accuracy", "tokens", "gradient_norm")
    log = read_log(settings.root / run / "log.jsonl")
    records = [{name: record[name] for name in names if name in record} for record in log[1:]]
    return (settings.root / run / "best.safetensors").read_bytes(), records


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("task", "values"),
    [
        ("masked_lm", {"accumulation_steps": 2}),
        ("classifier", {"order": "epochs", "label_smoothing": 0.1}),
        ("encoder_decoder", {"label_smoothing": 0.1, "schedule": "inverse_sqrt", "valid": ()}),
    ],
    ids=TASKS,
)
def test_a_killed_run_ends_with_the_same_bits(
    settings_of: Make, task: str, values: dict[str, Any]
) -> None:
    settings = settings_of(task, **values)
    whole = replace(settings, output="whole")
    metrics = train_model(whole)["held_out"]
    with pytest.raises(_Kill):
        train_model(settings, callbacks=[_Killer()])
    train_model(settings)
    assert _result(settings, "run") == _result(settings, "whole")
    assert set(metrics) == ({"valid/loss", "valid/accuracy"} if settings.valid else set())
    model, tokenizer = load(settings.root / "run/model")
    assert task_of(model) is FirstModel(settings).task
    assert model.vocab_size >= tokenizer.vocab_size


def _task(settings: Settings, share: tuple[int, int] = (0, 1)) -> tuple[Task, Any]:
    first = FirstModel(settings)
    kind = first.task
    folder = tokenizer_folder(
        settings,
        280,
        is_resumed=False,
        columns=kind.columns(settings),
        mask_token=kind.mask_token,
    )
    return kind(settings, first.model, folder, share), first.model


@pytest.mark.parametrize("task", TASKS)
def test_processes_share_the_rows(settings_of: Make, task: str) -> None:
    settings = settings_of(task, accumulation_steps=2)
    alone, *shares = (_task(settings, share)[0] for share in ((0, 1), (0, 2), (1, 2)))
    for step in (0, 5):
        parts = [share.batches(step) for share in shares]
        for number, whole in enumerate(alone.batches(step)):
            rows = [part[number] for part in parts]
            assert sum(row.tokens for row in rows) == whole.tokens
            assert sum(row.terms for row in rows) == whole.terms
            for rank, row in enumerate(rows):
                want = whole.targets[rank::2]
                width = min(want.shape[1], row.targets.shape[1])
                assert (row.targets[:, :width] == want[:, :width]).all()


@pytest.mark.interop
@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("label_smoothing", [0.0, 0.2])
def test_losses_are_those_of_torch(settings_of: Make, task: str, label_smoothing: float) -> None:
    torch = pytest.importorskip("torch")
    learner, model = _task(settings_of(task, label_smoothing=label_smoothing))
    [batch] = learner.batches(1)
    logits = model.logits(learner.hidden(model, batch))
    logits = torch.tensor(np.array(logits)).double().reshape(-1, logits.shape[-1])
    targets = torch.tensor(batch.targets).reshape(-1).long()
    each = torch.nn.functional.cross_entropy(
        logits, targets, label_smoothing=label_smoothing, reduction="none"
    )
    want = (each * torch.tensor(batch.weights).reshape(-1)).sum().item()
    got = learner.loss(learner._settings)(model, batch).item()
    assert got == pytest.approx(want, rel=TOLERANCE[mx.float32])
    metrics = learner._metrics(model, learner._settings.valid[0], None)
    assert 0 <= metrics["accuracy"] <= 1


def test_padding_changes_no_loss(settings_of: Make) -> None:
    for task in ("classifier", "encoder_decoder"):
        learner, model = _task(settings_of(task))
        [batch] = learner.batches(0)
        assert batch.valid is not None
        loss = learner.loss(learner._settings)
        alone = [loss(model, _cut(batch.part(slice(n, n + 1)))).item() for n in range(4)]
        assert loss(model, batch).item() == pytest.approx(sum(alone), rel=TOLERANCE[mx.float32])


def _cut(row: Any) -> Any:
    """A batch of one row without its padding."""
    arrays = {}
    for valid, names in (("valid", ("inputs",)), ("source_valid", ("source",))):
        if getattr(row, valid, None) is not None:
            length = int(getattr(row, valid).sum())
            if valid == "valid" and row.targets.shape[1] > 1:
                names = (*names, "targets", "weights")
            arrays |= {name: getattr(row, name)[:, :length] for name in names} | {valid: None}
    return replace(row, **arrays)


@pytest.mark.parametrize("order", ["random", "epochs"])
def test_each_sample_once_in_an_epoch(settings_of: Make, order: str) -> None:
    stages = (Stage(1, {"train.tsv": 1}),)
    learner, _ = _task(settings_of("encoder_decoder", order=order, stages=stages, steps=10))
    sources = [tuple(row) for step in range(10) for b in learner.batches(step) for row in _rows(b)]
    # 40 samples, four in a step
    everything = {tuple(sample.source.tolist()) for sample in learner._samples["train.tsv"]}
    assert (set(sources) == everything) is (order == "epochs")


def _rows(batch: Any) -> list[list[int]]:
    valid = np.ones(batch.source.shape, bool) if batch.source_valid is None else batch.source_valid
    return [row[real].tolist() for row, real in zip(batch.source, valid, strict=True)]


def test_samples_of_similar_length_come_together(settings_of: Make) -> None:
    learner, _ = _task(settings_of("encoder_decoder", steps=32))
    spread = [np.ptp([len(row) for row in _rows(learner.batches(step)[0])]) for step in range(32)]
    lengths = [len(sample.source) for sample in learner._all]
    assert np.mean(spread) < np.ptp(lengths) / 3


def test_long_samples_are_left_out(settings_of: Make, capsys: pytest.CaptureFixture[str]) -> None:
    learner, _ = _task(settings_of("encoder_decoder", sequence_length=6))
    assert max(sample.length for sample in learner._all) <= 6
    assert "samples of 'train.tsv' are left out, since they are longer than" in (
        capsys.readouterr().err
    )
    with pytest.raises(TrainingError, match=r"'more\.tsv' must hold a sample of at most"):
        _task(settings_of("encoder_decoder", sequence_length=1))


@pytest.mark.parametrize(
    ("task", "line", "message"),
    [
        (
            "classifier",
            {"text": "a", "label": "dog"},
            "line 2: 'label' must be one of 'none', 'pet'",
        ),
        ("classifier", {"text": "a", "label": 2}, "or the number of one, from 0, but got 2"),
        ("classifier", {"text": "a", "label": True}, "but got True"),
        ("classifier", {"text": "a"}, "but got None"),
        ("classifier", {"label": 1}, "line 2: it must have 'text' but has 'label'"),
        ("classifier", {"text": "", "label": 1}, "'text' must hold a token but is empty"),
        ("encoder_decoder", "only one", "line 2: it must hold 'source' and 'target', separated by"),
        ("encoder_decoder", {"source": "a", "target": 3}, "'target' must be text but is int"),
    ],
)
def test_wrong_lines_are_named(
    settings_of: Make, tmp_path: Path, task: str, line: Any, message: str
) -> None:
    good: dict[str, Any] = {"text": "the cat", "label": 1, "source": "a", "target": "b"}
    name = "bad.tsv" if isinstance(line, str) else "bad.jsonl"
    first = "a\tb" if isinstance(line, str) else json.dumps(good)
    (tmp_path / name).write_text(
        f"{first}\n{line if isinstance(line, str) else json.dumps(line)}\n"
    )
    with pytest.raises(TrainingError, match=message):
        _task(settings_of(task, stages=(Stage(1, {name: 1}),)))


def test_what_does_not_fit_the_model(settings_of: Make, tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match=r"'eos_token_id' of 'model' must be .*, 0, but got 5"):
        train_model(settings_of("encoder_decoder", {"eos_token_id": 5}))
    with pytest.raises(TrainingError, match="'vocab_size' must cover the tokenizer's"):
        train_model(settings_of("classifier", {"vocab_size": 200}))
    missing = settings_of("classifier", valid=("none.jsonl",))
    with pytest.raises(
        TrainingError, match=r"'valid' must name files that can be .*none\.jsonl' cannot"
    ):
        train_model(missing)


def test_a_model_without_a_task_is_refused() -> None:
    class Other:
        purpose, pipeline = "something else", ""

    with pytest.raises(UnsupportedModelError, match="a model for something else cannot be trained"):
        task_of(Other())


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    "values",
    [
        {"positions": "alibi"},
        {"positions": "relative_bias"},
        {"positions": "relative_bias", "task": "masked_lm"},
        {"block": "reversible"},
        {"block": "reversible", "task": "masked_lm", "linear_class": "ternary"},
        {"block": "reversible", "token_mixer": ["mlgru", MODEL["token_mixer"]]},
    ],
    ids=str,
)
def test_positions_and_blocks_of_descriptions_are_trained(
    settings_of: Make, values: dict[str, Any]
) -> None:
    settings = settings_of(values.get("task", "causal_lm"), values)
    first = FirstModel(settings)
    before = dict(tree_flatten(first.model.trainable_parameters()))
    train_model(settings, first=first)
    model, _ = load(settings.root / "run/model", packed=True)
    assert model.config.positions == settings.model["positions"]
    after = dict(tree_flatten(first.model.trainable_parameters()))
    still = [name for name in before if mx.array_equal(before[name], after[name])]
    assert not still


def test_reversible_blocks_keep_no_activations(settings_of: Make) -> None:
    """A run of more layers is planned with hardly more memory for activations."""
    grown = {}
    for block in ("residual", "reversible"):
        activations = []
        for layers in (2, 6):
            settings = settings_of("masked_lm", {"block": block, "num_hidden_layers": layers})
            model = FirstModel(settings).model
            activations.append(plan_training(settings, model, DataParallel()).activations)
        grown[block] = activations[1] - activations[0]
    assert grown["reversible"] < grown["residual"] / 4, grown


@pytest.mark.parametrize("task", TASKS)
def test_recomputed_blocks_give_the_same_gradient(settings_of: Make, task: str) -> None:
    learner, model = _task(settings_of(task))
    [batch] = learner.batches(0)
    loss = nn.value_and_grad(model, learner.loss(learner._settings))
    want_loss, want = loss(model, batch)
    checkpoint_blocks(model)
    got_loss, got = loss(model, batch)
    assert got_loss.item() == want_loss.item()
    for (name, gradient), (_, wanted) in zip(tree_flatten(got), tree_flatten(want), strict=True):
        assert relative_error(gradient, wanted) <= GRADIENT_TOLERANCE, name


@pytest.mark.parametrize("task", ["causal_lm", *TASKS])
@pytest.mark.parametrize(
    "values", [{"positions": "learned"}, {"token_mixer": "cosformer"}], ids=["table", "mixer"]
)
def test_rows_longer_than_the_model_are_refused(
    settings_of: Make, task: str, values: dict[str, Any]
) -> None:
    bounded = values | {"max_position_embeddings": 20}
    with pytest.raises(TrainingError, match=r"must be at most the number of positions .*, 20, but"):
        FirstModel(settings_of(task, bounded))
    model = FirstModel(settings_of(task, bounded, sequence_length=20)).model
    assert model.max_length == 20
    assert FirstModel(settings_of(task)).model.max_length is None
