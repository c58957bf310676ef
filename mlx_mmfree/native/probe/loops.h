#pragma once

#include "probe/kernels.h"
#include "runtime/unroll.h"

// An instruction set `Isa` gives
//   Vector, load_vector(bytes), join(a, b), first(vector)
//   kDotMacs                multiply-accumulates of one dot product of bytes, or 0
//   dot_bytes(sums, a, b)
//   keep(vector)            makes the compiler compute it

namespace mmfree {

constexpr size_t kChains = 12;

template <class Isa>
uint32_t read_vectors(const uint8_t* bytes, size_t size) {
  constexpr size_t kSize = sizeof(typename Isa::Vector);
  typename Isa::Vector joined[4] = {};
  for (size_t i = 0; i + 4 * kSize <= size; i += 4 * kSize) {
    unroll<4>([&](auto k) MMFREE_INLINE {
      joined[k] = Isa::join(joined[k], Isa::load_vector(bytes + i + k * kSize));
    });
  }
  return Isa::first(Isa::join(Isa::join(joined[0], joined[1]), Isa::join(joined[2], joined[3])));
}

template <class Isa>
void multiply_bytes(size_t turns) {
  if constexpr (Isa::kDotMacs > 0) {
    typename Isa::Vector sums[kChains] = {}, a = {}, b = {};
    Isa::keep(a);
    Isa::keep(b);
    for (size_t turn = 0; turn < turns; ++turn) {
      unroll<kChains>([&](auto k) MMFREE_INLINE {
        sums[k] = Isa::dot_bytes(sums[k], a, b);
        Isa::keep(sums[k]);
      });
    }
  }
}

template <class Isa, class Dense>
constexpr ProbeKernels ProbeKernels::of() {
  return {mmfree::read_vectors<Dense>, mmfree::multiply_bytes<Dense>, kChains * Dense::kDotMacs};
}

}  // namespace mmfree
