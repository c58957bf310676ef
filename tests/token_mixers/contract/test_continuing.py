"""A text goes on from a state as if it had been read at once, for every mixer found in the package."""

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten, tree_map

from mlx_mmfree.layers.context import Context
from mlx_mmfree.layers.mixer import StatesByPosition
from tests.token_mixers.contract.cases import (
    CAUSAL,
    LENGTH,
    LINEARS,
    ROUNDED,
    Case,
    assert_equal,
    beside,
    by_case,
    sequence,
)


@by_case(CAUSAL)
def test_whole_equals_chunks_equals_steps(case: Case) -> None:
    mixer, x = case.mixer, sequence()
    whole, last = mixer(x)
    for cuts in ([5], list(range(1, LENGTH))):
        state, parts = mixer.init_state(3, x.dtype), []
        for chunk in mx.split(x, cuts, axis=1):
            y, state = mixer(chunk, state)
            parts.append(y)
        assert_equal(mx.concatenate(parts, axis=1), whole)
        assert_equal(state, last)


@by_case(CAUSAL)
def test_tokens_can_be_taken_back(case: Case) -> None:
    mixer, read, more = case.mixer, 6, 3
    x, kind, given = sequence(), mixer.state_kind, beside(mixer)
    before = mixer(x[:, :read], None, None, **given)[1]
    part = x[:, read : read + more]
    asking = Context(**given, by_position=True)
    y, after = mixer(part, before, context=asking)
    want, _ = mixer(part, before, context=Context(**given))
    assert_equal(y, want)
    rest = x[:, read + more :]
    for count in range(1, more + 1):
        if isinstance(after, StatesByPosition):
            state = after.states[count - 1]
        else:
            assert kind.can_rewind(before, more)
            state = kind.rewound(after, more - count)
        _, want = mixer(part[:, :count], before, context=Context(**given))
        assert_equal(mixer(rest, state, **given)[0], mixer(rest, want, **given)[0])


@by_case(CAUSAL)
def test_rows_can_be_selected(case: Case) -> None:
    mixer, x = case.mixer, sequence()
    rows = mx.array([2, 0])
    _, state = mixer(x[:, :6])
    selected = tree_map(lambda a: a[rows], state)
    want, want_state = mixer(x[rows])
    y, last = mixer(x[rows][:, 6:], selected)
    assert_equal(y, want[:, 6:])
    assert_equal(last, want_state)


@by_case(CAUSAL)
def test_the_callers_state_is_not_changed(case: Case) -> None:
    mixer, x = case.mixer, sequence()
    state = mixer.init_state(3, x.dtype)
    before = [mx.array(a) for _, a in tree_flatten(state)]
    mx.eval(mixer(x, state))
    assert all(mx.array_equal(a, b) for (_, a), b in zip(tree_flatten(state), before, strict=True))


@pytest.mark.usefixtures("unfused")
@by_case(CAUSAL)
def test_compiled_step_equals_the_plain_one(case: Case) -> None:
    mixer, x = case.mixer, sequence()
    state = mixer(x)[1]
    assert_equal(mx.compile(mixer.__call__)(x[:, :1], state), mixer(x[:, :1], state))


@pytest.mark.exhaustive
@pytest.mark.parametrize("linear", [*LINEARS, *ROUNDED])
def test_fused_step_equals_the_plain_one(fused: None, linear: str) -> None:
    test_compiled_step_equals_the_plain_one(Case("MLGRU", linear, {}))
