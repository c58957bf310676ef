"""A masked language model: every position sees the whole text."""

import mlx.core as mx

from ...layers.context import Context
from .token_model import TokenModel
from .tokens import known_rows


class MaskedLM(TokenModel):
    """Fills in tokens that are left out of a text (BERT, Devlin et al., arXiv 1810.04805).

    Args: as of `TokenModel`; the token mixers are built to see the whole sequence.

    Shape:
        `tokens`: integers `(B, L)`; `valid`: booleans `(B, L)`, `False` where padded; logits
        `(B, L, V)`.

    Example:
        >>> blocks = [Block(32, GQA(32, is_causal=False), SwiGLU(32))]
        >>> model = MaskedLM(nn.Embedding(100, 32), blocks, nn.RMSNorm(32))
        >>> model(mx.array([[1, 2, 3]])).shape
        (1, 3, 100)
    """

    purpose = "filling in masked tokens"
    command = "fill"

    def hidden(self, tokens: mx.array, valid: mx.array | None = None) -> mx.array:
        """The normed residual stream before the head, `(B, L, D)`."""
        return self.transform(known_rows(self.embed, tokens), Context(valid))

    def predictions(self, tokens: mx.array) -> mx.array:
        return self(tokens)

    def __call__(self, tokens: mx.array, valid: mx.array | None = None) -> mx.array:
        return self.logits(self.hidden(tokens, valid))
