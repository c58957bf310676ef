"""Texts in another language, by an encoder-decoder and beam search."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import mlx.core as mx
import numpy as np
from mlx.utils import tree_map

from ..errors import CheckpointError, UnsupportedModelError
from ..models import EncoderDecoder
from ..models.parts.encoders import SEARCH_KEYS
from ..models.parts.token_checks import check_length, check_tokens
from ..ops import log_softmax
from ..tokenizer.tokenizer import Tokenizer
from ..tokenizer.translation_tokenizer import PairTokenizer, SharedVocabulary
from .prompts import check_text_length

_MOST_BEAMS = 1024
_LARGEST = 2**31 - 1


@dataclass(frozen=True)
class BeamSettings:
    """How a search goes. Length counts tokens after `start`.

    Attributes:
        num_beams: Texts that are written side by side, `K`. With one the search is greedy.
        length_penalty: Exponent `a` of the length in a text's score, the sum of its log-probabilities
            over its number of tokens to the power of `a`. 0 takes the likeliest text, which favours
            short ones.
        max_tokens: Number of tokens of the longest text.
        start: The token before the first.
        end: The token after the last, or several of which each is one.
        never: Tokens that are never written.
        renormalize: The probabilities of the tokens that may be written sum to 1. Otherwise the
            probabilities of the others are lost.
        early_stopping: When the search for a source ends that has `num_beams` texts: at once (`True`),
            once no open beam beats them at its present length (`False`), or at the length that favours
            it most (`"never"`).
        forced_end: The tokens of which one ends a text of the longest length, at no cost; none: such a
            text ends as it is.
        forced_first: The first token; `None`: any.
        never_first: Tokens that are never the first.
        never_together: Sequences of several tokens that are never written.
        no_repeat_ngram_size: A text holds no sequence of so many tokens twice; 0: it may.
        repetition_penalty: Scores of tokens that a text holds, or `start`, are divided by it if they are
            positive, else multiplied.
        min_tokens: Number of tokens of the shortest text, with the last.

    Raises:
        ValueError: A number is out of its bounds.
    """

    num_beams: int
    length_penalty: float
    max_tokens: int
    start: int
    end: int | tuple[int, ...]
    never: tuple[int, ...] = ()
    renormalize: bool = False
    early_stopping: bool | Literal["never"] = False
    forced_end: tuple[int, ...] | None = None
    forced_first: int | None = None
    never_first: tuple[int, ...] = ()
    never_together: tuple[tuple[int, ...], ...] = ()
    no_repeat_ngram_size: int = 0
    repetition_penalty: float = 1.0
    min_tokens: int = 0

    def __post_init__(self) -> None:
        for name in ("num_beams", "max_tokens"):
            value = getattr(self, name)
            if value < 1:
                raise ValueError(f"[beam_search] '{name}' must be positive but got {value}.")
        if not 0 <= self.length_penalty < math.inf:
            raise ValueError(
                f"[beam_search] 'length_penalty' must be a number from 0 but got {self.length_penalty}."
            )
        if not 0 < self.repetition_penalty < math.inf:
            raise ValueError(
                "[beam_search] 'repetition_penalty' must be a positive number but got "
                f"{self.repetition_penalty}."
            )

    @property
    def ends(self) -> tuple[int, ...]:
        """The tokens after the last."""
        return self.end if isinstance(self.end, tuple) else (self.end,)

    @property
    def last(self) -> tuple[int, ...]:
        """The tokens that end a text of the longest length."""
        return self.ends if self.forced_end is None else self.forced_end


# what would change the result and is not implemented, with the value that changes nothing
_REFUSED = {
    "do_sample": False,
    "num_return_sequences": 1,
    "num_beam_groups": 1,
    "diversity_penalty": 0,
    "encoder_repetition_penalty": 1,
    "encoder_no_repeat_ngram_size": 0,
    "guidance_scale": 1,
    "penalty_alpha": 0,
    "exponential_decay_length_penalty": None,
    "sequence_bias": None,
    "constraints": None,
    "force_words_ids": None,
    "dola_layers": None,
    "prompt_lookup_num_tokens": None,
    "stop_strings": None,
    "max_time": None,
    "watermarking_config": None,
}


def settings_of(
    model: EncoderDecoder,
    *,
    num_beams: int | None = None,
    length_penalty: float | None = None,
    max_tokens: int | None = None,
) -> BeamSettings:
    """How a model's publishers search, apart from what is given, by the rules of transformers.

    `generation_config.json` decides alone if it says anything of a search, and else `config.json`.
    A model whose files name no `bad_words_ids` there never writes `unwritten_tokens`.

    Args:
        model: The model.
        num_beams, length_penalty, max_tokens: As for `translate`.

    Raises:
        CheckpointError: A value of the model's files is of the wrong type or out of its bounds.
        UnsupportedModelError: They ask for a search that is not implemented.
        ValueError: An argument is out of its bounds.
    """
    values = _Values(_written(model), model.vocab_size)
    values.refuse()
    # the first token takes a position
    longest = model.config.max_position_embeddings - 1
    most = (
        values.whole("max_new_tokens", low=1) or values.whole("max_length", longest + 1, low=2) - 1
    )
    if num_beams is None:
        num_beams = values.whole("num_beams", 1, low=1, high=_MOST_BEAMS)
    if length_penalty is None:
        length_penalty = values.number("length_penalty", 1.0, low=0)
    ends = values.tokens("eos_token_id") or (int(model.config.eos_token_id),)
    never = [seq for seq in values.sequences("bad_words_ids") if len(seq) > 1 or seq[0] not in ends]
    forced_first = values.tokens("forced_bos_token_id")
    return BeamSettings(
        num_beams=num_beams,
        length_penalty=length_penalty,
        max_tokens=min(most, longest) if max_tokens is None else max_tokens,
        start=(*values.tokens("decoder_start_token_id"), model.start_token_id)[0],
        end=ends,
        never=(*(seq[0] for seq in never if len(seq) == 1), *values.tokens("suppress_tokens")),
        renormalize=values.flag("renormalize_logits"),
        early_stopping=values.early_stopping(),
        forced_end=values.tokens("forced_eos_token_id"),
        forced_first=forced_first[0] if forced_first else None,
        never_first=values.tokens("begin_suppress_tokens"),
        never_together=tuple(seq for seq in never if len(seq) > 1),
        no_repeat_ngram_size=values.whole("no_repeat_ngram_size", 0),
        repetition_penalty=values.number("repetition_penalty", 1.0, low=1e-6),
        # the first token counts for the one, and the last for both
        min_tokens=max(values.whole("min_length", 0), values.whole("min_new_tokens", -1) + 1),
    )


def _written(model: EncoderDecoder) -> Mapping[str, Any]:
    """The settings of the model's files, or their defaults."""
    files = model.search_files
    known = SEARCH_KEYS | _REFUSED.keys()
    if known & files.generation.keys():
        return files.generation
    written = {
        "num_beams": model.config.num_beams,
        **{key: files.config[key] for key in known & files.config.keys()},
    }
    if "bad_words_ids" not in written:
        never = [[token] for token in model.unwritten_tokens]
        written |= {"bad_words_ids": never, "renormalize_logits": True}
    return written


