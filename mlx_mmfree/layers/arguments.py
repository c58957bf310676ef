"""Checks of the arguments of layers and mixers."""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx


def check_sizes(caller: str, **sizes: int) -> None:
    """Refuses sizes that are no positive integers.

    Args:
        caller: The caller that the error names.
        sizes: By the names of the arguments.

    Raises:
        TypeError: A size is not an integer.
        ValueError: A size is below 1.
    """
    for name, size in sizes.items():
        if not isinstance(size, int) or isinstance(size, bool):
            raise TypeError(f"[{caller}] '{name}' must be a positive integer but got {size!r:.80}.")
        if size < 1:
            raise ValueError(f"[{caller}] '{name}' must be positive but got {size}.")


def check_optional_sizes(caller: str, **sizes: int | None) -> None:
    """`check_sizes` of those that are given, not `None`."""
    check_sizes(caller, **{name: size for name, size in sizes.items() if size is not None})


def check_counts(caller: str, **counts: int) -> None:
    """Refuses counts that are no integers from 0.

    Args:
        caller: The caller that the error names.
        counts: By the names of the arguments.

    Raises:
        TypeError: A count is not an integer.
        ValueError: A count is negative.
    """
    for name, count in counts.items():
        if not isinstance(count, int) or isinstance(count, bool):
            raise TypeError(f"[{caller}] '{name}' must be an integer from 0 but got {count!r:.80}.")
        if count < 0:
            raise ValueError(f"[{caller}] '{name}' must not be negative but got {count}.")


def check_array(caller: str, x: Any, name: str = "x") -> None:
    """Refuses what is no array of MLX.

    Raises:
        TypeError: It is one of another library, a list, or something else.
    """
    if isinstance(x, mx.array):
        return
    kind = f"{type(x).__module__}.{type(x).__name__}".removeprefix("builtins.")
    hint = ""
    if isinstance(x, str):
        hint = " Encode it: mx.array([tokenizer.encode(text)])."
    elif hasattr(x, "shape") or isinstance(x, (list, tuple, int, float)):
        format = f"{name}.numpy()" if hasattr(x, "numpy") else name
        hint = f" Convert it: mx.array({format})."
    raise TypeError(f"[{caller}] '{name}' must be an mx.array but got {kind}.{hint}")


def boolean_masks(
    caller: str, shape: Sequence[int], **masks: mx.array | None
) -> list[mx.array | None]:
    """Masks that tell of each position of a batch whether it counts, as booleans.

    Args:
        caller: The caller that errors name.
        shape: The batch and the length.
        masks: By the names of the arguments. Integers count where they are not 0; `None` is no mask.

    Raises:
        TypeError: One holds neither booleans nor integers.
        ValueError: One has another shape.
    """
    found: list[mx.array | None] = []
    for name, mask in masks.items():
        if mask is None:
            found.append(None)
            continue
        check_array(caller, mask, name)
        if mask.dtype != mx.bool_ and not mx.issubdtype(mask.dtype, mx.integer):
            raise TypeError(
                f"[{caller}] '{name}' must hold booleans but got {mask.dtype}. Convert it: "
                f"{name}.astype(mx.bool_)."
            )
        if mask.shape != tuple(shape):
            raise ValueError(
                f"[{caller}] '{name}' must have the shape (batch, length), {tuple(shape)}, but got "
                f"{mask.shape}."
            )
        found.append(mask.astype(mx.bool_))
    return found


def check_sequences(caller: str, x: mx.array, dims: int) -> None:
    """Refuses an input of a token mixer that is not `(B, L, D)` with `D = dims` floats.

    Raises:
        TypeError: It is no array, or holds no floats.
        ValueError: It has another number of axes or another size.
    """
    check_array(caller, x)
    if x.ndim != 3:
        hint = " Add a batch axis: x[None]." if x.ndim == 2 else ""
        raise ValueError(
            f"[{caller}] 'x' must have the three axes (batch, length, dims) but got shape "
            f"{x.shape}.{hint}"
        )
    check_features(caller, x, dims)


def check_features(caller: str, x: mx.array, dims: int) -> None:
    """Refuses an input whose last axis does not hold `dims` floats.

    Raises:
        TypeError: It is no array, or holds no floats.
        ValueError: It has another size.
    """
    check_array(caller, x)
    if not mx.issubdtype(x.dtype, mx.floating):
        raise TypeError(
            f"[{caller}] 'x' must hold floats but got {x.dtype}. Convert it: x.astype(mx.float32)."
        )
    shape = x.shape
    if not shape or shape[-1] != dims:
        raise ValueError(
            f"[{caller}] 'x' must have {dims} values in its last axis but got shape {shape}."
        )


def dims_of_a_head(caller: str, dims: int, num_heads: int, head_dim: int | None = None) -> int:
    """`head_dim`, or by default what each of `num_heads` gets of `dims`.

    Args:
        caller: The caller that errors name.
        dims: Numbers of all heads.
        num_heads: Heads.
        head_dim: Numbers of one head.

    Raises:
        TypeError: One is not an integer.
        ValueError: One is not positive, or the heads do not divide the dims.
    """
    check_sizes(caller, dims=dims, num_heads=num_heads)
    check_optional_sizes(caller, head_dim=head_dim)
    if head_dim is not None:
        return head_dim
    if dims % num_heads:
        raise ValueError(
            f"[{caller}] 'num_heads' must divide 'dims' but got {num_heads} heads for {dims} dims."
        )
    return dims // num_heads
