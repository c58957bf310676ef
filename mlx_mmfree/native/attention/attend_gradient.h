#pragma once

#include <cstddef>

namespace mmfree {

// An array (batch, heads, length, dims) in float32 whose dims lie side by side.
struct HeadRows {
  const float* data;
  size_t batch, head, token;  // distances in floats

  const float* at(size_t b, size_t h, size_t t) const {
    return data + b * batch + h * head + t * token;
  }
};

// The gradient of softmax attention. The sizes and the mask are those of `QueriesCall`.
struct AttentionGradientCall {
  size_t batch, heads, groups, length, count, dims, value_dims;
  HeadRows queries, keys, values;
  HeadRows y, d_y;          // (batch, heads, length, value_dims), the result and its gradient
  const float* log_totals;  // (batch, heads, length), log of the sum of e^score
  bool is_causal;
  const bool* mask;
  size_t mask_batch, mask_token, mask_key;
  float* parts;  // (parts of the keys, batch, heads, length, dims), of the gradient of the queries
  float *d_queries, *d_keys, *d_values;
};

// The number of parts in which the keys of a group are shared out. It follows from the sizes alone,
// so that results do not depend on the number of threads.
size_t key_parts(size_t batch, size_t groups, size_t count);

// `parts` may be null if there is one part only.
void attend_gradient(const AttentionGradientCall& call);

}  // namespace mmfree
