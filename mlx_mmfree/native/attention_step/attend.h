#pragma once

#include <cstdint>

#include "attention_step/slots.h"
#include "runtime/floats.h"

namespace mmfree {

// One token of each row. Its query heads attend to the slots of the row, which take its key and its
// value.
struct AttentionCall {
  Floats projected;  // (batch, (heads + 2 groups) dims)
  size_t batch, heads, groups, dims;
  Floats query_norm, key_norm;  // (dims,) or none
  float eps;
  const float* wavelengths;  // (rotated / 2,) or null
  size_t rotated;            // the first dims of a head
  bool is_interleaved;
  Slots rule;
  const int32_t* positions;  // (batch, used)
  size_t used;
  void *keys, *values;  // (batch, groups, room, dims) of their types
  FloatType key_type, value_type;
  size_t room;
  int32_t* new_positions;  // (batch, slots), 0 < slots <= room
  size_t slots;
  void* y;  // (batch, heads, dims) of the type of `projected`
};

void attend(const AttentionCall& call);

}  // namespace mmfree
