"""Declarations of layers about their matrices, by which alone others know their kinds."""

import ast
import importlib
import pkgutil
from collections.abc import Callable, Iterator
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

import mlx_mmfree
from mlx_mmfree import layers
from mlx_mmfree.layers import BitLinear, PackedLinear, TiedBitLinear
from mlx_mmfree.layers.lora import AdaptedLayer
from mlx_mmfree.layers.matrix import Matrix, matrices, matrix_of
from mlx_mmfree.layers.sharded_linear import all_to_sharded
from mlx_mmfree.ops import pack_ternary, ternarize, unpack_ternary
from tests.tolerances import TOLERANCE, relative_error

PACKAGE = Path(mlx_mmfree.__path__[0])
NORMS = {"RMSNorm", "LayerNorm", "PlacedRMSNorm", "ShardedRMSNorm", "BatchNorm"}
OF_MLX = {"Linear", "Embedding", "QuantizedLinear", "QuantizedEmbedding"}


def _kinds() -> set[str]:
    """Names of all classes of linears and embeddings, here and in MLX."""
    found = set(OF_MLX)
    for entry in pkgutil.iter_modules(layers.__path__):
        module = importlib.import_module(f"{layers.__name__}.{entry.name}")
        for name, value in vars(module).items():
            if isinstance(value, type) and issubclass(value, Matrix | AdaptedLayer):
                found.add(name)
    return found


def _mentions(node: ast.AST, names: set[str]) -> bool:
    return any(
        (isinstance(part, ast.Name) and part.id in names)
        or (isinstance(part, ast.Attribute) and part.attr in names)
        for part in ast.walk(node)
    )


def _is_call(node: ast.AST, *functions: str) -> bool:
    return (
        isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in functions
    )


def _groups(tree: ast.Module, names: set[str]) -> set[str]:
    """Names of a module that stand for several kinds, as `KINDS = (A, B)` or `A | B`."""
    return {
        target.id
        for node in tree.body
        if isinstance(node, ast.Assign)
        and isinstance(node.value, ast.Tuple | ast.Set | ast.BinOp)
        and _mentions(node.value, names)
        for target in node.targets
        if isinstance(target, ast.Name)
    }


def _lines_that_tell_apart(source: str, kinds: set[str]) -> Iterator[int]:
    tree = ast.parse(source)
    names = kinds | _groups(tree, kinds)
    for node in ast.walk(tree):
        if _is_call(node, "isinstance", "issubclass"):
            assert isinstance(node, ast.Call)
            if _mentions(node.args[1], names):
                yield node.lineno
        elif isinstance(node, ast.Compare) and any(
            _is_call(part, "type") for part in ast.walk(node.left)
        ):
            if any(_mentions(other, names) for other in node.comparators):
                yield node.lineno
        elif isinstance(node, ast.MatchClass) and _mentions(node.cls, names):
            yield node.cls.lineno


@pytest.mark.parametrize(
    "line",
    [
        "isinstance(m, nn.Linear)",
        "isinstance(m, (nn.RMSNorm, PackedLinear))",
        "isinstance(m, BitLinear | nn.Embedding)",
        "issubclass(type(m), layers.LoRALinear)",
        "type(m) is nn.QuantizedLinear",
        "type(m) in (nn.Linear, nn.Embedding)",
        "type(m) not in KINDS",
        "match m:\n    case BitLinear(): pass",
    ],
)
def test_lines_that_tell_kinds_apart_are_found(line: str) -> None:
    source = f"KINDS = (PackedBitLinear, nn.RMSNorm)\n{line}"
    assert list(_lines_that_tell_apart(source, _kinds()))


def test_other_lines_are_not() -> None:
    source = "isinstance(m, nn.RMSNorm)\ntype(m) is dict\nx: BitLinear = BitLinear(4, 4)"
    assert not list(_lines_that_tell_apart(source, _kinds()))


