#pragma once

// Checks norms by mean and variance, and their gradients, against float64.

#include <cmath>
#include <random>
#include <string>
#include <vector>

#include "check.h"
#include "layer_norm/kernels.h"

namespace {

std::vector<float> check_layer_norm(const std::string& name) {
  random_source.seed(43);
  const auto& loops = table<LayerNormKernels>(kernels());
  std::vector<float> result;
  for (size_t dims : {1, 15, 64, 133}) {
    const std::string where = name + " layer norm of " + std::to_string(dims);
    const size_t rows = 5;
    const float eps = 0.1f;
    Buffer<float> x(rows * dims), d_y(rows * dims), weight(dims), bias(dims), scratch(3 * dims);
    Buffer<float> y(rows * dims), d_x(rows * dims), d_weight(2 * dims);
    std::normal_distribution<float> normal(2, 3);
    for (auto* buffer : {&x, &d_y, &weight, &bias}) {
      for (size_t i = 0; i < buffer->size; ++i) {
        (*buffer)[i] = normal(random_source);
      }
    }
    for (const bool is_scaled : {true, false}) {
      const Floats scale = is_scaled ? floats(weight) : kNone;
      const Floats shift = is_scaled ? floats(bias) : kNone;
      const LayerNormRows forward{floats(x), scale, shift, dims, eps, y.data()};
      loops.normalize(forward, 0, 2, scratch.data());
      loops.normalize(forward, 2, rows, scratch.data());
      loops.differentiate({floats(x), floats(d_y), scale, dims, eps, d_x.data()}, 0, rows,
                          d_weight.data(), scratch.data());
      std::vector<double> sums(2 * dims);
      for (size_t row = 0; row < rows; ++row) {
        const float *own = x.data() + row * dims, *cotangent = d_y.data() + row * dims;
        const auto factor = [&](size_t j) { return is_scaled ? weight[j] : 1.0; };
        double mean = 0, variance = 0, slope = 0, of_mean = 0;
        for (size_t j = 0; j < dims; ++j) {
          mean += own[j] / static_cast<double>(dims);
        }
        for (size_t j = 0; j < dims; ++j) {
          variance += std::pow(own[j] - mean, 2.0) / dims;
        }
        const double inverse = 1 / std::sqrt(variance + eps);
        for (size_t j = 0; j < dims; ++j) {
          slope += (own[j] - mean) * inverse * factor(j) * cotangent[j] / dims;
          of_mean += factor(j) * cotangent[j] / dims;
        }
        for (size_t j = 0; j < dims; ++j) {
          const size_t at = row * dims + j;
          const double centred = (own[j] - mean) * inverse;
          const double value = centred * factor(j) + (is_scaled ? bias[j] : 0.0);
          const double gradient =
              (factor(j) * cotangent[j] - of_mean - centred * slope) * inverse;
          require(std::abs(y[at] - value) <= 1e-5 * (1 + std::abs(value)), "a norm is wrong",
                  where);
          require(std::abs(d_x[at] - gradient) <= 2e-5 * (1 + std::abs(cotangent[j] * factor(j))),
                  "a gradient of a norm is wrong", where);
          sums[j] += centred * cotangent[j];
          sums[dims + j] += cotangent[j];
        }
      }
      for (size_t j = 0; j < 2 * dims; ++j) {
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
