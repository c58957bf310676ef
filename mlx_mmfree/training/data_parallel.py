"""Training on several machines or processes, each with a share of every batch."""

import math
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, wait
from functools import partial
from itertools import accumulate
from queue import SimpleQueue
from threading import Thread
from typing import Any, NoReturn, TypeVar

import mlx.core as mx
from mlx.utils import tree_flatten, tree_unflatten

from ..errors import TrainingError
from ..ops.device import on_cpu


class Exchanges:
    """Runs exchanges in the order in which they are asked for, beside the thread that computes.

    MLX can queue many exchanges. If another process dies, however, those in the queue wait for it for
    ever, and MLX waits for them when it queues the next one or ends. Here an exchange begins after the
    one before it has ended, so that nothing is left in MLX's queue when one fails. After one has failed,
    all later ones fail with the same error.
    """

    def __init__(self) -> None:
        self._tasks: SimpleQueue[tuple[Callable[[], mx.array], Future[mx.array]]] = SimpleQueue()
        self._thread: Thread | None = None

    def add(self, exchange: Callable[[], mx.array]) -> "Future[mx.array]":
        """The future result of an exchange.

        Args:
            exchange: Builds the array that is exchanged from arrays of which each has been computed, or
                is being computed after `mx.async_eval`.
        """
        if self._thread is None:
            # an exchange with a process that hangs cannot be ended, and must not keep this one running
            self._thread = Thread(target=self._work, daemon=True)
            self._thread.start()
        future: Future[mx.array] = Future()
        self._tasks.put((exchange, future))
        return future

    def _work(self) -> None:
        failure: Exception | None = None
        while True:
            exchange, future = self._tasks.get()
            if failure is not None:
                future.set_exception(failure)
                continue
            try:
                result = exchange()
                mx.eval(result)
            except Exception as error:
                failure = error
                future.set_exception(error)
            else:
                future.set_result(result)
                del result
            # what was exchanged is not kept until the next exchange
            del exchange, future


_BYTES = 25 * 2**20
_MOST = 32
_ITEMSIZE = mx.float32.size


def backward_order(names: Iterable[str]) -> list[str]:
    """The names of parameters, those first whose gradients are computed first.

    The last layers come first. What the model itself holds, such as lower bounds, belongs to all
    blocks, and its gradient is complete only after the first one's.
    """
    return sorted(reversed(list(names)), key=lambda name: "." not in name)


# `mlx.nn.average_gradients` fills its messages in the order of the forward pass, so that the first one
# waits for the end of the backward pass, and sends each array alone once their dtypes differ
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


def fused(bucket: Sequence[mx.array]) -> mx.array:
    """The numbers of all arrays of a bucket, float32 `(N,)`."""
    return mx.concatenate([array.astype(mx.float32).reshape(-1) for array in bucket])


def split_bucket(numbers: mx.array, bucket: Sequence[mx.array]) -> list[mx.array]:
    """The inverse of `fused`: arrays of the shapes and dtypes of a bucket."""
    ends = list(accumulate(array.size for array in bucket))
    return [
        chunk.reshape(array.shape).astype(array.dtype)
        for chunk, array in zip(mx.split(numbers, ends[:-1]), bucket, strict=True)
    ]


Result = TypeVar("Result")
Tree = TypeVar("Tree")

DEFAULT_TIMEOUT_S = 300.0

_BEAT_S = 5.0
_STATUS = 2
_BACKEND_ERROR = re.compile(r"\[(ring|mpi|nccl|jaccl)\]")


