"""Models for other ends than continuing a text, made of the same stacks."""

from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest

from mlx_mmfree.channel_mixers import SwiGLU
from mlx_mmfree.errors import UnsupportedModelError
from mlx_mmfree.models import (
    Block,
    EncoderDecoder,
    ImageClassifier,
    SequenceClassifier,
    Stack,
    check_causal,
)
from mlx_mmfree.token_mixers import GQA, MLGRU
from mlx_mmfree.training.optimizer_step import checkpoint_blocks
from tests.adding.token_mixers.gate_by_memory import GateByMemory
from tests.tolerances import TOLERANCE, relative_error

DIMS = 16
TOKENS = mx.array([[1, 7, 3, 9, 0], [2, 2, 8, 4, 6]])
SOURCE = mx.array([[5, 1, 4], [3, 3, 9]])


def _block(**options: Any) -> Block:
    mixer = GQA(DIMS, num_heads=2, is_causal=False)
    return Block(DIMS, mixer, SwiGLU(DIMS, hidden_dims=24), **options)


def _stack(depth: int = 2) -> Stack:
    return Stack([_block() for _ in range(depth)], nn.RMSNorm(DIMS))


def _translator() -> EncoderDecoder:
    mx.random.seed(0)
    blocks = [
        Block(DIMS, MLGRU(DIMS), SwiGLU(DIMS, hidden_dims=24), memory_mixer=GateByMemory(DIMS))
        for _ in range(2)
    ]
    return EncoderDecoder(nn.Embedding(10, DIMS), _stack(), blocks, nn.RMSNorm(DIMS))


def test_a_target_is_read_whole_in_chunks_and_token_by_token() -> None:
    model = _translator()
    want, _ = model(SOURCE, TOKENS)
    assert want.shape == (2, 5, 10)
    memory = model.encode(SOURCE)
    for cuts in ([2], [1, 2, 3, 4]):
        state, parts = None, []
        for part in mx.split(TOKENS, cuts, axis=1):
            logits, state = model.decode(part, memory, state)
            parts.append(logits)
        assert relative_error(mx.concatenate(parts, axis=1), want) <= TOLERANCE[mx.float32]


def test_a_target_sees_its_source_as_a_whole_and_no_padding_of_it() -> None:
    model = _translator()
    want, _ = model(SOURCE, TOKENS)
    for index in range(3):
        changed = mx.where(mx.arange(3) == index, 8, SOURCE)
        assert mx.abs(model(changed, TOKENS)[0] - want).max(axis=(1, 2)).min().item() > 1e-4
    padded = mx.concatenate([mx.zeros((2, 2), SOURCE.dtype), SOURCE], axis=1)
    got, _ = model(padded, TOKENS, source_valid=mx.broadcast_to(mx.arange(5) >= 2, (2, 5)))
    assert relative_error(got, want) <= TOLERANCE[mx.float32]


def test_gradient_checkpoints_reach_the_encoder() -> None:
    model = _translator()

    def gradients() -> Any:
        loss = nn.value_and_grad(model, lambda: (model(SOURCE, TOKENS)[0] ** 2).mean())
        return loss()[1]["encoder"]["blocks"][0]["token_mixer"]["query_proj"]["weight"]

    want = gradients()
    checkpoint_blocks(model)
    assert mx.abs(want).max().item() > 0
    assert relative_error(gradients(), want) <= TOLERANCE[mx.float32]


@pytest.mark.parametrize("pooling", ["first", "last", "mean"])
def test_a_text_is_classified_whatever_pads_it(pooling: Any) -> None:
    mx.random.seed(0)
    embed, head = nn.Embedding(10, DIMS), nn.Linear(DIMS, 3)
    model = SequenceClassifier(embed, _stack().blocks, nn.RMSNorm(DIMS), head, pooling=pooling)
    want = model(TOKENS)
    assert want.shape == (2, 3)
    hidden = model.transform(embed(TOKENS))
    pooled = {"first": hidden[:, 0], "last": hidden[:, -1], "mean": hidden.mean(axis=1)}[pooling]
    assert relative_error(want, head(pooled)) <= TOLERANCE[mx.float32]
    for before, after in ((2, 0), (0, 3), (1, 1)):
        padded = mx.pad(TOKENS, [(0, 0), (before, after)])
        position = mx.arange(padded.shape[1])
        valid = mx.logical_and(position >= before, position < before + 5)
        got = model(padded, mx.broadcast_to(valid, padded.shape))
        assert relative_error(got, want) <= TOLERANCE[mx.float32]


class _Patches(nn.Module):
    """Squares of 4 by 4 pixels, one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Conv2d(3, DIMS, 4, stride=4)

    def __call__(self, images: mx.array) -> mx.array:
        return self.proj(images).flatten(1, 2)


class _Pairs(nn.Module):
    """The mean of each two positions."""

    def __call__(self, x: mx.array) -> mx.array:
        return (x[:, ::2] + x[:, 1::2]) / 2


def test_an_image_passes_through_stages() -> None:
    mx.random.seed(0)
    model = ImageClassifier(
        _Patches(), [_stack(1), _stack(1)], nn.Linear(DIMS, 5), merges=[_Pairs()]
    )
    images = mx.random.normal((2, 8, 16, 3), key=mx.random.key(2))
    first, second = model.stages
    x = second.transform(_Pairs()(first.transform(model.embed(images))))
    assert x.shape == (2, 4, DIMS)
    assert relative_error(model(images), model.head(x.mean(axis=1))) <= TOLERANCE[mx.float32]
    with pytest.raises(ValueError, match="one entry between each two stages but has 0 for 2"):
        ImageClassifier(_Patches(), [_stack(1), _stack(1)], nn.Linear(DIMS, 5), merges=[])


def test_what_they_are_for_is_reported_where_a_text_is_to_go_on() -> None:
    classifier = SequenceClassifier(
        nn.Embedding(10, DIMS), [_block()], nn.RMSNorm(DIMS), nn.Linear(DIMS, 3)
    )
    with pytest.raises(UnsupportedModelError, match="SequenceClassifier is for sorting texts into"):
        check_causal(classifier)
    with pytest.raises(UnsupportedModelError, match="EncoderDecoder is for turning one text into"):
        check_causal(_translator())
    with pytest.raises(ValueError, match="'pooling' must be one of 'first', 'last', 'mean'"):
        SequenceClassifier(
            *(nn.Embedding(10, DIMS), [_block()], nn.RMSNorm(DIMS), nn.Linear(DIMS, 3)),
            pooling="max",  # type: ignore[arg-type]
        )
