#pragma once

// Checks activations of gates and their gradients against float64.

#include <cmath>
#include <random>
#include <string>
#include <vector>

#include "check.h"
#include "gated_activation/kernels.h"

namespace {

struct GatedCase {
  Activation activation;
  double (*value)(double), (*slope)(double);
};

constexpr double kRoot = 0.70710678118654752;

const GatedCase kGatedCases[] = {
    {Activation::silu, [](double x) { return x / (1 + std::exp(-x)); },
     [](double x) {
       const double s = 1 / (1 + std::exp(-x));
       return s * (1 + x * (1 - s));
     }},
    {Activation::relu2, [](double x) { return x > 0 ? x * x : 0; },
     [](double x) { return x > 0 ? 2 * x : 0; }},
    {Activation::gelu,
     [](double x) { return x * (1 + std::erf(x * kRoot)) / 2; },
     [](double x) {
       return (1 + std::erf(x * kRoot)) / 2 +
              x * std::exp(-x * x / 2) * 0.39894228040143268;
     }},
    {Activation::relu, [](double x) { return x > 0 ? x : 0; },
     [](double x) { return x > 0 ? 1.0 : 0.0; }}};

std::vector<float> check_gated_activation(const std::string &name) {
  random_source.seed(31);
  const size_t rows = 3, dims = 77, stride = 80;
  Buffer<float> gate(2 * stride + dims), up(2 * stride + dims),
      d_y(rows * dims);
  Buffer<float> y(rows * dims), d_gate(rows * dims), d_up(rows * dims),
      scratch(4 * dims);
  std::normal_distribution<float> normal(0, 5);
  for (auto *buffer : {&gate, &up, &d_y}) {
    for (size_t i = 0; i < buffer->size; ++i) {
      (*buffer)[i] = normal(random_source);
    }
  }
  const auto &loops = table<GatedActivationKernels>(kernels());
  std::vector<float> result;
  for (const GatedCase &c : kGatedCases) {
    const std::string where =
        name + " activation " + std::to_string(static_cast<int>(c.activation));
    const GatedRows forward{{floats(gate), stride},
                            {floats(up), stride},
                            dims,
                            c.activation,
                            y.data(),
                            FloatType::float32};
    loops.compute(forward, 0, 1, scratch.data());
    loops.compute(forward, 1, rows, scratch.data());
    loops.differentiate({{floats(gate), stride},
                         {floats(up), stride},
                         {floats(d_y), dims},
                         dims,
                         c.activation,
                         d_gate.data(),
                         d_up.data(),
                         dims},
                        0, rows, scratch.data());
    const auto check = [&](Buffer<float> &got, size_t i, double want,
                           const char *what) {
      require(std::abs(got[i] - want) <= 2e-6 * (1 + std::abs(want)), what,
              where);
    };
    for (size_t i = 0; i < rows * dims; ++i) {
      const size_t at = i / dims * stride + i % dims;
      const double x = gate[at], factor = static_cast<double>(up[at]) * d_y[i];
      check(y, i, c.value(x) * up[at], "a gated value is wrong");
      check(d_up, i, c.value(x) * d_y[i],
            "a gradient of what is gated is wrong");
      check(d_gate, i, c.slope(x) * factor, "a gradient of a gate is wrong");
    }
    for (auto *buffer : {&y, &d_gate, &d_up}) {
      // the error function is the C library's, which is one for all sets
      result.insert(result.end(), buffer->data(),
                    buffer->data() + buffer->size);
    }
  }
  return result;
}

} // namespace
