#pragma once

#include "gated_linear_attention/kernels.h"

namespace mmfree {

struct GatedCall {
  size_t batch, heads, length, keys, values, gates;
  HeadArray q, k, v, f;
  const float* state;  // (B, H, K, V)

  GatedHead of(size_t b, size_t h) const {
    return {length,     keys,       values,
            gates,      q.of(b, h), k.of(b, h),
            v.of(b, h), f.of(b, h), state + (b * heads + h) * keys * values};
  }
};

// Computes `o`, which lies in memory as (B, L, H, V), and the last state.
void run_chunks(const GatedCall& call, float* o, float* last);

struct GatedGradientCall {
  GatedCall call;
  HeadArray d_o;
  const float* d_last;
  float *d_q, *d_k, *d_v, *d_f, *d_state;  // dense
};

void run_chunks_gradient(const GatedGradientCall& call);

}  // namespace mmfree
