"""What processes that `mlx.launch` starts together share: the output of one, and one seed."""

import argparse
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from typing import TYPE_CHECKING

from ...errors import UsageError

if TYPE_CHECKING:
    import mlx.core as mx


def add_tensor_parallel_flag(parser: argparse.ArgumentParser) -> None:
    parser.add_argument_group("several processes").add_argument(
        "--tensor-parallel",
        action="store_true",
        help="split a transformer over the processes that 'mlx.launch -n N --backend ring' started; "
        "N must divide its number of key and value heads",
    )


def tensor_group(args: argparse.Namespace) -> "mx.distributed.Group | None":
    """The processes over which `--tensor-parallel` splits the model, or `None` without the flag.

    Raises:
        UsageError: There is only one process.
    """
    import mlx.core as mx

    if not args.tensor_parallel:
        return None
    group = mx.distributed.init()
    if group.size() == 1:
        raise UsageError(
            "[generate] 'tensor_parallel' must be used in several processes but got one. Start them "
            "with 'mlx.launch -n 2 --backend ring -- mmfree generate --tensor-parallel ...'."
        )
    return group


@contextmanager
def quiet_unless_first(rank: int) -> Iterator[None]:
    """Inside the `with` block, only the process of rank 0 prints."""
    if rank == 0:
        yield
        return
    with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere), redirect_stderr(nowhere):
        yield


def common_seed(group: "mx.distributed.Group") -> int:
    """A random seed that is the same in all processes."""
    import mlx.core as mx

    own = secrets.randbelow(2**31) if group.rank() == 0 else 0
    return int(mx.distributed.all_sum(mx.array(own, mx.int32), group=group))
