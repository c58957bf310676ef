"""The mixers found in the package, with the options and the linears with which the contract is asked."""

import importlib
import importlib.util
import inspect
import pkgutil
from collections.abc import Callable, Iterable
from functools import cache, partial
from types import ModuleType
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
import pytest
from _pytest.mark import ParameterSet
from mlx.utils import tree_flatten

import mlx_mmfree.token_mixers as package
from mlx_mmfree.layers import BitLinear
from mlx_mmfree.layers.mixer import TokenMixer
from tests.tolerances import TOLERANCE, relative_error

DIMS, LENGTH = 32, 13
# of those mixers that have one: capacity for padding and what is read afterwards
MAX_LENGTH = 2 * LENGTH
# where two ways must agree, activations are not rounded: the last bit of a sum can move a code
LINEARS = {
    "dense": nn.Linear,
    "ternary": partial(BitLinear, norm_eps=1e-6, quantize_activations=False),
}
ROUNDED = {"rounded": partial(BitLinear, norm_eps=1e-6)}
FOLDER = "tests.token_mixers.variants"


class Case(NamedTuple):
    """One mixer with its options.

    Attributes:
        name: The class.
        linear: A key of `LINEARS` or `ROUNDED`.
        options: Arguments of the class.
    """

    name: str
    linear: str
    options: dict[str, Any]

    @property
    def kind(self) -> type[TokenMixer]:
        return MIXERS[self.name]

    def build(self, max_length: int = MAX_LENGTH) -> TokenMixer:
        """A mixer of its own, for a test that changes it."""
        mx.random.seed(3)
        bound = {"max_length": max_length} if self.kind.length_bound else {}
        linear = (LINEARS | ROUNDED)[self.linear]
        return self.kind(DIMS, linear=linear, **self.options | bound)

    @property
    def mixer(self) -> TokenMixer:
        """The mixer that tests share."""
        key = f"{self.name} {self.linear} {self.options}"
        if key not in _shared:
            _shared[key] = self.build()
        return _shared[key]


_shared: dict[str, TokenMixer] = {}


def _mixers() -> dict[str, type[TokenMixer]]:
    found = {}
    for entry in pkgutil.iter_modules(package.__path__):
        module = importlib.import_module(f"{package.__name__}.{entry.name}")
        for name, value in inspect.getmembers(module, inspect.isclass):
            if issubclass(value, TokenMixer) and value.__module__ == module.__name__:
                found[name] = value
    return found


MIXERS = _mixers()


@cache
def variants_file(mixer: type[TokenMixer]) -> ModuleType | None:
    """The file of `variants` that is named as the mixer's own, if there is one."""
    name = f"{FOLDER}.{mixer.name or mixer.__module__.rpartition('.')[2]}"
    return None if importlib.util.find_spec(name) is None else importlib.import_module(name)


def _variants(mixer: type[TokenMixer]) -> list[dict[str, Any]]:
    """The options of a mixer, as its file of `variants` lists them."""
    variants: list[dict[str, Any]] = getattr(variants_file(mixer), "VARIANTS", [{}])
    return variants


def _whole_variants(mixer: type[TokenMixer]) -> list[dict[str, Any]]:
    """Those with which a mixer sees the whole sequence, as far as they can be had at once."""
    if not mixer.causal:
        return _variants(mixer)
    plain: dict[str, Any] = {"is_causal": False}
    others = [options | plain for options in _variants(mixer) if options]
    return [plain, *(options for options in others if _is_possible(mixer, options))]


def _is_possible(mixer: type[TokenMixer], options: dict[str, Any]) -> bool:
    try:
        mixer(DIMS, **options | ({"max_length": MAX_LENGTH} if mixer.length_bound else {}))
    except ValueError:
        return False
    return True


def _cases(
    applies: Callable[[type[TokenMixer]], bool],
    linears: Iterable[str] = LINEARS,
    variants: Callable[[type[TokenMixer]], list[dict[str, Any]]] = _variants,
) -> list[ParameterSet]:
    """Every variant of the mixers that something is asked of."""
    return [
        pytest.param(Case(name, linear, options), id=f"{name}-{linear}-{options or 'plain'}")
        for name, mixer in MIXERS.items()
        if applies(mixer)
        for linear in linears
        for options in variants(mixer)
    ]


CAUSAL = _cases(lambda mixer: mixer.causal)
PACKING = _cases(lambda mixer: mixer.causal and mixer.packs_samples)
WHOLE = _cases(lambda mixer: mixer.bidirectional, variants=_whole_variants)
CROSS = _cases(lambda mixer: mixer.cross)
BOUNDED = _cases(lambda mixer: mixer.length_bound)
SMOOTH = [*CAUSAL, *WHOLE]
ALL = [*SMOOTH, *_cases(lambda mixer: mixer.causal, ROUNDED)]


def by_case(cases: Iterable[ParameterSet]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """A test of each case; usually of one for each mixer."""

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        return pytest.mark.sample(1, of="case")(pytest.mark.parametrize("case", cases)(test))

    return decorate


def sequence(length: int = LENGTH, seed: int = 7) -> mx.array:
    """Three rows of random numbers."""
    return mx.random.normal((3, length, DIMS), key=mx.random.key(seed))


def beside(mixer: TokenMixer) -> dict[str, mx.array]:
    """The arguments of a mixer beside its input."""
    if not mixer.cross:
        return {}
    return {"memory": mx.random.normal((3, 7, DIMS), key=mx.random.key(9))}


def rounds_keys(case: Case) -> bool:
    """Returns whether keys and values are stored in few bits, which has no gradient."""
    return getattr(case.options.get("cache"), "quantization", None) is not None


def assert_equal(got: object, want: object) -> None:
    """Both hold the same arrays, but for the order of sums."""
    for (_, g), (_, w) in zip(tree_flatten(got), tree_flatten(want), strict=True):
        assert relative_error(g, w) <= TOLERANCE[mx.float32]


def continue_equally(mixer: TokenMixer, x: mx.array, state: object, want: object) -> None:
    """Two states mean the same, whatever capacity they take."""
    assert_equal(mixer(x[:, :3], state)[0], mixer(x[:, :3], want)[0])
    assert_equal(mixer(x[:, :1], state)[0], mixer(x[:, :1], want)[0])
