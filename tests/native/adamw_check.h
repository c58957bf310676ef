#pragma once

// Checks a step of AdamW against float64.

#include <cmath>
#include <random>
#include <string>
#include <vector>

#include "adamw/kernels.h"
#include "check.h"

namespace {

std::vector<float> check_adamw(const std::string &name) {
  random_source.seed(41);
  const size_t count = 1037;
  Buffer<float> g(count), w(count), m(count), v(count);
  std::normal_distribution<float> normal;
  for (auto *buffer : {&g, &w, &m, &v}) {
    for (size_t i = 0; i < count; ++i) {
      (*buffer)[i] = normal(random_source);
    }
  }
  std::vector<double> wanted;
  for (size_t i = 0; i < count; ++i) {
    v[i] = std::abs(v[i]);
    const double mean = 0.875 * m[i] + 0.125 * g[i],
                 square = 0.75 * v[i] + 0.25 * g[i] * g[i];
    wanted.insert(wanted.end(),
                  {w[i] * 0.5 - 0.1f * mean / (std::sqrt(square) * 1.5 + 1e-3f),
                   mean, square});
  }
  const AdamFactors factors{0.5f,  0.875f, 0.125f, 0.75f,
                            0.25f, 0.1f,   1.5f,   1e-3f};
  const auto &loops = table<AdamwKernels>(kernels());
  loops.update(factors, g.data(), 1, w.data(), m.data(), v.data());
  loops.update(factors, g.data() + 1, count - 1, w.data() + 1, m.data() + 1,
               v.data() + 1);
  std::vector<float> result;
  for (size_t i = 0; i < count; ++i) {
    for (float own : {w[i], m[i], v[i]}) {
      const double want = wanted[result.size()];
      require(std::abs(own - want) <= 1e-6 * (1 + std::abs(want)),
              "a step of AdamW is wrong", name);
      result.push_back(own);
    }
  }
  return result;
}

} // namespace
