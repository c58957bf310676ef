"""Embeddings: the mean of what a model makes of the tokens of a text."""

import base64
from collections.abc import Sequence

import mlx.core as mx
import numpy as np

from ..models import Decoder
from ..models.parts.tokens import token_array
from .engine import Steps
from .schemas.embedding import EmbeddingRequest


def embedding_steps(model: Decoder, texts: Sequence[Sequence[int]], step_size: int) -> Steps:
    r"""The embedding of each text, `float32` `(D,)`; the work stops after each piece of a text.

    .. math::
        e = m / \lVert m \rVert, \quad m = \frac{1}{L} \sum_i h_i

    with :math:`h_i` the hidden state at token i, which the head would read.

    Args:
        model: Reads the texts.
        texts: Their ids.
        step_size: Tokens of a piece.
    """
    embeddings = []
    for text in texts:
        total = np.zeros(0)
        state = model.init_state(1)
        for first in range(0, len(text), step_size):
            piece = token_array(text[first : first + step_size], model.vocab_size)
            hidden, state = model.hidden(piece, state)
            hidden = hidden.astype(mx.float32)
            mx.eval(hidden, state)
            # in float64, since the sum is long
            part = np.asarray(hidden, np.float64)[0].sum(axis=0)
            total = part if first == 0 else total + part
            yield
        length = float(np.linalg.norm(total))
        embeddings.append((total / length if length > 0 else total).astype(np.float32))
    return embeddings


def embedding_list(
    body: EmbeddingRequest, name: str, embeddings: Sequence[np.ndarray], count: int
) -> dict[str, object]:
    """The answer to a request for embeddings of `count` tokens."""
    data = [
        {
            "object": "embedding",
            "index": index,
            "embedding": embedding.tolist()
            if body.encoding_format == "float"
            else base64.b64encode(embedding.astype("<f4").tobytes()).decode(),
        }
        for index, embedding in enumerate(embeddings)
    ]
    usage = {"prompt_tokens": count, "total_tokens": count}
    return {"object": "list", "data": data, "model": name, "usage": usage}
