"""Models that embed texts, against the reference: hidden states and both poolings, padded and alone."""

from typing import Any, get_args

import mlx.core as mx
import pytest

from mlx_mmfree import embed, embed_tokens
from mlx_mmfree.errors import UnsupportedModelError
from mlx_mmfree.models import TextEmbedder, check_causal
from mlx_mmfree.models.parts.encoders import Pooling
from tests.goldens.cases import Case, golden, model_of
from tests.tolerances import TOLERANCE, relative_error

FLOAT32 = TOLERANCE[mx.float32]


class Spelled:
    """A tokenizer whose texts are numbers."""

    def encode(self, text: str) -> list[int]:
        return [int(word) for word in text.split()]


def opened(case: Case, packed: bool) -> tuple[dict[str, mx.array], Any, mx.array]:
    tensors, model = golden(case.folder), model_of(case.folder, packed, mx.float32)
    return tensors, model, tensors["attention_mask"].astype(mx.bool_)


def texts(tensors: dict[str, mx.array], valid: mx.array) -> list[str]:
    rows = zip(tensors["input_ids"].tolist(), valid.tolist(), strict=True)
    return [" ".join(str(t) for t, v in zip(*row, strict=True) if v) for row in rows]


def test_last_hidden_state(embedding_case: Case, packed: bool) -> None:
    tensors, model, valid = opened(embedding_case, packed)
    hidden, _ = model(tensors["input_ids"], None, valid)
    got = mx.where(valid[..., None], hidden, 0)
    assert relative_error(got, tensors["last_hidden_state"]) <= FLOAT32


@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_poolings(embedding_case: Case, packed: bool, pooling: Pooling) -> None:
    tensors, model, valid = opened(embedding_case, packed)
    want = tensors[f"embedding_{pooling}"]
    mask = tensors["attention_mask"]
    assert (
        relative_error(embed_tokens(model, tensors["input_ids"], mask, pooling=pooling), want)
        <= FLOAT32
    )
    rows = texts(tensors, valid)
    got = embed(model, Spelled(), rows, pooling=pooling)
    assert relative_error(got, want) <= FLOAT32
    # padding on the other side, and texts in another order
    left = mx.concatenate([mx.zeros((1, 3), mx.int32), tensors["input_ids"][:1]], axis=1)
    seen = mx.concatenate([mx.zeros((1, 3), mx.int32), mask[:1]], axis=1)
    assert relative_error(embed_tokens(model, left, seen, pooling=pooling), want[:1]) <= FLOAT32
    turned = embed(model, Spelled(), rows[::-1], pooling=pooling)
    assert relative_error(turned[::-1], want) <= FLOAT32


def test_the_files_say_which_pooling(embedding_case: Case, packed: bool) -> None:
    tensors, model, valid = opened(embedding_case, packed)
    pooling = model.embedding.pooling
    assert pooling in get_args(Pooling)
    got = embed_tokens(model, tensors["input_ids"], valid)
    assert relative_error(got, tensors[f"embedding_{pooling}"]) <= FLOAT32


def test_no_text_is_written(embedding_case: Case, packed: bool) -> None:
    _, model, _ = opened(embedding_case, packed)
    assert isinstance(model, TextEmbedder)
    with pytest.raises(UnsupportedModelError, match=r"embedding texts\. Use 'mmfree embed'"):
        check_causal(model)
