#pragma once

#include "mlx/array.h"
#include "runtime/operation.h"

namespace mmfree {

// The same arrays, made of the leaves by one operation that runs those of their graph. MLX then
// prepares one operation instead of many. Arrays that the graph reads beside the leaves are kept by
// the operation and must not change. It has no gradient and no batched form. The results are
// returned as they are if the graph runs on several streams or on a GPU.
Arrays joined(const Arrays& results, const Arrays& leaves);

}  // namespace mmfree
