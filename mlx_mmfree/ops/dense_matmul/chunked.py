"""`dense_matmul` for some outputs at a time, so that few weights are held as float32."""

import mlx.core as mx

from . import AffineForm, reference

BLOCK_WEIGHTS = 2**24


def run(x: mx.array, weight: mx.array, quantization: AffineForm | None) -> mx.array:
    if quantization is None and weight.dtype == mx.float32:
        return reference.run(x, weight, None)
    rows = max(BLOCK_WEIGHTS // max(x.shape[-1], 1), 1)
    parts = []
    for start in range(0, max(weight.shape[0], 1), rows):
        block = slice(start, start + rows)
        part = quantization and quantization._replace(
            scales=quantization.scales[block], biases=quantization.biases[block]
        )
        parts.append(reference.run(x, weight[block], part))
    return mx.concatenate(parts, axis=-1)
