"""How a search for a text goes, as its caller or the model's files say."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from ...errors import CheckpointError, UnsupportedModelError
from ...models import EncoderDecoder
from ...models.parts.encoder_decoder import SEARCH_KEYS

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
        renormalize: The probabilities of the tokens that may be written sum to 1. Otherwise those of
            the others are lost.
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
    """What the model's files say, or mean where they say nothing."""
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
