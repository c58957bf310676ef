#pragma once

#include <vector>

#include "ternary_matmul/kernels.h"

namespace mmfree {

// The products on plain memory. Their work is shared out over the threads, and no row of a result
// depends on the number of rows or threads. The padding of the weight meets zeros.

// x: (rows, dims), y: (rows, outputs). A row that holds anything but whole numbers in [-128, 127]
// gives NaN.
void code_product(const float* x, size_t rows, size_t dims, const PackedMatrix& weight, float* y);

// x: (rows, dims), y: (rows, outputs).
void float_product(const float* x, size_t rows, size_t dims, const PackedMatrix& weight, float* y);

// A row of some matrix's product: x (dims,) and y (outputs,).
struct RowOf {
  size_t matrix;
  const float* x;
  float* y;
};

// The products of several matrices of one shape, whose rows lie side by side. The threads share out
// the outputs of all of them together.
void float_products(const std::vector<RowOf>& rows, size_t dims,
                    const std::vector<PackedMatrix>& matrices);

// The threads share out the rows and blocks of all of them together.
void transposed_products(const std::vector<TransposedProduct>& products);

}  // namespace mmfree
