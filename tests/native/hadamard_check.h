#pragma once

// Checks the signed transform of blocks against its definition, by which the sign of a term is the
// parity of the bits that two places share.

#include <cmath>
#include <random>
#include <string>
#include <vector>

#include "check.h"
#include "hadamard/kernels.h"

namespace {

std::vector<float> check_hadamard(const std::string& name) {
  random_source.seed(47);
  const auto& loops = table<HadamardKernels>(kernels());
  std::vector<float> result;
  for (size_t block : {2, 8, 16, 32, 128, 512}) {
    const std::string where = name + " transform of blocks of " + std::to_string(block);
    const size_t rows = 2, blocks = 3, dims = blocks * block;
    Buffer<float> x(rows * dims), signs(dims), y(rows * dims), scratch(block);
    std::normal_distribution<float> normal;
    for (size_t i = 0; i < x.size; ++i) {
      x[i] = normal(random_source);
    }
    for (size_t i = 0; i < dims; ++i) {
      signs[i] = draw(0, 1) ? 1.0f : -1.0f;
    }
    for (const bool has_signs : {true, false}) {
      for (const bool inverse : {false, true}) {
        const float* own = has_signs ? signs.data() : nullptr;
        const HadamardBlocks given{floats(x), own, dims, block, inverse, y.data()};
        loops.transform(given, 0, 4, scratch.data());
        loops.transform(given, 4, rows * blocks, scratch.data());
        for (size_t at = 0; at < x.size; ++at) {
          const size_t start = at / block * block, place = at % block;
          double sum = 0;
          for (size_t j = 0; j < block; ++j) {
            const double sign = __builtin_popcountll(place & j) % 2 ? -1 : 1;
            const bool moves = has_signs && !inverse;
            sum += sign * x[start + j] * (moves ? signs[(start + j) % dims] : 1.0);
          }
          sum *= has_signs && inverse ? signs[at % dims] : 1.0;
          const double want = sum / std::sqrt(static_cast<double>(block));
          require(std::abs(y[at] - want) <= 1e-5, "a transformed number is wrong", where);
        }
        result.insert(result.end(), y.data(), y.data() + y.size);
      }
    }
  }
  return result;
}

}  // namespace
