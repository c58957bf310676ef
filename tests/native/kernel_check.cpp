// Checks the kernels without MLX: built with sanitizers, or for another
// processor. Usage: kernel_check NAME..., the instruction sets that must be
// there; prints what it checked.

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "attention_check.h"
#include "attention_step_check.h"
#include "bit_linear/project.h"
#include "check.h"
#include "instruction_sets/kernels.h"
#include "runtime/thread_pool.h"
#include "dense_matmul/product.h"
#include "ternary_matmul/product.h"
#include "thread_check.h"

using namespace mmfree;

namespace {

struct Problem {
  size_t rows, dims, outputs, row_bytes;
  Buffer<float> x, dy;
  std::vector<int> trits;
  Buffer<uint8_t> packed;

  Problem(size_t rows, size_t dims, size_t outputs)
      : rows(rows), dims(dims), outputs(outputs),
        row_bytes((dims + 31) / 32 * 8), x(rows * dims), dy(rows * outputs),
        trits(outputs * dims), packed(outputs * row_bytes) {
    for (size_t i = 0; i < x.size; ++i) {
      x[i] = draw(0, 9) ? draw(-128, 127) : -128;
    }
    for (size_t i = 0; i < dy.size; ++i) {
      dy[i] = draw(-100, 100);
    }
    for (size_t n = 0; n < outputs; ++n) {
      for (size_t i = 0; i < 4 * row_bytes; ++i) {
        const int trit = i < dims ? draw(-1, 1) : 0;
        if (i < dims) {
          trits[n * dims + i] = trit;
        }
        packed[n * row_bytes + i / 4] |= (trit + 1) << (2 * (i % 4));
      }
    }
  }

