"""Walks over the windows of a dense model, and writes the ternary one."""

import hashlib
import json
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten, tree_unflatten

from ...errors import TrainingError
from ...files.reading import open_file, read_json_object, write_json
from ...files.tensors import TensorEntry, read_arrays
from ...files.writing import check_space, new_file
from ...hub.checkpoint.checkpoint import RUN_MODEL, described_checkpoint, open_checkpoint
from ...hub.checkpoint.parameter_reader import ParameterReader
from ...hub.checkpoint.save import check_apart, check_target, write_tensors
from ...hub.conversion.convert import convert
from ...hub.conversion.to_folder import FloatFormats, GivenCodes
from ...hub.publish.model_card import ModelCard
from ...hub.remote.source import find_source
from ...layers.dense import QuantizedLinear
from ...layers.embedding import embed_tokens
from ...layers.matrix import Matrix, matrices
from ...models import Block
from ...platform.progress import Progress
from ..precision import compute_dtype
from ..results import read_log
from ..run_folder import check_record, own_run_folder, writing
from ..run_settings import LoopSettings
from ..tasks.corpus import CausalLMTask
from .layers import LayerFiles, run_blocks
from .measures import Spread, squared_errors, token_losses
from .modulation import BITS, ModulatedLinear, Modulation
from .picture import draw_errors
from .plan import CalibrationPlan, plan_calibration
from .settings import CalibrateSettings
from .streams import OpenStream, Stream
from .window import Window, train_window, window_batches

REPORT_FILE, PICTURE_FILE, LOG_FILE = "calibrate.json", "errors.png", "log.jsonl"
_FOLDER, _RECORD = "windows", "run.json"
_DIGESTED = 4096
"""Bytes of a tensor that tell it from another one."""


