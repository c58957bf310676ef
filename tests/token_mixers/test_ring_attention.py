"""Ring attention: in 2 and 4 processes equal to ordinary attention in one, with its gradients."""

from typing import Any

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten

from mlx_mmfree.token_mixers import GQA, RingAttention
from tests.token_mixers.ring import Arrays, make, results, run_group
from tests.tolerances import GRADIENT_TOLERANCE, TOLERANCE, relative_error

DIMS, LENGTH = 16, 24
OPTIONS: dict[str, dict[str, Any]] = {
    "causal": {"num_heads": 4, "num_kv_heads": 2, "rope": 4, "bias": True},
    "whole": {"num_heads": 2, "is_causal": False},
    "padded": {"num_heads": 4, "rope": 4},
    "padded whole": {"num_heads": 4, "rope": 4, "is_causal": False},
}
Found = dict[str, Arrays]


def _cases() -> dict[str, tuple[dict[str, Any], Arrays]]:
    mx.random.seed(4)
    cases = {}
    for name, options in OPTIONS.items():
        arrays = {part: mx.random.normal((2, LENGTH, DIMS)) for part in ("x", "cotangent")}
        for path, array in tree_flatten(make(DIMS, options, None).parameters()):
            arrays[f"parameters.{path}"] = array + 0.1
        if name.startswith("padded"):
            # one row with a whole part of padding before, and one with holes
            position = mx.arange(LENGTH)
            arrays["valid"] = mx.stack([position >= LENGTH // 2 + 1, position % 5 != 2])
        cases[name] = options, arrays
    return cases


@pytest.fixture(scope="module")
def groups(tmp_path_factory: pytest.TempPathFactory) -> dict[int, tuple[Found, list[str]]]:
    """The results of groups of two sizes for each case, and what they reported in the end."""
    return {size: run_group(tmp_path_factory.mktemp("ring"), size, _cases()) for size in (2, 4)}


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("size", [2, 4])
def test_a_group_finds_what_one_process_finds(
    groups: dict[int, tuple[Found, list[str]]], size: int, name: str
) -> None:
    got = groups[size][0][name]
    options, arrays = _cases()[name]
    want = results(make(DIMS, options, None), arrays)
    assert got.keys() == want.keys()
    for part, value in want.items():
        limit = TOLERANCE[mx.float32] if part == "y" else GRADIENT_TOLERANCE
        assert relative_error(got[part], value) <= limit, part


@pytest.mark.exhaustive
@pytest.mark.parametrize("size", [2, 4])
def test_parts_of_different_lengths_are_refused(
    groups: dict[int, tuple[Found, list[str]]], size: int
) -> None:
    lengths = [2 + rank for rank in range(size)]
    assert (
        groups[size][1]
        == [f"[ring_attention] the parts of all processes must have one length but have {lengths}."]
        * size
    )


def test_one_process_is_ordinary_attention() -> None:
    mixer, plain = RingAttention(DIMS, num_heads=2), GQA(DIMS, num_heads=2)
    plain.update(mixer.parameters())
    x = mx.random.normal((2, 9, DIMS), key=mx.random.key(1))
    assert mx.array_equal(mixer(x)[0], plain(x)[0])


class _Group:
    """Two processes, as far as refusals ask for them."""

    def size(self) -> int:
        return 2


@pytest.mark.parametrize("name", ["state", "starts"])
def test_what_a_split_sequence_cannot_have_is_refused(name: str) -> None:
    x = mx.zeros((1, 3, DIMS))
    group: Any = _Group()
    mixer = RingAttention(DIMS, num_heads=2, group=group)
    state = GQA(DIMS, num_heads=2)(x)[1]
    given: dict[str, Any] = {"state": state} if name == "state" else {"starts": x[..., 0] > 0}
    with pytest.raises(ValueError, match=rf"\[RingAttention\] '{name}' must be None where"):
        mixer(x, **given)
