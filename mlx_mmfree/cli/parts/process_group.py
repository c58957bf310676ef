"""Processes that `mlx.launch` starts together: the output of one, and one seed."""

import argparse
import ctypes.util
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from typing import TYPE_CHECKING, Any

from ...errors import UsageError
from ...platform.process_group import wait_for_group

if TYPE_CHECKING:
    import mlx.core as mx


BACKENDS = ("any", "ring", "mpi", "nccl", "jaccl")

_REMEDIES = {
    "mpi": "Install Open MPI, or give the path of its library in MLX_MPI_LIBNAME",
    "nccl": "NCCL comes with MLX for CUDA",
    "jaccl": "JACCL comes with MLX for macOS 26.2 or newer",
}


def add_process_flags(parser: argparse.ArgumentParser) -> Any:
    """Adds `--backend`, and returns its group of flags."""
    group = parser.add_argument_group("several processes")
    group.add_argument(
        "--backend",
        choices=BACKENDS,
        default="any",
        help="what connects the processes that 'mlx.launch' started; 'any' takes what it has prepared, "
        "or runs alone (any)",
    )
    return group


def add_tensor_parallel_flag(parser: argparse.ArgumentParser) -> None:
    add_process_flags(parser).add_argument(
        "--tensor-parallel",
        action="store_true",
        help="split the model over the processes that 'mlx.launch -n N --backend ring' started; "
        "N must divide its heads and channels",
    )


def connected(args: argparse.Namespace, name: str) -> "mx.distributed.Group":
    """The processes that were started together, connected as `--backend` says.

    Raises:
        UsageError: This build of MLX lacks the backend, or the processes cannot be connected.
    """
    import mlx.core as mx

    backend = args.backend
    library = ctypes.util.find_library("mpi") if backend == "mpi" else None
    if library is not None:
        # MLX looks for 'libmpi.so', which only the headers' package of a Linux system brings
        os.environ.setdefault("MLX_MPI_LIBNAME", library)
    if not mx.distributed.is_available(backend):
        found = [each for each in BACKENDS if mx.distributed.is_available(each)]
        raise UsageError(
            f"[{name}] 'backend' must be one that MLX has here ({', '.join(found)}) but got "
            f"{backend!r}. {_REMEDIES[backend]}."
        )
    wait_for_group()
    try:
        return mx.distributed.init(strict=backend != "any", backend=backend)
    except (RuntimeError, ValueError) as error:
        raise UsageError(
            f"[{name}] 'backend' must connect the processes but {backend!r} failed: {error}. Start "
            f"them with 'mlx.launch -n 2 --backend ring -- mmfree {name} ...'."
        ) from error


def tensor_group(args: argparse.Namespace) -> "mx.distributed.Group | None":
    """The processes over which `--tensor-parallel` splits the model, or `None` without the flag.

    Raises:
        UsageError: There is only one process, or the processes cannot be connected.
    """
    if not args.tensor_parallel:
        return None
    group = connected(args, "generate")
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