class Calibration:
    """A run from a dense model to its ternary one.

    The files of the run tell how far it is: a window is finished once its file is there. Repeating the
    run goes on from there, and the result is the same, bit for bit.

    Args:
        settings: The run.
        only_plans: Whether the run is planned alone. The model may then be a folder with a `config.json`
            and no weights.

    Attributes:
        folder: The folder that holds the dense model.

    Raises:
        TrainingError: The model cannot be made ternary in this way, or a setting is wrong.
        CheckpointError, DownloadError, UnsupportedModelError: As for `load`.
    """

    def __init__(self, settings: CalibrateSettings, *, only_plans: bool = False):
        self.settings = settings
        described = described_checkpoint(find_source(settings.model)) if only_plans else None
        checkpoint = described or open_checkpoint(settings.model)
        checkpoint.refuse_adapter("calibrate", "to be made ternary")
        self.folder = checkpoint.folder
        self.output = Path(settings.output)
        check_apart(self.output.resolve(), [self.folder], "calibrate")
        check_target((self.output / RUN_MODEL).resolve(), True, "calibrate", [self.folder])
        self._reader = ParameterReader(checkpoint)
        self.layers = LayerFiles(self._reader, settings.group_size)
        count = len(self.layers.model.blocks)
        settings.check(
            "dense_last", settings.dense_last < count, f"less than the {count} layers of the model"
        )
        self.windows = settings.windows(count)
        self.compute_dtype = compute_dtype(settings.dtype)
        is_narrow = self._reader.activation_dtype.size == 2
        stored = self._reader.activation_dtype
        self.modulation = Modulation(
            settings.group_size,
            settings.rank,
            "kept" if settings.start == "kept" else "mean",
            stored if is_narrow else mx.float16,
        )
        self.stream_dtype = mx.bfloat16 if is_narrow else mx.float32

    def check_files(self) -> None:
        """Refuses a run whose texts are not there.

        Raises:
            TrainingError: A file cannot be opened, or holds neither texts nor tokens.
        """
        CausalLMTask.check_files(self.settings.corpus(), "calibrate", "data")

    @cached_property
    def paths(self) -> list[str]:
        """The paths of the linears that become ternary."""
        layers = range(self.windows[-1].stop)
        return [f"blocks.{n}.{name}" for n in layers for name in self.layers.linears[n]]

    def places(self, kind: str) -> list[int]:
        """The layers before which a stream stops, so that only some are in memory for the next stop."""
        windows, layers = self.windows, len(self.layers.model.blocks)
        found = {window.start for window in windows} | {windows[-1].stop, layers}
        if kind == "dense":
            found |= {window.stop for window in windows}
        tail = range(windows[-1].stop, layers, self.settings.window)
        return sorted(found | set(tail))

    def window(
        self, number: int, blocks: Sequence[Block], arguments: Sequence[dict[str, mx.array]]
    ) -> Window:
        """The window of a number, as it begins.

        Args:
            number: Of the window.
            blocks: Its blocks, with dense weights.
            arguments: What each block of the model is given beside the stream.
        """
        layers, key = self.windows[number], mx.random.key(self.settings.seed)
        return Window(
            blocks,
            [self.layers.linears[layer] for layer in layers],
            [arguments[layer] for layer in layers],
            self.modulation,
            mx.random.split(key, number + 2)[number],
            recomputes=self.settings.grad_checkpoint,
        )

    def loop(self) -> LoopSettings:
        """The settings of the loop of a window."""
        settings, dtype = self.settings, self.compute_dtype
        return LoopSettings(
            self.output,
            settings.steps,
            settings.seed,
            settings.clip_norm,
            dtype=None if dtype == mx.float32 else dtype,
        )

    @cached_property
    def plan(self) -> CalibrationPlan:
        """The memory, the disk and the work of the run. Nothing is computed or written."""
        return plan_calibration(self)

    def run(self, card: ModelCard | None = None) -> dict[str, Any]:
        """Trains the windows that are left and writes the ternary model to `model/`.

        Args:
            card: What the model card says of the source; `None` writes none.

        Returns:
            The report, which is also written: the errors of each window and, of the held-out samples,
            the cross-entropy of both models in nats.

        Raises:
            TrainingError: A file or setting is wrong, the folder cannot be written or belongs to
                another run at work, or a loss is not finite.
            TrainingStopped: A signal ended the run early. The windows before are kept.
        """
        self.check_files()
        with own_run_folder(self.output), writing(self.output):
            return self._run(card)

    def _run(self, card: ModelCard | None) -> dict[str, Any]:
        home = self.output / _FOLDER
        task = CausalLMTask(self.settings.corpus(), self.layers.model, self.folder, (0, 1))
        self._begin(home, task)
        self.layers.load_rest()
        walk = _Walk(self, home, _rows(self.settings, task))
        log = read_log(self.output / LOG_FILE)
        for number in range(len(self.windows)):
            if not walk.is_done(number):
                record = walk.train(number)
                log = [*log[:number], record]
                with new_file(self.output / LOG_FILE) as new:
                    new.write_text("".join(json.dumps(each) + "\n" for each in log))
                Progress.write(_line(record, len(self.windows)))
        metrics = walk.measure()
        draw_errors(log, self.output / PICTURE_FILE)
        self._write(walk, card)
        report = {"settings": self.settings.record(), "windows": log, "metrics": metrics}
        write_json(self.output / REPORT_FILE, report)
        shutil.rmtree(home)
        return report

    def _begin(self, home: Path, task: CausalLMTask) -> None:
        """Begins a run, or refuses to go on with one that has other settings."""
        record = {
            **self.settings.record(),
            "texts": dict(task.digests),
            "weights": _digest(self._reader.checkpoint.tensors),
        }
        if (home / _RECORD).exists():
            before = read_json_object(home / _RECORD)
            check_record(self.output, {"settings": before}, record)
            return
        check_space(self.output, self.plan.disk_bytes)
        home.mkdir(exist_ok=True)
        write_json(home / _RECORD, record)

    def _write(self, walk: "_Walk", card: ModelCard | None) -> None:
        """Writes the model, tensor by tensor."""
        settings = self.settings
        given = {
            path: GivenCodes(
                settings.group_size, BITS, self.modulation.scale_dtype, partial(walk.codes, path)
            )
            for path in self.paths
        }
        formats = FloatFormats(
            embed_bits=settings.embed_bits, head_bits=settings.head_bits, given_codes=given
        )
        target = self.output / RUN_MODEL
        convert(
            self._reader.checkpoint, target, formats=formats, check=False, overwrite=True, card=card
        )