  PackedMatrix weight() { return {packed.data(), outputs, row_bytes}; }
};

void check_products(Problem &p, const std::string &where) {
  Buffer<float> codes(p.rows * p.outputs), floats(p.rows * p.outputs),
      dx(p.rows * p.dims);
  code_product(p.x.data(), p.rows, p.dims, p.weight(), codes.data());
  float_product(p.x.data(), p.rows, p.dims, p.weight(), floats.data());
  transposed_product(p.dy.data(), p.rows, p.dims, p.weight(), dx.data());
  for (size_t m = 0; m < p.rows; ++m) {
    for (size_t n = 0; n < p.outputs; ++n) {
      float want = 0;
      for (size_t i = 0; i < p.dims; ++i) {
        want += p.x[m * p.dims + i] * p.trits[n * p.dims + i];
      }
      require(codes[m * p.outputs + n] == want, "a sum of codes is wrong",
              where);
      require(floats[m * p.outputs + n] == want, "a sum of floats is wrong",
              where);
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

void check_bad_rows(const std::string &where) {
  for (float bad : {NAN, INFINITY, -INFINITY, 0.5f, 128.0f, 1e30f}) {
    Problem p(3, 70, 9);
    p.x[70 + 69] = bad;
    Buffer<float> y(27);
    code_product(p.x.data(), 3, 70, p.weight(), y.data());
    for (size_t i = 0; i < y.size; ++i) {
      require(std::isnan(y[i]) == (i / 9 == 1), "NaN is not in its row alone",
              where);
    }
  }
}

// Other floats: all instruction sets must give the bits of the first.
std::vector<float> fractions(size_t rows, size_t dims, size_t outputs) {
  random_source.seed(7);
  Problem p(rows, dims, outputs);
  std::normal_distribution<float> normal;
  for (size_t i = 0; i < p.x.size; ++i) {
    p.x[i] = normal(random_source);
  }
  std::vector<float> result(rows * (outputs + 3 * dims + 2));
  float *y = result.data();
  float *dx = y + rows * outputs;
  float_product(p.x.data(), rows, dims, p.weight(), y);
  transposed_product(y, rows, dims, p.weight(), dx);
  float *codes = dx + rows * dims;
  for (bool half_away : {true, false}) {
    float *scale = codes + rows * dims;
    RowQuantizer quantizer{{p.x.data(), FloatType::float32},
                           nullptr,
                           dims,
                           half_away,
                           1e-6f,
                           half_away,
                           codes,
                           scale};
    kernels().quantize_rows(quantizer, 0, rows);
    for (size_t i = 0; i < rows * dims; ++i) {
      require(std::abs(codes[i]) <= 127 && codes[i] == std::floor(codes[i]),
              "a code is no whole number", kernels().name);
    }
    codes = scale + rows;
  }
  return result;
}

void check_halves(const std::string &where) {
  Buffer<uint16_t> x(1 << 16);
  for (size_t i = 0; i < x.size; ++i) {
    x[i] = i;
  }
  Buffer<float> codes(x.size), scale(x.size);
  for (FloatType type : {FloatType::float16, FloatType::bfloat16}) {
    RowQuantizer quantizer{{x.data(), type}, nullptr,     1, false, 0, false,
                           codes.data(),     scale.data()};
    kernels().quantize_rows(quantizer, 0, x.size);
    const uint16_t one = type == FloatType::float16 ? 0x3c00 : 0x3f80;
    require(codes[one] == 127 && scale[one] == 127, "1 is read wrongly", where);
    require(codes[one | 0x8000] == -127, "-1 is read wrongly", where);
    require(std::isnan(codes[0x7fff]) && std::isnan(scale[0xffff]),
            "NaN is lost", where);
    require(codes[0] == 0 && scale[0] == 127 / 1e-5f, "0 is read wrongly",
            where);
  }
}

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
  const BitLinearCall call{
      {floats(x), dims, has_gate ? Activation::relu2 : Activation::none,
       floats(before), 0},
      rows,
      {{first.weight(), &one_scale, false, floats(norm_a)},
       {second.weight(), scales.data(), true, floats(norm_b)}},
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
              1e-5f},
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
      kernels().finish({&sum, 1, 1, &one, false, nullptr, residual, back.data(),
                        FloatType::float32, 1});
      return back[0];
    };
    const auto write = [&](float value) {
      kernels().finish(
          {&value, 1, 1, &one, false, nullptr, kNone, result.data(), type, 1});
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

std::vector<float> check_recurrence(const std::string &where) {
  random_source.seed(13);
  const size_t rows = 5, dims = 133;
  Buffer<float> gates(3 * rows * dims), state(dims), weight(dims), bound(dims),
      inverse(rows);
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
    inverse[row] = kernels().rms_inverse(floats(gates), (3 * row + 2) * dims,
                                         dims, 1e-6f, scratch.data());
  }
  const RecurrenceStep step{
      floats(gates), state.data(), floats(weight), floats(bound), valid.data(),
      rows,          dims,         inverse.data(), y.data(),      last.data()};
  kernels().recur(step, 0, 64);
  kernels().recur(step, 64, dims);
  const auto sigmoid = [](double v) { return 1 / (1 + std::exp(-v)); };
  for (size_t c = 0; c < dims; ++c) {
    double h = state[c];
    for (size_t row = 0; row < rows; ++row) {
      const float *g = gates.data() + 3 * row * dims + c;
      const double f = bound[c] + (1 - bound[c]) * sigmoid(g[dims]);
      h = valid[row] ? f * h + g[0] * sigmoid(g[0]) * (1 - f) : h;
      double square = 0;
      for (size_t i = 0; i < dims; ++i) {
        square += std::pow(gates[(3 * row + 2) * dims + i], 2) / dims;
      }
      const double want =
          g[2 * dims] / std::sqrt(square + 1e-6) * weight[c] * h * sigmoid(h);
      require(std::abs(y[row * dims + c] - want) <= 1e-5 * (1 + std::abs(want)),
              "an output of the recurrence is wrong", where);
    }
    require(std::abs(last[c] - h) <= 1e-5 * (1 + std::abs(h)),
            "a state is wrong", where);
  }
  std::vector<float> result(y.data(), y.data() + y.size);
  result.insert(result.end(), last.data(), last.data() + dims);
  return result;
}

template <class T> void append(std::vector<T> &to, const std::vector<T> &from) {
  to.insert(to.end(), from.begin(), from.end());
}

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
void check_dense(size_t rows, size_t dims, size_t outputs,
                 const std::vector<double> &weight, Product &&product,
                 const std::string &where) {
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
      require(std::abs(y[m * outputs + n] - want) <= 1e-4 * size,
              "a dense sum is wrong", where);
      require(y[m * outputs + n] == one[n], "a row depends on the others",
              where);
    }
  }
}

void check_dense_floats(size_t rows, size_t dims, size_t outputs,
                        const std::string &where) {
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
  for (const FloatMatrix &matrix : {wide, narrow}) {
    check_dense(
        rows, dims, outputs, weight,
        [&](const float *x, size_t count, float *y) {
          dense_product(x, count, dims, matrix, y);
        },
        where);
  }
}

void check_dense_codes(size_t rows, size_t group, size_t groups, size_t outputs,
                       int bits, const std::string &where) {
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
  const QuantizedMatrix matrix{
      codes.data(), scales.data(), biases.data(), FloatType::float32,
      outputs,      group,         bits};
  check_dense(
      rows, dims, outputs, weight,
      [&](const float *x, size_t count, float *y) {
        quantized_product(x, count, dims, matrix, y);
      },
      where);
}

void check_dense_products(const std::string &name) {
  for (size_t rows : {1, 3, 7}) {
    for (size_t dims : {1, 31, 32, 100}) {
      check_dense_floats(rows, dims, 10, name + " floats");
    }
    for (size_t group : {32, 64, 128}) {
      for (size_t groups : {1, 3, 17}) {
        for (int bits : {2, 4, 6, 8}) {
          check_dense_codes(rows, group, groups, 5, bits, name + " codes");
        }
      }
    }
  }
}

} // namespace

