"""Few rows and codes of 1, 2 or 6 bits on Metal; MLX's own kernels compute other products.

A SIMD group computes some outputs of all rows. A lane takes 32 neighbouring codes of each, which share
a scale and a bias. These multiply two sums: of the products of inputs with codes, and of inputs.
`ops/README.md` counts what that takes beside MLX's kernel.
"""

from functools import cache, partial
from typing import Any, NamedTuple

import mlx.core as mx

from ..backend import launch, self_check
from ..backend.dispatch import FLOATS
from ..backend.gradient import with_reference_gradient
from ..backend.metal_codes import BITS, CODES
from ..backend.metal_functions import keeps_half_denormals
from .definition import AffineFormat, of_mlx, reference, round_activations

MOST_ROWS = 8
SIMD_GROUPS = 2
FILLING_SIMD_GROUPS = 512
"""How many of them are taken to fill a GPU."""

_MOST_TOGETHER = 7
"""The most rows that read the words once. Sums of 8 need more registers than there are."""

MAX_WORDS = 2**31
"""Indices in more words are no numbers of 32 bits."""


class Tuning(NamedTuple):
    """The options that select the text of a launch, beside dtypes.

    Attributes:
        bits: Those of a code.
        rows: The rows that read the words once.
        outputs: Those of a SIMD group.
        are_halves: Whether codes are taken from words as halves.
    """

    bits: int
    rows: int
    outputs: int
    are_halves: bool

    @classmethod
    def of(cls, bits: int, rows: int, outputs: int) -> "Tuning":
        """That for a number of rows and of all outputs."""
        together = rows // -(-rows // _MOST_TOGETHER)
        fills = outputs >= 8 * FILLING_SIMD_GROUPS
        # as many sums as there are registers for
        is_wide = fills and together <= (1 if bits == 6 else 2)
        own = 8 if is_wide else 4 if together <= 5 else 3
        return cls(bits, together, own, keeps_half_denormals())


