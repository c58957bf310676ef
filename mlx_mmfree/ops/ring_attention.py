"""Attention of a sequence that is split over processes (Liu et al., arXiv 2310.01889)."""

from typing import Any, NamedTuple

import mlx.core as mx

LOWEST = -1e30
"""The largest score where there is none yet. It is finite, so that differences are numbers."""


class Statistics(NamedTuple):
    """The sums of attention over the keys so far, float32.

    Attributes:
        largest: The largest score of each query, `(..., L, 1)`.
        total: The sum of all weights relative to it, `(..., L, 1)`.
        values: The values, weighed so but not divided, `(..., L, V)`.
    """

    largest: mx.array
    total: mx.array
    values: mx.array

    @classmethod
    def none(cls, queries: mx.array, value_dims: int) -> "Statistics":
        """Those before the first key, for queries `(..., L, K)`."""
        rows = queries.shape[:-1]
        largest = mx.full((*rows, 1), LOWEST)
        return cls(largest, mx.zeros((*rows, 1)), mx.zeros((*rows, value_dims)))

    def with_keys(
        self, queries: mx.array, keys: mx.array, values: mx.array, seen: mx.array
    ) -> "Statistics":
        """Those with further keys; weights found before are brought to the new largest score."""
        scores = _scores(queries, keys)
        largest = mx.where(seen, scores, LOWEST).max(axis=-1, keepdims=True)
        largest = mx.maximum(self.largest, largest)
        weights = mx.where(seen, mx.exp(scores - largest), 0.0)
        before = mx.exp(self.largest - largest)
        total = self.total * before + weights.sum(axis=-1, keepdims=True)
        return Statistics(largest, total, self.values * before + weights @ values)

    @property
    def result(self) -> mx.array:
        """The attention, `(..., L, V)`; 0 where nothing is seen."""
        return mx.where(self.total > 0, self.values / mx.maximum(self.total, 1e-30), 0.0)


def ring_attention(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    group: mx.distributed.Group,
    *,
    is_causal: bool,
    valid: mx.array | None = None,
) -> mx.array:
    r"""Softmax attention of this process's part of a sequence to all of it.

    Process `r` of `P` holds positions :math:`r L` to :math:`(r + 1) L - 1`. In `P` steps its queries
    meet the keys and values of one process after the other, which pass them on in a ring, so that no
    process holds more than two parts; the backward pass goes round once more, with the gradients. The
    result equals ordinary attention. Every step waits for its neighbour, so that it cannot be
    compiled, and all processes must make the same calls in the same order.

    Args:
        queries: Those of this process, `(B, H, L, K)`.
        keys: `(B, G, L, K)`; `G` divides `H`.
        values: `(B, G, L, V)`.
        group: The processes. All have parts of the same length.
        is_causal: A position sees none after it.
        valid: Booleans `(B, L)`, `False` for keys that nobody sees; `None`: all are seen.

    Returns:
        `(B, H, L, V)` in the dtype of the queries.

    Raises:
        ValueError: Parts have different lengths.
    """
    batch, _, length, _ = queries.shape
    lengths: Any = mx.distributed.all_gather(mx.array([length]), group=group).tolist()
    if len(set(lengths)) > 1:
        raise ValueError(
            f"[ring_attention] the parts of all processes must have one length but have {lengths}."
        )
    if valid is None:
        valid = mx.ones((batch, length), mx.bool_)
    rotation = _Rotation(group, length, is_causal, valid)
    exact = [x.astype(mx.float32) for x in (queries, keys, values)]
    exact[0] = mx.unflatten(exact[0], 1, (keys.shape[1], -1))
    attend: Any = mx.custom_function(rotation.attend)
    attend.vjp(rotation.gradients)
    y = attend(*exact)[0]
    return mx.flatten(y, 1, 2).astype(queries.dtype)


