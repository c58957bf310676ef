"""The warm-up of quantisation in the loop: what each step sees, and resume within it."""

from pathlib import Path

import mlx.core as mx
import pytest

from mlx_mmfree.errors import TrainingError
from mlx_mmfree.layers import BitLinear, pack_linears
from mlx_mmfree.models import Decoder
from mlx_mmfree.training.batches import Batch
from mlx_mmfree.training.losses.loss import next_token_loss
from mlx_mmfree.training.optimizer_step import checkpoint_blocks
from tests.training.test_loop import _batches, _Kill, _model, _settings, _trainer, _weights


def strengths(model: Decoder) -> set[float]:
    return {m._quantization_strength for m in model.modules() if isinstance(m, BitLinear)}


def test_steps_see_the_warm_up_and_validations_see_all(tmp_path: Path) -> None:
    seen: list[float] = []

    def loss(model: Decoder, batch: Batch) -> mx.array:
        seen.extend(strengths(model))
        return next_token_loss(model, batch)

    settings = _settings(tmp_path, quantization_warmup=4)
    trainer = _trainer(_model(), settings, _batches(), loss=loss)
    validated: list[set[float]] = []
    measure = trainer._validation
    assert measure is not None
    trainer._validation = lambda model: (validated.append(strengths(model)), measure(model))[1]
    trainer.train()
    assert seen[:5] == [0.0, 0.25, 0.5, 0.75, 1.0]
    # later steps may repeat the graph of the fifth
    assert set(seen[5:]) <= {1.0}
    assert validated == [{1.0}] * 3
    assert strengths(trainer.model) == {1.0}


@pytest.mark.exhaustive
def test_a_run_that_dies_while_warming_up_resumes_to_the_same_bits(tmp_path: Path) -> None:
    want = _model()
    _trainer(want, _settings(tmp_path, output="whole", quantization_warmup=6), _batches()).train()

    def dying(step: int) -> list[Batch]:
        if step == 5:
            raise _Kill
        return _batches()(step)

    settings = _settings(tmp_path, quantization_warmup=6)
    dead = _model()
    checkpoint_blocks(dead)
    with pytest.raises(_Kill):
        _trainer(dead, settings, dying).train()
    assert strengths(dead) == {1.0}
    got = _model()
    _trainer(got, settings, _batches()).train()
    for name, value in _weights(want).items():
        assert mx.array_equal(_weights(got)[name], value), name


def test_packed_and_dense_models_have_nothing_to_warm_up(tmp_path: Path) -> None:
    settings = _settings(tmp_path, quantization_warmup=4)
    for model in (pack_linears(_model()), _model(linear_class="dense")):
        with pytest.raises(TrainingError, match="'quantization_warmup' must be 0"):
            _trainer(model, settings, _batches())
    with pytest.raises(TrainingError, match="'quantization_warmup' must be at least 0"):
        _settings(tmp_path, quantization_warmup=-1)
