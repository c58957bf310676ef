#pragma once

#include <optional>

#include "mlx/array.h"
#include "mlx/stream.h"
#include "runtime/floats.h"

namespace mmfree {

// Returns the array itself if its items lie one behind the other in memory, else a copy, which is
// made when the stream runs.
mlx::core::array contiguous(const mlx::core::array& x, mlx::core::Stream stream);

// Gives an output the values of an input, and its memory if nothing else holds it.
void take(const mlx::core::array& input, mlx::core::array& output, mlx::core::Stream stream);

// The floats of `contiguous`, or none if there is no array.
Floats floats_of(const std::optional<mlx::core::array>& x, mlx::core::Stream stream);

}  // namespace mmfree
