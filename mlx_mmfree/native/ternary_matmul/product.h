#pragma once

#include "ternary_matmul/kernels.h"

namespace mmfree {

// The products on plain memory. Their work is shared out over the threads, and no row of a result
// depends on the number of rows or threads. The padding of the weight meets zeros.

// x: (rows, dims), y: (rows, outputs). A row that holds anything but whole numbers in [-128, 127]
// gives NaN.
void code_product(const float* x, size_t rows, size_t dims, const PackedMatrix& weight, float* y);

// x: (rows, dims), y: (rows, outputs).
void float_product(const float* x, size_t rows, size_t dims, const PackedMatrix& weight, float* y);

// dy: (rows, outputs), dx: (rows, dims).
void transposed_product(const float* dy, size_t rows, size_t dims, const PackedMatrix& weight,
                        float* dx);

}  // namespace mmfree
