#pragma once

#include <cstddef>
#include <cstdint>

namespace mmfree {

// Loops that show the most that the processor can do.
struct ProbeKernels {
  // Reads the whole vectors of [bytes, bytes + size) and joins them, so that the compiler leaves no
  // read out.
  uint32_t (*read)(const uint8_t* bytes, size_t size);
  // Computes kChains dot products of 8-bit numbers, which do not wait for each other, `turns`
  // times.
  void (*multiply)(size_t turns);
  // Multiply-accumulates of one turn, or 0 if the set has no such instruction.
  size_t turn_macs;

  template <class Isa, class Dense>
  static constexpr ProbeKernels of();
};

}  // namespace mmfree
