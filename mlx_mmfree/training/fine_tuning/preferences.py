"""Learning from pairs of answers: the pairs, the losses and the reference model."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeGuard, get_args

import mlx.core as mx
import numpy as np

from ...errors import TrainingError
from ...files.tensors import read_header, read_tensors
from ...files.writing import new_file
from ...hub.checkpoint.save import write_tensors
from ...models import Decoder
from ...ops import long_sum
from ...platform.progress import Progress
from .. import samples
from ..batches import Batch, padded_batch
from ..corpus.rows import RowError, names_in, read_rows, text_of
from ..data_parallel import DataParallel
from ..losses.loss import Loss, token_losses
from ..run_folder import samples_digest, weights_digest, writing

QUESTION = "question"
PROMPTS = (QUESTION, samples.INSTRUCTION, samples.INPUT)
"""Other keys of the prompt in published sets of preferences. An instruction may come with an input."""


@dataclass(frozen=True)
class Pair:
    """Two answers to one prompt.

    Attributes:
        chosen: The prompt with the answer that is preferred.
        rejected: The prompt with the other answer.
        reference: Log-probabilities of the two answers under a reference model, in nats; `None`: they
            have not been computed.
    """

    chosen: samples.Sample
    rejected: samples.Sample
    reference: tuple[float, float] | None = None

    @property
    def length(self) -> int:
        return max(self.chosen.length, self.rejected.length)

    @property
    def texts(self) -> tuple[samples.Sample, ...]:
        return self.chosen, self.rejected


@dataclass(frozen=True)
class PairBatch(Batch):
    """A batch of P pairs: P rows with their chosen answers, and then P rows with the rejected ones.

    Attributes: as `Batch`, and
        reference: Log-probabilities of the answers under a reference model, float32 `(P, 2)`; `None`:
            they have not been computed.
    """

    reference: np.ndarray | None = field(kw_only=True)

    @property
    def terms(self) -> int:
        return len(self.inputs) // 2


def pair_batch(pairs: Sequence[Pair]) -> PairBatch:
    """The batch of some pairs, padded to the longest answer, rounded up."""
    rows = padded_batch([pair.chosen for pair in pairs] + [pair.rejected for pair in pairs])
    known = [pair.reference for pair in pairs if pair.reference is not None]
    reference = np.array(known, np.float32) if len(known) == len(pairs) else None
    return PairBatch(rows.inputs, rows.targets, rows.weights, rows.valid, reference=reference)


def read_pairs(
    path: Path,
    tokenizer: samples.SampleTokenizer,
    *,
    max_length: int = 2048,
    features: samples.Features | None = None,
    vocab_size: int | None = None,
) -> samples.Samples[Pair]:
    """Reads and encodes the rows of a file of preferences, see `read_rows`.

    A row holds `chosen` and `rejected`, and usually the `prompt` that they answer: texts, or lists of
    messages. The prompt may also be called `question`, `instruction` (with an `input`) or `input`, and
    follow a text under `system`. Texts are put into the chat template, or appended to the prompt if the
    model has none. Without a prompt, what both answers begin with is the prompt. Only answers are
    learned: turns after the assistant's last are cut off, and a pair without an answer is left out.

    Args:
        path: The file.
        tokenizer: The tokenizer of the model.
        max_length: Longer answers are cut at the end.
        features: Other names for the keys.
        vocab_size: The tokens that the model has rows for; the tokenizer may have more.

    Raises:
        TrainingError: A line cannot be used. The message names the file and the line.
    """
    features = features or samples.Features()
    encode = _PairEncoder(tokenizer, features)
    found: samples.Samples[Pair] = samples.Samples()

    def encoded_of(line: Mapping[str, Any]) -> tuple[list[samples.Encoded], set[str]]:
        line, is_changed = samples.as_messages(
            line, features.prompt, features.chosen, features.rejected
        )
        found.converted += is_changed
        return [samples.with_rows(answer, vocab_size) for answer in encode(line)], encode.unread(
            line
        )

    for both, read in read_rows(path, encoded_of, text_key=features.text):
        found.unread |= read
        if pair := found.cut(both, max_length):
            chosen, rejected = pair
            found.samples.append(Pair(chosen, rejected))
    return found


class PromptReader:
    """Finds the prompt of a line under its usual names.

    Args:
        tokenizer: The tokenizer of the model.
        features: Other names for the keys.
    """

    def __init__(self, tokenizer: samples.SampleTokenizer, features: samples.Features):
        self._features, self._prompt = features, features.prompt
        self._of_template = samples.OF_TEMPLATE if tokenizer.has_chat_template else ()

    def keys(self, line: Mapping[str, Any]) -> tuple[str, ...]:
        """The keys that hold the prompt."""
        if line.get(self._prompt) is not None:
            return (self._prompt,)
        # sets of instructions hold an empty input where there is none
        found = tuple(name for name in PROMPTS if line.get(name))
        if len(found) > 1 and found != (samples.INSTRUCTION, samples.INPUT):
            raise RowError(
                f"it must have one prompt but has {' and '.join(map(repr, found))}. Name its key as "
                "'prompt_feature'."
            )
        return found

    def prompt(self, line: Mapping[str, Any]) -> Any:
        """The prompt, a text or a list of messages; `None` if there is none."""
        keys = self.keys(line)
        if len(keys) > 1:
            return "\n".join(text_of(line, key) for key in keys)
        prompt = line[keys[0]] if keys else None
        if prompt is not None:
            samples.messages_of(prompt, keys[0], "user")
        return prompt

    def required(self, line: Mapping[str, Any]) -> str | list[Any]:
        """The prompt, with the instruction before it; there must be one."""
        prompt = self.prompt(line)
        if prompt is None:
            raise RowError(
                f"it must have its prompt under '{self._prompt}' or {', '.join(map(repr, PROMPTS))} but "
                f"has {names_in(line)}. Name its key by --prompt-feature.{self._features.meant(line)}"
            )
        if isinstance(prompt, str) and not line.get(samples.SYSTEM):
            return prompt
        return self.conversation(line, prompt)

    def read(self, line: Mapping[str, Any]) -> set[str]:
        """The keys that say what is before the answer."""
        return {*self.keys(line), samples.SYSTEM, *self._of_template}

    def conversation(
        self, line: Mapping[str, Any], prompt: str | list[Any] | None, shared: Sequence[Any] = ()
    ) -> list[Any]:
        """The messages before the answers. What both of these repeat is there once."""
        begun = [] if prompt is None else samples.messages_of(prompt, self._prompt, "user")
        key = samples.SYSTEM
        system = samples.messages_of(text_of(line, key), key, key) if line.get(key) else []
        common = list(shared)
        if common[:1] == system:
            del common[:1]
        return [*system, *(common if common[: len(begun)] == begun else [*begun, *common])]


class _PairEncoder(PromptReader):
    """Maps a line to its two answers."""

    def __init__(self, tokenizer: samples.SampleTokenizer, features: samples.Features):
        super().__init__(tokenizer, features)
        self._encode = samples.SampleEncoder(tokenizer, True, features)
        self._answers = (features.chosen, features.rejected)

    def __call__(self, line: Mapping[str, Any]) -> tuple[samples.Encoded, samples.Encoded]:
        if any(line.get(key) is None for key in self._answers):
            raise RowError(
                f"it must have '{self._answers[0]}' and '{self._answers[1]}' but has "
                f"{names_in(line)}. Name other keys by --chosen-feature and --rejected-feature."
                f"{self._features.meant(line)}"
            )
        prompt = self.prompt(line)
        answers = [_answer(line[key]) for key in self._answers]
        are_lists = [isinstance(answer, list) for answer in answers]
        shared = answers[0][: samples.common_length(*answers)] if all(are_lists) else []
        if prompt is None and not shared:
            self._check_unread(line)
        has_list = all(are_lists) if prompt is None else any(are_lists)
        if isinstance(prompt, list) or has_list or line.get(samples.SYSTEM):
            begun = self.conversation(line, prompt, shared)
            rests = [answer[len(shared) :] if shared else answer for answer in answers]
            chosen, rejected = (
                # a conversation that the other one continues ends without an answer
                samples.UNANSWERED
                if not rest and any(rests) and shared
                else self._answered(begun, rest, line)
                for rest in rests
            )
        elif prompt is not None:
            chosen, rejected = (
                self._encode.completion(prompt, text_of(line, key), line) for key in self._answers
            )
        else:
            ended = [self._encode.ended([text_of(line, key)], 0) for key in self._answers]
            length = samples.common_length(*(encoded.tokens for encoded in ended))
            chosen, rejected = (encoded._replace(prompt=length) for encoded in ended)
        return chosen, rejected

    def unread(self, line: Mapping[str, Any]) -> set[str]:
        """The keys of a line that hold something that is not read."""
        given = {name for name, value in line.items() if value is not None}
        return given - {*self._answers} - self.read(line)

    def _check_unread(self, line: Mapping[str, Any]) -> None:
        """Refuses a line without a prompt that holds what may be one under another name."""
        unread = sorted(n for n in self.unread(line) if isinstance(line[n], (str, list, dict)))
        if unread:
            raise RowError(
                f"it must have its prompt under '{self._prompt}', {', '.join(map(repr, PROMPTS))}, or "
                f"in both answers, but has {', '.join(map(repr, unread))[:200]}. Name the key of the "
                "prompt as 'prompt_feature', or leave the others out."
            )

    def _answered(self, begun: list[Any], answer: Any, line: Mapping[str, Any]) -> samples.Encoded:
        if not isinstance(answer, (str, list)) or not answer:
            raise RowError(
                f"'{self._answers[0]}' and '{self._answers[1]}' must be different texts or lists "
                f"of messages but one is {answer!r:.80}."
            )
        answer = samples.messages_of(answer, self._answers[0], "assistant")
        return self._encode.chat([*begun, *answer], line, len(begun))


def _answer(value: Any) -> Any:
    """An answer: a text or a list of messages, which may also be an object with them, or a message."""
    if not isinstance(value, Mapping):
        return value
    return value["messages"] if isinstance(value.get("messages"), list) else [value]


TrainMode = Literal["dpo", "orpo"]
LossType = Literal["sigmoid", "hinge", "ipo"]

_MOST = -1e-7
"""A mean log-probability above it counts as this one: the odds of a certain answer are infinite."""


def is_mode(name: str) -> TypeGuard[TrainMode]:
    """Returns whether it names a way to learn preferences."""
    return name in get_args(TrainMode)


class Preferences(NamedTuple):
    """How much a model prefers the chosen answers of P pairs, float32 `(P,)` each.

    Attributes:
        losses: The loss of each pair.
        margins: The reward of the chosen answer minus the rejected answer's.
    """

    losses: mx.array
    margins: mx.array


def preference_loss(mode: TrainMode, *, beta: float = 0.1, loss_type: LossType = "sigmoid") -> Loss:
    """The loss of a preference run, `dpo` or `orpo`, summed over the pairs of a batch."""

    def loss(model: Decoder, batch: Batch) -> mx.array:
        return preferences(model, batch, mode, beta=beta, loss_type=loss_type).losses.sum()

    return loss


def preferences(
    model: Decoder,
    batch: Batch,
    mode: TrainMode,
    *,
    beta: float = 0.1,
    loss_type: LossType = "sigmoid",
) -> Preferences:
    """Losses and margins of a batch of pairs under a model; see `dpo` and `orpo`."""
    if not isinstance(batch, PairBatch):
        raise TypeError(f"[{mode}] 'batch' must hold pairs but is a {type(batch).__name__}.")
    sums = answer_log_probabilities(model, batch)
    counts = mx.array(batch.weights).sum(axis=1)
    if mode == "orpo":
        return orpo(*_halves(sums / counts), beta=beta)
    if batch.reference is None:
        raise TrainingError(
            "[dpo] 'data' must have log-probabilities under a reference model but has none. Compute "
            "them with 'with_reference'."
        )
    ratios = sums - mx.array(batch.reference).T.reshape(-1)
    if loss_type == "ipo":
        ratios = ratios / counts
    return dpo(*_halves(ratios), beta=beta, loss_type=loss_type)


def answer_log_probabilities(model: Decoder, batch: Batch) -> mx.array:
    r"""The log-probability of the learned tokens of each row, in nats, float32 `(B,)`.

    .. math::
        \sum_t w_{bt} \log p(y_{bt} \mid x_{b, \le t})
    """
    return -long_sum(token_losses(model, batch), axis=-1)


def dpo(
    chosen: mx.array, rejected: mx.array, *, beta: float = 0.1, loss_type: LossType = "sigmoid"
) -> Preferences:
    r"""Direct preference optimisation (Rafailov et al., arXiv 2305.18290, eq. 7).

    .. math::
        d = \log\frac{\pi(y_c \mid x)}{\pi_\mathrm{ref}(y_c \mid x)}
          - \log\frac{\pi(y_r \mid x)}{\pi_\mathrm{ref}(y_r \mid x)}, \quad
        L = -\log \sigma(\beta d)

    `"hinge"` is :math:`\max(0, 1 - \beta d)` (arXiv 2305.10425), and `"ipo"`
    :math:`(d - 1 / 2\beta)^2` (arXiv 2310.12036, eq. 17) with log-ratios that are means over tokens.

    Args:
        chosen: Log-ratios of the chosen answers, float32 `(P,)`.
        rejected: Log-ratios of the rejected ones.
        beta: How far the model may leave the reference; the smaller, the farther.
        loss_type: `"sigmoid"`, `"hinge"` or `"ipo"`.
    """
    difference = chosen - rejected
    margins = beta * difference
    if loss_type == "sigmoid":
        return Preferences(_negative_log_sigmoid(margins), margins)
    if loss_type == "hinge":
        return Preferences(mx.maximum(1 - margins, 0), margins)
    return Preferences(mx.square(difference - 1 / (2 * beta)), margins)


def orpo(chosen: mx.array, rejected: mx.array, *, beta: float = 0.1) -> Preferences:
    r"""Odds ratio preference optimisation (Hong et al., arXiv 2403.07691, eq. 6 and 7).

    .. math::
        L = -\ell_c - \beta \log \sigma\Big(\log\frac{\mathrm{odds}(y_c)}{\mathrm{odds}(y_r)}\Big), \quad
        \mathrm{odds}(y) = \frac{e^{\ell}}{1 - e^{\ell}}

    where :math:`\ell` is the mean log-probability of the tokens of an answer.

    Args:
        chosen: Mean log-probabilities of the chosen answers, float32 `(P,)`.
        rejected: Mean log-probabilities of the rejected ones.
        beta: The weight of the odds ratio.
    """
    ratio = _log_odds(chosen) - _log_odds(rejected)
    return Preferences(beta * _negative_log_sigmoid(ratio) - chosen, beta * (chosen - rejected))


def _log_odds(mean: mx.array) -> mx.array:
    mean = mx.minimum(mean, _MOST)
    return mean - mx.log(-mx.expm1(mean))


def _negative_log_sigmoid(x: mx.array) -> mx.array:
    return mx.logaddexp(-x, mx.zeros((), x.dtype))


def _halves(rows: mx.array) -> tuple[mx.array, mx.array]:
    """The values of the chosen and of the rejected answers."""
    middle = rows.shape[0] // 2
    return rows[:middle], rows[middle:]


_FILE = "reference.safetensors"


def with_reference(
    data: Mapping[str, samples.Samples[Pair]],
    model: Decoder,
    *,
    batch_size: int = 4,
    folder: Path | None = None,
    processes: DataParallel | None = None,
) -> dict[str, samples.Samples[Pair]]:
    """The same pairs, with the log-probabilities of their answers under a reference model.

    Args:
        data: The pairs of each split.
        model: The reference model: the one that a run begins with, or another one with its vocabulary.
        batch_size: Pairs in a forward pass.
        folder: Where they are kept for a run that is resumed; `None`: nowhere.
        processes: The processes that compute them together, each a part.
    """
    processes = DataParallel() if processes is None else processes
    digest = hashlib.sha256((samples_digest(data) + weights_digest(model)).encode()).hexdigest()
    blank = {name: mx.zeros((len(split.samples), 2)) for name, split in data.items()}
    file = None if folder is None else folder / _FILE
    stored = _read(file, digest, blank) if processes.is_first else None
    if processes.largest(int(stored is not None)):
        values = processes.of_first(blank if stored is None else stored)
    else:
        values = _computed(data, model, batch_size, processes)
        if file is not None and processes.is_first:
            with writing(file.parent), new_file(file) as new:
                write_tensors(new, values, {"digest": digest})
    return {
        name: replace(split, samples=_referenced(split.samples, values[name]))
        for name, split in data.items()
    }


def reference_digest(data: Mapping[str, samples.Samples[Pair]]) -> str:
    """The digest of the log-probabilities that `with_reference` has added."""
    digest = hashlib.sha256()
    for name in sorted(data):
        known = [pair.reference for pair in data[name].samples if pair.reference is not None]
        digest.update(np.array(known, np.float32).tobytes())
    return digest.hexdigest()


def _read(
    file: Path | None, digest: str, blank: Mapping[str, mx.array]
) -> dict[str, mx.array] | None:
    """The values that an earlier start of the same run has kept, or `None`."""
    if file is None or not file.exists():
        return None
    entries, metadata = read_header(file)
    is_same = metadata.get("digest") == digest and entries.keys() == blank.keys()
    if not is_same or any(entries[name].shape != blank[name].shape for name in blank):
        return None
    return dict(read_tensors(file, entries.values()))


def _computed(
    data: Mapping[str, samples.Samples[Pair]],
    model: Decoder,
    batch_size: int,
    processes: DataParallel,
) -> dict[str, mx.array]:
    """The log-probabilities `(pairs, 2)` of each split; each process computes every n-th batch."""
    model.eval()
    found = {}
    total = sum(len(split.samples) for split in data.values())
    with Progress("reference", total, "pair", is_shown=processes.is_first) as bar:
        for name, split in data.items():
            values = np.zeros((len(split.samples), 2), np.float32)
            # texts of similar lengths together
            order = sorted(range(len(values)), key=lambda n: split.samples[n].length)
            starts = range(0, len(order), batch_size)
            for start in starts[processes.rank :: processes.size]:
                indices = order[start : start + batch_size]
                batch = pair_batch([split.samples[n] for n in indices])
                rows = np.array(answer_log_probabilities(model, batch))
                values[indices] = rows.reshape(2, -1).T
                bar.update(len(indices) * processes.size)
            found[name] = mx.array(values)
    _, _, values_of_all = processes.sums(mx.zeros(()), mx.array(0, mx.int32), found)
    return dict(values_of_all)


def _referenced(pairs: Sequence[Pair], values: mx.array) -> list[Pair]:
    rows = np.array(values).tolist()
    return [replace(pair, reference=tuple(row)) for pair, row in zip(pairs, rows, strict=True)]