# Units of inputs are powers of 2, and sums are multiplied by 2^24 last, so that nothing overflows which
# would not without halves. Few products are added up before a scale meets them, and codes are taken from
# the middle one, so that sums and their rounding errors stay small.
_kernel = mx.fast.metal_kernel(
    name="dense_matmul_of_codes",
    # (rows, D), (N, D * BITS / 32), twice (N, groups)
    input_names=["x", "weight", "scales", "biases"],
    output_names=["out"],  # (rows, N)
    header=CODES,
    source="""
    constexpr int WORDS = BITS == 6 ? 3 : 1;  // of a part
    constexpr int PLACES = 32 * WORDS / BITS;
    // whose products are added up together
    constexpr int PAIRS = BITS == 6 || (ROWS == 2 && OUTPUTS == 8) ? 4 : 8;
    constexpr float MIDDLE = BITS == 1 ? 0.5f : (BITS == 2 ? 1.0f : 32.0f);
    constexpr float UNIT = HALVES ? 1.0f / 16777216.0f : 1.0f;
    const int dims = x_shape[1];
    const int outputs = weight_shape[0];
    const int words = weight_shape[1];
    const int groups = scales_shape[1];
    // a group is of 1, 2 or 4 times the codes of a lane
    const int shift = dims / 32 / groups / 2;
    const int lane = thread_index_in_simdgroup;
    const int group = simdgroup_index_in_threadgroup;
    const int own = OUTPUTS * (simdgroups_per_threadgroup * threadgroup_position_in_grid.x + group);
    if (own >= outputs) return;

    // the last ones compute some outputs of those before them again, and store only their own
    const int first = min(own, outputs - OUTPUTS);
    const int first_row = ROWS * threadgroup_position_in_grid.y;
    const auto inputs = x + static_cast<size_t>(first_row) * dims;
    const auto weights = weight + static_cast<size_t>(first) * words;
    const auto own_scales = scales + static_cast<size_t>(first) * groups;
    const auto own_biases = biases + static_cast<size_t>(first) * groups;
    float sums[ROWS][OUTPUTS];
    #pragma clang loop unroll(full)
    for (int row = 0; row < ROWS; row++) {
        #pragma clang loop unroll(full)
        for (int n = 0; n < OUTPUTS; n++) sums[row][n] = 0;
    }
    for (int place = lane; place < dims / 32; place += 32) {
        float scale[OUTPUTS];
        #pragma clang loop unroll(full)
        for (int n = 0; n < OUTPUTS; n++) {
            scale[n] = static_cast<float>(own_scales[n * groups + (place >> shift)]);
        }
        float totals[ROWS];
        #pragma clang loop unroll(full)
        for (int row = 0; row < ROWS; row++) totals[row] = 0;
        #pragma clang loop unroll(full)
        for (int part = 0; part < BITS / WORDS; part++) {
            uint3 packed[OUTPUTS];
            #pragma clang loop unroll(full)
            for (int n = 0; n < OUTPUTS; n++) {
                packed[n] = words_of_part<BITS>(weights + n * words + BITS * place + WORDS * part);
            }
            #pragma clang loop unroll(full)
            for (int first_pair = 0; first_pair < PLACES / 2; first_pair += PAIRS) {
                float2 codes[PAIRS][OUTPUTS];
                #pragma clang loop unroll(full)
                for (int k = 0; k < PAIRS; k++) {
                    #pragma clang loop unroll(full)
                    for (int n = 0; n < OUTPUTS; n++) {
                        codes[k][n] = pair_of_codes<BITS, HALVES>(packed[n], first_pair + k);
                    }
                }
                #pragma clang loop unroll(full)
                for (int row = 0; row < ROWS; row++) {
                    const auto from = inputs + (row * dims + 32 * place + PLACES * part);
                    float2 pairs[PAIRS];
                    #pragma clang loop unroll(full)
                    for (int k = 0; k < PAIRS; k++) {
                        pairs[k][0] = static_cast<float>(from[low_place<BITS>(first_pair + k)]);
                        pairs[k][1] = static_cast<float>(from[high_place<BITS>(first_pair + k)]);
                    }
                    float2 total = pairs[0];
                    #pragma clang loop unroll(full)
                    for (int k = 1; k < PAIRS; k++) total += pairs[k];
                    const float both = (total[0] + total[1]) * UNIT;
                    totals[row] += both;
                    float products[OUTPUTS];
                    #pragma clang loop unroll(full)
                    for (int n = 0; n < OUTPUTS; n++) products[n] = -MIDDLE * both;
                    #pragma clang loop unroll(full)
                    for (int k = 0; k < PAIRS; k++) {
                        float2 pair = pairs[k];
                        if (HALVES) pair *= units_of_pair<BITS>(first_pair + k);
                        #pragma clang loop unroll(full)
                        for (int n = 0; n < OUTPUTS; n++) {
                            products[n] = fma(pair[0], codes[k][n][0], products[n]);
                            products[n] = fma(pair[1], codes[k][n][1], products[n]);
                        }
                    }
                    #pragma clang loop unroll(full)
                    for (int n = 0; n < OUTPUTS; n++) {
                        sums[row][n] = fma(scale[n], products[n], sums[row][n]);
                    }
                }
            }
        }
        #pragma clang loop unroll(full)
        for (int n = 0; n < OUTPUTS; n++) {
            const float bias = static_cast<float>(own_biases[n * groups + (place >> shift)]);
            const float middle = fma(scale[n], MIDDLE, bias);
            #pragma clang loop unroll(full)
            for (int row = 0; row < ROWS; row++) {
                sums[row][n] = fma(middle, totals[row], sums[row][n]);
            }
        }
    }
    // each lane stores one of the results
    float result = 0;
    #pragma clang loop unroll(full)
    for (int row = 0; row < ROWS; row++) {
        #pragma clang loop unroll(full)
        for (int n = 0; n < OUTPUTS; n++) {
            const float sum = simd_sum(sums[row][n]);
            if (lane == OUTPUTS * row + n) result = sum;
        }
    }
    const int output = first + lane % OUTPUTS;
    if (lane < ROWS * OUTPUTS && output >= own) {
        const size_t row = first_row + lane / OUTPUTS;
        out[row * outputs + output] = static_cast<T>(result * (1.0f / UNIT));
    }
    """,
)