class DataParallel:
    """The processes of a run.

    Losses, tokens and gradients are summed over the processes and divided once. A run therefore equals
    a run of one process with all rows, but for the order of the sums. After each step, all processes
    have the same weights, bit for bit. Only the first one writes files.

    Args:
        group: The processes; `None` takes all that `mlx.launch` started together, or this one alone.
        timeout_s: Seconds that a process waits for another one. It then prints a message and ends with
            status 2, since MLX offers no other way to end the wait.

    Raises:
        TrainingError: `timeout_s` is not positive.
    """

    def __init__(
        self, group: mx.distributed.Group | None = None, *, timeout_s: float = DEFAULT_TIMEOUT_S
    ):
        if not 0 < timeout_s < math.inf:
            raise TrainingError(
                f"[training] 'process_timeout_s' must be positive and finite but got {timeout_s}."
            )
        self._group = mx.distributed.init() if group is None else group
        self._timeout_s = timeout_s
        self._exchanges = Exchanges()
        # each thread has streams of its own; on a GPU, MLX chooses the device
        self._stream = mx.cpu if on_cpu() else None

    @property
    def rank(self) -> int:
        return self._group.rank()

    @property
    def size(self) -> int:
        return self._group.size()

    @property
    def is_first(self) -> bool:
        """True if this is the process that writes files."""
        return self.rank == 0

    def sums(
        self, loss: mx.array, counts: mx.array, gradient: Any
    ) -> tuple[mx.array, mx.array, Any]:
        """Sums loss, counts and gradients over all processes, in float32.

        What has not been computed yet is computed here, and gradients are exchanged meanwhile.

        Args:
            loss: Sum of the losses of this process, float32 `()`.
            counts: Whole numbers of this process, such as the number of its learned tokens, int32.
            gradient: A tree with the sums of the gradients of this process, of any float dtypes.

        Raises:
            TrainingError: Another process has ended.
        """
        if self.size == 1:
            return loss, counts, gradient
        gradients: dict[str, mx.array] = dict(tree_flatten(gradient))
        order = backward_order(gradients)
        # float32 holds the sums of these two halves exactly
        halves = mx.stack([counts // 4096, counts % 4096])
        loss, halves, *summed = self._summed([loss, halves, *(gradients[name] for name in order)])
        counts = halves[0] * 4096 + halves[1]
        gradients |= zip(order, summed, strict=True)
        return loss, counts, tree_unflatten(list(gradients.items()))

    def of_first(self, tree: Tree) -> Tree:
        """Gives all processes the first one's tree of float arrays or numbers, in float32 precision."""
        if self.size == 1:
            return tree
        values: dict[str, mx.array | float] = dict(tree_flatten(tree))
        arrays = [mx.array(value) for value in values.values()]
        if not self.is_first:
            arrays = [mx.zeros_like(array) for array in arrays]
        shared = [
            (name, array if isinstance(value, mx.array) else array.item())
            for (name, value), array in zip(values.items(), self._summed(arrays), strict=True)
        ]
        result: Tree = tree_unflatten(shared)
        return result

    def means(self, arrays: dict[str, mx.array]) -> dict[str, mx.array]:
        """The means over all processes of arrays by name, in float32 precision.

        Raises:
            TrainingError: Another process has ended.
        """
        if self.size == 1 or not arrays:
            return arrays
        totals = self._summed([array.astype(mx.float32) / self.size for array in arrays.values()])
        return {
            name: mx.round(total).astype(array.dtype)
            if mx.issubdtype(array.dtype, mx.integer)
            else total.astype(array.dtype)
            for (name, array), total in zip(arrays.items(), totals, strict=True)
        }

    def after_first(self, action: Callable[[], Result]) -> Result:
        """Runs an action in the first process, and then in the others, which wait for it.

        Args:
            action: The action. It may take any time. It runs in a thread and must not use MLX.

        Returns:
            What the action returns in this process.

        Raises:
            TrainingError: Another process has ended.
        """
        if self.size == 1:
            return action()
        if not self.is_first:
            while not self.largest(0):
                pass
            return action()
        future = _started(action)
        while True:
            wait([future], timeout=min(_BEAT_S, self._timeout_s / 4))
            done = future.done()
            if done:
                future.result()
            # tells the others that this process is alive or done
            self.largest(int(done))
            if done:
                return future.result()

    def largest(self, value: int) -> int:
        """The largest of the numbers that the processes give.

        Raises:
            TrainingError: Another process has ended.
        """
        if self.size == 1:
            return value
        return int(self._run_collective(mx.distributed.all_max, mx.array(value, mx.int32)))

    def check_same(self, name: str, value: int) -> None:
        """Refuses a number that is not the same in all processes.

        Raises:
            TrainingError: The number differs.
        """
        bounds = self._run_collective(mx.distributed.all_max, mx.array([value, -value], mx.int32))
        high, low = int(bounds[0]), -int(bounds[1])
        if low != high:
            raise TrainingError(
                f"[training] '{name}' must be the same in all processes but got {low} to "
                f"{high}. Give all of them the same folder for the run."
            )

    def share(self, batch_size: int) -> tuple[int, int]:
        """The rank of this process and the number of processes, between which a batch is split.

        Raises:
            TrainingError: The batch cannot be split evenly.
        """
        if batch_size % self.size:
            raise TrainingError(
                f"[training] 'batch_size' must be a multiple of the number of processes, {self.size}, "
                f"but got {batch_size}. Change one of the two."
            )
        return self.rank, self.size

    def _summed(self, arrays: Sequence[mx.array]) -> list[mx.array]:
        """The arrays summed over the processes in float32.

        Each bucket is sent as soon as its arrays have been computed, while the rest are.
        """
        parts = list(buckets(arrays))
        totals = self._exchanged(parts)
        # the time that this process computes is not spent on waiting for others
        mx.synchronize()
        return [
            chunk
            for total, part in zip(totals, parts, strict=True)
            for chunk in split_bucket(self._wait(total), part)
        ]

    def _exchanged(self, parts: Sequence[Sequence[mx.array]]) -> "list[Future[mx.array]]":
        """For each bucket its future sum over the processes."""
        futures = []
        for part in parts:
            message = fused(part)
            mx.async_eval(message)
            futures.append(self._begin(mx.distributed.all_sum, message))
        return futures

    def _run_collective(self, collective: Callable[..., mx.array], array: mx.array) -> mx.array:
        """Runs a collective operation on an array."""
        mx.eval(array)
        return self._wait(self._begin(collective, array))

    def _begin(self, collective: Callable[..., mx.array], array: mx.array) -> "Future[mx.array]":
        return self._exchanges.add(
            partial(collective, array, group=self._group, stream=self._stream)
        )

    def _wait(self, exchange: "Future[mx.array]") -> mx.array:
        """Waits for the result of a collective operation whose input has been computed."""
        try:
            return exchange.result(self._timeout_s)
        except TimeoutError:
            self._give_up()
        except RuntimeError as error:
            if not _BACKEND_ERROR.match(str(error)):
                raise
            raise TrainingError(
                f"[training] another of the {self.size} processes has ended, so process {self.rank} "
                f"stops ({error}). Start all of them again: they go on from the last checkpoint."
            ) from error

    def _give_up(self) -> NoReturn:
        """Ends the process, because the thread that waits inside MLX cannot be woken."""
        message = (
            f"error: [training] process {self.rank} has waited {self._timeout_s:g} s for another of the "
            f"{self.size} processes, which hangs or was stopped. Start all of them again: they go "
            "on from the last checkpoint. 'process_timeout_s' sets how long a process waits."
        )
        sys.stdout.flush()
        os.write(2, f"\n{message}\n".encode())
        os._exit(_STATUS)


def _started(action: Callable[[], Result]) -> "Future[Result]":
    """Starts an action in a thread and returns its future result."""
    future: Future[Result] = Future()

    def work() -> None:
        try:
            future.set_result(action())
        except BaseException as error:
            future.set_exception(error)

    Thread(target=work, daemon=True).start()
    return future
