"""Arguments of attention, in groups: its norms, and what it keeps of a text."""

from dataclasses import dataclass, replace

from ..arguments import check_counts, check_optional_sizes, check_sizes
from ..quantization import Quantization

SINKS = 4
"""First tokens that stay in a state of limited size."""


@dataclass(frozen=True)
class AttentionNorms:
    """The norms inside attention.

    Attributes:
        qk_eps: Epsilon of an RMSNorm of each head's queries and keys before the rotation; `None`
            means none.
        output_eps: Epsilon of an RMSNorm before the output projection; `None` means none.

    Example:
        >>> mixer = GQA(32, norms=AttentionNorms(qk_eps=1e-6))
        >>> [name for name in mixer if name.endswith("norm")]
        ['query_norm', 'key_norm']
    """

    qk_eps: float | None = None
    output_eps: float | None = None


@dataclass(frozen=True)
class KeyValueCache:
    """Which tokens attention sees, and how it keeps their keys and values.

    Attributes:
        window: Each token sees only tokens nearer than this, itself included: `|t - j| < window`.
        sinks: Number of first tokens that every token sees beside its window (StreamingLLM, Xiao et
            al., arXiv 2309.17453), as near as if the text between had never been.
        quantization: Stores keys and values in few bits. A token's are rounded before anything
            attends to them, itself included.
        quantization_start: The state stays exact until it has so many slots, or its window is full.
        step: The window moves on by so many tokens at a time (blocks of them), so that the last of a
            step sees `window` tokens and the first `window - step + 1`.

    Raises:
        TypeError: A number is not an integer.
        ValueError: A number is out of its bounds, or there are sinks or steps without a window.

    Example:
        >>> cache = KeyValueCache(window=4, sinks=2)
        >>> y, state = GQA(32, cache=cache)(mx.zeros((1, 9, 32)))
        >>> cache.capacity, sorted(state.positions[0].tolist())
        (6, [0, 1, 5, 6, 7, 8])
    """

    window: int | None = None
    sinks: int = 0
    quantization: Quantization | None = None
    quantization_start: int = 0
    step: int = 1

    def __post_init__(self) -> None:
        check_optional_sizes("KeyValueCache", window=self.window)
        check_sizes("KeyValueCache", step=self.step)
        counts = {"sinks": self.sinks, "quantization_start": self.quantization_start}
        check_counts("KeyValueCache", **counts)
        if self.sinks and self.window is None:
            raise ValueError(
                "[KeyValueCache] 'sinks' must be 0, or positive with 'is_causal' and a 'window', but "
                f"got {self.sinks}."
            )
        if self.step > 1 and (self.window is None or self.window % self.step):
            raise ValueError(
                f"[KeyValueCache] 'step' must divide the 'window' but got {self.step} for "
                f"{self.window}."
            )

    @property
    def capacity(self) -> int | None:
        """The most slots of a state, `None` without a window."""
        return None if self.window is None else self.sinks + self.window

    @property
    def farthest(self) -> int:
        """The position of a query after a full window."""
        return self.sinks + (self.window or 0) - 1

    @property
    def exact_slots(self) -> int | None:
        """Slots in use with which a state is quantised; `None`: never."""
        if self.quantization is None:
            return None
        start = self.quantization_start
        return start if self.capacity is None else min(start, self.capacity)

    def limited(
        self,
        caller: str,
        max_size: int | None,
        quantization: Quantization | None,
        quantization_start: int,
    ) -> "KeyValueCache":
        """The same that holds at most `max_size` tokens, unless its own window is smaller.

        The first 4 stay as sinks, the last ones in the window.

        Args:
            caller: The mixer it belongs to, for errors.
            max_size: The most tokens; `None`: as many as now.
            quantization: As the attribute.
            quantization_start: As the attribute.

        Raises:
            TypeError: A number is not an integer.
            ValueError: There is no space beside the sinks.
        """
        cache = self
        if max_size is not None:
            check_sizes(caller, max_size=max_size)
            if not SINKS < max_size < 2**31:
                raise ValueError(
                    f"[{caller}] 'max_size' must be larger than {SINKS}, the first tokens that always "
                    f"stay, and below 2**31 but got {max_size}."
                )
            if self.capacity is None or self.capacity > max_size:
                cache = replace(cache, window=max_size - SINKS, sinks=SINKS, step=1)
        return replace(cache, quantization=quantization, quantization_start=quantization_start)
