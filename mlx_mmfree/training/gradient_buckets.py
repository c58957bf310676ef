"""Gradients put together into few messages, in the order in which the backward pass computes them.

`mlx.nn.average_gradients` fills its messages in the order of the forward pass, so that the first one
waits for the end of the backward pass. It divides by the number of processes, and sends each array
alone once their dtypes differ.
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate

import mlx.core as mx

_BYTES = 25 * 2**20
_MOST = 32
_ITEMSIZE = mx.float32.size


def backward_order(names: Iterable[str]) -> list[str]:
    """The names of parameters, those first whose gradients are computed first.

    The last layers come first. What the model itself holds, such as lower bounds, belongs to all
    blocks, and its gradient is complete only after the first one's.
    """
    return sorted(reversed(list(names)), key=lambda name: "." not in name)


def buckets(arrays: Sequence[mx.array]) -> Iterator[list[mx.array]]:
    """Groups arrays, in order, into buckets of at most 25 MiB of float32 or a single larger array.

    Large models have larger buckets, at most about 32, since each has a cost of its own.
    """
    largest = max(_BYTES // _ITEMSIZE, -(-sum(array.size for array in arrays) // _MOST))
    bucket: list[mx.array] = []
    size = 0
    for array in arrays:
        if bucket and size + array.size > largest:
            yield bucket
            bucket, size = [], 0
        bucket.append(array)
        size += array.size
    if bucket:
        yield bucket


def joined(bucket: Sequence[mx.array]) -> mx.array:
    """The numbers of all arrays of a bucket, float32 `(N,)`."""
    return mx.concatenate([array.astype(mx.float32).reshape(-1) for array in bucket])


def parted(numbers: mx.array, bucket: Sequence[mx.array]) -> list[mx.array]:
    """The inverse of `joined`: arrays of the shapes and dtypes of those in a bucket."""
    ends = list(accumulate(array.size for array in bucket))
    return [
        piece.reshape(array.shape).astype(array.dtype)
        for piece, array in zip(mx.split(numbers, ends[:-1]), bucket, strict=True)
    ]
