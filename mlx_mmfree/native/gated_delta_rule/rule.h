#pragma once

#include "gated_delta_rule/kernels.h"

namespace mmfree {

struct DeltaCall {
  size_t batch, heads, length, keys, values, gates;
  HeadArray q, k, v, a, f, b;
  const float* state;  // (B, H, K, V)

  DeltaHead of(size_t n, size_t h) const {
    return {length,
            keys,
            values,
            gates,
            q.of(n, h),
            k.of(n, h),
            v.of(n, h),
            a.of(n, h),
            f.of(n, h),
            b.data ? b.of(n, h) : PositionRows{},
            state + (n * heads + h) * keys * values};
  }
};

// Computes `o`, which lies in memory as (B, L, H, V), and the last state.
void run_rule(const DeltaCall& call, float* o, float* last);

struct DeltaGradientCall {
  DeltaCall call;
  HeadArray d_o;
  const float* d_last;
  float *d_q, *d_k, *d_v, *d_a, *d_f, *d_state, *d_b;  // dense
};

void run_rule_gradient(const DeltaGradientCall& call);

}  // namespace mmfree
