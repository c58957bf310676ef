#pragma once

// Checks heads in rotary position embedding, and the way back, against float64.

#include <cmath>
#include <random>
#include <string>
#include <vector>

#include "check.h"
#include "rotated_heads/kernels.h"

namespace {

std::vector<float> check_rotated_heads(const std::string &name) {
  random_source.seed(37);
  std::vector<float> result;
  const size_t batch = 2, length = 3, queries = 4, groups = 2,
               count = queries + 2 * groups;
  for (const size_t dims : {2u, 22u, 64u}) {
    for (const bool is_interleaved : {false, true}) {
      const size_t half = dims / 2, tokens = batch * length;
      const std::string where = name + " heads of " + std::to_string(dims);
      Buffer<float> x(tokens * count * dims), back(x.size);
      Buffer<float> q(tokens * queries * dims), k(tokens * groups * dims),
          v(k.size);
      Buffer<float> cosines(tokens * half), sines(tokens * half),
          scratch(2 * dims);
      std::normal_distribution<float> normal;
      for (size_t i = 0; i < x.size; ++i) {
        x[i] = normal(random_source);
      }
      for (size_t i = 0; i < cosines.size; ++i) {
        const float angle = 3 * normal(random_source);
        cosines[i] = std::cos(angle);
        sines[i] = std::sin(angle);
      }
      TokenHeads heads{length,
                       queries,
                       groups,
                       dims,
                       FloatType::float32,
                       x.data(),
                       {q.data(), k.data(), v.data()},
                       cosines.data(),
                       sines.data(),
                       length * half,
                       is_interleaved};
      const auto &loops = table<RotatedHeadsKernels>(kernels());
      loops.split(heads, 0, 1, scratch.data());
      loops.split(heads, 1, tokens, scratch.data());
      for (size_t token = 0; token < tokens; ++token) {
        for (size_t head = 0; head < queries; ++head) {
          const float *from = x.data() + (token * count + head) * dims;
          const float *own =
              q.data() +
              ((token / length * queries + head) * length + token % length) *
                  dims;
          for (size_t i = 0; i < half; ++i) {
            const size_t one = is_interleaved ? 2 * i : i,
                         two = one + (is_interleaved ? 1 : half);
            const double c = cosines[token * half + i],
                         s = sines[token * half + i];
            require(
                std::abs(own[one] - (from[one] * c - from[two] * s)) < 1e-5 &&
                    std::abs(own[two] - (from[one] * s + from[two] * c)) < 1e-5,
                "a rotated query is wrong", where);
          }
        }
      }
      heads.tokens = back.data();
      loops.join(heads, 0, tokens, scratch.data());
      for (size_t i = 0; i < x.size; ++i) {
        require(std::abs(back[i] - x[i]) < 1e-5,
                "a token rotated back is wrong", where);
      }
      for (auto *buffer : {&q, &k, &v, &back}) {
        result.insert(result.end(), buffer->data(),
                      buffer->data() + buffer->size);
      }
    }
  }
  return result;
}

} // namespace
