#pragma once

// Checks norms of rows and their gradients against float64.

#include <cmath>
#include <random>
#include <string>
#include <vector>

#include "check.h"
#include "rms_norm/kernels.h"

namespace {

std::vector<float> check_rms_norm(const std::string& name) {
  random_source.seed(41);
  const auto& loops = table<RmsNormKernels>(kernels());
  std::vector<float> result;
  for (size_t dims : {1, 15, 64, 133}) {
    const std::string where = name + " norm of " + std::to_string(dims);
    const size_t rows = 5;
    const float eps = 0.1f;
    Buffer<float> x(rows * dims), d_y(rows * dims), weight(dims), scratch(3 * dims);
    Buffer<float> y(rows * dims), d_x(rows * dims), d_weight(dims);
    std::normal_distribution<float> normal(0, 3);
    for (auto* buffer : {&x, &d_y, &weight}) {
      for (size_t i = 0; i < buffer->size; ++i) {
        (*buffer)[i] = normal(random_source);
      }
    }
    Buffer<float> scale(rows);
    for (size_t row = 0; row < rows; ++row) {
      scale[row] = 0.5f + row;
    }
    for (const Floats& given : {floats(weight), kNone}) {
      const float* factors = given.data ? scale.data() : nullptr;
      const NormRows forward{floats(x), given, dims, eps, y.data()};
      loops.normalize(forward, 0, 2, scratch.data());
      loops.normalize(forward, 2, rows, scratch.data());
      loops.differentiate({floats(x), floats(d_y), given, factors, dims, eps, d_x.data()}, 0, rows,
                          d_weight.data(), scratch.data());
      std::vector<double> sums(dims);
      for (size_t row = 0; row < rows; ++row) {
        const float* own = x.data() + row * dims;
        std::vector<double> cotangent(d_y.data() + row * dims, d_y.data() + (row + 1) * dims);
        for (double& value : cotangent) {
          value *= factors ? factors[row] : 1.0;
        }
        double square = 0, product = 0;
        const auto scale = [&](size_t j) { return given.data ? weight[j] : 1.0; };
        for (size_t j = 0; j < dims; ++j) {
          square += std::pow(own[j], 2.0) / dims;
          product += own[j] * scale(j) * cotangent[j];
        }
        const double inverse = 1 / std::sqrt(square + eps);
        for (size_t j = 0; j < dims; ++j) {
          const size_t at = row * dims + j;
          const double value = own[j] * inverse * scale(j);
          const double gradient =
              inverse * scale(j) * cotangent[j] - std::pow(inverse, 3) * own[j] * product / dims;
          require(std::abs(y[at] - value) <= 1e-5 * (1 + std::abs(value)), "a norm is wrong",
                  where);
          require(std::abs(d_x[at] - gradient) <= 1e-5 * (1 + std::abs(cotangent[j] * scale(j))),
                  "a gradient of a norm is wrong", where);
          sums[j] += own[j] * inverse * cotangent[j];
        }
      }
      for (size_t j = 0; j < dims; ++j) {
        require(std::abs(d_weight[j] - sums[j]) <= 1e-4, "a gradient of a weight is wrong", where);
      }
      for (auto* buffer : {&y, &d_x, &d_weight}) {
        result.insert(result.end(), buffer->data(), buffer->data() + buffer->size);
      }
    }
  }
  return result;
}

}  // namespace
