#pragma once

#include <cstddef>

namespace mmfree {

// Memory of the calling thread, aligned to 64 bytes, that lasts until its next call. It grows to
// the largest size asked for and is kept, so that repeated products allocate nothing.
void* workspace(size_t bytes);

}  // namespace mmfree
