"""Texts whose states are merged go on as each would alone, for every mixer found in the package."""

import mlx.core as mx

from mlx_mmfree.layers.mixer import State, TokenMixer
from tests.token_mixers.contract.cases import (
    CAUSAL,
    LENGTH,
    Case,
    assert_equal,
    beside,
    by_case,
    sequence,
)

# what a state holds does not depend on how its mixer projects
DENSE = [case for case in CAUSAL if case.values[0].linear == "dense"]

READ = [LENGTH - 4, 3, 0]
"""How many tokens each row has read when it is merged."""


def alone(mixer: TokenMixer, x: mx.array, row: int, count: int) -> State:
    """The state of one row that has read so many tokens."""
    state = mixer.init_state(1, x.dtype)
    return mixer(x[row : row + 1, :count], state)[1] if count else state


def steps(mixer: TokenMixer, x: mx.array, state: State, count: int) -> tuple[mx.array, State]:
    """The output for so many tokens, one at a time."""
    parts = []
    for n in range(count):
        y, state = mixer(x[:, n : n + 1], state)
        parts.append(y)
    return mx.concatenate(parts, axis=1), state


@by_case(DENSE)
def test_merged_rows_go_on_as_alone(case: Case) -> None:
    mixer, x, more = case.mixer, sequence(), 3
    kind = mixer.state_kind
    states = [alone(mixer, x, row, count) for row, count in enumerate(READ)]
    tails = [x[row : row + 1, count : count + more] for row, count in enumerate(READ)]
    merged = kind.merged(states)
    y, after = steps(mixer, mx.concatenate(tails), merged, more)
    want = [steps(mixer, tail, state, more) for tail, state in zip(tails, states, strict=True)]
    assert_equal(y, mx.concatenate([one for one, _ in want]))
    # rows that stay, in another order and one of them twice, and one that comes
    chosen, newcomer = [1, 2, 1], 2
    longest = max(READ[row] for row in chosen) + more
    rest = kind.selected(after, mx.array(chosen), longest)
    again = kind.merged([states[newcomer], rest])
    x = sequence(seed=8)[:1, :2]
    y, _ = steps(mixer, mx.repeat(x, 4, axis=0), again, 2)
    befores = [states[newcomer], *(want[row][1] for row in chosen)]
    assert_equal(y, mx.concatenate([steps(mixer, x, before, 2)[0] for before in befores]))


@by_case(DENSE)
def test_merged_rows_read_several_tokens(case: Case) -> None:
    mixer, x = case.mixer, sequence()
    states = [alone(mixer, x, row, count) for row, count in enumerate(READ)]
    tails = [x[row : row + 1, count : count + 4] for row, count in enumerate(READ)]
    y, _ = mixer(mx.concatenate(tails), mixer.state_kind.merged(states))
    want = [mixer(tail, state)[0] for tail, state in zip(tails, states, strict=True)]
    assert_equal(y, mx.concatenate(want))


@by_case([case for case in DENSE if case.values[0].kind.cross])
def test_second_sequences_of_other_lengths_are_merged(case: Case) -> None:
    mixer, x = case.mixer, sequence()
    memory = beside(mixer)["memory"]
    states = [
        mixer(x[:1, :2], None, None, memory=memory[:1])[1],
        mixer(x[1:2, :2], None, None, memory=memory[1:2, :3])[1],
    ]
    tail = x[:2, 2:3]
    y, _ = mixer(tail, mixer.state_kind.merged(states))
    want = [mixer(tail[n : n + 1], state)[0] for n, state in enumerate(states)]
    assert_equal(y, mx.concatenate(want))
