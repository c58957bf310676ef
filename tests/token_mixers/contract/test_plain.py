"""Every mixer computes in a block what its definition says, whatever is computed together."""

from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten

from mlx_mmfree.layers.context import Context
from mlx_mmfree.layers.fusing import plain_definitions
from mlx_mmfree.layers.matrix import converted
from mlx_mmfree.models import Block
from mlx_mmfree.models.parts.fused import FusedBlock, fuse_operations
from tests.token_mixers.contract.cases import (
    ALL,
    DIMS,
    Case,
    beside,
    by_case,
    rounds_keys,
    sequence,
)
from tests.tolerances import GRADIENT_TOLERANCE, TOLERANCE, relative_error

VALID = mx.array([[False, True, True, False, True, True], [True] * 6, [True] * 3 + [False] * 3])
# softmax does not see what is added to all keys: the gradient of their bias is rounding alone
ZERO = 1e-6
STARTS = mx.array([[True, False, False, False, True, False]] * 3)


def block_of(case: Case) -> Block:
    """A block with a mixer of its own, which is fused."""
    block = fuse_operations(Block(DIMS, case.build(), None))
    assert type(block) is FusedBlock
    return block.eval()


def calls(case: Case, block: Block, dtype: mx.Dtype) -> list[mx.array]:
    """The results of a prompt, of tokens after it, and of calls with padding or samples."""
    mixer, x = block.token_mixer, sequence(9).astype(dtype)
    given: dict[str, Any] = {name: array.astype(dtype) for name, array in beside(mixer).items()}
    x, later = x[:, :6], x[:, 6:]
    y, state = block(x, None, Context(**given))
    results = [y, block(x, None, Context(VALID, **given))[0]]
    if mixer.packs_samples and mixer.is_causal and not given and not rounds_keys(case):
        results.append(block(x, None, Context(VALID, starts=STARTS))[0])
    if mixer.is_causal:
        results.append(block(later[:, :1], state, Context(**given))[0])
        results.append(block(later, state, Context(by_position=True, **given))[0])
    return results


def is_real(y: mx.array) -> mx.array:
    """The results where `VALID` says that there is a token, if they are of as many positions."""
    return mx.where(VALID[..., None], y, 0.0) if y.shape[1] == VALID.shape[1] else y


@by_case(ALL)
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
def test_what_is_computed_together_is_the_definition(case: Case, dtype: mx.Dtype) -> None:
    block = converted(block_of(case), dtype)
    with plain_definitions():
        want = calls(case, block, dtype)
    for got, expected in zip(calls(case, block, dtype), want, strict=True):
        assert relative_error(is_real(got), is_real(expected)) <= TOLERANCE[dtype]
    if dtype == mx.float32 and case.linear == "dense" and not rounds_keys(case):
        got, expected = (dict(tree_flatten(gradients(block, each))) for each in (False, True))
        largest = max(mx.abs(gradient).max().item() for gradient in expected.values())
        for name, gradient in got.items():
            sizes = [mx.abs(each).max().item() for each in (gradient, expected[name])]
            if max(sizes) > ZERO * largest:
                assert relative_error(gradient, expected[name]) <= GRADIENT_TOLERANCE, name


def gradients(block: Block, is_plain: bool) -> Any:
    def loss(block: Block) -> mx.array:
        y, _ = block(sequence(6), None, Context(**beside(block.token_mixer)))
        return (y * mx.cos(mx.arange(DIMS))).sum()

    if not is_plain:
        return nn.value_and_grad(block, loss)(block)[1]
    with plain_definitions():
        return nn.value_and_grad(block, loss)(block)[1]