class _Values:
    """The values of a model's files, each checked as it is read; null is none."""

    def __init__(self, values: Mapping[str, Any], vocab_size: int):
        self._values = values
        self._vocab_size = vocab_size

    def refuse(self) -> None:
        """Refuses what is not implemented."""
        for key, neutral in _REFUSED.items():
            value = self._values.get(key)
            if value is not None and value != neutral:
                raise UnsupportedModelError(
                    f"[translate] the model's files must leave out {key!r} but give {value!r:.80}, "
                    "which is not implemented. Take it out of generation_config.json."
                )

    def whole(self, key: str, default: int = 0, *, low: int = 0, high: int = _LARGEST) -> int:
        value = self._values.get(key)
        if value is None:
            return default
        if type(value) is not int or not low <= value <= high:
            raise self._wrong(key, f"be a whole number from {low} to {high}")
        return value

    def number(self, key: str, default: float, *, low: float) -> float:
        value = self._values.get(key)
        if value is None:
            return default
        if type(value) not in (int, float) or not low <= value < math.inf:
            raise self._wrong(key, f"be a number from {low:g}")
        return float(value)

    def flag(self, key: str) -> bool:
        value = self._values.get(key)
        if value is not None and not isinstance(value, bool):
            raise self._wrong(key, "be true or false")
        return bool(value)

    def early_stopping(self) -> Literal["never"] | bool:
        if self._values.get("early_stopping") == "never":
            return "never"
        return self.flag("early_stopping")

    def tokens(self, key: str) -> tuple[int, ...]:
        """One token or several."""
        value = self._values.get(key)
        listed = value if isinstance(value, list) else [] if value is None else [value]
        if not all(map(self._is_token, listed)):
            raise self._wrong(key, f"be tokens below {self._vocab_size}")
        return tuple(listed)

    def sequences(self, key: str) -> list[tuple[int, ...]]:
        """Lists of tokens."""
        value = self._values.get(key) or []
        lists = isinstance(value, list) and all(
            isinstance(entry, list) and entry for entry in value
        )
        if not lists or not all(self._is_token(token) for entry in value for token in entry):
            raise self._wrong(key, f"be a list of lists of tokens below {self._vocab_size}")
        return [tuple(entry) for entry in value]

    def _is_token(self, value: Any) -> bool:
        return type(value) is int and 0 <= value < self._vocab_size

    def _wrong(self, key: str, rule: str) -> CheckpointError:
        return CheckpointError(
            f"[translate] {key!r} of the model's files must {rule} but got {self._values[key]!r:.80}. "
            "Correct it in generation_config.json."
        )


