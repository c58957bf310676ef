#pragma once

// The build writes this file, which includes every loops.h and lists the tables.
#include "kernel_tables.h"

namespace mmfree {

struct InstructionSet {
  const char* name;
  bool (*is_supported)();
};

#define MMFREE_BASE(Table) , Table
struct Kernels : InstructionSet MMFREE_KERNEL_TABLES(MMFREE_BASE) {};
#undef MMFREE_BASE

// `Isa` computes with packed trits, `Dense` with vectors of floats.
template <class Isa, class Dense>
constexpr Kernels kernel_set(const char* name, bool (*is_supported)()) {
#define MMFREE_TABLE(Table) , Table::of<Isa, Dense>()
  return {{name, is_supported} MMFREE_KERNEL_TABLES(MMFREE_TABLE)};
#undef MMFREE_TABLE
}

}  // namespace mmfree
