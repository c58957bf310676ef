#pragma once

namespace mmfree {

// The loops of one instruction set. Each operation has a table of functions, which its folder
// declares in kernels.h and fills in loops.h.
struct Kernels;

// The loops in use, which are those of the fastest set that this processor has unless another was
// chosen.
const Kernels& kernels();

template <class Table>
const Table& table(const Kernels& set);

}  // namespace mmfree
