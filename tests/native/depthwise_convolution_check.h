#pragma once

// Checks depthwise convolutions and their gradients against float64.

#include <cmath>
#include <random>
#include <string>
#include <vector>

#include "check.h"
#include "depthwise_convolution/convolve.h"

namespace {

struct DepthwiseSizes {
  int side, stride, batch, rows, columns, channels;
};

// Maps smaller than the window, with more rows than a strip and more columns than a piece, and whole
// blocks of channels and others.
const DepthwiseSizes kDepthwiseSizes[] = {
    {3, 1, 2, 16, 60, 20}, {3, 2, 2, 31, 115, 3}, {5, 2, 3, 6, 7, 33},
    {7, 1, 2, 4, 9, 16},   {9, 1, 1, 7, 7, 18},   {11, 2, 2, 5, 12, 5},
    {1, 2, 1, 3, 5, 16},   {3, 4, 2, 9, 10, 17}};

void check_depthwise_sizes(const DepthwiseSizes& s, const std::string& where) {
  const int height = (s.rows + s.stride - 1) / s.stride;
  const int width = (s.columns + s.stride - 1) / s.stride;
  const size_t taps = s.side * s.side;
  Buffer<float> x(s.batch * s.rows * s.columns * s.channels), weight(s.channels * taps);
  Buffer<float> bias(s.channels), y(s.batch * height * width * s.channels), d_y(y.size);
  Buffer<float> d_x(x.size), d_weight(weight.size), d_bias(s.channels);
  std::normal_distribution<float> normal(0.5, 1);
  for (auto* buffer : {&x, &weight, &bias, &d_y}) {
    for (size_t i = 0; i < buffer->size; ++i) {
      (*buffer)[i] = normal(random_source);
    }
  }
  DepthwiseCall call{size_t(s.batch), size_t(s.channels), size_t(s.side), size_t(s.stride), false,
                     size_t(s.rows), size_t(s.columns), size_t(height), size_t(width), floats(x),
                     nullptr, nullptr, y.data(), FloatType::float32};
  convolve(call, floats(weight), floats(bias));
  DepthwiseCall back{size_t(s.batch), size_t(s.channels), size_t(s.side), size_t(s.stride), true,
                     size_t(height), size_t(width), size_t(s.rows), size_t(s.columns), floats(d_y),
                     nullptr, nullptr, d_x.data(), FloatType::float32};
  convolve(back, floats(weight), kNone);
  sum_weight_gradients({size_t(s.batch), size_t(s.channels), size_t(s.side), size_t(s.stride),
                        size_t(s.rows), size_t(s.columns), size_t(height), size_t(width), floats(x),
                        floats(d_y), 0, nullptr},
                       d_weight.data(), d_bias.data());
  std::vector<double> of_x(x.size), of_weight(weight.size), of_bias(s.channels);
  for (size_t i = 0; i < y.size; ++i) {
    const int channel = i % s.channels, column = i / s.channels % width;
    const int row = i / s.channels / width % height, image = i / s.channels / width / height;
    double value = bias[channel], size = std::abs(value);
    of_bias[channel] += d_y[i];
    for (int u = 0; u < s.side; ++u) {
      for (int v = 0; v < s.side; ++v) {
        const int above = row * s.stride + u - s.side / 2;
        const int beside = column * s.stride + v - s.side / 2;
        if (above < 0 || above >= s.rows || beside < 0 || beside >= s.columns) {
          continue;
        }
        const size_t at =
            ((size_t(image) * s.rows + above) * s.columns + beside) * s.channels + channel;
        const size_t tap = channel * taps + u * s.side + v;
        const double product = static_cast<double>(x[at]) * weight[tap];
        value += product;
        size += std::abs(product);
        of_x[at] += static_cast<double>(d_y[i]) * weight[tap];
        of_weight[tap] += static_cast<double>(d_y[i]) * x[at];
      }
    }
    require(std::abs(y[i] - value) <= 1e-6 * size, "a convolved value is wrong", where);
  }
  const auto check = [&](Buffer<float>& got, const std::vector<double>& want, const char* what) {
    double most = 0;
    for (double value : want) {
      most = std::max(most, std::abs(value));
    }
    for (size_t i = 0; i < got.size; ++i) {
      require(std::abs(got[i] - want[i]) <= 2e-6 * most, what, where);
    }
  };
  check(d_x, of_x, "a gradient of a map is wrong");
  check(d_weight, of_weight, "a gradient of a window is wrong");
  check(d_bias, of_bias, "a gradient of a bias is wrong");
}

std::vector<float> check_depthwise_convolution(const std::string& name) {
  random_source.seed(53);
  for (const DepthwiseSizes& sizes : kDepthwiseSizes) {
    check_depthwise_sizes(sizes, name + " depthwise convolution of side " +
                                     std::to_string(sizes.side) + ", stride " +
                                     std::to_string(sizes.stride));
  }
  // products are added before they are rounded, where the processor can
  return {};
}

}  // namespace