def metal(
    x: mx.array,
    weight: mx.array,
    quantization: AffineFormat | None,
    rounds: bool = False,
    dtype: mx.Dtype = mx.float32,
) -> mx.array:
    if quantization is None or not _is_taken(x, weight, quantization):
        return of_mlx(x, weight, quantization, rounds, dtype)
    scales, biases, group_size, bits = quantization
    tuning = Tuning.of(bits, x.size // x.shape[-1], weight.shape[0])
    if _fault(tuning, x.dtype, scales.dtype, dtype) is not None:
        return of_mlx(x, weight, quantization, rounds, dtype)
    x = round_activations(x).astype(x.dtype) if rounds else x
    y: mx.array = _function(tuning, group_size, dtype)(x, weight, scales, biases)
    return y


def fault(
    x: mx.array,
    weight: mx.array,
    quantization: AffineFormat | None,
    rounds: bool = False,
    dtype: mx.Dtype = mx.float32,
) -> str | None:
    """Returns why these codes are left to MLX although there is a kernel for them, or `None`."""
    if quantization is None or not _is_taken(x, weight, quantization):
        return None
    tuning = Tuning.of(quantization.bits, x.size // x.shape[-1], weight.shape[0])
    return _fault(tuning, x.dtype, quantization.scales.dtype, dtype)


def _is_taken(x: mx.array, weight: mx.array, quantization: AffineFormat) -> bool:
    """Returns whether a kernel takes these bits, rows and outputs, with arrays in device memory."""
    outputs, dims = weight.shape[0], x.shape[-1]
    return (
        quantization.bits in BITS
        and x.dtype in FLOATS
        and x.size <= MOST_ROWS * dims
        and outputs >= 8
        and weight.size < MAX_WORDS
    )


def _fault(tuning: Tuning, x: mx.Dtype, scales: mx.Dtype, dtype: mx.Dtype) -> str | None:
    """Why the kernel must not be used."""
    return self_check.kernel_fault(
        "dense_matmul_of_codes",
        partial(_in_codes, tuning=tuning, dtype=dtype),
        partial(_defined, tuning.bits, 64, dtype),
        partial(_check_inputs, tuning, x, scales),
        **tuning._asdict(),
        x=x,
        scales=scales,
        dtype=dtype,
    )


def _check_inputs(tuning: Tuning, x: mx.Dtype, scales: mx.Dtype) -> list[mx.array]:
    """More indices than lanes, and a last SIMD group with less outputs than the others."""
    dims, outputs = 33 * 64, SIMD_GROUPS * tuning.outputs + 1
    inputs = ((mx.arange(tuning.rows * dims) * 37) % 63 - 31).reshape(tuning.rows, dims)
    words = mx.arange(outputs * dims * tuning.bits // 32, dtype=mx.uint32) * 2654435761
    floats = (mx.arange(outputs * dims // 64) % 7 - 3).reshape(outputs, -1)
    weight = words.reshape(outputs, -1)
    return [inputs.astype(x), weight, (floats / 4).astype(scales), (1 - floats).astype(scales)]


def _defined(bits: int, group_size: int, dtype: mx.Dtype, *arrays: mx.array) -> mx.array:
    x, weight, scales, biases = arrays
    return reference(x, weight, AffineFormat(scales, biases, group_size, bits), dtype=dtype)


def _in_codes(
    x: mx.array,
    weight: mx.array,
    scales: mx.array,
    biases: mx.array,
    *,
    tuning: Tuning,
    dtype: mx.Dtype,
) -> mx.array:
    *leading, dims = x.shape
    rows, outputs = x.size // dims, weight.shape[0]
    threads = SIMD_GROUPS * launch.SIMD_GROUP
    (y,) = launch.launch(
        _kernel,
        inputs=[x.reshape(rows, dims), weight, scales, biases],
        template=[
            ("T", dtype),
            ("BITS", tuning.bits),
            ("ROWS", tuning.rows),
            ("OUTPUTS", tuning.outputs),
            ("HALVES", tuning.are_halves),
        ],
        grid=(-(-outputs // (SIMD_GROUPS * tuning.outputs)) * threads, rows // tuning.rows, 1),
        threadgroup=(threads, 1, 1),
        output_shapes=[(rows, outputs)],
        output_dtypes=[dtype],
    )
    return y.reshape(*leading, outputs)


@cache
def _function(tuning: Tuning, group_size: int, dtype: mx.Dtype) -> Any:
    def mlx_product(*arrays: mx.array) -> mx.array:
        x, weight, scales, biases = arrays
        variant = AffineFormat(scales, biases, group_size, tuning.bits)
        return of_mlx(x, weight, variant, dtype=dtype)

    return with_reference_gradient(partial(_in_codes, tuning=tuning, dtype=dtype), mlx_product)
