"""A text above a limit that exists is refused before it is encoded, by everything that reads texts."""

from collections.abc import Callable
from typing import Any, cast

import pytest

from mlx_mmfree import batch_generate, embed, generate
from mlx_mmfree.cli.parts.prompts import PromptWriter
from mlx_mmfree.generation.predictions import classify, fill
from mlx_mmfree.generation.prompts import prompt_tokens
from mlx_mmfree.generation.translation import translate
from mlx_mmfree.hub import Tokenizer
from tests.hub.checkpoints import GOLDENS, tiny_model, tiny_of

_TEXT = "the cat sat on the mat " * 10_000


class Unread:
    """A tokenizer that tells how many tokens a text has at least, and fails where it encodes one."""

    mask_token_id = 0

    def __init__(self) -> None:
        self._tokenizer = Tokenizer.from_folder(GOLDENS / "tokenizer_bpe")

    def least_tokens(self, text: str) -> int:
        return self._tokenizer.least_tokens(text)

    def encode(self, *_: object, **__: object) -> list[int]:
        raise AssertionError("it was encoded")

    decode = encode


def _bounded(kind: str, **values: Any) -> Any:
    return tiny_of(kind, vocab_size=518, max_position_embeddings=32, **values)


def _task(task: str) -> Any:
    mixers = {"token_mixer": {"name": "multi_head_attention", "num_heads": 2}}
    values = {"task": task, "num_labels": 2, "scale_embedding": True, **mixers}
    return _bounded("metaformer", positions="learned", **values)


@pytest.mark.parametrize(
    "read",
    [
        lambda: generate(_task("causal_lm"), Unread(), _TEXT),
        lambda: batch_generate(_task("causal_lm"), Unread(), [_TEXT]),
        lambda: embed(_task("causal_lm"), Unread(), [_TEXT]),
        lambda: classify(_task("classifier"), Unread(), [_TEXT]),
        lambda: fill(_task("masked_lm"), Unread(), _TEXT),
        lambda: translate(_task("encoder_decoder"), cast(Any, Unread()), [_TEXT]),
    ],
    ids=["generate", "batch", "embed", "classify", "fill", "translate"],
)
def test_a_long_text_is_not_encoded(read: Callable[[], object]) -> None:
    with pytest.raises(ValueError, match=r"at most 32 tokens.*but got at least [0-9]{4}"):
        read()


def test_neither_is_a_conversation(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = Tokenizer.from_folder(GOLDENS / "tokenizer_bpe")
    write = PromptWriter(tokenizer, most=32)
    vocabulary = type(tokenizer._vocabulary)
    monkeypatch.setattr(vocabulary, "encode", Unread.encode)
    for kind in (write, write.opening, write.continuation):
        with pytest.raises(ValueError, match="but got at least"):
            kind(_TEXT)


def test_a_recurrence_reads_texts_of_any_length() -> None:
    with pytest.raises(AssertionError, match="it was encoded"):
        generate(tiny_model(vocab_size=518), Unread(), _TEXT)


def test_a_token_that_comes_again_takes_no_more_memory() -> None:
    ids = prompt_tokens(Tokenizer.from_folder(GOLDENS / "tokenizer_bpe"), _TEXT[:2000], 518)
    assert len({id(token) for token in ids}) == len(set(ids)) < len(ids)
