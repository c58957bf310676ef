"""Unified memory: what a model needs, whether the device has it, and MLX's limits while it runs."""

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_reduce

from .. import ops
from ..errors import MMFreeError
from ..layers.matrix import matrices, matrix_of
from ..layers.states import HELD_TAILS, TAIL_SLOTS
from ..models import Decoder
from ..ops.device import backend_report, forced_backend, runs_metal_kernels
from ..ops.ternary import packed_width
from ..platform.device import DeviceInfo, device_info
from ..platform.resident_memory import BYTES_PER_GB
from .reader import PREFILL_STEP_SIZE, fixed_state, with_tails
from .states import blank_state
from .wired_memory import MARGIN_BYTES, Setter, wired

# Float32 values that are alive at once, for each input and output of the widest linear (measured).
_COPIES_OF_WIDEST = 6
# Queries whose weights are alive beside the whole chunk's (measured).
_ATTENTION_BLOCK = 256
# Copies of matrices while they are unpacked (measured).
_COPIES_OF_UNPACKED = 1.5


@dataclass(frozen=True)
class MemoryNeed:
    """The memory of running a model.

    Attributes:
        weights_bytes: The loaded weights.
        state_bytes: What the model carries from token to token.
        activations_bytes: About the most that reading one chunk of a prompt takes.

    Example:
        >>> MemoryNeed(weights_bytes=1000, state_bytes=20, activations_bytes=300).total_bytes
        1320
    """

    weights_bytes: int
    state_bytes: int
    activations_bytes: int

    @property
    def total_bytes(self) -> int:
        return self.weights_bytes + self.state_bytes + self.activations_bytes


def memory_need(
    model: Decoder,
    weights_bytes: int,
    *,
    batch_size: int = 1,
    prefill_step_size: int = PREFILL_STEP_SIZE,
    context_length: int = 0,
) -> MemoryNeed:
    """Estimates the memory for running a model; its own weights may still be unloaded.

    Args:
        model: The architecture; only shapes are looked at, nothing is computed.
        weights_bytes: Size of the weights in memory.
        batch_size: Texts at a time.
        prefill_step_size: Positions of each prompt read at a time.
        context_length: The longest text, prompt included; what attention keeps grows with it. 0 if it
            is not known.

    Returns:
        Bytes of weights, state and activations.

    Example:
        >>> from mlx_mmfree import demo, load
        >>> model, tokenizer = load(demo.path())
        >>> need = memory_need(model, weights_bytes=3_300_000, context_length=2048)
        >>> need.state_bytes == memory_need(model, 3_300_000, context_length=4096).state_bytes
        True
    """
    if context_length:
        prefill_step_size = min(prefill_step_size, context_length)
    widths = [width for block in model.blocks for width in _widths(block)]
    values = _COPIES_OF_WIDEST * max(widths, default=0) * batch_size * prefill_step_size
    values += _scores(model, batch_size, prefill_step_size, context_length) + _unpacked(model)
    state = blank_state(model, batch_size, context_length)
    return MemoryNeed(
        weights_bytes=weights_bytes,
        state_bytes=_nbytes(state) + (_tail_bytes(model, state) if runs_metal_kernels() else 0),
        activations_bytes=values * mx.float32.size,
    )


def _nbytes(tree: Any) -> int:
    return int(tree_reduce(lambda total, array: total + array.nbytes, tree, 0))


def _tail_bytes(model: Decoder, state: tuple[Any, ...]) -> int:
    """The tails of attention layers, in which a GPU keeps the last tokens."""
    fixed, capacities = fixed_state(model, state, 1)
    if not capacities:
        return 0
    return HELD_TAILS * (_nbytes(with_tails(model, fixed, TAIL_SLOTS)) - _nbytes(fixed))


def _widths(block: nn.Module) -> list[int]:
    """How many numbers each projection of a block takes and gives for a position."""
    found: list[int] = []
    for mixer in block.children().values():
        own = getattr(mixer, "widths", None)
        weights = matrices(mixer).values() if own is None else ()
        found += own or [matrix.input_dims + matrix.output_dims for matrix in weights]
    return found


def _scores(model: Decoder, batch_size: int, length: int, context_length: int) -> int:
    """The most numbers that attention weights take; kernels keep none."""
    token = mx.zeros((1, 1, 1, 32))
    if _backend("attention", token, token, token, None) in ("metal", "cuda", "native"):
        return 0
    queries = length + min(length, _ATTENTION_BLOCK)
    return max(
        (
            mixer.score_count(batch_size, queries, length, context_length)
            for mixer in model.token_mixers
        ),
        default=0,
    )


def _unpacked(model: Decoder) -> int:
    """The most numbers that ternary matrices take where a backend unpacks them to multiply."""
    weight = mx.zeros((1, packed_width(32)), mx.uint32)
    if _backend("ternary_matmul", mx.zeros((1, 32)), weight, codes=True) != "reference":
        return 0
    parts = [model, *(mixer for block in model.blocks for mixer in block.children().values())]
    most = 0
    for part in parts:
        # matrices that share an input are unpacked together
        sizes: Counter[int] = Counter()
        for module in part.children().values():
            matrix = matrix_of(module) if isinstance(module, nn.Module) else None
            if matrix is not None and matrix.is_ternary:
                sizes[matrix.input_dims] += matrix.input_dims * matrix.output_dims
        most = max(most, *sizes.values(), 0)
    return int(_COPIES_OF_UNPACKED * most)


