"""What every token mixer promises, for every mixer found in the package."""

import importlib
import importlib.util
import inspect
import pkgutil
from collections.abc import Callable, Iterable
from functools import partial

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from _pytest.mark import ParameterSet
from mlx.utils import tree_flatten, tree_map

import mlx_mmfree.token_mixers as package
from mlx_mmfree.layers import BitLinear
from mlx_mmfree.layers.context import Context
from mlx_mmfree.layers.state_kind import StatesByPosition
from mlx_mmfree.layers.token_mixer import TokenMixer
from mlx_mmfree.token_mixers import KeyValueCache
from tests.tolerances import GRADIENT_TOLERANCE, TOLERANCE, relative_error

DIMS, LENGTH = 32, 13
# of those mixers that have one: room for padding and what is read afterwards
MAX_LENGTH = 2 * LENGTH
# where two ways must agree, activations are not rounded: the last bit of a sum can move a code
LINEARS = {
    "dense": nn.Linear,
    "ternary": partial(BitLinear, norm_eps=1e-6, quantize_activations=False),
}
ROUNDED = {"rounded": partial(BitLinear, norm_eps=1e-6)}


def _mixers() -> dict[str, type[TokenMixer]]:
    found = {}
    for entry in pkgutil.iter_modules(package.__path__):
        module = importlib.import_module(f"{package.__name__}.{entry.name}")
        for name, value in inspect.getmembers(module, inspect.isclass):
            if issubclass(value, TokenMixer) and value.__module__ == module.__name__:
                found[name] = value
    return found


MIXERS = _mixers()
FOLDER = "tests.token_mixers.variants"


def _variants(mixer: type[TokenMixer]) -> list[dict[str, object]]:
    """Its options, as `VARIANTS` in the file of `variants` that is named as its own."""
    name = mixer.__module__.rpartition(".")[2]
    if importlib.util.find_spec(f"{FOLDER}.{name}") is None:
        return [{}]
    variants: list[dict[str, object]] = importlib.import_module(f"{FOLDER}.{name}").VARIANTS
    return variants


def _cases(
    applies: Callable[[type[TokenMixer]], bool], linears: Iterable[str] = LINEARS
) -> list[ParameterSet]:
    """Every variant of the mixers that something is asked of."""
    return [
        pytest.param(name, linear, options, id=f"{name}-{linear}-{options or 'plain'}")
        for name, mixer in MIXERS.items()
        if applies(mixer)
        for linear in linears
        for options in _variants(mixer)
    ]


CAUSAL = _cases(lambda mixer: mixer.causal)
PACKING = _cases(lambda mixer: mixer.causal and mixer.packs_samples)
WHOLE = [
    pytest.param(name, linear, options, id=f"{name}-{linear}")
    for name, mixer in MIXERS.items()
    if mixer.bidirectional
    for linear in LINEARS
    for options in [{"is_causal": False} if mixer.causal else {}]
]
CROSS = _cases(lambda mixer: mixer.cross)
BOUNDED = _cases(lambda mixer: mixer.length_bound)
ALL = [*CAUSAL, *WHOLE, *_cases(lambda mixer: mixer.causal, ROUNDED)]
by_case = partial(pytest.mark.parametrize, ("name", "linear", "options"))


@pytest.fixture
def x() -> mx.array:
    return mx.random.normal((3, LENGTH, DIMS), key=mx.random.key(7))


def _build(name: str, linear: str, options: dict[str, object]) -> TokenMixer:
    mx.random.seed(3)
    bound = {"max_length": MAX_LENGTH} if MIXERS[name].length_bound else {}
    return MIXERS[name](DIMS, linear=(LINEARS | ROUNDED)[linear], **options | bound)


def _beside(mixer: TokenMixer) -> dict[str, mx.array]:
    """What a mixer is given beside its input."""
    if not mixer.cross:
        return {}
    return {"memory": mx.random.normal((3, 7, DIMS), key=mx.random.key(9))}


def _recurrence(state: object) -> object:
    """What padding never touches; a short convolution keeps the last inputs, padded or not."""
    return getattr(state, "hidden", state)


def _equal(got: object, want: object) -> None:
    for (_, g), (_, w) in zip(tree_flatten(got), tree_flatten(want), strict=True):
        assert relative_error(g, w) <= TOLERANCE[mx.float32]


