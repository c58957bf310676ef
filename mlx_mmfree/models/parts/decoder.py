"""A causal language model made of blocks."""

from collections.abc import Sequence

import mlx.core as mx

from ...layers.context import Context
from ...layers.embedding import embed_tokens
from ...layers.mixer import State
from .token_model import TokenModel
from .tokens import known_rows


class Decoder(TokenModel):
    """Continues texts: embedding, blocks, norm, head.

    Args: as of `TokenModel`.

    Shape:
        `tokens`: integers `(B, L)`, of which one outside the vocabulary makes its row NaN from there on;
        `valid`: booleans `(B, L)`, `False` where padded; `starts`: booleans `(B, L)`, `True` where
        another sample begins in the row; logits `(B, L, V)`.

    State:
        A tuple with the state of each block; every array has the batch on axis 0.

    Example:
        >>> blocks = [Block(32, MLGRU(32), SwiGLU(32, hidden_dims=64)) for _ in range(2)]
        >>> model = Decoder(nn.Embedding(100, 32), blocks, nn.RMSNorm(32))
        >>> logits, state = model(mx.array([[1, 2, 3]]))
        >>> logits.shape, len(state)
        ((1, 3, 100), 2)
    """

    purpose = "continuing a text"
    command = "generate"

    def hidden(
        self,
        tokens: mx.array,
        state: tuple[State, ...] | None = None,
        valid: mx.array | None = None,
        *,
        starts: mx.array | None = None,
        block_arguments: Sequence[dict[str, mx.array]] | None = None,
        by_position: bool = False,
    ) -> tuple[mx.array, tuple[State, ...]]:
        """The normed residual stream before the head, `(B, L, D)`, and the new state.

        The tokens are taken as they are: their caller has checked them on the host, as a generator
        does. `block_arguments` are those of `block_arguments()`, from a caller who has computed them
        before. With `by_position`, the new state is as mixers give it whose context asks so.
        """
        state = self.init_state(tokens.shape[0]) if state is None else state
        x = embed_tokens(self.embed, tokens)
        context = Context(valid, starts=starts, by_position=by_position)
        return self.run(x, state, context, block_arguments)

    def predictions(self, tokens: mx.array) -> mx.array:
        return self(tokens)[0]

    def known_hidden(
        self,
        tokens: mx.array,
        state: tuple[State, ...] | None = None,
        valid: mx.array | None = None,
        *,
        starts: mx.array | None = None,
        block_arguments: Sequence[dict[str, mx.array]] | None = None,
    ) -> tuple[mx.array, tuple[State, ...]]:
        """As `hidden`, for tokens that nobody has checked: one without a row makes its row NaN."""
        x = known_rows(self.embed, tokens)
        state = self.init_state(x.shape[0]) if state is None else state
        return self.run(x, state, Context(valid, starts=starts), block_arguments)

    def text_hidden(
        self,
        tokens: mx.array,
        valid: mx.array | None = None,
        *,
        starts: mx.array | None = None,
    ) -> mx.array:
        """As `known_hidden`, of texts that begin and end with the call, without a state."""
        return self.transform(known_rows(self.embed, tokens), Context(valid, starts=starts))

    def __call__(
        self,
        tokens: mx.array,
        state: tuple[State, ...] | None = None,
        valid: mx.array | None = None,
        *,
        starts: mx.array | None = None,
    ) -> tuple[mx.array, tuple[State, ...]]:
        x, state = self.known_hidden(tokens, state, valid, starts=starts)
        return self.logits(x), state
