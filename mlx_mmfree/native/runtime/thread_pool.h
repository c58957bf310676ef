#pragma once

#include <cstddef>

namespace mmfree {

// The number of threads that compute, the calling one included. Threads start at first need.
void set_threads(size_t count);
size_t threads();

class Pool;

// The pieces of one thread's turn in a parallel region.
class Claims {
 public:
  // Takes the next piece, the items [first, last). Returns false if none is left.
  bool next(size_t& first, size_t& last);

  // The number of this thread among those that compute. The caller is 0.
  size_t thread() const {
    return thread_;
  }

 private:
  friend class Pool;
  friend void parallel(size_t, size_t, size_t, void (*)(void*, Claims&), void*);

  Claims(Pool* pool, size_t thread) : pool_(pool), thread_(thread) {
  }

  Pool* pool_;  // null: the caller does all items
  size_t thread_;
  size_t turn_ = 0, next_ = 0, items_ = 0, step_ = 0;
};

// Calls function(context, claims) on at most `count` threads, whose claims together are [0, items).
// Each thread owns a contiguous share, which starts at a multiple of `step` and is taken in pieces
// of `step` items. A thread that is done takes pieces from the others. The caller runs alone while
// another caller computes, or if there is one piece only. A region of no items does nothing, and
// its `step` may be zero.
void parallel(size_t items, size_t step, size_t count,
              void (*function)(void* context, Claims& claims), void* context);

template <class F>
void parallel_region(size_t items, size_t step, size_t count, F&& body) {
  parallel(
      items, step, count,
      [](void* context, Claims& claims) { (*static_cast<F*>(context))(claims); }, &body);
}

// Calls body(first, last) for ranges that together are [0, items).
template <class F>
void parallel_for(size_t items, size_t step, F&& body) {
  parallel_region(items, step, threads(), [&](Claims& claims) {
    for (size_t first, last; claims.next(first, last);) {
      body(first, last);
    }
  });
}

}  // namespace mmfree
