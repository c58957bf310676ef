#pragma once

#include <cstddef>
#include <vector>

#include "mlx/array.h"

namespace mmfree {

// Reads all of the arrays once and returns the seconds. Each thread reads a contiguous share.
double read_seconds(const std::vector<mlx::core::array>& arrays);

// The multiply-accumulates of bytes a second that all threads do, measured for about `seconds`, or
// 0 if the instruction set has none.
double multiply_rate(double seconds);

}  // namespace mmfree