def _continue_equally(mixer: TokenMixer, x: mx.array, state: object, want: object) -> None:
    """Two states mean the same, whatever room they take."""
    _equal(mixer(x[:, :3], state)[0], mixer(x[:, :3], want)[0])
    _equal(mixer(x[:, :1], state)[0], mixer(x[:, :1], want)[0])


def test_each_file_holds_a_mixer() -> None:
    files = {entry.name for entry in pkgutil.iter_modules(package.__path__)}
    assert {mixer.__module__.rpartition(".")[2] for mixer in MIXERS.values()} == files


@pytest.mark.parametrize("name", MIXERS)
def test_capabilities_are_declared(name: str) -> None:
    mixer = MIXERS[name]
    assert mixer.causal or mixer.bidirectional
    parameters = inspect.signature(mixer.__call__).parameters
    assert mixer.cross == ("memory" in parameters)
    assert mixer.length_bound == ("max_length" in inspect.signature(mixer.__init__).parameters)
    for line in (mixer.equation, mixer.complexity, mixer.paper):
        assert line and "\n" not in line


@by_case(CAUSAL)
def test_whole_equals_pieces_equals_steps(
    name: str, linear: str, options: dict[str, object], x: mx.array
) -> None:
    mixer = _build(name, linear, options)
    whole, last = mixer(x)
    for cuts in ([5], list(range(1, LENGTH))):
        state, parts = mixer.init_state(3, x.dtype), []
        for piece in mx.split(x, cuts, axis=1):
            y, state = mixer(piece, state)
            parts.append(y)
        _equal(mx.concatenate(parts, axis=1), whole)
        _equal(state, last)


@by_case(CAUSAL)
def test_tokens_can_be_taken_back(
    name: str, linear: str, options: dict[str, object], x: mx.array
) -> None:
    mixer, norm, read, more = _build(name, linear, options), nn.RMSNorm(DIMS), 6, 3
    kind, beside = mixer.state_kind, _beside(mixer)
    before = mixer(x[:, :read], None, None, **beside)[1]
    part = x[:, read : read + more]
    context = Context(**beside, by_position=True)
    y, after = mixer.residual_by_position(part, norm, before, context)
    want, _ = mixer.residual(part, norm, before, Context(**beside))
    _equal(y, want)
    rest = x[:, read + more :]
    for kept in range(1, more + 1):
        if isinstance(after, StatesByPosition):
            state = after.states[kept - 1]
        else:
            assert kind.can_rewind(before, more)
            state = kind.rewound(after, more - kept)
        _, want = mixer.residual(part[:, :kept], norm, before, Context(**beside))
        _equal(mixer(rest, state, **beside)[0], mixer(rest, want, **beside)[0])


@by_case(CAUSAL)
def test_output_depends_on_the_past_only(
    name: str, linear: str, options: dict[str, object], x: mx.array
) -> None:
    mixer = _build(name, linear, options)
    changed = mx.concatenate([x[:, :6], x[:, 6:] + 1.0], axis=1)
    assert mx.array_equal(mixer(changed)[0][:, :6], mixer(x)[0][:, :6])


@by_case(CAUSAL)
def test_left_padding_changes_nothing(
    name: str, linear: str, options: dict[str, object], x: mx.array
) -> None:
    mixer = _build(name, linear, options)
    padded = mx.concatenate([mx.full((3, 4, DIMS), 9.0), x], axis=1)
    valid = mx.broadcast_to(mx.arange(LENGTH + 4) >= 4, (3, LENGTH + 4))
    y, state = mixer(padded, None, valid)
    want, want_state = mixer(x)
    _equal(y[:, 4:], want)
    if mixer.recurrent:
        _equal(state, want_state)
    _continue_equally(mixer, x, state, want_state)


@by_case(CAUSAL)
def test_a_padded_step_leaves_the_recurrence(
    name: str, linear: str, options: dict[str, object], x: mx.array
) -> None:
    mixer = _build(name, linear, options)
    _, state = mixer(x)
    _, after = mixer(x[:, :2], state, mx.zeros((3, 2), mx.bool_))
    if mixer.recurrent:
        _equal(_recurrence(after), _recurrence(state))
    else:
        _continue_equally(mixer, x, after, state)


