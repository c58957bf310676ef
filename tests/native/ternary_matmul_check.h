#pragma once

#include <cmath>
#include <random>
#include <string>
#include <vector>

#include "check.h"
#include "ternary_matmul/product.h"
#include "ternary_problem.h"

namespace {

void check_whole_sums(Problem& p, const std::string& where) {
  Buffer<float> codes(p.rows * p.outputs), floats(p.rows * p.outputs), dx(p.rows * p.dims);
  code_product(p.x.data(), p.rows, p.dims, p.weight(), codes.data());
  float_product(p.x.data(), p.rows, p.dims, p.weight(), floats.data());
  transposed_products({{p.dy.data(), p.rows, p.weight(), dx.data(), p.dims}});
  for (size_t m = 0; m < p.rows; ++m) {
    for (size_t n = 0; n < p.outputs; ++n) {
      float want = 0;
      for (size_t i = 0; i < p.dims; ++i) {
        want += p.x[m * p.dims + i] * p.trits[n * p.dims + i];
      }
      require(codes[m * p.outputs + n] == want, "a sum of codes is wrong", where);
      require(floats[m * p.outputs + n] == want, "a sum of floats is wrong", where);
    }
    for (size_t i = 0; i < p.dims; ++i) {
      float want = 0;
      for (size_t n = 0; n < p.outputs; ++n) {
        want += p.dy[m * p.outputs + n] * p.trits[n * p.dims + i];
      }
      require(dx[m * p.dims + i] == want, "a transposed sum is wrong", where);
    }
  }
}

void check_bad_rows(const std::string& where) {
  for (float bad : {NAN, INFINITY, -INFINITY, 0.5f, 128.0f, 1e30f}) {
    Problem p(3, 70, 9);
    p.x[70 + 69] = bad;
    Buffer<float> y(27);
    code_product(p.x.data(), 3, 70, p.weight(), y.data());
    for (size_t i = 0; i < y.size; ++i) {
      require(std::isnan(y[i]) == (i / 9 == 1), "NaN is not in its row alone", where);
    }
  }
}

// Other floats: all instruction sets must give the same bits.
std::vector<float> sums_of_fractions(size_t rows, size_t dims, size_t outputs) {
  random_source.seed(7);
  Problem p(rows, dims, outputs);
  std::normal_distribution<float> normal;
  for (size_t i = 0; i < p.x.size; ++i) {
    p.x[i] = normal(random_source);
  }
  std::vector<float> result(rows * (outputs + dims));
  float* y = result.data();
  float_product(p.x.data(), rows, dims, p.weight(), y);
  transposed_products({{y, rows, p.weight(), y + rows * outputs, dims}});
  return result;
}

std::vector<float> check_ternary_matmul(const std::string& name) {
  for (size_t dims : {1, 31, 33, 63, 100, 256, 257, 1000}) {
    for (size_t rows : {1, 2, 3, 4, 5, 6, 7, 13, 19, 31}) {
      for (size_t outputs : {1, 3, 4, 37}) {
        Problem p(rows, dims, outputs);
        check_whole_sums(p, name + " " + std::to_string(rows) + " x " + std::to_string(dims) +
                                " x " + std::to_string(outputs));
      }
    }
  }
  Problem large(30, 300, 500);
  check_whole_sums(large, name + " large");
  check_bad_rows(name);
  return sums_of_fractions(5, 333, 41);
}

}  // namespace
