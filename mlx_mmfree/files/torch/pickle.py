"""Evaluates the pickle of a PyTorch checkpoint as data, which can only build dictionaries of tensors.

Pickle is a language for a stack machine. Python's own machine imports and calls whatever a file names.
The machine here knows a few names, gives each a meaning of its own, and calls nothing.
"""

import math
import pickletools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

MAX_PICKLE_BYTES = 4_000_000
MAX_DIMENSIONS = 8

STORAGES: Mapping[str, mx.Dtype] = {
    "torch.BoolStorage": mx.bool_,
    "torch.ByteStorage": mx.uint8,
    "torch.CharStorage": mx.int8,
    "torch.ShortStorage": mx.int16,
    "torch.IntStorage": mx.int32,
    "torch.LongStorage": mx.int64,
    "torch.HalfStorage": mx.float16,
    "torch.BFloat16Storage": mx.bfloat16,
    "torch.FloatStorage": mx.float32,
}
_DICTIONARY = "collections.OrderedDict"
_TENSOR = "torch._utils._rebuild_tensor_v2"
_PARAMETER = "torch._utils._rebuild_parameter"
_UNREAD = ("torch.DoubleStorage", "torch.ComplexFloatStorage", "torch.ComplexDoubleStorage")
_GLOBALS = (_DICTIONARY, _TENSOR, _PARAMETER, *STORAGES)

