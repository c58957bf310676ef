"""Mixers that read whole rows, and hold keys and values of the tokens before if they are causal."""

from collections.abc import Callable
from typing import ClassVar

import mlx.core as mx

from .arguments import check_sequences
from .attention_options import KeyValueCache
from .context import Context
from .key_value_kind import KeyValueKind
from .key_value_state import KeyValueState
from .padding import RealTokens, read_without_padding
from .state_kind import StateKind
from .token_mixer import TokenMixer

HeldTokens = KeyValueState | tuple[()]


class KeyValueMixer(TokenMixer):
    """A mixer that sees the tokens before only by the keys and values that it holds of them.

    A mixer of this family sets `_dims`, `_is_causal` and, if it is bound to a length, `_max_length`. It
    says what it holds in `held_dims`, and calls `read_tokens`.

    Attributes:
        is_exact: As `KeyValueKind` has it.
    """

    is_exact: ClassVar[bool] = True

    _dims: int
    _max_length: int

    @property
    def held_dims(self) -> tuple[int, int, int]:
        """Heads, dims of a key, which may be 0, and dims of a value."""
        raise NotImplementedError

    @property
    def state_kind(self) -> StateKind:
        if not self.is_causal:
            return super().state_kind
        heads, key_dims, value_dims = self.held_dims
        cache = KeyValueCache()
        return KeyValueKind(
            heads,
            key_dims,
            cache,
            takes_steps=False,
            value_dims=value_dims,
            is_exact=self.is_exact,
        )

    def init_state(self, batch_size: int, dtype: mx.Dtype) -> HeldTokens:
        return self.state_kind.blank(batch_size, 0, dtype) if self.is_causal else ()

    def read_tokens(
        self,
        x: mx.array,
        state: HeldTokens | None,
        context: Context,
        mix: Callable[[mx.array, HeldTokens, RealTokens], tuple[mx.array, HeldTokens]],
    ) -> tuple[mx.array, HeldTokens]:
        """What `mix` makes of the tokens of a call, and the state.

        Args:
            x: `(B, L, D)`, padded anywhere.
            state: The state before; `None`: that of an empty text.
            context: The call.
            mix: Called with `x`, whose padding stands behind its tokens and is zero, the state before
                and the tokens.

        Raises:
            ValueError: `x` has other dims, or there are more tokens than places.
        """
        before = self.init_state(x.shape[0], x.dtype) if state is None else state
        self.check_tokens(x, before)
        if not x.shape[1]:
            return x, before
        return read_without_padding(x, context, lambda x, tokens: mix(x, before, tokens))

    def check_tokens(self, x: mx.array, before: HeldTokens = ()) -> None:
        """Refuses what it cannot read behind the tokens before, as `read_tokens` does."""
        name = type(self).__name__
        check_sequences(name, x, self._dims)
        used = before.used if isinstance(before, KeyValueState) else 0
        if self.length_bound and used + x.shape[1] > self._max_length:
            raise ValueError(
                f"[{name}] 'x' and what was read before must not be longer than 'max_length', "
                f"{self._max_length}, but have {used + x.shape[1]} positions."
            )