Step = Callable[[mx.array, Any], tuple[mx.array, Any]]
"""Reads one token of each row, `(R, 1)`, after a state: the logits `(R, V)` and the new state."""


@dataclass
class _Search:
    """The search for one source.

    Attributes:
        tokens: What each beam has written.
        scores: The sums of their log-probabilities; of one beam, its last logit.
        finished: Texts that have ended, with their scores, best first.
        is_done: Whether no beam can become better than those.
    """

    tokens: list[list[int]]
    scores: np.ndarray
    finished: list[tuple[float, list[int]]] = field(default_factory=list)
    is_done: bool = False


def beam_search(
    step: Step, rows: int, settings: BeamSettings, report: Callable[[int], object] = lambda _: None
) -> list[list[int]]:
    """The best text that is found for each source.

    A beam ends with the token `end`, and at the longest length every beam ends. All rules are
    transformers'.

    Args:
        step: Reads tokens; its rows are the beams, source by source.
        rows: Number of sources.
        settings: How the search goes.
        report: Called with the number of sources that are done, after each step.

    Returns:
        The tokens for each source, without the first and the last.
    """
    beams, state = settings.num_beams, None
    # all beams begin alike, so that only the first of them counts
    first = np.where(np.arange(beams) == 0, 0.0, -np.inf)
    searches = [_Search([[] for _ in range(beams)], first) for _ in range(rows)]
    tokens = np.full((rows * beams, 1), settings.start, np.int32)
    for length in range(1, settings.max_tokens + 1):
        logits, state = step(mx.array(tokens), state)
        values, indices = _likeliest(logits, searches, settings, length)
        from_beam, token = np.divmod(indices, logits.shape[-1])
        order = np.concatenate(
            [
                row * beams
                + _advance(search, values[row], from_beam[row], token[row], length, settings)
                for row, search in enumerate(searches)
            ]
        )
        done = sum(search.is_done for search in searches)
        report(done)
        if done == rows:
            break
        if beams > 1:
            state = tree_map(lambda array: array[mx.array(order)], state)  # noqa: B023
        tokens = np.array([[beam[-1]] for search in searches for beam in search.tokens], np.int32)
    # where the rules leave nothing to write, no text ends
    return [search.finished[0][1] if search.finished else search.tokens[0] for search in searches]


def _likeliest(
    logits: mx.array, searches: list[_Search], settings: BeamSettings, length: int
) -> tuple[np.ndarray, np.ndarray]:
    """The best continuations of each source, best first, and their indices in `(K, V)`.

    There are so many that `K` go on though each beam ends in every way.
    """
    beams, size = settings.num_beams, logits.shape[-1]
    scores = logits.astype(mx.float32)
    if beams > 1:
        scores = log_softmax(scores)
    texts = [tokens for search in searches for tokens in search.tokens]
    scores = _allowed(scores, texts, settings, length)
    if beams > 1:
        sums = np.concatenate([search.scores for search in searches]).astype(np.float32)
        scores = scores + mx.array(sums[:, None])
    flat = scores.reshape(len(searches), beams * size)
    count = min((1 + len(settings.ends)) * beams, beams * size)
    indices = np.sort(np.array(mx.argpartition(-flat, count - 1, axis=-1)[:, :count]), axis=-1)
    values = np.take_along_axis(np.array(flat), indices, axis=-1)
    order = np.argsort(-values, axis=-1, kind="stable")
    return np.take_along_axis(values, order, axis=-1), np.take_along_axis(indices, order, axis=-1)


