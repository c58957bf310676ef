#pragma once

#include <cmath>
#include <random>
#include <string>
#include <vector>

#include "check.h"
#include "mlgru_step/kernels.h"
#include "rms_norm_quantize/kernels.h"

namespace {

std::vector<float> check_mlgru_step(const std::string& where) {
  random_source.seed(13);
  const size_t rows = 5, dims = 333;
  Buffer<float> gates(3 * rows * dims), state(dims), weight(dims), bound(dims), inverse(rows);
  Buffer<float> scratch(dims), last(dims), y(rows * dims);
  Buffer<bool> valid(rows);
  std::normal_distribution<float> normal(0, 4);
  for (size_t i = 0; i < gates.size; ++i) {
    gates[i] = normal(random_source);
  }
  for (size_t i = 0; i < dims; ++i) {
    state[i] = normal(random_source);
    weight[i] = normal(random_source);
    bound[i] = draw(0, 9) / 10.0f;
  }
  for (size_t row = 0; row < rows; ++row) {
    valid[row] = row != 2;
    inverse[row] = table<RmsNormQuantizeKernels>(kernels()).rms_inverse(
        floats(gates), (3 * row + 2) * dims, dims, 1e-6f, scratch.data());
  }
  const RecurrenceStep step{floats(gates), state.data(), floats(weight), floats(bound),
                            valid.data(),  rows,         dims,           inverse.data(),
                            y.data(),      last.data()};
  table<MlgruStepKernels>(kernels()).recur(step, 0, 64);
  table<MlgruStepKernels>(kernels()).recur(step, 64, dims);
  const auto sigmoid = [](double v) { return 1 / (1 + std::exp(-v)); };
  for (size_t c = 0; c < dims; ++c) {
    double h = state[c];
    for (size_t row = 0; row < rows; ++row) {
      const float* g = gates.data() + 3 * row * dims + c;
      const double f = bound[c] + (1 - bound[c]) * sigmoid(g[dims]);
      h = valid[row] ? f * h + g[0] * sigmoid(g[0]) * (1 - f) : h;
      double square = 0;
      for (size_t i = 0; i < dims; ++i) {
        square += std::pow(gates[(3 * row + 2) * dims + i], 2) / dims;
      }
      const double want = g[2 * dims] / std::sqrt(square + 1e-6) * weight[c] * h * sigmoid(h);
      require(std::abs(y[row * dims + c] - want) <= 1e-5 * (1 + std::abs(want)),
              "an output of the recurrence is wrong", where);
    }
    require(std::abs(last[c] - h) <= 1e-5 * (1 + std::abs(h)), "a state is wrong", where);
  }
  std::vector<float> result(y.data(), y.data() + y.size);
  result.insert(result.end(), last.data(), last.data() + dims);
  return result;
}

}  // namespace