# the samples of each row; what remains of 3 + LENGTH positions is padding
SAMPLES = [[3, 11, 2], [9, 5], [16]]


@pytest.mark.parametrize("is_carried", [False, True], ids=["fresh", "carried"])
@by_case(PACKING)
def test_packed_samples_equal_each_alone(
    name: str, linear: str, options: dict[str, object], x: mx.array, is_carried: bool
) -> None:
    mixer = _build(name, linear, options)
    before = mixer(x[:, :5])[1] if is_carried else mixer.init_state(3, x.dtype)
    x = mx.random.normal((3, 3 + LENGTH, DIMS), key=mx.random.key(8))
    weights = mx.cos(mx.arange(x.size)).reshape(x.shape)
    starts, valid = np.zeros(x.shape[:2], bool), np.zeros(x.shape[:2], bool)
    for row, lengths in enumerate(SAMPLES):
        # a carried state goes on with the first sample
        starts[row, np.cumsum(lengths if is_carried else [0, *lengths])[:-1]] = True
        valid[row, : sum(lengths)] = True

    def packed(x: mx.array) -> tuple[mx.array, object]:
        return mixer(x, before, mx.array(valid), starts=mx.array(starts))

    def alone(x: mx.array) -> tuple[mx.array, list[object]]:
        rows, states = [], []
        for row, lengths in enumerate(SAMPLES):
            state, parts = tree_map(lambda a, row=row: a[row : row + 1], before), []
            for n, part in enumerate(
                mx.split(x[row : row + 1], np.cumsum(lengths).tolist(), axis=1)
            ):
                if n < len(lengths):
                    y, state = mixer(part, state if n == 0 else None)
                    parts.append(y)
                else:
                    parts.append(mx.zeros_like(part))
            rows.append(mx.concatenate(parts, axis=1))
            states.append(state)
        return mx.concatenate(rows), states

    def weighted(y: mx.array) -> mx.array:
        return (mx.where(mx.array(valid)[..., None], y, 0.0) * weights).sum()

    got, state = packed(x)
    want, states = alone(x)
    _equal(mx.where(mx.array(valid)[..., None], got, 0.0), want)
    for row, last in enumerate(states):
        own = tree_map(lambda a, row=row: a[row : row + 1], state)
        if mixer.recurrent and not valid[row].all():
            _equal(_recurrence(own), _recurrence(last))
            continue
        if mixer.recurrent:
            _equal(own, last)
        _continue_equally(mixer, x[row : row + 1], own, last)
    cache = options.get("cache")
    if isinstance(cache, KeyValueCache) and cache.quantization:  # rounding has no gradient
        return
    gradient = mx.grad(lambda x: weighted(packed(x)[0]))(x)
    want_gradient = mx.grad(lambda x: weighted(alone(x)[0]))(x)
    assert relative_error(gradient, want_gradient) <= GRADIENT_TOLERANCE


@by_case(PACKING)
def test_padding_starts_no_sample(
    name: str, linear: str, options: dict[str, object], x: mx.array
) -> None:
    mixer = _build(name, linear, options)
    valid = mx.broadcast_to(mx.arange(LENGTH) % 5 != 3, x.shape[:2])
    got, state = mixer(x, None, valid, starts=~valid)
    want, want_state = mixer(x, None, valid)
    _equal(mx.where(valid[..., None], got, 0.0), mx.where(valid[..., None], want, 0.0))
    _continue_equally(mixer, x, state, want_state)


@by_case(CAUSAL)
def test_rows_can_be_selected(
    name: str, linear: str, options: dict[str, object], x: mx.array
) -> None:
    mixer = _build(name, linear, options)
    rows = mx.array([2, 0])
    _, state = mixer(x[:, :6])
    selected = tree_map(lambda a: a[rows], state)
    want, want_state = mixer(x[rows])
    y, last = mixer(x[rows][:, 6:], selected)
    _equal(y, want[:, 6:])
    _equal(last, want_state)


@by_case(CAUSAL)
def test_the_callers_state_is_not_changed(
    name: str, linear: str, options: dict[str, object], x: mx.array
) -> None:
    mixer = _build(name, linear, options)
    state = mixer.init_state(3, x.dtype)
    before = [mx.array(a) for _, a in tree_flatten(state)]
    mx.eval(mixer(x, state))
    assert all(mx.array_equal(a, b) for (_, a), b in zip(tree_flatten(state), before, strict=True))


