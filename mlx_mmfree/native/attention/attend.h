#pragma once

#include "runtime/floats.h"

namespace mmfree {

// Each query head attends to the keys and values of its group. Distances count values.
struct QueriesCall {
  size_t batch, heads, groups, length, count;
  Floats queries;  // (batch, heads, length, dims)
  size_t query_batch, query_head, query_token, dims;
  Floats keys;  // (batch, groups, count, dims)
  size_t key_batch, key_group;
  Floats values;  // (batch, groups, count, value_dims)
  size_t value_batch, value_group, value_dims;
  // Whether a query sees the keys up to its own place only. The last query has the place of the
  // last key.
  bool is_causal;
  const bool* mask;  // what a query sees, (batch, length, count), or null
  size_t mask_batch, mask_token, mask_key;
  void* y;            // (batch, length, heads, value_dims) of the type of the queries
  float* log_totals;  // (batch, heads, length), log of the sum of e^score
};

void attend(const QueriesCall& call);

}  // namespace mmfree
