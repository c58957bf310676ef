"""Sequences of one position, and of lengths beside the lengths of chunks and blocks, for every mixer."""

import mlx.core as mx

from tests.token_mixers.contract.cases import (
    CAUSAL,
    WHOLE,
    Case,
    assert_equal,
    by_case,
    continue_equally,
    sequence,
    variants_file,
)

LENGTHS = (1, 63, 100)


@by_case(CAUSAL)
def test_whole_equals_chunks(case: Case) -> None:
    mixer = case.build(max_length=max(LENGTHS) + 3)
    most: int = getattr(variants_file(case.kind), "EXACT_UP_TO", max(LENGTHS) + 3)
    for length in LENGTHS:
        x = sequence(min(length, most))
        whole, last = mixer(x)
        state, parts = None, []
        for chunk in mx.split(x, [cut for cut in (37, 38) if cut < length], axis=1):
            y, state = mixer(chunk, state)
            parts.append(y)
        assert_equal(mx.concatenate(parts, axis=1), whole)
        if x.shape[1] + 3 <= most:
            continue_equally(mixer, sequence(), state, last)


@by_case(WHOLE)
def test_padding_after_changes_nothing(case: Case) -> None:
    mixer = case.build(max_length=max(LENGTHS) + 3)
    for length in LENGTHS:
        x, shape = sequence(length), (3, length + 3)
        padded = mx.pad(x, [(0, 0), (0, 3), (0, 0)], constant_values=9.0)
        valid = mx.broadcast_to(mx.arange(length + 3) < length, shape)
        want = mixer(x)[0]
        assert mx.isfinite(want).all()
        assert_equal(mixer(padded, None, valid)[0][:, :length], want)
