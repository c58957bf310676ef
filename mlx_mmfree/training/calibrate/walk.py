"""The walk over the windows of a dense model, of which the files tell how far it is."""

import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten, tree_unflatten

from ...files.tensors import read_arrays
from ...files.writing import new_file
from ...hub.checkpoint.save import write_tensors
from ...layers.dense import QuantizedLinear
from ...layers.embedding import embed_tokens
from ...layers.matrix import Matrix, matrices
from ...models import Block
from .course import Course
from .layers import run_blocks
from .measures import Spread, squared_errors, token_losses
from .modulation import BITS, ModulatedLinear
from .streams import OpenStream, Stream
from .window import Window, train_window, window_batches


class Walk:
    """The streams and windows of a run in its folder.

    Args:
        course: The run.
        home: The folder.
        tokens: The tokens of all samples, int32 `(samples, length + 1)`.
    """

    def __init__(self, course: Course, home: Path, tokens: np.ndarray):
        self._course, self._home, self._tokens = course, home, tokens
        self._settings = course.settings
        self._layers = course.layers
        self._arguments = course.layers.model.block_arguments()

    def is_done(self, number: int) -> bool:
        """Returns whether a window is finished."""
        return self._file(number).exists()

    def _file(self, number: int) -> Path:
        return self._home / f"window-{number:03}.safetensors"

    def _carried(self, number: int) -> Path:
        """The file of what a window learned of the layers that the next one trains again."""
        return self._home / f"carried-{number:03}.safetensors"

    def _last_window_of(self, layer: int) -> int:
        return max(n for n, window in enumerate(self._course.windows) if layer in window)

    def codes(self, path: str) -> Sequence[mx.array]:
        """The codes, scales and biases of a linear."""
        layer = int(path.split(".")[1])
        arrays = read_arrays(self._file(self._last_window_of(layer)))
        return [arrays[f"{path}.{key}"] for key in ("weight", "scales", "biases")]

    def train(self, number: int) -> dict[str, Any]:
        """Trains a window, writes what it learned, and says what it came to."""
        course, settings, layers = self._course, self._settings, self._course.windows[number]
        begin, words = time.perf_counter(), f"window {number + 1} of {len(course.windows)}"
        inputs = self._stream("ternary", layers.start).open()
        targets = self._stream("dense", layers.stop).open()
        deviation = self._deviation(targets)
        with self._layers.loaded(layers, mx.float32) as blocks:
            window = course.window(number, blocks, self._arguments)
            window.eval()
            if number and self._carried(number - 1).exists():
                known = read_arrays(self._carried(number - 1))
                window.update(tree_unflatten(_within(known, layers)))
            mx.eval(window.parameters())
            measure = partial(squared_errors, window, batch_size=settings.batch_size)
            held_out, learned = self._split()
            error = {"before": measure(inputs, targets, held_out)}
            batches = window_batches(
                inputs,
                targets,
                deviation,
                samples=settings.samples,
                batch_size=settings.batch_size,
                steps=settings.steps,
                seed=(settings.seed, number),
                soft=settings.soft,
            )
            train_window(
                window,
                batches,
                course.loop(),
                optimizer=settings.optimizer,
                learning_rate=settings.learning_rate,
                words=words,
            )
            window.eval()
            error |= {"after": measure(inputs, targets, held_out)}
            error |= {"learned": measure(inputs, targets, learned)}
            self._keep(number, window)
        return {
            "window": number + 1,
            "layers": [layers.start, layers.stop - 1],
            **error,
            "seconds": time.perf_counter() - begin,
            "peak_memory_bytes": mx.get_peak_memory(),
        }

    def _split(self) -> tuple[range, range]:
        """The held-out samples, and as many of those that are learned from."""
        samples = self._settings.samples
        held_out = range(samples, len(self._tokens))
        return held_out, range(min(samples, len(held_out)))

    def _keep(self, number: int, window: Window) -> None:
        """Writes what a window learned. The last file says that it is finished."""
        layers = self._course.windows[number]
        following = self._course.windows[number + 1 : number + 2]
        again = set(following[0]) & set(layers) if following else set()
        arrays: dict[str, mx.array] = {}
        carried: dict[str, mx.array] = {}
        for layer, block in zip(layers, window.blocks, strict=True):
            for name, linear in _modulated(block):
                path = f"blocks.{layer}.{name}"
                if layer in again:
                    own = dict(tree_flatten(linear.trainable_parameters()))
                    carried |= {f"{path}.{key}": array for key, array in own.items()}
                else:
                    packed = linear.to_packed()
                    keys = ("weight", "scales", "biases")
                    arrays |= {f"{path}.{key}": packed[key] for key in keys}
        if carried:
            with new_file(self._carried(number)) as new:
                write_tensors(new, carried)
        with new_file(self._file(number)) as new:
            write_tensors(new, arrays)
        if number:
            self._carried(number - 1).unlink(missing_ok=True)

    def measure(self) -> dict[str, float]:
        """The cross-entropy of both models on the held-out samples, in nats a token."""
        layers, dtype = len(self._layers.model.blocks), self._course.compute_dtype
        rows, _ = self._split()
        metrics = {}
        for kind in ("dense", "ternary"):
            stream = self._stream(kind, layers).open()
            with self._layers.filled(self._layers.head_names) as model:
                metrics[f"{kind}_loss"] = token_losses(model, stream, rows, self._tokens, dtype)
        return metrics

    def _at(self, kind: str, layer: int) -> Stream:
        samples, length = self._tokens.shape
        shape = samples, length - 1, self._layers.model.dims
        return Stream(self._home / f"{kind}-{layer:03}.bin", shape, self._course.stream_dtype)

    def _stream(self, kind: str, layer: int) -> Stream:
        """The stream of a kind before a layer. It only goes forward; earlier ones are removed."""
        wanted = self._at(kind, layer)
        if wanted.file.exists():
            return wanted
        if layer == 0:
            wanted.write(self._embedded())
            return wanted
        start = max(stop for stop in self._course.stops(kind) if stop < layer)
        given = self._stream(kind, start)
        wanted.write(self._after(kind, given.open(), range(start, layer)))
        given.file.unlink()
        return wanted

    def _embedded(self) -> Iterator[mx.array]:
        with self._layers.filled(self._layers.embed_names) as model:
            for part in self._parts():
                tokens = mx.array(self._tokens[part, :-1])
                yield embed_tokens(model.embed, tokens, model.embed_scale)

    def _after(self, kind: str, inputs: OpenStream, layers: range) -> Iterator[mx.array]:
        """The stream after some layers, batch by batch."""
        ternary = {path for path in self._course.paths if int(path.split(".")[1]) in layers}
        ternary = ternary if kind == "ternary" else set()
        dtype = self._course.compute_dtype
        with self._layers.loaded(layers, dtype, ternary) as blocks:
            for path in ternary:
                _, layer, name = path.split(".", 2)
                block = blocks[int(layer) - layers.start]
                linear = self._packed(path, matrices(block)[name])
                block.update_modules(tree_unflatten([(name, linear)]))
            for part in self._parts():
                x = inputs[part].astype(dtype)
                yield run_blocks(blocks, [self._arguments[layer] for layer in layers], x)

    def _packed(self, path: str, matrix: Matrix) -> nn.Module:
        """The packed format of a dense linear that was trained."""
        sizes = matrix.input_dims, matrix.output_dims
        has_bias = "bias" in matrix.layer
        packed = QuantizedLinear(*sizes, has_bias, self._settings.group_size, BITS)
        packed.weight, packed.scales, packed.biases = self.codes(path)
        if has_bias:
            packed.bias = matrix.layer.bias
        return packed

    def _parts(self) -> Iterator[slice]:
        size, count = self._settings.batch_size, len(self._tokens)
        return (slice(start, min(start + size, count)) for start in range(0, count, size))

    def _deviation(self, targets: OpenStream) -> float:
        """Of the targets of the samples that are learned from."""
        spread = Spread()
        for part in self._parts():
            spread.add(targets[slice(part.start, min(part.stop, self._settings.samples))])
        return spread.deviation


def _modulated(block: Block) -> list[tuple[str, ModulatedLinear]]:
    modules = block.named_modules()
    return [(name, module) for name, module in modules if isinstance(module, ModulatedLinear)]


def _within(arrays: Mapping[str, mx.array], layers: range) -> list[tuple[str, mx.array]]:
    """The learned arrays of layers, by their names in a window of these."""
    found = []
    for name, array in arrays.items():
        head, layer, rest = name.split(".", 2)
        if int(layer) in layers:
            found.append((f"{head}.{int(layer) - layers.start}.{rest}", array))
    return found
