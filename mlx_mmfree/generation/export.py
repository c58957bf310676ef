"""One step of decoding as MLX's exported function, for programs without this library."""

import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, cast

import mlx.core as mx
from mlx.utils import tree_flatten, tree_map, tree_unflatten

from ..errors import CheckpointError, UnsupportedModelError
from ..files.reading import real_path, tokenizer_files, write_json
from ..files.tensors import PlannedTensors, write_safetensors
from ..files.writing import new_folder, writing
from ..hub.checkpoint.save import check_target, copy_files
from ..layers.matrix import parameters
from ..models import Decoder, check_causal
from ..ops.device import mlx_version, on_cpu, use_plain_operations, without_gradients
from ..tokenizer.tokenizer import Tokenizer
from ..version import __version__
from .finite_logits import are_finite, check_finite
from .reader import Reader, fixed_state

TOKEN_DTYPE = mx.uint32
"""The dtype of `mx.argmax`, so that a token can be read as it was chosen."""

_STATE = "state"
_BLOCK_ARGUMENTS = "block_arguments."


class DecodingStep:
    """One step of decoding for one text.

    Called without arrays, it gives the arrays of the state before the first token. Called with a token,
    uint32 `(1,)`, and the arrays of a state, it gives the logits after it, float32 `(1, V)`, and the
    arrays of the state after it. After a token outside the vocabulary, and once the state has no space
    for another token, the logits are NaN.

    Args:
        model: Continues texts.
        context: The number of tokens that attention has space for, at least. A state of constant size
            takes any number.

    Attributes:
        weights: What a step is computed with, by name. Steps take other arrays of the same shapes by
            these names.
        state: The arrays of the state before the first token, by name and in order.
        capacity: The number of tokens that a state takes, or `None` for any.

    Raises:
        UnsupportedModelError: The model cannot continue texts, or has no state of fixed shapes.
    """

    def __init__(self, model: Decoder, context: int):
        check_causal(model)
        self._model = model
        self._tree, self._capacities = fixed_state(model, model.init_state(1), context)
        if not self._capacities:
            raise _without_fixed_state(model)
        capacities = (
            capacity for capacity in (*self._capacities, model.max_length) if capacity is not None
        )
        self.capacity = min(capacities, default=None)
        self.state = dict(_named(self._tree, _STATE))
        self._arguments: Any = model.block_arguments()
        self._own_weights = parameters(model)
        folded = {_BLOCK_ARGUMENTS + name: array for name, array in _flat(self._arguments)}
        self.weights = self._own_weights | folded
        mx.eval(self.state, self.weights)

    def __call__(self, *arrays: mx.array, **weights: mx.array) -> list[mx.array]:
        if not arrays:
            return self._first()
        token, *state = arrays
        with self._replaced(weights):
            return self._next(token, _filled(self._tree, state), self._block_arguments(weights))

    def _first(self) -> list[mx.array]:
        """The arrays of the first state, made anew, so that a graph need not hold their numbers."""
        return [
            array if (value := uniform(array)) is None else mx.full(array.shape, value, array.dtype)
            for array in self.state.values()
        ]

    def _next(self, token: mx.array, state: Any, arguments: Any) -> list[mx.array]:
        hidden, after = self._model.known_hidden(token[:, None], state, block_arguments=arguments)
        logits = self._model.logits(hidden).squeeze(1).astype(mx.float32)
        for free in self._free(state):
            logits = mx.where(free, logits, mx.nan)
        return [logits, *(array for _, array in _flat(after))]

    def _free(self, state: Any) -> Iterator[mx.array]:
        """For each mixer whose state is full at some time, whether it has space for a token."""
        for mixer, capacity, part in zip(
            self._model.token_mixers, self._capacities, state, strict=True
        ):
            if capacity is not None:
                for positions in mixer.state_kind.counted(part):
                    yield mx.any(positions < 0)

    def _block_arguments(self, weights: Mapping[str, mx.array]) -> Any:
        names = [_BLOCK_ARGUMENTS + name for name, _ in _flat(self._arguments)]
        return _filled(self._arguments, [weights.get(name, self.weights[name]) for name in names])

    @contextmanager
    def _replaced(self, weights: Mapping[str, mx.array]) -> Iterator[None]:
        """Puts other arrays in the place of the model's weights inside the `with` block."""
        given = {name: weights[name] for name in self._own_weights if name in weights}
        self._model.update(cast(Any, tree_unflatten(list(given.items()))))
        try:
            yield
        finally:
            self._model.update(cast(Any, tree_unflatten(list(self._own_weights.items()))))


