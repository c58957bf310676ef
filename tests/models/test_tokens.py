"""Token ids are checked on the host before they reach an embedding."""

from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlx_mmfree.models.parts.token_checks import check_tokens, token_array


def test_makes_one_sequence() -> None:
    for ids in ([0, 3, 9], (0, 3, 9), np.array([0, 3, 9]), range(0, 10, 3)):
        array = token_array(ids, 10)
        assert array.dtype == mx.int32
        assert array.shape == (1, len(ids))
    assert token_array([np.int64(4)], 5).tolist() == [[4]]


@pytest.mark.parametrize("bad", [-1, 10, 2**31, 2**70, -(2**40)])
def test_refuses_ids_outside_the_vocabulary(bad: int) -> None:
    with pytest.raises(ValueError, match=rf"0 to 9, but got {bad} at position 1"):
        check_tokens([0, bad], 10)


@pytest.mark.parametrize("bad", [1.0, "1", None, True, [1]], ids=repr)
def test_refuses_what_is_no_whole_number(bad: Any) -> None:
    with pytest.raises(ValueError, match="must be whole numbers"):
        token_array([bad], 10)


def test_refuses_an_empty_sequence() -> None:
    with pytest.raises(ValueError, match="at least one id"):
        token_array([], 10)
    check_tokens([], 10)
