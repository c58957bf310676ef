#pragma once

#include "mlx/array.h"
#include "runtime/contiguous.h"
#include "runtime/head_rows.h"

namespace mmfree {

// Returns the array itself if the numbers of each row lie one behind the other, else a copy.
inline mlx::core::array with_rows(const mlx::core::array& x, mlx::core::Stream stream) {
  return x.shape(3) == 1 || x.strides(3) == 1 ? x : contiguous(x, stream);
}

inline HeadArray head_array(const mlx::core::array& x) {
  const auto distance = [&](int axis) {
    return x.shape(axis) == 1 ? 0 : static_cast<size_t>(x.strides(axis));
  };
  return {x.data<float>(), distance(0), distance(1), distance(2)};
}

}  // namespace mmfree