def uniform(array: mx.array) -> float | None:
    """The number that all elements of an array equal, or `None` if they differ."""
    first = array.reshape(-1)[:1]
    if not array.size or not mx.all(array == first).item():
        return None
    return cast(float, first.item())


def _without_fixed_state(model: Decoder) -> UnsupportedModelError:
    state = model.init_state(1)
    pairs = zip(model.token_mixers, state, strict=True)
    names = {type(mixer).__name__ for mixer, part in pairs if mixer.state_kind.fixed(part) is None}
    return UnsupportedModelError(
        "[export] each token mixer must have a state of fixed shapes, because an exported function does "
        f"not change them, but {', '.join(sorted(names))} keeps one that grows. Export another model."
    )


def _named(tree: Any, name: str) -> Iterator[tuple[str, mx.array]]:
    """The arrays of a state by the names of their fields, in the order of `tree_flatten`."""
    if isinstance(tree, mx.array):
        yield name, tree
        return
    fields = getattr(tree, "_fields", range(len(tree)))
    for field, part in zip(fields, tree, strict=True):
        yield from _named(part, f"{name}.{field}")


def _flat(tree: Any) -> list[tuple[str, mx.array]]:
    return cast(list[tuple[str, mx.array]], tree_flatten(tree))


def _filled(tree: Any, arrays: list[mx.array]) -> Any:
    """A tree of the same structure with other arrays, in the order of `tree_flatten`."""
    rest = iter(arrays)
    return tree_map(lambda _: next(rest), tree)


Step = Callable[..., Sequence[mx.array]]

CHOSEN_TOKENS = 8
TOLERANCE = 0.5
"""The most by which logits may differ from the results of the model's kernels, as a share of the
largest. Kernels add norms up in another order, which moves a code of 8 bits to its neighbour now and
then: logits of a large model with random weights differed by 0.09. Beyond this, something else is
    computed."""


class Example(NamedTuple):
    """The requirements of a step.

    Attributes:
        prompt: Tokens to read.
        tokens: The most likely tokens after them, one after the other.
    """

    prompt: list[int]
    tokens: list[int]


class Run(NamedTuple):
    """The results of a step.

    Attributes:
        example: What it read and chose.
        results: All that it gave after each token.
    """

    example: Example
    results: list[list[mx.array]]


def run(first: Sequence[mx.array], step: Step, prompt: Sequence[int]) -> Run:
    """Reads a prompt and then the tokens that are chosen greedily.

    Args:
        first: The state before the first token.
        step: Takes a token and a state.
        prompt: Tokens to begin with, one at least.
    """
    state, tokens, results = list(first), list(prompt), []
    for position in range(len(prompt) + CHOSEN_TOKENS - 1):
        logits, *state = step(mx.array([tokens[position]], TOKEN_DTYPE), *state)
        mx.eval(logits, state)
        results.append([logits, *state])
        if position + 1 >= len(prompt):
            tokens.append(cast(int, mx.argmax(logits).item()))
    return Run(Example(list(prompt), tokens[len(prompt) :]), results)


def check_equal(found: Run, expected: Run) -> None:
    """Refuses an imported step that does not compute what was exported.

    Raises:
        CheckpointError: A bit of a logit or of a state differs.
        NumericalError: The logits are not finite.
    """
    for got, want in zip(found.results, expected.results, strict=True):
        check_finite(are_finite(want[0]))
        if not all(mx.array_equal(*pair).item() for pair in zip(got, want, strict=True)):
            raise CheckpointError(
                "[export] the imported function must give the logits and states of the exported one "
                "but gives others. The export is thrown away; please report this."
            )


