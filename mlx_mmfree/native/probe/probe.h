#pragma once

#include <cstddef>
#include <vector>

#include "mlx/array.h"

namespace mmfree {

// Reads all of the arrays once, each thread a contiguous share of the whole, and returns the
// seconds.
double read_seconds(const std::vector<mlx::core::array>& arrays);

// Multiply-accumulates of bytes a second with all threads, for about `seconds`; 0 where the
// instruction set has none.
double multiply_rate(double seconds);

}  // namespace mmfree
