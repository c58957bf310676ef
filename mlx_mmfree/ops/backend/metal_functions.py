"""Functions that several Metal kernels use, as text for their headers."""

TERNARY = """
    constant constexpr uint ZERO_TRITS = 0x55555555;

    // the value with the sign of the trit whose code is in the two lowest bits
    inline float with_sign_of(float value, uint codes) {
        const uint code = codes & 3;
        return code == 1 ? 0.0f : (code == 0 ? -value : value);
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