int main(int count, char **wanted) {
  const auto names = kernel_names();
  for (int i = 1; i < count; ++i) {
    bool found = false;
    for (const auto &name : names) {
      found |= name == wanted[i];
    }
    require(found, "is not offered by this processor", wanted[i]);
  }
  set_threads(2);
  std::vector<float> first;
  for (const auto &name : names) {
    use_kernels(name);
    for (size_t dims : {1, 31, 33, 63, 100, 256, 257, 1000}) {
      for (size_t rows : {1, 2, 3, 4, 5, 6, 7, 13}) {
        for (size_t outputs : {1, 3, 4, 37}) {
          Problem p(rows, dims, outputs);
          check_products(p, name + " " + std::to_string(rows) + " x " +
                                std::to_string(dims) + " x " +
                                std::to_string(outputs));
        }
      }
    }
    Problem large(30, 300, 500);
    check_products(large, name + " large");
    check_bad_rows(name);
    check_halves(name);
    for (size_t dims : {1, 31, 33, 63, 100, 300}) {
      for (size_t rows : {1, 2, 3, 30}) {
        for (int kind = 0; kind < 4; ++kind) {
          check_projections(rows, dims, kind % 2, kind / 2,
                            name + " projections " + std::to_string(rows) +
                                " x " + std::to_string(dims));
        }
      }
    }
    check_rounding(name);
    check_dense_products(name);
    check_attention(name);
    check_attention_step(name);
    auto bits = fractions(5, 333, 41);
    append(bits, check_rows(name));
    append(bits, check_recurrence(name));
    first = first.empty() ? bits : first;
    require(std::memcmp(bits.data(), first.data(), 4 * bits.size()) == 0,
            "other bits", name);
    std::printf("%s\n", name.c_str());
  }
  check_threads();
  std::printf("threads\n");
}
