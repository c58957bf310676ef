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
      if constexpr (Isa::kInterleaves) {
        interleaved_tile<Isa, m + 1>(p);
      } else {
        side_by_side_tile<Isa, m + 1>(p);
      }
    }
  });
}

template <class Isa>
constexpr size_t outputs_of_tile() {
  if constexpr (Isa::kInterleaves) {
    return Isa::kTileVectors * kVectorOutputs;
  } else {
    return kSideBySideOutputs;
  }
}

template <class Isa, class Dense>
constexpr TernaryMatmulKernels TernaryMatmulKernels::of() {
  constexpr size_t outputs = outputs_of_tile<Isa>();
  static_assert(Isa::kTileRows * outputs <= kTileValues && Isa::kStreamRows <= kMostStreamRows);
  void (*interleaved)(const PackedMatrix&, size_t, size_t, uint8_t*) = nullptr;
  if constexpr (Isa::kInterleaves) {
    interleaved = mmfree::interleave<Isa>;
  }
  return {Isa::kTransposedRows,
          mmfree::permute_codes<Isa>,
          mmfree::permute_floats<Isa>,
          Isa::kStreamRows,
          mmfree::stream_codes<Isa>,
          Isa::kTileRows,
          outputs,
          interleaved,
          mmfree::multiply_tile<Isa>,
          mmfree::multiply_floats<Isa>,
          mmfree::multiply_transposed<Isa>};
}

}  // namespace mmfree
