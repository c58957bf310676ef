#pragma once

namespace mmfree {

// The loops of one instruction set: a table of functions for each operation, which its folder
// declares in kernels.h and fills in loops.h.
struct Kernels;

// Those of the fastest set that this processor has, unless another was chosen.
const Kernels& kernels();

template <class Table>
const Table& table(const Kernels& set);

}  // namespace mmfree
