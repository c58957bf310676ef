#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "check.h"
#include "dense_matmul/product.h"

namespace {

uint16_t to_bfloat16(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  return bits >> 16;
}

float from_bfloat16(uint16_t half) {
  const uint32_t bits = static_cast<uint32_t>(half) << 16;
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

// Every row alone must give the bits that it has among the others.
template <class Product>
void check_dense(size_t rows, size_t dims, size_t outputs, const std::vector<double>& weight,
                 Product&& product, const std::string& where, double tolerance = 1e-4) {
  std::normal_distribution<float> normal;
  Buffer<float> x(rows * dims), y(rows * outputs), one(outputs);
  for (size_t i = 0; i < x.size; ++i) {
    x[i] = normal(random_source);
  }
  product(x.data(), rows, y.data());
  for (size_t m = 0; m < rows; ++m) {
    product(x.data() + m * dims, 1, one.data());
    for (size_t n = 0; n < outputs; ++n) {
      double want = 0, size = 0;
      for (size_t i = 0; i < dims; ++i) {
        want += x[m * dims + i] * weight[n * dims + i];
        size += std::abs(x[m * dims + i] * weight[n * dims + i]);
      }
      require(std::abs(y[m * outputs + n] - want) <= tolerance * size, "a dense sum is wrong",
              where);
      require(y[m * outputs + n] == one[n], "a row depends on the others", where);
    }
  }
}

void check_dense_floats(size_t rows, size_t dims, size_t outputs, const std::string& where) {
  std::normal_distribution<float> normal;
  Buffer<uint16_t> halves(outputs * dims);
  Buffer<float> floats(outputs * dims);
  std::vector<double> weight(outputs * dims);
  for (size_t i = 0; i < weight.size(); ++i) {
    halves[i] = to_bfloat16(normal(random_source));
    weight[i] = floats[i] = from_bfloat16(halves[i]);
  }
  const FloatMatrix wide{floats.data(), FloatType::float32, outputs};
  const FloatMatrix narrow{halves.data(), FloatType::bfloat16, outputs};
  for (const FloatMatrix& matrix : {wide, narrow}) {
    check_dense(
        rows, dims, outputs, weight,
        [&](const float* x, size_t count, float* y) { dense_product(x, count, dims, matrix, y); },
        where);
  }
}

void check_dense_codes(size_t rows, size_t group, size_t groups, size_t outputs, int bits,
                       const std::string& where) {
  const size_t dims = group * groups;
  Buffer<uint8_t> codes(outputs * dims * bits / 8);
  Buffer<float> scales(outputs * groups), biases(outputs * groups);
  for (size_t i = 0; i < codes.size; ++i) {
    codes[i] = draw(0, 255);
  }
  for (size_t i = 0; i < scales.size; ++i) {
    scales[i] = draw(1, 100) * 0.01f;
    biases[i] = draw(-100, 100) * 0.01f;
  }
  std::vector<double> weight(outputs * dims);
  for (size_t i = 0; i < weight.size(); ++i) {
    int code = 0;
    for (int bit = 0; bit < bits; ++bit) {
      const size_t at = i * bits + bit;
      code |= (codes[at / 8] >> (at % 8) & 1) << bit;
    }
    weight[i] = double(code) * scales[i / group] + biases[i / group];
  }
  const QuantizedMatrix matrix{codes.data(), scales.data(), biases.data(), FloatType::float32,
                               outputs,      group,         bits};
  check_dense(
      rows, dims, outputs, weight,
      [&](const float* x, size_t count, float* y) {
        quantized_product(x, count, dims, matrix, false, y);
      },
      where);
  if (bits <= 2) {
    check_dense(
        rows, dims, outputs, weight,
        [&](const float* x, size_t count, float* y) {
          quantized_product(x, count, dims, matrix, true, y);
        },
        where + " rounded", 2e-2);
    std::vector<double> columns(dims * outputs);
    for (size_t i = 0; i < weight.size(); ++i) {
      columns[i % dims * outputs + i / dims] = weight[i];
    }
    check_dense(
        rows, outputs, dims, columns,
        [&](const float* dy, size_t count, float* dx) {
          quantized_transposed(dy, count, dims, matrix, dx);
        },
        where + " transposed");
  }
}

std::vector<float> check_dense_matmul(const std::string& name) {
  for (size_t rows : {1, 3, 7}) {
    for (size_t dims : {1, 31, 32, 100}) {
      check_dense_floats(rows, dims, 10, name + " floats");
    }
    for (size_t group : {32, 64, 128}) {
      for (size_t groups : {1, 3, 17}) {
        for (int bits : {1, 2, 4, 6, 8}) {
          check_dense_codes(rows, group, groups, 5, bits, name + " codes");
        }
      }
    }
  }
  // the bits are those of each set alone
  return {};
}

}  // namespace
