#pragma once

#include <cstddef>
#include <cstdint>

namespace mmfree {

// Loops that show what the processor can do at most.
struct ProbeKernels {
  // Reads whole vectors of [bytes, bytes + size) and joins them, so that no read can be left out.
  uint32_t (*read)(const uint8_t* bytes, size_t size);
  // `turns` times kChains dot products of 8-bit numbers, which do not wait for each other.
  void (*multiply)(size_t turns);
  // Multiply-accumulates of one turn; 0 where the set has no such instruction.
  size_t turn_macs;

  template <class Isa, class Dense>
  static constexpr ProbeKernels of();
};

}  // namespace mmfree