def _allowed(
    scores: mx.array, texts: Sequence[Sequence[int]], settings: BeamSettings, length: int
) -> mx.array:
    """Scores in which a token that must not follow its text has none, in the order of transformers.

    Args:
        scores: Scores `(R, V)`.
        texts: What the rows have written, without the first token.
        settings: Says what must not follow.
        length: Number of tokens with the next.
    """
    size = scores.shape[-1]
    if settings.repetition_penalty != 1:
        occurs = mx.array(_marked([[settings.start, *text] for text in texts], size))
        penalty = settings.repetition_penalty
        scores = mx.where(occurs, mx.where(scores > 0, scores / penalty, scores * penalty), scores)
    if settings.no_repeat_ngram_size or settings.never_together:
        rows = [_not_next([settings.start, *text], settings) for text in texts]
        scores = mx.where(mx.array(_marked(rows, size)), -mx.inf, scores)
    scores = _without(scores, settings.never)
    if length < settings.min_tokens:
        scores = _without(scores, settings.ends)
    if length == 1 and settings.forced_first is not None:
        scores = _only(scores, (settings.forced_first,))
    if length == settings.max_tokens and settings.last:
        scores = _only(scores, settings.last)
    if length == (1 if settings.forced_first is None else 2):
        scores = _without(scores, settings.never_first)
    return log_softmax(scores) if settings.renormalize and settings.num_beams > 1 else scores


def _not_next(text: list[int], settings: BeamSettings) -> list[int]:
    """The tokens that would complete a sequence that must not be written, or not again."""
    size = settings.no_repeat_ngram_size
    found = [seq[-1] for seq in settings.never_together if tuple(text[1 - len(seq) :]) == seq[:-1]]
    if size and len(text) >= size - 1:
        before = text[len(text) - size + 1 :]
        starts = range(len(text) - size + 1)
        found += [text[n + size - 1] for n in starts if text[n : n + size - 1] == before]
    return found


def _marked(rows: Sequence[Sequence[int]], size: int) -> np.ndarray:
    """Where each row has its tokens, booleans `(R, V)`."""
    marked = np.zeros((len(rows), size), bool)
    for is_marked, tokens in zip(marked, rows, strict=True):
        is_marked[list(tokens)] = True
    return marked


def _without(scores: mx.array, tokens: Sequence[int]) -> mx.array:
    marked = _marked([tokens], scores.shape[-1])
    return mx.where(mx.array(marked), -mx.inf, scores) if tokens else scores


def _only(scores: mx.array, tokens: Sequence[int]) -> mx.array:
    """Scores that leave nothing but some tokens, at no cost."""
    marked = mx.array(_marked([tokens], scores.shape[-1]))
    return mx.broadcast_to(mx.where(marked, mx.array(0.0), mx.array(-mx.inf)), scores.shape)


def _advance(
    search: _Search,
    values: np.ndarray,
    beams: np.ndarray,
    tokens: np.ndarray,
    length: int,
    settings: BeamSettings,
) -> np.ndarray:
    """Takes the best continuations of a source; returns the beam that each new one goes on from.

    Args:
        search: The source; it is changed.
        values: The sums of the scores of the continuations, best first.
        beams: The beam that each continues.
        tokens: The token that each adds.
        length: Number of tokens with it.
        settings: How the search goes.
    """
    if search.is_done:
        return np.arange(settings.num_beams)
    is_end = np.isin(tokens, settings.ends)
    ends = is_end | (length == settings.max_tokens)
    for n in np.flatnonzero(ends[: settings.num_beams] & np.isfinite(values[: settings.num_beams])):
        score = float(values[n]) / length**settings.length_penalty
        last = [] if is_end[n] else [int(tokens[n])]
        search.finished.append((score, [*search.tokens[beams[n]], *last]))
    search.finished.sort(key=lambda found: -found[0])
    del search.finished[settings.num_beams :]
    # so many continuations were asked for that enough of them go on
    going = np.flatnonzero(~ends)[: settings.num_beams]
    if not len(going):
        search.is_done = True
        return np.arange(settings.num_beams)
    chosen = np.resize(going, settings.num_beams)
    search.tokens = [[*search.tokens[beams[n]], int(tokens[n])] for n in chosen]
    search.scores = np.where(np.arange(settings.num_beams) < len(going), values[chosen], -np.inf)
    search.is_done = _is_done(search, length, settings)
    return beams[chosen]


