#pragma once

#include "ternary_matmul/code_stream.h"
#include "ternary_matmul/float_product.h"
#include "ternary_matmul/interleaved_tile.h"
#include "ternary_matmul/kernels.h"
#include "ternary_matmul/permute.h"
#include "ternary_matmul/side_by_side_tile.h"

namespace mmfree {

template <class Isa>
void multiply_tile(const CodeTile& p) {
  unroll<Isa::kTileRows>([&](auto m) {
    if (p.rows == m + 1) {
      side_by_side_tile<Isa, m + 1>(p);
    }
  });
}

template <class Isa>
void multiply_interleaved(const CodeTile& p) {
  unroll<Isa::kTileRows>([&](auto m) {
    if (p.rows == m + 1) {
      interleaved_tile<Isa, m + 1>(p);
    }
  });
}

template <class Isa, class Dense>
constexpr TernaryMatmulKernels TernaryMatmulKernels::of() {
  static_assert(Isa::kTileRows <= kMostCodeTileRows && Isa::kStreamRows <= kMostStreamRows);
  TernaryMatmulKernels kernels = {Isa::kTransposedRows,
                                  mmfree::permute_codes<Isa>,
                                  mmfree::permute_floats<Isa>,
                                  Isa::kStreamRows,
                                  mmfree::stream_codes<Isa>,
                                  Isa::kTileRows,
                                  mmfree::multiply_tile<Isa>,
                                  nullptr,
                                  nullptr,
                                  mmfree::multiply_floats<Isa>,
                                  mmfree::multiply_transposed<Isa>};
  if constexpr (Isa::kInterleaves) {
    kernels.interleave = mmfree::interleave<Isa>;
    kernels.multiply_interleaved = mmfree::multiply_interleaved<Isa>;
  }
  return kernels;
}

}  // namespace mmfree
