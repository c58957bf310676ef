#pragma once

#include <cstddef>
#include <utility>

namespace mmfree {

template <class F, size_t... I>
[[gnu::always_inline]] inline void unroll_indices(F&& body, std::index_sequence<I...>) {
  (body(std::integral_constant<size_t, I>{}), ...);
}

// Calls body(0) to body(N - 1) with constants, so that arrays indexed by them stay in registers.
template <size_t N, class F>
[[gnu::always_inline]] inline void unroll(F&& body) {
  unroll_indices(body, std::make_index_sequence<N>{});
}

// Makes the compiler hold a vector in a register instead of loading it for each use.
template <class Vector>
[[gnu::always_inline]] inline void keep(Vector& vector) {
#if defined(__x86_64__)
  asm("" : "+v"(vector));
#elif defined(__aarch64__)
  asm("" : "+w"(vector));
#endif
}

}  // namespace mmfree

#define MMFREE_INLINE __attribute__((always_inline))
