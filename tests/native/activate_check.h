#pragma once

// Checks activations of numbers and their gradients against float64.

#include <cmath>
#include <random>
#include <string>
#include <vector>

#include "activate/kernels.h"
#include "check.h"
#include "gated_activation_check.h"

namespace {

std::vector<float> check_activate(const std::string &name) {
  random_source.seed(61);
  const size_t count = 2 * kActivated + 13;
  Buffer<float> x(count), d_y(count), y(count), d_x(count);
  std::normal_distribution<float> normal(0, 4);
  for (size_t i = 0; i < count; ++i) {
    x[i] = normal(random_source);
    d_y[i] = normal(random_source);
  }
  const auto &loops = table<ActivateKernels>(kernels());
  std::vector<float> result;
  for (const GatedCase &c : kGatedCases) {
    const std::string where =
        name + " activation " + std::to_string(static_cast<int>(c.activation));
    const ActivateValues forward{floats(x), c.activation, y.data(),
                                 FloatType::float32};
    loops.compute(forward, 0, 5);
    loops.compute(forward, 5, count);
    loops.differentiate({floats(x), floats(d_y), c.activation, d_x.data()}, 0,
                        count);
    for (size_t i = 0; i < count; ++i) {
      const double value = c.value(x[i]), slope = c.slope(x[i]) * d_y[i];
      require(std::abs(y[i] - value) <= 1e-6 * (1 + std::abs(value)),
              "a value is wrong", where);
      require(std::abs(d_x[i] - slope) <= 2e-6 * (1 + std::abs(slope)),
              "a gradient is wrong", where);
    }
    result.insert(result.end(), y.data(), y.data() + count);
    result.insert(result.end(), d_x.data(), d_x.data() + count);
  }
  return result;
}

} // namespace
