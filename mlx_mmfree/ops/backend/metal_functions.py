"""Functions that several Metal kernels use, as text for their headers."""

TERNARY = """
    // The exponent of 2^23, under which the bits of a float count ones.
    constant constexpr uint EXPONENT = 0x4B000000;

    // Sets the exponent in words, for the trits at 8 of their 16 places: 0 to 7, or from 8.
    template <typename Words>
    inline Words under_exponent(Words words, uint first_place) {
        return (first_place == 0 ? words : words >> 16) | EXPONENT;
    }

    // The trits at a place of words, counted from the first of the 8. With all other bits masked out a
    // word is the float 2^23 + 4^place * code, of which a multiply-add makes code - 1, without rounding.
    template <typename Trits, typename Words>
    inline Trits trits_at(Words words, uint place) {
        const Words bits = words & (EXPONENT | (3u << (2 * place)));
        const float unit = 1.0f / static_cast<float>(1u << (2 * place));
        return fma(as_type<Trits>(bits), Trits(unit), Trits(-8388608.0f * unit - 1.0f));
    }
"""

SIGMOID = """
    inline float sigmoid(float x) { return 1.0f / (1.0f + precise::exp(-x)); }
"""

QUANTIZE = """
    // the largest value of a row with NaN is NaN, and so are its scale and codes
    inline float scale_of_codes(float largest) {
        return 127.0f / (largest < 1e-5f ? 1e-5f : largest);
    }

    inline float code_of(float scaled, bool half_away) {
        const float code = half_away ? round(scaled) : rint(scaled);
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
