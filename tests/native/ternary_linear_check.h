#pragma once

// Checks sums of sizes, packed and unpacked trits against plain loops.

#include <algorithm>
#include <cmath>
#include <random>
#include <string>
#include <vector>

#include "check.h"
#include "ternary_linear/kernels.h"

namespace {

float drawn_weight() {
  std::normal_distribution<float> normal(0, 1);
  // ties once they are doubled, zeros of both signs and what is not finite
  const float special[] = {0.25f, -0.25f, 0.75f, -0.0f, 0.0f, INFINITY, -INFINITY};
  return draw(0, 9) ? normal(random_source) : special[draw(0, 6)];
}

std::vector<float> check_size_sums(const TernaryLinearKernels& loops, const std::string& name) {
  std::vector<float> result;
  for (size_t columns : {1, 7, 64, 333}) {
    for (size_t rows : {1, 64}) {
      Buffer<float> weight(rows * columns), sums(columns), scratch(columns);
      for (size_t i = 0; i < weight.size; ++i) {
        weight[i] = drawn_weight();
      }
      const SizeSums given{floats(weight), rows, columns, sums.data()};
      loops.add_sizes(given, 0, columns / 2, scratch.data());
      loops.add_sizes(given, columns / 2, columns, scratch.data());
      for (size_t c = 0; c < columns; ++c) {
        float want = 0;
        for (size_t row = 0; row < rows; ++row) {
          want += std::abs(weight[row * columns + c]);
        }
        require(sums[c] == want, "a sum of sizes is wrong", name + std::to_string(columns));
      }
      result.insert(result.end(), sums.data(), sums.data() + columns);
    }
  }
  return result;
}

int code_of(float weight, float inverse) {
  const float whole = std::nearbyint(weight * inverse);
  return static_cast<int>(std::min(std::max(whole, -1.0f), 1.0f)) + 1;
}

std::vector<float> check_packing(const TernaryLinearKernels& loops, const std::string& name) {
  std::vector<float> result;
  for (size_t dims : {1, 4, 31, 64, 255, 256, 257, 1000}) {
    const size_t rows = 3, row_bytes = (dims + 31) / 32 * 8;
    const float inverse = 2.0f;
    const std::string where = name + " packing of " + std::to_string(dims);
    Buffer<float> weight(rows * dims), values(rows * dims), table(4 * 256);
    Buffer<uint8_t> packed(rows * row_bytes);
    for (size_t i = 0; i < weight.size; ++i) {
      weight[i] = drawn_weight();
    }
    for (size_t n = 0; n < table.size; ++n) {
      table[n] = static_cast<float>(static_cast<int>(n / 4 >> 2 * (n % 4) & 3) - 1) * 0.3f;
    }
    const RowPacker packer{floats(weight), dims, inverse, row_bytes, packed.data()};
    loops.pack_rows(packer, 0, 1);
    loops.pack_rows(packer, 1, rows);
    const RowUnpacker unpacker{packed.data(), row_bytes, dims, table.data(), values.data()};
    loops.unpack_rows(unpacker, 0, 2);
    loops.unpack_rows(unpacker, 2, rows);
    for (size_t row = 0; row < rows; ++row) {
      for (size_t j = 0; j < 4 * row_bytes; ++j) {
        const int code = packed[row * row_bytes + j / 4] >> 2 * (j % 4) & 3;
        const int want = j < dims ? code_of(weight[row * dims + j], inverse) : 1;
        require(code == want, "a trit is wrong", where);
        require(j >= dims || values[row * dims + j] == static_cast<float>(want - 1) * 0.3f,
                "an unpacked trit is wrong", where);
      }
    }
    result.insert(result.end(), values.data(), values.data() + values.size);
  }
  return result;
}

std::vector<float> check_ternary_linear(const std::string& name) {
  random_source.seed(43);
  const auto& loops = table<TernaryLinearKernels>(kernels());
  std::vector<float> result = check_size_sums(loops, name);
  const std::vector<float> values = check_packing(loops, name);
  result.insert(result.end(), values.begin(), values.end());
  return result;
}

}  // namespace