_MAX_STACK = 100_000
_VALUES = ("BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT", "BINUNICODE", "SHORT_BINUNICODE")
_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
_TUPLES = {"EMPTY_TUPLE": 0, "TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
_PUTS, _GETS = ("BINPUT", "LONG_BINPUT"), ("BINGET", "LONG_BINGET")


@dataclass(frozen=True)
class Storage:
    """The numbers that one or several tensors are views of.

    Attributes:
        key: Its name in the zip file.
        dtype: Its MLX dtype.
        size: How many numbers it holds.
    """

    key: str
    dtype: mx.Dtype
    size: int


@dataclass(frozen=True)
class View:
    """A tensor: a strided view of a storage.

    Attributes:
        storage: The storage.
        offset: The index of its first number in the storage.
        shape: Its shape.
        strides: The distance of neighbours along each axis, in numbers.
    """

    storage: Storage
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def span(self) -> int:
        """How many numbers it spans from its first to its last one; 0 if it is empty."""
        if not math.prod(self.shape):
            return 0
        pairs = zip(self.shape, self.strides, strict=True)
        return 1 + sum((size - 1) * stride for size, stride in pairs)


@dataclass(frozen=True)
class _Global:
    name: str


def read_views(text: bytes) -> dict[str, View]:
    """The tensors that a pickle describes, by their names.

    Raises:
        ValueError: The pickle is not well formed, or asks for anything but a flat dictionary of tensors
            that lie within their storages.
    """
    machine = _Machine()
    try:
        for opcode, argument, _ in pickletools.genops(text):
            machine.step(opcode.name, argument)
        result = machine.stack.pop()
    except (IndexError, KeyError) as error:
        raise ValueError("has a pickle that is not well formed") from error
    if not isinstance(result, dict):
        raise ValueError(f"must hold a dictionary of tensors but holds a {type(result).__name__}")
    for name, value in result.items():
        if not isinstance(value, View):
            raise ValueError(
                f"must hold a tensor under {name!r:.100} but holds a {type(value).__name__}"
            )
    return result


class _Machine:
    """The stack machine. Each instruction that it knows is a method `do_...`.

    It raises `IndexError` or `KeyError` where a pickle takes something that is not on the stack or in
    the memo.
    """

    def __init__(self) -> None:
        self.stack: list[Any] = []
        self._marks: list[int] = []
        self._memo: dict[int, Any] = {}

    def step(self, name: str, argument: Any) -> None:
        if name in _VALUES:
            self._push(argument)
        elif name in _CONSTANTS:
            self._push(_CONSTANTS[name])
        elif name in _TUPLES:
            self._push(tuple(self._pop(_TUPLES[name])))
        elif name in _PUTS:
            self._memo[argument] = self.stack[-1]
        elif name in _GETS:
            self._push(self._memo[argument])
        elif hasattr(self, f"do_{name.lower()}"):
            getattr(self, f"do_{name.lower()}")(argument)
        else:
            raise ValueError(f"uses the pickle instruction {name}, which tensors do not need")

    def _push(self, value: Any) -> None:
        if len(self.stack) >= _MAX_STACK:
            raise ValueError("has a pickle that needs too much memory")
        self.stack.append(value)

    def _pop(self, count: int) -> list[Any]:
        if self._marks and len(self.stack) - count < self._marks[-1]:
            raise IndexError
        values = [self.stack.pop() for _ in range(count)]
        return values[::-1]

    def _pop_to_mark(self) -> list[Any]:
        mark = self._marks.pop()
        values = self.stack[mark:]
        del self.stack[mark:]
        return values

    def do_proto(self, version: int) -> None:
        pass

    def do_frame(self, nbytes: int) -> None:
        pass

    def do_stop(self, _: None) -> None:
        if self._marks or len(self.stack) != 1:
            raise IndexError

    def do_mark(self, _: None) -> None:
        if len(self._marks) >= _MAX_STACK:
            raise ValueError("has a pickle that needs too much memory")
        self._marks.append(len(self.stack))

    def do_memoize(self, _: None) -> None:
        self._memo[len(self._memo)] = self.stack[-1]

    def do_empty_dict(self, _: None) -> None:
        self._push({})

    def do_empty_list(self, _: None) -> None:
        self._push([])

    def do_append(self, _: None) -> None:
        self._extend(self._pop(1))

    def do_appends(self, _: None) -> None:
        self._extend(self._pop_to_mark())

    def _extend(self, values: list[Any]) -> None:
        if not isinstance(self.stack[-1], list):
            raise IndexError
        self.stack[-1].extend(values)

    def do_tuple(self, _: None) -> None:
        self._push(tuple(self._pop_to_mark()))

    def do_setitem(self, _: None) -> None:
        self._update(self._pop(2))

    def do_setitems(self, _: None) -> None:
        self._update(self._pop_to_mark())

    def _update(self, items: list[Any]) -> None:
        target = self.stack[-1]
        if not isinstance(target, dict) or len(items) % 2:
            raise IndexError
        for key, value in zip(items[::2], items[1::2], strict=True):
            if not isinstance(key, str):
                raise ValueError(f"must name tensors by text but uses a {type(key).__name__}")
            if key in target:
                raise ValueError(f"names tensor {key!r:.100} twice")
            target[key] = value

    def do_global(self, names: str) -> None:
        self._push_global(".".join(names.split(" ", 1)))

    def do_stack_global(self, _: None) -> None:
        module, name = self._pop(2)
        if not isinstance(module, str) or not isinstance(name, str):
            raise IndexError
        self._push_global(f"{module}.{name}")

    def _push_global(self, name: str) -> None:
        if name in _UNREAD:
            raise ValueError(
                f"holds numbers of the type {name}, which is not supported; convert them to float32"
            )
        if name not in _GLOBALS:
            raise ValueError(
                f"asks for {name!r:.100}, which is not needed for tensors of a known type and is "
                "refused"
            )
        self._push(_Global(name))

    def do_binpersid(self, _: None) -> None:
        [value] = self._pop(1)
        if not isinstance(value, tuple) or len(value) != 5 or value[0] != "storage":
            raise ValueError("has a reference that is not to a storage")
        _, kind, key, _, size = value
        dtype = STORAGES.get(kind.name) if isinstance(kind, _Global) else None
        if dtype is None or not isinstance(key, str) or not _is_size(size):
            raise ValueError("has a storage that is not well described")
        self._push(Storage(key, dtype, size))

    def do_reduce(self, _: None) -> None:
        called, arguments = self._pop(2)
        if not isinstance(called, _Global) or not isinstance(arguments, tuple):
            raise IndexError
        if called.name == _DICTIONARY and not arguments:
            self._push({})
        elif called.name == _TENSOR and len(arguments) in (6, 7):
            self._push(_view(*arguments[:4]))
        elif called.name == _PARAMETER and len(arguments) == 3 and isinstance(arguments[0], View):
            self._push(arguments[0])
        else:
            raise ValueError(f"has odd arguments of {called.name!r}")

    def do_build(self, _: None) -> None:
        # the attribute `_metadata` of a state dictionary holds the versions of its modules
        self._pop(1)
        if not isinstance(self.stack[-1], dict):
            raise ValueError("sets attributes of something that has none")


def _is_size(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63


def _view(storage: object, offset: object, shape: object, strides: object) -> View:
    if (
        not isinstance(storage, Storage)
        or not isinstance(offset, int)
        or not isinstance(shape, tuple)
        or not isinstance(strides, tuple)
        or len(shape) != len(strides)
        or len(shape) > MAX_DIMENSIONS
        or not all(map(_is_size, (offset, *shape, *strides)))
        or any(size >= 2**31 for size in shape)
        or math.prod(size or 1 for size in shape) >= 2**48
    ):
        raise ValueError("has a tensor with an impossible shape, strides or offset")
    count = math.prod(shape)
    # an empty tensor may have any offset, and an axis of one number any stride; neither is used
    steps = (
        stride if count and size > 1 else 0 for size, stride in zip(shape, strides, strict=True)
    )
    view = View(storage, offset if count else 0, shape, tuple(steps))
    if count and max(count, offset + view.span) > storage.size:
        raise ValueError(
            f"has a tensor of shape {shape} that needs more than the {storage.size} numbers of its "
            "storage"
        )
    return view
