#pragma once

#include "mlx/array.h"
#include "runtime/floats.h"

namespace mmfree {

// Whether the array has a float type that the kernels take.
inline bool is_float(const mlx::core::array& x) {
  return x.dtype() == mlx::core::float32 || x.dtype() == mlx::core::float16 ||
         x.dtype() == mlx::core::bfloat16;
}

inline FloatType float_type(mlx::core::Dtype dtype) {
  return dtype == mlx::core::float32   ? FloatType::float32
         : dtype == mlx::core::float16 ? FloatType::float16
                                       : FloatType::bfloat16;
}

}  // namespace mmfree
