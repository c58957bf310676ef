"""The state of every causal mixer found in the package is kept and goes on, whole or cut."""

from types import SimpleNamespace
from typing import Any

import mlx.core as mx

from mlx_mmfree.generation.sessions import can_be_packed, pack, unpack
from mlx_mmfree.generation.states import can_rewind
from tests.token_mixers.contract.cases import CAUSAL, Case, assert_equal, by_case, sequence

# what a state holds does not depend on how its mixer projects
DENSE = [case for case in CAUSAL if case.values[0].linear == "dense"]
READ, CUT = 9, 5


def model_of(case: Case) -> Any:
    """All that is asked of a model here: its mixers and its dtype."""
    return SimpleNamespace(token_mixers=[case.mixer], dtype=mx.float32)


@by_case(DENSE)
def test_a_packed_state_goes_on_as_the_state(case: Case) -> None:
    model, x = model_of(case), sequence()[:1]
    _, state = case.mixer(x[:, :READ])
    packed = pack(model, (state,), READ)
    assert packed is not None and can_be_packed(model, packed, READ)
    (again,) = unpack(model, packed)
    rest = x[:, READ:]
    assert mx.array_equal(case.mixer(rest, again)[0], case.mixer(rest, state)[0])


CUTTABLE = [case for case in DENSE if can_rewind(model_of(case.values[0]), CUT, READ - CUT)]


@by_case(CUTTABLE)
def test_a_cut_state_goes_on_as_the_state_of_the_prefix(case: Case) -> None:
    model, x = model_of(case), sequence()[:1]
    _, state = case.mixer(x[:, :READ])
    packed = pack(model, (state,), READ)
    assert packed is not None
    (cut,) = unpack(model, packed, READ - CUT)
    _, want = case.mixer(x[:, :CUT])
    rest = x[:, CUT:]
    assert_equal(case.mixer(rest, cut)[0], case.mixer(rest, want)[0])
    assert pack(model, (cut,), CUT) is not None
