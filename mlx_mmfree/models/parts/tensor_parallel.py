"""Tensor parallelism of transformers: each process holds some heads and some hidden columns.

Shoeybi et al. (arXiv 1909.08053). Embedding, head and norms of the residual stream stay whole.
"""

import mlx.core as mx
import mlx.nn as nn

from ...channel_mixers import GatedLinearUnit
from ...errors import UnsupportedModelError
from ...layers import pack_linears
from ...layers.matrix import matrix_of
from ...layers.sharded_linear import (
    Group,
    all_to_sharded,
    can_shard,
    sharded_norm,
    sharded_to_all,
)
from ...token_mixers import GQA
from .decoder import Decoder

_ATTENTION = ("query_proj", "key_proj", "value_proj", "output_proj", "output_norm")
_FEED_FORWARD = ("gate_proj", "up_proj", "down_proj", "hidden_norm")


def shard(model: Decoder, group: Group | None = None) -> Decoder:
    """Splits a model, in place, over the processes of a group, each of which has loaded it whole.

    Every process must then run the model on the same tokens; all get the same logits. Linears in
    their training form are packed. Ternary products are those of one process bit for bit; float sums
    are taken in another order.

    Args:
        model: A transformer: blocks of `GQA` and a gated feed-forward.
        group: The processes. Default: all that were started together.

    Returns:
        The model.

    Raises:
        UnsupportedModelError: A block is of another kind, or has linears that cannot be split.
        ValueError: The number of processes does not divide heads or hidden columns.

    Example:
        >>> model = shard(load_model("microsoft/bitnet-b1.58-2B-4T"))  # doctest: +SKIP
    """
    group = mx.distributed.init() if group is None else group
    for block in model.blocks:
        _check(block.token_mixer, block.channel_mixer, group.size())
    if group.size() == 1:
        return model
    for block in model.blocks:
        mixer = block.token_mixer
        mixer.num_heads //= group.size()
        mixer.num_kv_heads //= group.size()
        _split(mixer, _ATTENTION, group)
        _split(block.channel_mixer, _FEED_FORWARD, group)
        mx.eval(block.parameters())
        # the whole matrices would otherwise stay in MLX's cache
        mx.clear_cache()
    return model


def _split(mixer: nn.Module, names: tuple[str, ...], group: Group) -> None:
    pack_linears(mixer)
    *columns, rows, norm = names
    for name in columns:
        mixer[name] = all_to_sharded(mixer[name], group)
    mixer[rows] = sharded_to_all(mixer[rows], group)
    if norm in mixer:
        mixer[norm] = sharded_norm(mixer[norm], mixer[rows], group)


def _check(attention: nn.Module, feed_forward: nn.Module, size: int) -> None:
    _check_mixer(attention, GQA, _ATTENTION)
    _check_mixer(feed_forward, GatedLinearUnit, _FEED_FORWARD)
    heads, hidden = attention.num_kv_heads, feed_forward.gate_proj.weight.shape[0]
    if heads % size or hidden % size:
        fitting = [n for n in range(1, heads + 1) if heads % n == 0 == hidden % n]
        raise ValueError(
            f"[shard] the number of processes must divide {heads} key and value heads and {hidden} "
            f"hidden columns but got {size}. Fitting numbers: {', '.join(map(str, fitting))}."
        )
    queries = attention.num_heads * attention.head_dim
    for inputs, linear in ((queries, attention.output_proj), (hidden, feed_forward.down_proj)):
        matrix = matrix_of(linear)
        if matrix is not None and inputs // size % matrix.group_size:
            raise ValueError(
                f"[shard] the part of {inputs} quantized inputs must be a multiple of the group, "
                f"{matrix.group_size}, but got {inputs // size}. Start fewer processes."
            )


def _check_mixer(mixer: nn.Module, kind: type[nn.Module], names: tuple[str, ...]) -> None:
    *linears, _ = names
    if not isinstance(mixer, kind) or not all(name in mixer for name in linears):
        raise UnsupportedModelError(
            "[shard] 'model' must have attention and a gated feed-forward in every block but got a "
            f"{type(mixer).__name__}. Run it in one process."
        )
    for name in linears:
        if not can_shard(mixer[name]):
            raise UnsupportedModelError(
                "[shard] 'model' must have dense, quantized or packed linears but got a "
                f"{type(mixer[name]).__name__}. Fuse an adapter before."
            )