class _Rotation:
    """One call: what is seen when, and the two rounds."""

    def __init__(self, group: mx.distributed.Group, length: int, is_causal: bool, valid: mx.array):
        self._group = group
        self._length = length
        self._is_causal = is_causal
        self._valid = valid

    def attend(
        self, queries: mx.array, keys: mx.array, values: mx.array
    ) -> tuple[mx.array, mx.array]:
        """The attention, and the logarithm of the sum of exponentials of each query's scores."""
        found = Statistics.none(queries, values.shape[-1])
        valid = self._column(keys)
        for step in range(self._group.size()):
            if step:
                keys, values, valid = self._passed_on([keys, values, valid])
            if self._sees(step):
                seen = self._seen(step, valid)
                found = found.with_keys(queries, keys[:, :, None], values[:, :, None], seen)
                mx.eval(found)
        has_any = found.total > 0
        logarithm = found.largest + mx.log(mx.where(has_any, found.total, 1.0))
        return found.result, mx.where(has_any, logarithm, 0.0)

    def gradients(self, primals: Any, cotangents: Any, outputs: Any) -> tuple[mx.array, ...]:
        """The gradients of queries, keys and values; the last two go round with their parts."""
        queries, keys, values = primals
        (y, logarithm), gradient = outputs, cotangents[0]
        scale = queries.shape[-1] ** -0.5
        shared = (gradient * y).sum(axis=-1, keepdims=True)
        of_queries = mx.zeros_like(queries)
        of_keys, of_values, valid = mx.zeros_like(keys), mx.zeros_like(values), self._column(keys)
        for step in range(self._group.size()):
            if self._sees(step):
                scores = _scores(queries, keys[:, :, None])
                seen = self._seen(step, valid)
                weights = mx.where(seen, mx.exp(scores - logarithm), 0.0)
                of_values = of_values + (weights.swapaxes(-1, -2) @ gradient).sum(axis=2)
                of_weights = gradient @ values[:, :, None].swapaxes(-1, -2)
                of_scores = weights * (of_weights - shared) * scale
                of_queries = of_queries + of_scores @ keys[:, :, None]
                of_keys = of_keys + (of_scores.swapaxes(-1, -2) @ queries).sum(axis=2)
                mx.eval(of_queries)
            keys, values, valid, of_keys, of_values = self._passed_on(
                [keys, values, valid, of_keys, of_values]
            )
        return of_queries, of_keys, of_values

    def _column(self, keys: mx.array) -> mx.array:
        """Which keys are seen, as numbers that travel with them, `(B, G, L, 1)`."""
        column = self._valid[:, None, :, None].astype(mx.float32)
        return mx.broadcast_to(column, (*keys.shape[:3], 1))

    def _sees(self, step: int) -> bool:
        """Returns whether anything of the part that has come in this step may be seen."""
        return not self._is_causal or step <= self._group.rank()

    def _seen(self, step: int, valid: mx.array) -> mx.array:
        seen = (valid > 0).swapaxes(-1, -2)[:, :, None]
        if self._is_causal and step == 0:
            token = mx.arange(self._length)
            seen = mx.logical_and(seen, token <= token[:, None])
        return seen

    def _passed_on(self, parts: list[mx.array]) -> list[mx.array]:
        """The part of the process before, once this one's has gone to the next."""
        group, rank, size = self._group, self._group.rank(), self._group.size()
        if size == 1:
            return parts
        message = mx.concatenate(parts, axis=-1)
        mx.eval(message)
        sent = mx.distributed.send(message, (rank + 1) % size, group=group)
        # received beside, since a send waits until it is taken
        received = mx.distributed.recv_like(
            message, (rank - 1) % size, group=group, stream=_receiving()
        )
        mx.eval(sent, received)
        sizes = [part.shape[-1] for part in parts]
        ends = [sum(sizes[: n + 1]) for n in range(len(sizes) - 1)]
        return list(mx.split(received, ends, axis=-1))


_streams: list[mx.Stream] = []


def _receiving() -> mx.Stream:
    """The stream on which parts arrive, made when it is first needed."""
    if not _streams:
        _streams.append(mx.new_stream(mx.cpu))
    return _streams[0]


def _scores(queries: mx.array, keys: mx.array) -> mx.array:
    return (queries * queries.shape[-1] ** -0.5) @ keys.swapaxes(-1, -2)