@by_case(ALL)
def test_gradients_are_finite_and_reach_every_parameter(
    name: str, linear: str, options: dict[str, object], x: mx.array
) -> None:
    mixer = _build(name, linear, options)

    def loss(given: dict[str, dict[str, mx.array]]) -> mx.array:
        mixer.update(given["parameters"])
        return (mixer(given["inputs"]["x"], **_beside(mixer))[0] ** 2).sum()

    given = {"parameters": mixer.trainable_parameters(), "inputs": {"x": x}}
    for path, gradient in tree_flatten(mx.grad(loss)(given)):
        assert mx.isfinite(gradient).all().item(), path
        assert mx.abs(gradient).max().item() > 0, path


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16], ids=str)
@by_case(ALL)
def test_dtype_is_kept(
    name: str, linear: str, options: dict[str, object], x: mx.array, dtype: mx.Dtype
) -> None:
    mixer = _build(name, linear, options)
    mixer.set_dtype(dtype)
    beside = {name: array.astype(dtype) for name, array in _beside(mixer).items()}
    assert mixer(x.astype(dtype), **beside)[0].dtype == dtype


@by_case(CAUSAL)
def test_compiled_step_equals_the_plain_one(
    name: str, linear: str, options: dict[str, object], x: mx.array
) -> None:
    mixer = _build(name, linear, options)
    state = mixer(x)[1]
    _equal(mx.compile(mixer.__call__)(x[:, :1], state), mixer(x[:, :1], state))


@by_case(WHOLE)
def test_every_position_sees_the_whole_sequence(
    name: str, linear: str, options: dict[str, object], x: mx.array
) -> None:
    mixer = _build(name, linear, options)
    assert not mixer.is_causal
    changed = mx.concatenate([x[:, :-1], x[:, -1:] + 1.0], axis=1)
    assert not mx.array_equal(mixer(changed)[0][:, 0], mixer(x)[0][:, 0])


@by_case(WHOLE)
@pytest.mark.parametrize("before", [0, 2, 4])
def test_padding_around_a_sequence_changes_nothing(
    name: str, linear: str, options: dict[str, object], x: mx.array, before: int
) -> None:
    mixer, total = _build(name, linear, options), LENGTH + 4
    after = total - LENGTH - before
    blank = partial(mx.full, vals=9.0)
    padded = mx.concatenate([blank((3, before, DIMS)), x, blank((3, after, DIMS))], axis=1)
    place = mx.arange(total)
    valid = mx.broadcast_to((place >= before) & (place < before + LENGTH), (3, total))
    y, _ = mixer(padded, None, valid)
    _equal(y[:, before : before + LENGTH], mixer(x)[0])


@by_case(WHOLE)
def test_rows_do_not_see_each_other(
    name: str, linear: str, options: dict[str, object], x: mx.array
) -> None:
    mixer = _build(name, linear, options)
    _equal(mixer(x[1:2])[0], mixer(x)[0][1:2])


@by_case(CROSS)
def test_the_second_sequence_is_seen_but_for_its_padding(
    name: str, linear: str, options: dict[str, object], x: mx.array
) -> None:
    mixer = _build(name, linear, options)
    memory = _beside(mixer)["memory"]
    y, _ = mixer(x, memory=memory)
    assert not mx.array_equal(mixer(x, memory=memory + 1.0)[0], y)
    padded = mx.concatenate([memory, mx.full((3, 2, DIMS), 9.0)], axis=1)
    valid = mx.broadcast_to(mx.arange(9) < 7, (3, 9))
    _equal(mixer(x, memory=padded, memory_valid=valid)[0], y)


@by_case(BOUNDED)
def test_longer_sequences_are_refused(
    name: str, linear: str, options: dict[str, object], x: mx.array
) -> None:
    mixer = _build(name, linear, options)
    with pytest.raises(ValueError, match="max_length"):
        mixer(mx.zeros((1, 1 + MAX_LENGTH, DIMS)))


@pytest.mark.parametrize("linear", [*LINEARS, *ROUNDED])
def test_fused_step_equals_the_plain_one(fused: None, linear: str, x: mx.array) -> None:
    test_compiled_step_equals_the_plain_one("MLGRU", linear, {}, x)
