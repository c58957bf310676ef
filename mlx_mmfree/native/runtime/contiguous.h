#pragma once

#include "mlx/array.h"

namespace mmfree {

// The array itself where its values lie one behind the other, else a copy that lives until the work
// queued next on the stream is done. To be called from eval_cpu.
mlx::core::array contiguous(const mlx::core::array& x, mlx::core::Stream stream);

}  // namespace mmfree