def _backend(op: str, *args: Any, **kwargs: Any) -> str:
    report = backend_report(f"{ops.__name__}.{op}", *args, **kwargs)
    runs = (name for name, reason in report.items() if reason is None)
    return forced_backend() or next(runs)


def joint_bytes(needs: Sequence[MemoryNeed]) -> int:
    """The memory of several models that are loaded together and compute in turn.

    Example:
        >>> joint_bytes([MemoryNeed(1000, 20, 300), MemoryNeed(500, 10, 400)])
        1930
    """
    loaded = sum(need.weights_bytes + need.state_bytes for need in needs)
    return loaded + max((need.activations_bytes for need in needs), default=0)


def check_memory(need: MemoryNeed, device: DeviceInfo | None = None) -> str | None:
    """Compares what a model needs with what the device offers.

    Args:
        need: What the model needs.
        device: What there is. Default: MLX's default device.

    Returns:
        A line that says what does not fit, or `None`.

    Raises:
        MMFreeError: The weights alone are larger than the device's whole memory.

    Example:
        >>> need = MemoryNeed(weights_bytes=1000, state_bytes=20, activations_bytes=300)
        >>> check_memory(need) is None
        True
    """
    device = device_info() if device is None else device
    if need.weights_bytes > device.memory_bytes:
        raise MMFreeError(
            f"[memory] the weights need {_gb(need.weights_bytes)} but {device.name} has "
            f"{_gb(device.memory_bytes)} of memory. Choose a smaller model or packed weights."
        )
    verb, offered = memory_offer(device)
    if need.total_bytes <= offered:
        return None
    return (
        f"[memory] the model needs {_gb(need.total_bytes)} (weights {_gb(need.weights_bytes)}, state "
        f"{_gb(need.state_bytes)}, one chunk of the prompt {_gb(need.activations_bytes)}) but "
        f"{device.name} {verb} {_gb(offered)}: it may be slow or fail. Reduce the prefill step size "
        "or the batch size, or close other programs."
    )


def memory_offer(device: DeviceInfo) -> tuple[str, int]:
    """How many bytes a device offers now, after the word for it: it "has" them, or "has free"."""
    offers = {
        "recommends at most": device.working_set_bytes,
        "has free": device.available_bytes,
        "has": device.memory_bytes,
    }
    return min(
        ((verb, size) for verb, size in offers.items() if size is not None),
        key=lambda offer: offer[1],
    )


def _gb(size_bytes: int) -> str:
    return f"{size_bytes / BYTES_PER_GB:.3g} GB"


@contextmanager
def memory_limits(
    model_bytes: int,
    *,
    margin_bytes: int = MARGIN_BYTES,
    wired_bytes: int | None = None,
    cache_bytes: int | None = None,
    memory_bytes: int | None = None,
    device: DeviceInfo | None = None,
    set_wired: Setter = mx.set_wired_limit,
    set_cache: Setter = mx.set_cache_limit,
    set_memory: Setter = mx.set_memory_limit,
) -> Iterator[None]:
    """Sets MLX's limits for a model inside the `with` block and restores them after it.

    Wired memory stays resident, so a model is not paged out between tokens; cached memory is kept
    by MLX for later arrays. Both default to the model plus a margin, wired memory at most to what
    Metal recommends. Only Metal has wired memory; elsewhere its limit has no effect.

    Args:
        model_bytes: Size of the model.
        margin_bytes: Added to it.
        wired_bytes: Wired limit instead; 0 wires nothing.
        cache_bytes: Cache limit instead.
        memory_bytes: MLX's limit for all memory; by default it is left alone.
        device: What there is. Default: MLX's default device.
        set_wired: Sets the wired limit and returns the old one.
        set_cache: Sets the cache limit and returns the old one.
        set_memory: Sets the memory limit and returns the old one.

    Raises:
        ValueError: A size is negative, or `wired_bytes` is more than Metal recommends.

    Example:
        >>> with memory_limits(2**30, cache_bytes=2**28):
        ...     before = mx.set_cache_limit(2**28)
        >>> before == 2**28
        True
    """
    sizes = {
        "margin_bytes": margin_bytes,
        "wired_bytes": wired_bytes,
        "cache_bytes": cache_bytes,
        "memory_bytes": memory_bytes,
    }
    for name, size in sizes.items():
        if size is not None and size < 0:
            raise ValueError(f"[memory_limits] '{name}' must not be negative but got {size}.")
    working_set = (device_info() if device is None else device).working_set_bytes
    limit = model_bytes + margin_bytes
    if wired_bytes is None:
        wired_bytes = limit if working_set is None else min(limit, working_set)
    elif working_set is not None and wired_bytes > working_set:
        raise ValueError(
            f"[memory_limits] 'wired_bytes' must be at most {working_set}, which Metal recommends, "
            f"but got {wired_bytes}."
        )
    with ExitStack() as stack:
        if memory_bytes is not None:
            stack.callback(set_memory, set_memory(memory_bytes))
        stack.callback(set_cache, set_cache(limit if cache_bytes is None else cache_bytes))
        # work under way still counts on the limits, and is waited for before they are restored
        stack.enter_context(wired(wired_bytes, set_wired))
        yield