def _is_done(search: _Search, length: int, settings: BeamSettings) -> bool:
    """Returns whether no open beam is worth going on with."""
    if len(search.finished) < settings.num_beams:
        return False
    if settings.num_beams == 1 or settings.early_stopping is True:
        return True
    if settings.early_stopping == "never":
        length = settings.max_tokens
    best = float(search.scores[0]) / length**settings.length_penalty
    return best <= search.finished[-1][0]


def translate(
    model: EncoderDecoder,
    tokenizer: PairTokenizer | Tokenizer,
    texts: Sequence[str],
    *,
    num_beams: int | None = None,
    length_penalty: float | None = None,
    max_tokens: int | None = None,
    batch_size: int = 16,
    progress: Callable[[int], object] = lambda _: None,
) -> list[str]:
    """Translates texts, together with others of similar length.

    Args:
        model: A model whose configuration names the last token.
        tokenizer: Belongs to the model, as `load` gives it.
        texts: The texts; sentences, for most models.
        num_beams: Texts that are written side by side; 1 is greedy. Default: as the model's publishers
            search.
        length_penalty: See `BeamSettings`. Default: the publishers'.
        max_tokens: Number of tokens of the longest result. Default: the publishers', or as many as the
            model was made for.
        batch_size: Number of texts translated together.
        progress: Called with the number of texts that are done.

    Returns:
        The translation of each text.

    Raises:
        CheckpointError: A value of the model's files is wrong, or the tokenizer names no end of a text.
        UnsupportedModelError: The files ask for a search that is not implemented.
        ValueError: A number is not positive, a text is too long, or a token is outside the vocabulary.

    Example:
        >>> model, tokenizer = load("Helsinki-NLP/opus-mt-en-de")  # doctest: +SKIP
        >>> translate(model, tokenizer, ["I am a small frog."])  # doctest: +SKIP
        ['Ich bin ein kleiner Frosch.']
    """
    if batch_size < 1:
        raise ValueError(f"[translate] 'batch_size' must be positive but got {batch_size}.")
    if isinstance(tokenizer, Tokenizer):
        tokenizer = SharedVocabulary(tokenizer)
    settings = settings_of(
        model, num_beams=num_beams, length_penalty=length_penalty, max_tokens=max_tokens
    )
    for text in texts:
        check_text_length(tokenizer, text, model.context_length)
    sources = [tokenizer.encode(text) for text in texts]
    for source in sources:
        check_length(len(source), model.context_length)
    order = sorted(range(len(sources)), key=lambda n: len(sources[n]))
    results = [""] * len(sources)
    for first in range(0, len(order), batch_size):
        group = order[first : first + batch_size]
        found = translate_tokens(
            model,
            [sources[n] for n in group],
            settings,
            lambda done, first=first: progress(first + done),  # type: ignore[misc]
        )
        for n, tokens in zip(group, found, strict=True):
            results[n] = tokenizer.decode(tokens)
    return results


def translate_tokens(
    model: EncoderDecoder,
    sources: Sequence[Sequence[int]],
    settings: BeamSettings,
    report: Callable[[int], object] = lambda _: None,
) -> list[list[int]]:
    """The tokens of the target of each source; all are read together.

    Args:
        model: Reads the sources and writes the targets.
        sources: Their tokens, with the last.
        settings: How the search goes.
        report: Called with the number of sources that are done, after each step.

    Raises:
        ValueError: There is no source, one is empty or too long, the targets may become so, or a token
            is outside the vocabulary.
    """
    if not sources or not all(len(source) for source in sources):
        raise ValueError("[translate] every source must hold a token, but one holds none.")
    for source in sources:
        check_tokens(source, model.vocab_size)
        check_length(len(source), model.max_length)
    check_length(settings.max_tokens, model.max_length)
    lengths = np.array([len(source) for source in sources])
    tokens = np.zeros((len(sources), int(lengths.max())), np.int32)
    for row, source in zip(tokens, sources, strict=True):
        row[: len(source)] = source
    valid = mx.array(np.arange(tokens.shape[1]) < lengths[:, None])
    memory = model.encode(mx.array(tokens), valid)
    # a row for each beam
    memory, valid = (mx.repeat(array, settings.num_beams, axis=0) for array in (memory, valid))

    def step(last: mx.array, state: Any) -> tuple[mx.array, Any]:
        logits, state = model.decode(last, memory, state, memory_valid=valid)
        return logits[:, -1], state

    return beam_search(step, len(sources), settings, report)
