"""Functions that several Metal kernels use, as text for their headers, and what they need of a GPU."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import mlx.core as mx

from . import launch, self_check

TERNARY = """
    // The exponent of 2^23, under which the bits of a float count ones.
    constant constexpr uint EXPONENT = 0x4B000000;

    // Sets the exponent of words, for the trits at 8 of their 16 indices: 0 to 7, or from 8.
    template <typename Words>
    inline Words under_exponent(Words words, uint first_place) {
        return (first_place == 0 ? words : words >> 16) | EXPONENT;
    }

    // The trits at an index of words, counted from the first of the 8. With all other bits masked out a
    // word is the float 2^23 + 4^place * code, of which a multiply-add makes code - 1, without rounding.
    template <typename Trits, typename Words>
    inline Trits trits_at(Words words, uint place) {
        const Words bits = words & (EXPONENT | (3u << (2 * place)));
        const float unit = 1.0f / static_cast<float>(1u << (2 * place));
        return fma(as_type<Trits>(bits), Trits(unit), Trits(-8388608.0f * unit - 1.0f));
    }
"""

PAIRS = """
    // A word for indices of its halves: before the sixth and from there on, or its low and high half
    // for `trits_at`, where halves must not be denormal.
    template <bool HALVES>
    inline uint2 shifts_of(uint word) {
        uint2 shifts;
        shifts[0] = HALVES ? word : under_exponent(word, 0);
        shifts[1] = HALVES ? word >> 10 : under_exponent(word, 8);
        return shifts;
    }

    // The codes at one index of both halves of a word, or their trits. Under one mask, codes are the
    // last bits of halves, which are denormal numbers: code * 4^place / 2^24, where places begin again
    // with the sixth.
    template <bool HALVES>
    inline float2 pair_at(uint2 shifts, uint place) {
        if (HALVES) {
            return float2(as_type<half2>(shifts[place / 5] & (0x00030003u << (2 * (place % 5)))));
        }
        float2 trits;
        trits[0] = trits_at<float>(shifts[0], place);
        trits[1] = trits_at<float>(shifts[1], place);
        return trits;
    }

    // An input is multiplied by this, and what is summed of its products with codes by 2^24.
    inline float unit_of_code(uint place) {
        return as_type<float>(0x3F800000u - ((place % 5) << 24));  // 1 / 4^place
    }
"""

SIGMOID = """
    // the square of a root takes fewer instructions than a division
    inline float sigmoid(float x) {
        const float root = precise::rsqrt(1.0f + precise::exp(-x));
        return root * root;
    }
"""

QUANTIZE = """
    // the largest value of a row with NaN is NaN, and so are its scale and codes
    inline float scale_of_codes(float largest) {
        return 127.0f / (largest < 1e-5f ? 1e-5f : largest);
    }

    inline float rounded(float scaled, bool half_away) {
        return half_away ? round(scaled) : rint(scaled);
    }

    inline float code_of(float scaled, bool half_away) {
        const float code = rounded(scaled, half_away);
        return code < -128.0f ? -128.0f : (code > 127.0f ? 127.0f : code);
    }
"""

SUM_OF_THREADGROUP = """
    // sums: one for each SIMD group, at most 32
    inline float sum_of_threadgroup(
        float value, threadgroup float* sums, uint lane, uint group, uint groups) {
        value = simd_sum(value);
        if (lane == 0) sums[group] = value;
        threadgroup_barrier(mem_flags::mem_threadgroup);
        return simd_sum(lane < groups ? sums[lane] : 0.0f);
    }
"""


_without_halves: ContextVar[bool] = ContextVar("without_halves", default=False)

# the products of PAIRS, as kernels compute them
_codes = mx.fast.metal_kernel(
    name="half_denormals",
    input_names=["words"],  # (32,)
    output_names=["out"],  # (8, 2, 32): indices, halves
    header=TERNARY + PAIRS,
    source="""
    const uint lane = thread_index_in_simdgroup;
    #pragma clang loop unroll(full)
    for (uint place = 0; place < 8; place++) {
        const float2 codes = pair_at<true>(shifts_of<true>(words[lane]), place);
        float2 sums = float2(0.0f);
        sums = fma(float2(unit_of_code(place)), codes, sums);
        out[64 * place + lane] = sums[0] * 16777216.0f;
        out[64 * place + 32 + lane] = sums[1] * 16777216.0f;
    }
    """,
)


def record_half_denormals() -> None:
    """Launches what checks halves, for its text."""
    _codes_in(*_words())


def keeps_half_denormals() -> bool:
    """Returns whether the default device computes with denormal halves, which may be zero in Metal."""
    if _without_halves.get():
        return False
    if launch.is_recording():
        return True
    return self_check.kernel_fault("half_denormals", _codes_in, _codes_by_shifts, _words) is None


@contextmanager
def without_halves() -> Iterator[None]:
    """Inside the `with` block kernels are written for a device that flushes denormal halves."""
    token = _without_halves.set(True)
    try:
        yield
    finally:
        _without_halves.reset(token)


def _codes_in(words: mx.array) -> mx.array:
    (codes,) = launch.launch(
        _codes,
        inputs=[words],
        grid=(launch.SIMD_GROUP, 1, 1),
        threadgroup=(launch.SIMD_GROUP, 1, 1),
        output_shapes=[(8, 2, launch.SIMD_GROUP)],
        output_dtypes=[mx.float32],
    )
    return codes


def _codes_by_shifts(words: mx.array) -> mx.array:
    indices = mx.arange(8, dtype=mx.uint32)[:, None] + mx.array([0, 8], mx.uint32)
    return mx.bitwise_and(words >> (2 * indices[..., None]), 3).astype(mx.float32)


def _words() -> list[mx.array]:
    # code 1 alone at each index, then others
    ones = mx.left_shift(mx.array(1, mx.uint32), mx.arange(0, 32, 2, mx.uint32))
    return [mx.concatenate([ones, mx.arange(16, dtype=mx.uint32) * 2654435761])]
