#pragma once

#include <optional>

#include "mlx/array.h"
#include "mlx/stream.h"
#include "runtime/floats.h"

namespace mmfree {

// The array, or a copy whose items lie one behind the other in memory, made when the stream runs.
mlx::core::array contiguous(const mlx::core::array& x, mlx::core::Stream stream);

// Its floats, or none where there is no array.
Floats floats_of(const std::optional<mlx::core::array>& x, mlx::core::Stream stream);

}  // namespace mmfree
