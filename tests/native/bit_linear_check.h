#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <random>
#include <string>
#include <vector>

#include "bit_linear/project.h"
#include "check.h"
#include "runtime/thread_pool.h"
#include "ternary_problem.h"

namespace {

// Activations of +-1 have the mean square 1, and a norm whose largest weight is
// 127 has codes that are its weights: everything is a whole number.
void check_projections(size_t rows, size_t dims, bool has_gate, bool has_codes,
                       const std::string &where) {
  Problem first(rows, dims, 37), second(rows, dims, 21);
  Buffer<float> x(rows * dims * (has_gate ? 2 : 1)), before(dims),
      residual(rows * 58);
  Buffer<float> norm_a(dims), norm_b(dims), scales(21), y(rows * 58);
  for (size_t i = 0; i < x.size; ++i) {
    x[i] = draw(0, 1) ? 1 : -1;
  }
  for (size_t row = 0; has_gate && row < rows; ++row) {
    for (size_t i = 0; i < dims; ++i) {
      x[2 * row * dims + i] = 1;
    }
  }
  for (size_t i = 0; i < dims; ++i) {
    before[i] = draw(0, 1) ? 1 : -1;
    norm_a[i] = i == dims - 1 ? 127 : draw(-127, 127);
    norm_b[i] = i == 0 ? -127 : draw(-127, 127);
  }
  for (size_t i = 0; i < residual.size; ++i) {
    residual[i] = draw(-100, 100);
  }
  for (size_t i = 0; i < scales.size; ++i) {
    scales[i] = draw(1, 4);
  }
  const float one_scale = 2;
  const BitLinearCall call{{floats(x), dims,
                            has_gate ? Activation::relu2 : Activation::none,
                            floats(before), 0, 0},
                           rows,
                           {{first.weight(), &one_scale, false, floats(norm_a)},
                            {second.weight(), scales.data(), true,
                             floats(norm_b)}},
                           0,
                           true,
                           has_codes,
                           floats(residual),
                           y.data(),
                           FloatType::float32};
  project(call);
  for (size_t m = 0; m < rows; ++m) {
    for (size_t n = 0; n < 58; ++n) {
      const bool is_first = n < 37;
      const size_t output = is_first ? n : n - 37;
      float sum = 0;
      for (size_t i = 0; i < dims; ++i) {
        const float z =
            x[has_gate ? (2 * m + 1) * dims + i : m * dims + i] * before[i];
        sum += z * (is_first ? norm_a : norm_b)[i] *
               (is_first ? first : second).trits[output * dims + i];
      }
      const float want =
          sum * (is_first ? one_scale : scales[output]) + residual[m * 58 + n];
      require(y[m * 58 + n] == want, "a projection is wrong", where);
    }
  }
}

// Rows one by one, with any number of threads: the same bits.
std::vector<float> check_rows(const std::string &where) {
  random_source.seed(11);
  const size_t rows = 29, dims = 333;
  Problem p(rows, dims, 500);
  Buffer<float> x(2 * rows * dims), norm(dims);
  std::normal_distribution<float> normal;
  for (size_t i = 0; i < x.size; ++i) {
    x[i] = normal(random_source);
  }
  for (size_t i = 0; i < dims; ++i) {
    norm[i] = 1 + normal(random_source) / 8;
  }
  std::vector<float> whole(rows * 500), single(rows * 500);
  const float scale = 0.25f;
  const auto run = [&](size_t first, size_t count, bool has_codes,
                       std::vector<float> &y) {
    project({{{x.data() + 2 * first * dims, FloatType::float32},
              dims,
              Activation::silu,
              floats(norm),
              1e-5f,
              0},
             count,
             {{p.weight(), &scale, false, floats(norm)}},
             1e-6f,
             true,
             has_codes,
             kNone,
             y.data() + first * 500,
             FloatType::float32});
  };
  std::vector<float> result;
  for (bool has_codes : {true, false}) {
    run(0, rows, has_codes, whole);
    for (size_t count : {1, 3, 2}) {
      set_threads(count);
      for (size_t row = 0; row < rows; row += count) {
        run(row, std::min(count, rows - row), has_codes, single);
      }
      require(single == whole, "a row depends on the others", where);
    }
    result.insert(result.end(), whole.begin(), whole.end());
  }
  x[2 * 7 * dims + 5] = NAN;
  x[2 * 9 * dims + dims + 6] = INFINITY;
  for (bool has_codes : {true, false}) {
    run(0, rows, has_codes, single);
    for (size_t i = 0; i < single.size(); ++i) {
      const bool is_bad = i / 500 == 7 || i / 500 == 9;
      require(!std::isfinite(single[i]) == is_bad, "a bad row is not alone",
              where);
      require(is_bad || single[i] == result[(has_codes ? 0 : whole.size()) + i],
              "a bad row changes others", where);
    }
  }
  return result;
}

void check_rounding(const std::string &where) {
  Buffer<float> values(2), back(2);
  Buffer<uint16_t> halves(2), result(2);
  const float one = 1;
  for (FloatType type : {FloatType::float16, FloatType::bfloat16}) {
    const unsigned infinity = type == FloatType::float16 ? 0x7c00 : 0x7f80;
    const auto read = [&](uint16_t half) {
      halves[0] = half;
      float sum = 0;
      const Floats residual{halves.data(), type};
      table<BitLinearKernels>(kernels()).finish({&sum, 1, 1, 1, &one, false,
                                                 nullptr, residual, back.data(),
                                                 FloatType::float32, 1});
      return back[0];
    };
    const auto write = [&](float value) {
      table<BitLinearKernels>(kernels()).finish(
          {&value, 1, 1, 1, &one, false, nullptr, kNone, result.data(), type, 1});
      return result[0];
    };
    for (unsigned half = 0; half < infinity; ++half) {
      const float value = read(half), next = read(half + 1);
      require(write(value) == half && write(-value) == (half | 0x8000),
              "a half is lost", where);
      if (half + 1 < infinity) {
        const float tie = value + (next - value) / 2;
        require(write(tie) == half + half % 2, "a tie is not rounded to even",
                where);
        require(write(std::nextafter(tie, next)) == half + 1,
                "a half is not the nearest", where);
      }
    }
    require(write(INFINITY) == infinity &&
                write(3e38f) ==
                    (type == FloatType::float16 ? infinity : 0x7f62),
            "a large half is wrong", where);
    require(std::isnan(read(write(NAN))), "NaN is lost", where);
  }
}

std::vector<float> check_bit_linear(const std::string &name) {
  for (size_t dims : {1, 31, 33, 63, 100, 300, 645}) {
    for (size_t rows : {1, 2, 3, 30}) {
      for (int kind = 0; kind < 4; ++kind) {
        check_projections(rows, dims, kind % 2, kind / 2,
                          name + " projections " + std::to_string(rows) +
                              " x " + std::to_string(dims));
      }
    }
  }
  check_rounding(name);
  return check_rows(name);
}

} // namespace
