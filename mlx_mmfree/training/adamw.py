"""AdamW (Loshchilov and Hutter, arXiv 1711.05101) in one pass over the parameters on a CPU."""

from typing import Any

import mlx.core as mx
import mlx.optimizers as optim

from ..ops import adamw


class AdamW(optim.AdamW):
    """MLX's AdamW, with the same arguments, state and bits, for float32 in one operation.

    Args: as of `mlx.optimizers.AdamW`.
    """

    def apply_single(
        self, gradient: mx.array, parameter: mx.array, state: dict[str, Any]
    ) -> mx.array:
        arrays = (parameter, gradient, state["m"], state["v"])
        if any(array.dtype != mx.float32 for array in arrays):
            result: mx.array = super().apply_single(gradient, parameter, state)
            return result
        b1, b2 = self.betas
        result, state["m"], state["v"] = adamw(
            *arrays, self._factors(), betas=(b1, b2), eps=self.eps
        )
        return result

    def _factors(self) -> mx.array:
        """What the parameter, the first moment and the root of the second are multiplied by."""
        rate = self.learning_rate.astype(mx.float32)
        numerator, denominator = rate, mx.ones(())
        if self.bias_correction:
            b1, b2 = self.betas
            numerator = (rate / (1 - b1**self.step)).astype(mx.float32)
            denominator = mx.rsqrt(1 - b2**self.step).astype(mx.float32)
        return mx.stack([1 - rate * self.weight_decay, numerator, denominator])
