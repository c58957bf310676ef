"""What can be done with the keys and values of attention."""

from collections.abc import Sequence
from typing import Any, TypeGuard

import mlx.core as mx

from ..ops.slots import slots_after
from .attention_options import KeyValueCache
from .key_value_state import FixedKeyValueState, KeyValueState
from .state_kind import StateKind

AnyKeyValueState = KeyValueState | FixedKeyValueState


class KeyValueKind(StateKind):
    """The states of one attention layer: a `KeyValueState`, or in fixed shapes a `FixedKeyValueState`.

    Args:
        num_heads: Key and value heads `G`.
        head_dim: Dims `K` of a key; 0 where there are only values.
        cache: Which tokens are seen, and how their keys and values are kept.
        takes_steps: Whether `attention_step` computes what this layer does with a single token.
        value_dims: Dims of a value. Default: `head_dim`.
        is_exact: A token sees the same whether it is read with later ones or alone.
    """

    def __init__(
        self,
        num_heads: int,
        head_dim: int,
        cache: KeyValueCache,
        *,
        takes_steps: bool,
        value_dims: int | None = None,
        is_exact: bool = True,
    ):
        super().__init__(self.empty, is_fixed=False)
        self._num_heads = num_heads
        self._dims = (head_dim, head_dim if value_dims is None else value_dims)
        self._cache = cache
        self._takes_steps = takes_steps
        self._is_exact = is_exact

    @property
    def settings(self) -> str:
        return repr(self._cache)

    def empty(self, batch_size: int, dtype: mx.Dtype) -> KeyValueState:
        """The state before the first token."""
        state = KeyValueState.empty(batch_size, self._num_heads, *self._dims, dtype)
        return self.quantized(state) if self._cache.exact_slots == 0 else state

    def quantized(self, state: KeyValueState) -> KeyValueState:
        """The state with keys and values in few bits, if that is how they are to be kept."""
        quantization = self._cache.quantization
        return state if quantization is None else state.quantized(quantization)

    def left_exact(self, state: Any) -> int | None:
        """How many more tokens the state takes before it is quantised; `None`: any number."""
        exact = self._cache.exact_slots
        if exact is None or not isinstance(state, KeyValueState) or state.is_quantized:
            return None
        return max(0, exact - state.used)

    def blank(self, batch_size: int, length: int, dtype: mx.Dtype) -> KeyValueState:
        state = self.empty(batch_size, dtype)
        if self._quantizes(length):
            state = self.quantized(state)
        return state.blank(length, self._cache.window, self._cache.sinks)

    @property
    def exact_length(self) -> int | None:
        return self._cache.exact_slots

    def is_of_batch(self, state: AnyKeyValueState, length: int) -> bool:
        """As `StateKind` has it: a longer row beside this one has made it quantised."""
        is_quantized = isinstance(state, KeyValueState) and state.is_quantized
        return is_quantized and not self._quantizes(length)

    def _quantizes(self, length: int) -> bool:
        """Whether the state after `length` tokens of one row is quantised."""
        exact = self._cache.exact_slots
        return exact is not None and length > exact

    def counted(self, state: AnyKeyValueState) -> tuple[mx.array, ...]:
        return (state.positions,)

    def can_rewind(self, state: AnyKeyValueState, count: int) -> bool:
        if self._cache.window is not None or not self._is_exact:
            return False
        if isinstance(state, FixedKeyValueState):
            return True
        exact = self._cache.exact_slots
        return exact is None or state.is_quantized or state.used + count <= exact

    def rewound(self, state: Any, count: int) -> AnyKeyValueState:
        rewound: AnyKeyValueState = state.without_last(count)
        return rewound

    def takes_step(self, state: Any) -> TypeGuard[KeyValueState]:
        """Whether `attention_step` can read a token into this state."""
        is_exact = isinstance(state, KeyValueState) and not state.is_quantized
        return is_exact and self._takes_steps

    def fixed(
        self, state: AnyKeyValueState, count: int = 1
    ) -> tuple[FixedKeyValueState, int | None] | None:
        if self._cache.quantization is not None or not self.takes_step(state):
            return None
        cache = self._cache
        fixed = FixedKeyValueState.of(state.with_room(count, cache.window, cache.sinks))
        room = fixed.positions.shape[1]
        return fixed, None if room == cache.capacity else room - state.used

    def growing(self, state: FixedKeyValueState, unread: int | None) -> KeyValueState:
        return KeyValueState(*state).without_slots(unread or 0)

    def joined(self, states: Sequence[KeyValueState]) -> KeyValueState:
        """As `StateKind` has it; where one is quantised, the others become so."""
        if any(state.is_quantized for state in states):
            states = [self.quantized(state) for state in states]
        used, room = max(state.used for state in states), max(state.room for state in states)
        return KeyValueState.joined([state.widened(used, room) for state in states])

    def selected(self, state: KeyValueState, rows: mx.array, length: int) -> KeyValueState:
        slots = slots_after(0, length, self._cache.window, self._cache.sinks)
        return state.narrowed(slots).selected(rows)
