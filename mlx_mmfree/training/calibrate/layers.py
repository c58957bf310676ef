"""The blocks of a dense model, read from its files a few at a time."""

from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from math import prod
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_unflatten

from ...errors import TrainingError
from ...hub.checkpoint.parameter_reader import ParameterReader
from ...hub.checkpoint.weight_format import code_format
from ...layers.context import Context
from ...layers.matrix import matrices
from ...models import Block, Decoder, architecture_of
from ...ops.device import FLOATS

_CALLER = "calibrate"


class LayerFiles:
    """The layers of a checkpoint. None has weights but inside of `loaded`.

    Args:
        reader: The checkpoint.
        group_size: Inputs of its linears that are to share a scale.

    Attributes:
        model: The model without the weights of its blocks, embedding and head.
        linears: By block, the names within it of the linears that become ternary.

    Raises:
        TrainingError: It is no model of causal blocks with dense linears, or the groups do not divide
            their inputs.
    """

    def __init__(self, reader: ParameterReader, group_size: int):
        self._reader = reader
        self.model: Decoder = reader.model
        self._check()
        self.linears = [self._linears(block, group_size) for block in self.model.blocks]
        self.model.eval()
        outside = [
            name for name in reader.shapes if not name.startswith(("blocks.", "embed.", "head."))
        ]
        self._outside = outside

    def load_rest(self) -> None:
        """Reads what belongs to no block, embedding or head, such as the last norm and shared gates."""
        self._read(self._outside, mx.float32)

    def _check(self) -> None:
        model: Any = self.model
        why = None
        if not isinstance(model, Decoder) or not model.is_causal:
            why = "does not continue texts"
        elif "positions" in model or not all(isinstance(block, Block) for block in model.blocks):
            why = "has other parts than an embedding, plain blocks, a norm and a head"
        elif code_format()[0].method not in architecture_of(model.config).packed_formats:
            why = (
                f"is a {architecture_of(model.config).name}, which is not read with codes of 2 bits"
            )
        elif any(matrix.is_packed or matrix.is_ternary for matrix in matrices(model).values()):
            why = "is in few bits already"
        if why is not None:
            folder = self._reader.checkpoint.folder
            raise TrainingError(
                f"[{_CALLER}] 'model' must be a dense language model but '{folder}' {why}. "
                "Give a dense Llama, Qwen3, Qwen3.5, Qwen3-MoE or HGRNBit, or a dense student of "
                "`mmfree distil`."
            )

    def _linears(self, block: nn.Module, group_size: int) -> list[str]:
        found = []
        for name, matrix in matrices(block).items():
            if not matrix.is_plain or matrix.is_embedding:
                continue
            if matrix.input_dims % group_size:
                raise TrainingError(
                    f"[{_CALLER}] 'group_size' must divide the {matrix.input_dims} inputs of the "
                    f"linears but got {group_size}. Give a smaller one, or use `mmfree ternarize`."
                )
            found.append(name)
        return found

    @contextmanager
    def loaded(
        self, numbers: Sequence[int], dtype: mx.Dtype, left_out: Collection[str] = ()
    ) -> Iterator[list[Block]]:
        """The blocks with these numbers, with dense weights inside the `with` block.

        Args:
            numbers: The layers.
            dtype: Their dtype in memory.
            left_out: The paths of linears whose weights are not read.
        """
        weights = {f"{path}.weight" for path in left_out}
        with self._restored(numbers) as (blocks, names):
            self._read([name for name in names if name not in weights], dtype)
            yield blocks

    @contextmanager
    def _restored(self, numbers: Sequence[int]) -> Iterator[tuple[list[Any], list[str]]]:
        """Blocks and the names of their parameters. At the end, they have their own linears again."""
        blocks: list[Any] = [self.model.blocks[number] for number in numbers]
        own = [{name: matrix.layer for name, matrix in matrices(block).items()} for block in blocks]
        prefixes = tuple(f"blocks.{number}." for number in numbers)
        names = [name for name in self._reader.shapes if name.startswith(prefixes)]
        try:
            yield blocks, names
        finally:
            for block, layers in zip(blocks, own, strict=True):
                block.update_modules(tree_unflatten(list(layers.items())))
            self._drop(names)

    @property
    def names(self) -> list[str]:
        """All parameters of the model."""
        return list(self._reader.shapes)

    @property
    def embed_names(self) -> list[str]:
        """The parameters of the embedding."""
        return self._prefix("embed.")

    @property
    def head_names(self) -> list[str]:
        """The parameters of the head, or of the embedding where it is tied to it."""
        return self._prefix("head." if "head" in self.model else "embed.")

    def _prefix(self, words: str) -> list[str]:
        return [name for name in self._reader.shapes if name.startswith(words)]

    @contextmanager
    def filled(self, names: Sequence[str]) -> Iterator[Decoder]:
        """The model with some of its parameters, as they are stored, inside the `with` block."""
        try:
            self._read(names)
            yield self.model
        finally:
            self._drop(names)

    @contextmanager
    def unread(self, numbers: Sequence[int], dtype: mx.Dtype) -> Iterator[list[Block]]:
        """Like `loaded`, with weights that have no values, to build graphs of."""
        with self._restored(numbers) as (blocks, names):
            for name in names:
                self._set(name, mx.zeros(self._reader.shapes[name], dtype))
            yield blocks

    def nbytes(self, names: Iterable[str]) -> int:
        """The bytes of parameters as they are stored."""
        shapes, dtypes = self._reader.shapes, self._reader.dtype
        return sum(prod(shapes[name]) * dtypes(name).size for name in names)

    def _read(self, names: Iterable[str], dtype: mx.Dtype | None = None) -> None:
        for name in names:
            array = self._reader.read(name)
            if dtype is not None and array.dtype in FLOATS:
                array = array.astype(dtype)
            mx.eval(array)
            self._set(name, array)

    def _drop(self, names: Iterable[str]) -> None:
        """Gives weights up. The zeros instead of them take no memory unless they are read."""
        for name in names:
            self._set(name, mx.zeros(self._reader.shapes[name], self._reader.dtype(name)))
        mx.clear_cache()

    def _set(self, name: str, array: mx.array) -> None:
        self.model.update(tree_unflatten([(name, array)]))


def run_blocks(
    blocks: Sequence[Any],
    arguments: Sequence[dict[str, mx.array]],
    x: mx.array,
    run: Any = None,
) -> mx.array:
    """The residual stream after some blocks, of sequences that begin with the call.

    Args:
        blocks: The blocks.
        arguments: What the token mixer of each is given beside it.
        x: The residual stream before them, `(B, L, D)`.
        run: Calls a block; `None` calls it as it is.

    Raises:
        TrainingError: A block hands something to those after it, beside the stream.
    """
    context = Context()
    for block, own in zip(blocks, arguments, strict=True):
        if run is None:
            x, _ = block(x, None, context, **own)
        else:
            x, _ = run(block, x, None, context, **own)
    if context.cross_layer:
        raise TrainingError(
            f"[{_CALLER}] 'model' must be one whose layers read the residual stream alone but they "
            f"pass on {', '.join(context.cross_layer)}. Use `mmfree ternarize`."
        )
    return x
