"""Tensor parallelism: each process holds some heads or channels of every mixer.

Shoeybi et al. (arXiv 1909.08053). Embedding, head and norms of the residual stream stay whole.
"""

from collections.abc import Iterator
from typing import TypeVar

import mlx.core as mx
import mlx.nn as nn

from ...errors import UnsupportedModelError
from ...layers import ChannelMixer, pack_linears
from ...layers.matrix import matrix_of
from ...layers.mixer import Group, Partition, TokenMixer, part_of
from ...layers.sharded_linear import all_to_sharded, can_shard, sharded_norm, sharded_to_all
from .stack import Stack

Mixer = TokenMixer | ChannelMixer
Model = TypeVar("Model", bound=nn.Module)


def shard(model: Model, group: Group | None = None) -> Model:
    """Splits a model, in place, over the processes of a group, each of which has loaded it whole.

    Every process must then run the model on the same input; all get the same result. Linears in their
    training variant are packed. Ternary products equal one process's bit for bit; float sums are taken
    in another order.

    Args:
        model: A model whose mixers have heads or channels that can be told apart.
        group: The processes. Default: all that were started together.

    Returns:
        The model.

    Raises:
        UnsupportedModelError: A mixer cannot be divided, or has linears that cannot be.
        ValueError: The number of processes does not divide heads or channels.

    Example:
        >>> model = shard(load_model("microsoft/bitnet-b1.58-2B-4T"))  # doctest: +SKIP
    """
    group = mx.distributed.init() if group is None else group
    stacks = [module for module in model.modules() if isinstance(module, Stack)]
    mixers = [mixer for stack in stacks for block in stack.blocks for mixer in _mixers(block)]
    sizes = sorted({size for mixer, parts in mixers for size in _divided(mixer, parts)})
    if any(size % group.size() for size in sizes):
        fitting = [n for n in range(1, sizes[0] + 1) if not any(size % n for size in sizes)]
        raise ValueError(
            "[shard] the number of processes must divide the heads and channels of all mixers, "
            f"{', '.join(map(str, sizes))}, but got {group.size()}. Fitting numbers: "
            f"{', '.join(map(str, fitting))}."
        )
    for mixer, parts in mixers:
        _check_groups(mixer, parts, group.size())
    if group.size() == 1:
        return model
    for mixer, parts in mixers:
        _divide(mixer, parts, group)
        mx.eval(mixer.parameters())
        # the whole matrices would otherwise stay in MLX's cache
        mx.clear_cache()
    for stack in stacks:
        for name in stack.channel_arrays:
            if name in stack:
                stack[name] = part_of(stack[name], group, axis=-1)
    return model


def _mixers(block: nn.Module) -> Iterator[tuple[Mixer, Partition]]:
    """The mixers of a block that have weights, and how they can be divided."""
    for name in ("token_mixer", "memory_mixer", "channel_mixer"):
        mixer = block.get(name)
        if mixer is None or not mixer.parameters():
            continue
        if mixer.partition is None:
            raise UnsupportedModelError(
                "[shard] 'model' must have mixers whose heads or channels can be told apart in "
                f"every block but got a {type(mixer).__name__}. Run it in one process."
            )
        for linear in (mixer.partition.rows, *_columns(mixer, mixer.partition)):
            if not can_shard(mixer[linear]):
                raise UnsupportedModelError(
                    "[shard] 'model' must have dense, quantized or packed linears but got a "
                    f"{type(mixer[linear]).__name__}. Fuse an adapter before."
                )
        yield mixer, mixer.partition


def _columns(mixer: Mixer, parts: Partition) -> dict[str, int]:
    return {name: sections for name, sections in parts.columns.items() if name in mixer}


def _divided(mixer: Mixer, parts: Partition) -> Iterator[int]:
    """The numbers that the processes share out."""
    yield from (getattr(mixer, name) for name in parts.counts)
    for name, sections in _columns(mixer, parts).items():
        yield mixer[name].weight.shape[0] // sections


def _check_groups(mixer: Mixer, parts: Partition, size: int) -> None:
    matrix = matrix_of(mixer[parts.rows])
    if matrix is not None and matrix.input_dims // size % matrix.group_size:
        raise ValueError(
            f"[shard] the part of {matrix.input_dims} quantized inputs must be a multiple of the group, "
            f"{matrix.group_size}, but got {matrix.input_dims // size}. Start fewer processes."
        )


def _divide(mixer: Mixer, parts: Partition, group: Group) -> None:
    pack_linears(mixer)
    mixer.take_part(group)
    projections = dict(mixer.projections)
    for name, sections in _columns(mixer, parts).items():
        mixer[name] = all_to_sharded(mixer[name], group, sections)
        if name in projections:
            projections[name] = [width // group.size() for width in projections[name]]
    mixer.declare(projections)
    mixer[parts.rows] = sharded_to_all(mixer[parts.rows], group)
    if parts.norm is not None and parts.norm in mixer:
        mixer[parts.norm] = sharded_norm(mixer[parts.norm], mixer[parts.rows], group)
    for name in parts.counts:
        setattr(mixer, name, getattr(mixer, name) // group.size())
    for name in parts.arrays:
        if name in mixer:
            mixer[name] = part_of(mixer[name], group)
