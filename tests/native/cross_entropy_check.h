#pragma once

// Checks losses of logits and their gradients against float64.

#include <cmath>
#include <random>
#include <string>
#include <vector>

#include "check.h"
#include "cross_entropy/kernels.h"

namespace {

std::vector<float> check_cross_entropy(const std::string& name) {
  random_source.seed(37);
  const auto& loops = table<CrossEntropyKernels>(kernels());
  std::vector<float> result;
  for (size_t classes : {1, 17, 2048, 4101}) {
    const std::string where = name + " cross-entropy of " + std::to_string(classes) + " classes";
    const size_t rows = 6;
    Buffer<float> logits(rows * classes), losses(rows), log_totals(rows), d_losses(rows);
    Buffer<float> d_logits(rows * classes);
    Buffer<int32_t> targets(rows);
    std::normal_distribution<float> normal(0, 5);
    for (size_t i = 0; i < logits.size; ++i) {
      logits[i] = normal(random_source) + 300;
    }
    for (size_t row = 0; row < rows; ++row) {
      targets[row] = draw(0, static_cast<int>(classes) - 1);
      d_losses[row] = normal(random_source);
    }
    const int32_t count = static_cast<int32_t>(classes);
    // far above all others, so that only the true maximum will do
    logits[4 * classes] += 150;
    targets[0] = count - 1;
    targets[1] = -count;
    targets[2] = count;
    targets[3] = -count - 1;
    const CrossEntropyRows forward{floats(logits), targets.data(), classes, losses.data(),
                                   log_totals.data()};
    loops.compute(forward, 0, 4);
    loops.compute(forward, 4, rows);
    loops.differentiate({floats(logits), targets.data(), classes, log_totals.data(),
                         d_losses.data(), d_logits.data()},
                        0, rows);
    for (size_t row = 0; row < rows; ++row) {
      const float* own = logits.data() + row * classes;
      const bool is_class = row != 2 && row != 3;
      const size_t target = row == 1 ? 0 : is_class ? targets[row] : 0;
      double total = 0;
      for (size_t j = 0; j < classes; ++j) {
        total += std::exp(own[j] - 300.0);
      }
      const double loss = std::log(total) + 300 - own[target];
      require(is_class ? std::abs(losses[row] - loss) <= 1e-4 : std::isnan(losses[row]),
              "a loss is wrong", where);
      for (size_t j = 0; j < classes; ++j) {
        const double share = std::exp(own[j] - 300.0) / total - (j == target);
        const double got = d_logits[row * classes + j], want = share * d_losses[row];
        require(is_class ? std::abs(got - want) <= 1e-4 * std::abs(d_losses[row]) : std::isnan(got),
                "a gradient of logits is wrong", where);
      }
    }
    for (size_t i = 0; i < rows * classes; ++i) {
      result.push_back(std::isnan(d_logits[i]) ? 0.0f : d_logits[i]);
    }
  }
  return result;
}

}  // namespace