class _Walk:
    """The streams and windows of a run in its folder.

    Args:
        run: The run.
        home: The folder.
        tokens: The tokens of all samples, int32 `(samples, length + 1)`.
    """

    def __init__(self, run: Calibration, home: Path, tokens: np.ndarray):
        self._run, self._home, self._tokens = run, home, tokens
        self._settings = run.settings
        self._layers = run.layers
        self._arguments = run.layers.model.block_arguments()

    def _of(self, layer: int) -> list[str]:
        return self._layers.linears[layer]

    def is_done(self, number: int) -> bool:
        """Whether a window is finished."""
        return self._file(number).exists()

    def _file(self, number: int) -> Path:
        return self._home / f"window-{number:03}.safetensors"

    def _carried(self, number: int) -> Path:
        """What a window learned of the layers that the next one trains again."""
        return self._home / f"carried-{number:03}.safetensors"

    def _last_window_of(self, layer: int) -> int:
        return max(n for n, window in enumerate(self._run.windows) if layer in window)

    def codes(self, path: str) -> Sequence[mx.array]:
        """The codes, scales and biases of a linear."""
        layer = int(path.split(".")[1])
        arrays = read_arrays(self._file(self._last_window_of(layer)))
        return [arrays[f"{path}.{key}"] for key in ("weight", "scales", "biases")]

    def train(self, number: int) -> dict[str, Any]:
        """Trains a window, writes what it learned, and says what it came to."""
        run, settings, layers = self._run, self._settings, self._run.windows[number]
        begin, words = time.perf_counter(), f"window {number + 1} of {len(run.windows)}"
        inputs = self._stream("ternary", layers.start).open()
        targets = self._stream("dense", layers.stop).open()
        deviation = self._deviation(targets)
        with self._layers.loaded(layers, mx.float32) as blocks:
            window = run.window(number, blocks, self._arguments)
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
                run.loop(),
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
        layers = self._run.windows[number]
        following = self._run.windows[number + 1 : number + 2]
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
        layers, dtype = len(self._layers.model.blocks), self._run.compute_dtype
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
        return Stream(self._home / f"{kind}-{layer:03}.bin", shape, self._run.stream_dtype)

    def _stream(self, kind: str, layer: int) -> Stream:
        """The stream of a kind before a layer. It only goes forward; earlier ones are removed."""
        wanted = self._at(kind, layer)
        if wanted.file.exists():
            return wanted
        if layer == 0:
            wanted.write(self._embedded())
            return wanted
        start = max(place for place in self._run.places(kind) if place < layer)
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
        ternary = {path for path in self._run.paths if int(path.split(".")[1]) in layers}
        ternary = ternary if kind == "ternary" else set()
        dtype = self._run.compute_dtype
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


def _rows(settings: CalibrateSettings, task: CausalLMTask) -> np.ndarray:
    """The tokens of all samples, int32 `(samples, length + 1)`; the last ones are held out."""
    if task.repeats_at_once:
        held_out = 0 if settings.valid else settings.valid_samples
        raise TrainingError(
            f"[calibrate] 'data' must hold more than {settings.samples + held_out:,} samples of "
            f"'{settings.key('sequence_length')}' {settings.sequence_length:,} but holds fewer. Give "
            "more text, or lower 'samples'."
        )
    batch = task.batches(0)[0]
    rows = np.concatenate([batch.inputs, batch.targets[:, -1:]], axis=1)
    if settings.valid:
        count = settings.valid_samples * settings.sequence_length + 1
        rows = np.concatenate([rows, task.held_out_rows(settings.valid[0], count)])
    return rows


def _digest(entries: Mapping[str, TensorEntry]) -> str:
    """The digest of the names, shapes and dtypes of tensors and of the first numbers of each."""
    digest = hashlib.sha256()
    for name, entry in sorted(entries.items()):
        digest.update(f"{name} {entry.shape} {entry.dtype} ".encode())
        first = entry.parts[0] if entry.parts else entry
        with open_file(first.file) as stream:
            stream.seek(first.start)
            digest.update(stream.read(min(_DIGESTED, first.nbytes)))
    return digest.hexdigest()


def _modulated(block: Block) -> list[tuple[str, ModulatedLinear]]:
    modules = block.named_modules()
    return [(name, module) for name, module in modules if isinstance(module, ModulatedLinear)]


def _within(arrays: Mapping[str, mx.array], layers: range) -> list[tuple[str, mx.array]]:
    """What was learned of layers, by its names in a window of these."""
    found = []
    for name, array in arrays.items():
        head, layer, rest = name.split(".", 2)
        if int(layer) in layers:
            found.append((f"{head}.{int(layer) - layers.start}.{rest}", array))
    return found


def _line(record: Mapping[str, Any], windows: int) -> str:
    first, last = record["layers"]
    shown = f"layer {first}" if first == last else f"layers {first} to {last}"
    return (
        f"Window {record['window']} of {windows}, {shown}: held-out error {record['before']:.4f} -> "
        f"{record['after']:.4f}, on samples learned from {record['learned']:.4f}, "
        f"{record['seconds']:,.0f} s."
    )