class Agreement(NamedTuple):
    """How near a step is to the model as it runs here.

    Attributes:
        difference: The largest difference of a logit, as a share of the largest logit.
        same_tokens: Whether both find the same token most likely, each time.
    """

    difference: float
    same_tokens: bool


def agreement(found: Run, model: Decoder) -> Agreement:
    """Compares a run with the model, which reads the same tokens with whatever is fastest here.

    Raises:
        CheckpointError: The logits differ by more than `TOLERANCE`.
    """
    reader = Reader(model, model.init_state(1))
    prompt, tokens = found.example
    largest, difference, same_tokens = 0.0, 0.0, True
    for token, (got, *_) in zip(prompt + tokens[:-1], found.results, strict=True):
        want, _ = reader.read(mx.array([token], TOKEN_DTYPE))
        largest = max(largest, _largest(want))
        difference = max(difference, _largest(got - want))
        same_tokens &= mx.argmax(got).item() == mx.argmax(want).item()
    result = Agreement(difference / largest, same_tokens)
    if not result.difference <= TOLERANCE:
        raise CheckpointError(
            f"[export] the logits must equal the model's within {TOLERANCE} of the largest but "
            f"differ by {result.difference:.3g}. The export is thrown away; please report this."
        )
    return result


def _largest(array: mx.array) -> float:
    return cast(float, mx.max(mx.abs(array)).item())


FORMAT_VERSION = 1


def describe(
    model: Decoder,
    tokenizer: Tokenizer,
    step: DecodingStep,
    example: Example,
    operations: Mapping[str, int],
    weights_file: str | None,
) -> dict[str, Any]:
    """The content of the JSON file beside a step.

    Args:
        model: The model.
        tokenizer: Its tokenizer.
        step: The step.
        example: What it must do.
        operations: How often the function has each primitive of MLX.
        weights_file: The file of weights that are passed by name, or `None` if they lie inside.
    """
    state = _formats(step.state.items())
    first = [{**each, "initial": uniform(step.state[each["name"]])} for each in state]
    token = {"name": "token", "shape": [1], "dtype": _dtype(TOKEN_DTYPE)}
    logits = {"name": "logits", "shape": [1, model.vocab_size], "dtype": _dtype(mx.float32)}
    return {
        "format": FORMAT_VERSION,
        "written_by": {"mlx_mmfree": __version__, "mlx": mlx_version()},
        "model_type": model.config.to_hub()["model_type"],
        "vocabulary": model.vocab_size,
        "known_tokens": min(tokenizer.vocab_size, model.vocab_size),
        "end_tokens": sorted(tokenizer.eos_token_ids),
        "most_tokens": step.capacity,
        "device": "cpu" if on_cpu() else "gpu",
        "operations": dict(operations),
        "start": {"inputs": [], "outputs": first},
        "step": {
            "inputs": [token, *state],
            "named_inputs": _formats(step.weights.items()) if weights_file else [],
            "outputs": [logits, *state],
        },
        "weights_file": weights_file,
        "example": {"prompt": example.prompt, "tokens": example.tokens},
    }


def _formats(arrays: Iterable[tuple[str, mx.array]]) -> list[dict[str, Any]]:
    return [
        {"name": name, "shape": list(array.shape), "dtype": _dtype(array.dtype)}
        for name, array in arrays
    ]


def _dtype(dtype: mx.Dtype) -> str:
    return str(dtype).rpartition(".")[2]


STEP_FILE, DESCRIPTION_FILE, WEIGHTS_FILE = "step.mlxfn", "step.json", "weights.safetensors"

_PROMPT = "Once upon a time"
_MOST_PROMPT = 8


@dataclass(frozen=True)
class Export:
    """The files that were written.

    Attributes:
        folder: Where.
        is_plain: Whether the function holds no kernel of this library.
        capacity: The number of tokens that a state takes, or `None` for any.
        example: The tokens with which the step was run again.
        agreement: How near it is to the model as it runs here.
        sizes: The bytes of each file.
    """

    folder: Path
    is_plain: bool
    capacity: int | None
    example: Example
    agreement: Agreement
    sizes: dict[str, int]


