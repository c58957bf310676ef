#pragma once

#include <cstddef>

namespace mmfree {

// The number of threads that compute, the calling one included. Threads start at first need.
void set_threads(size_t count);
size_t threads();

using RangeFunction = void (*)(void* context, size_t first, size_t last);

// Calls function(context, first, last) for ranges that together are [0, items). Each thread owns a
// contiguous share, which it walks in pieces of `step` items, a multiple of which each share
// starts at; who is done takes pieces from the others. Runs on the caller alone while another
// caller computes.
void parallel(size_t items, size_t step, RangeFunction function, void* context);

template <class F>
void parallel_for(size_t items, size_t step, F&& body) {
  parallel(
      items, step,
      [](void* context, size_t first, size_t last) { (*static_cast<F*>(context))(first, last); },
      &body);
}

}  // namespace mmfree