@pytest.mark.exhaustive
def test_only_layers_tell_kinds_of_linears_apart() -> None:
    kinds = _kinds()
    assert {"BitLinear", "PackedBitLinear", "PackedLinear", "LoRALinear"} < kinds
    files = [
        file for file in PACKAGE.rglob("*.py") if file.relative_to(PACKAGE).parts[0] != "layers"
    ]
    assert len(files) > 200
    found = [
        f"{file.relative_to(PACKAGE)}:{line}"
        for file in files
        for line in _lines_that_tell_apart(file.read_text(encoding="utf-8"), kinds)
    ]
    assert not found, "A layer answers for itself: ask `layers.matrix.matrix_of` for its matrix."


def _exact_classes(source: str, names: set[str]) -> Iterator[int]:
    """Lines that ask for the very class of a value: `type(m) is Linear`, or a look-up by `type(m)`."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Compare) and any(_is_call(p, "type") for p in ast.walk(node.left)):
            is_lookup = any(isinstance(each, ast.In | ast.NotIn) for each in node.ops)
            if is_lookup or any(_mentions(other, names) for other in node.comparators):
                yield node.lineno
        elif isinstance(node, ast.Subscript) and _is_call(node.slice, "type"):
            yield node.lineno
        elif isinstance(node, ast.Call) and any(_is_call(each, "type") for each in node.args[:1]):
            yield from [node.lineno] if ast.unparse(node.func).endswith(".get") else []


@pytest.mark.parametrize(
    "line",
    ["type(m) is nn.RMSNorm", "type(m) in KINDS", "KINDS.get(type(m))", "KINDS[type(m)](m)"],
)
def test_questions_for_exact_classes_are_found(line: str) -> None:
    assert list(_exact_classes(line, NORMS))
    assert not list(_exact_classes("type(n) is int", NORMS))
    assert not list(_exact_classes("getattr(type(m), 'variant', Variant)", NORMS))


def test_layers_ask_for_no_exact_class() -> None:
    files = list((PACKAGE / "layers").rglob("*.py"))
    assert len(files) > 20
    found = [
        f"{file.relative_to(PACKAGE)}:{line}"
        for file in files
        for line in _exact_classes(file.read_text(encoding="utf-8"), _kinds() | NORMS)
    ]
    assert not found, "The class of a linear or a norm says by an attribute what is done with it."


def _packed_linear() -> PackedLinear:
    layer = PackedLinear(64, 8, has_row_scales=True, has_column_scales=True)
    layer.weight = pack_ternary(mx.random.randint(-1, 2, (8, 64)))
    layer.scale = mx.random.uniform(1, 2, (8,))
    layer.input_scale = mx.random.uniform(1, 2, (64,))
    return layer


def _written_out(layer: PackedLinear) -> mx.array:
    return unpack_ternary(layer.weight, 64) * layer.scale[:, None] * layer.input_scale


def _dequantized(layer: nn.Module) -> mx.array:
    return mx.dequantize(layer.weight, layer.scales, layer.biases, layer.group_size, layer.bits)


def _trits(weight: mx.array) -> mx.array:
    trits, scale = ternarize(weight)
    return trits * scale


def _tied() -> TiedBitLinear:
    return TiedBitLinear(nn.Embedding(8, 64), norm_eps=1e-6)


# how it is made, what it says, its matrix
LAYERS: dict[
    str, tuple[Callable[[], nn.Module], dict[str, object], Callable[[nn.Module], mx.array]]
] = {
    "nn.Linear": (
        lambda: nn.Linear(64, 8),
        {"holds_floats": True, "is_plain": True},
        lambda layer: layer.weight,
    ),
    "nn.Embedding": (
        lambda: nn.Embedding(8, 64),
        {"holds_floats": True, "is_plain": True, "is_embedding": True},
        lambda layer: layer.weight,
    ),
    "nn.QuantizedLinear": (
        lambda: nn.QuantizedLinear(64, 8, group_size=32, bits=4),
        {"is_packed": True, "holds_codes": True, "group_size": 32, "fixed_dtypes": ("weight",)},
        _dequantized,
    ),
    "nn.QuantizedEmbedding": (
        lambda: nn.QuantizedEmbedding(8, 64, group_size=32, bits=8),
        {
            "is_packed": True,
            "holds_codes": True,
            "group_size": 32,
            "fixed_dtypes": ("weight",),
            "is_embedding": True,
        },
        _dequantized,
    ),
    "BitLinear": (
        lambda: BitLinear(64, 8, norm_eps=1e-6),
        {"holds_floats": True, "is_ternary": True},
        lambda layer: _trits(layer.weight),
    ),
    "TiedBitLinear": (
        _tied,
        {"is_shared": True, "is_ternary": True},
        lambda layer: _trits(layer.master),
    ),
    "PackedBitLinear": (
        lambda: BitLinear(64, 8).to_packed(),
        {
            "is_packed": True,
            "holds_trits": True,
            "is_ternary": True,
            "fixed_dtypes": ("weight", "scale"),
        },
        lambda layer: unpack_ternary(layer.weight, 64) * layer.scale,
    ),
    "PackedLinear": (
        _packed_linear,
        {
            "is_packed": True,
            "holds_trits": True,
            "fixed_dtypes": ("weight", "scale", "input_scale"),
        },
        _written_out,
    ),
}
SILENT = {
    **dict.fromkeys(
        ("holds_floats", "holds_trits", "holds_codes", "is_shared", "is_packed", "is_plain"), False
    ),
    **dict.fromkeys(("is_ternary", "is_embedding"), False),
    "group_size": 1,
}


@pytest.mark.parametrize("name", LAYERS)
def test_every_layer_answers(name: str) -> None:
    make, declared, written_out = LAYERS[name]
    layer = make()
    matrix = matrix_of(layer)
    assert matrix is not None
    assert matrix.layer is layer
    assert (matrix.output_dims, matrix.input_dims) == (8, 64)
    wanted = SILENT | {"fixed_dtypes": ()} | declared
    assert {key: getattr(matrix, key) for key in wanted} == wanted
    assert set(matrix.fixed_dtypes) <= layer.keys()
    x = mx.random.normal((3, 64))
    want = np.array(x, np.float64) @ np.array(written_out(layer), np.float64).T
    assert relative_error(matrix.multiply(x), mx.array(want, mx.float32)) <= TOLERANCE[mx.float32]


@pytest.mark.parametrize("make", [nn.Linear, nn.Embedding])
def test_a_layer_of_floats_has_a_format_in_codes(make: Callable[[int, int], nn.Module]) -> None:
    matrix = matrix_of(make(64, 64))
    assert matrix is not None
    codes = matrix_of(matrix.in_codes(32, 4))
    assert codes is not None
    assert (codes.is_packed, codes.is_embedding) == (True, matrix.is_embedding)
    assert (codes.output_dims, codes.input_dims) == (64, 64)
    assert ("bias" in codes.layer) == ("bias" in matrix.layer)


def test_a_layer_that_computes_more_is_not_replaced() -> None:
    class Doubled(nn.Linear):
        def __call__(self, x: mx.array) -> mx.array:
            return 2 * super().__call__(x)

    matrix = matrix_of(Doubled(4, 4))
    assert matrix is not None and not matrix.is_plain


def test_other_modules_have_no_matrix() -> None:
    model = nn.Sequential(nn.RMSNorm(4), nn.Linear(4, 4), BitLinear(4, 4, norm_eps=1e-6))
    assert matrix_of(model) is None
    assert matrices(model).keys() == {"layers.1", "layers.2"}


class _Second:
    """Stands for a group of two processes, in its second one."""

    def size(self) -> int:
        return 2

    def rank(self) -> int:
        return 1


@pytest.mark.parametrize("name", ["PackedBitLinear", "PackedLinear"])
def test_a_part_of_a_layer_answers_for_itself(name: str) -> None:
    make, _, written_out = LAYERS[name]
    layer = make()
    part = all_to_sharded(layer, _Second())
    assert (part.output_dims, part.input_dims) == (4, 64)
    assert mx.array_equal(written_out(part), written_out(layer)[4:])
    assert layer.output_dims == 8