def export_step(
    path: str | os.PathLike[str],
    model: Decoder,
    tokenizer: Tokenizer,
    *,
    context: int = 2048,
    weights_beside: bool = False,
    plain: bool = False,
    overwrite: bool = False,
) -> Export:
    """Writes one step of decoding as MLX's exported function, and runs it again before it is there.

    The file holds two functions, which MLX tells apart by their arguments. See `DecodingStep`.

    Args:
        path: The folder to make. It appears under its name only when it is complete.
        model: A causal model whose state has fixed shapes.
        tokenizer: Its tokenizer, whose files are copied.
        context: The number of tokens that attention has space for, at least.
        weights_beside: Whether weights are written to a file of their own, and are passed to each step.
        plain: Whether kernels of this library are left out. On a CPU they always are.
        overwrite: Replace an existing folder.

    Raises:
        CheckpointError: The folder exists or cannot be written, or what was written computes something
            else.
        NumericalError: The logits are not finite.
        UnsupportedModelError: The model cannot be exported.
        ValueError: `context` is too small.
    """
    if context < 1:
        raise ValueError(f"[export] 'context' must be at least 1 but got {context}.")
    target = real_path(path)
    check_target(target, overwrite, "export", [tokenizer.folder])
    step = DecodingStep(model, context)
    # what MLX cannot write: the C++ kernels, which are primitives of this library
    is_plain = plain or on_cpu()
    needed = sum(array.nbytes for array in step.weights.values())
    with (
        writing("export", target),
        new_folder(target, replaces=overwrite, needed_bytes=needed) as new,
    ):
        weights = step.weights if weights_beside else {}
        if weights:
            write_safetensors(
                new / WEIGHTS_FILE, [PlannedTensors.of(*each) for each in weights.items()]
            )
        with use_plain_operations() if is_plain else nullcontext(), without_gradients():
            prompt = _prompt(tokenizer)
            expected = run(step(), step, prompt)
            _write_function(new / STEP_FILE, step, weights)
            operations = _operations(step, weights)
        imported = _imported(new, weights_beside)
        found = run(imported(), imported, prompt)
        check_equal(found, expected)
        near = agreement(found, model)
        write_json(
            new / DESCRIPTION_FILE,
            describe(
                model, tokenizer, step, found.example, operations, WEIGHTS_FILE if weights else None
            ),
        )
        copy_files(tokenizer_files(tokenizer.folder), new)
        files = sorted(file for file in new.rglob("*") if file.is_file())
        sizes = {file.relative_to(new).as_posix(): file.stat().st_size for file in files}
    return Export(target, is_plain, step.capacity, found.example, near, sizes)


def _prompt(tokenizer: Tokenizer) -> list[int]:
    return tokenizer.encode(_PROMPT)[:_MOST_PROMPT] or [0]


def _arguments(step: DecodingStep) -> list[mx.array]:
    return [mx.array([0], TOKEN_DTYPE), *step.state.values()]


def _write_function(file: Path, step: DecodingStep, weights: dict[str, mx.array]) -> None:
    try:
        with mx.exporter(str(file), step) as exporter:
            exporter()
            exporter(*_arguments(step), **weights)
    except ValueError as error:
        raise UnsupportedModelError(
            f"[export] each operation must be one that MLX can write but: {error} Export another model."
        ) from error


def _imported(folder: Path, weights_beside: bool) -> Callable[..., Any]:
    """The written function as a stranger reads it, from the files alone."""
    function: Any = mx.import_function(str(folder / STEP_FILE))
    read: Any = mx.load(str(folder / WEIGHTS_FILE)) if weights_beside else {}
    return lambda *arrays: function(*arrays, **read) if arrays else function()


def _operations(step: DecodingStep, weights: dict[str, mx.array]) -> Counter[str]:
    """How often a step has each primitive of MLX."""
    found: Counter[str] = Counter()

    def count(event: dict[str, Any]) -> None:
        if event["type"] == "primitive":
            found[event["name"]] += 1

    named: Any = weights
    mx.export_function(count, step, *_arguments(step), **named)
    return found
