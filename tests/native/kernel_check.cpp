// Checks the kernels without MLX: built with sanitizers, or for another processor.
// Usage: kernel_check NAME..., the instruction sets that must be there; prints what it checked.

#include <sys/wait.h>
#include <unistd.h>

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "cpu/kernels.h"
#include "cpu/thread_pool.h"
#include "dense_matmul/product.h"
#include "ternary_matmul/product.h"

using namespace mmfree;

namespace {

std::mt19937 random_source(1);

int draw(int low, int high) {
  return std::uniform_int_distribution<int>(low, high)(random_source);
}

void require(bool condition, const char* what, const std::string& where) {
  if (!condition) {
    std::printf("%s: %s\n", where.c_str(), what);
    std::exit(1);
  }
}

// Buffers end where their memory ends, so that a sanitizer sees every read beyond them.
template <class T>
struct Buffer {
  explicit Buffer(size_t size) : memory(new T[size]()), size(size) {
  }
  T& operator[](size_t i) {
    return memory[i];
  }
  T* data() {
    return memory.get();
  }
  std::unique_ptr<T[]> memory;
  size_t size;
};

struct Problem {
  size_t rows, dims, outputs, row_bytes;
  Buffer<float> x, dy;
  std::vector<int> trits;
  Buffer<uint8_t> packed;

  Problem(size_t rows, size_t dims, size_t outputs)
      : rows(rows),
        dims(dims),
        outputs(outputs),
        row_bytes((dims + 31) / 32 * 8),
        x(rows * dims),
        dy(rows * outputs),
        trits(outputs * dims),
        packed(outputs * row_bytes) {
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

  PackedMatrix weight() {
    return {packed.data(), outputs, row_bytes};
  }
};

void check_products(Problem& p, const std::string& where) {
  Buffer<float> codes(p.rows * p.outputs), floats(p.rows * p.outputs), dx(p.rows * p.dims);
  code_product(p.x.data(), p.rows, p.dims, p.weight(), codes.data());
  float_product(p.x.data(), p.rows, p.dims, p.weight(), floats.data());
  transposed_product(p.dy.data(), p.rows, p.dims, p.weight(), dx.data());
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

// Other floats: all instruction sets must give the bits of the first.
std::vector<float> fractions(size_t rows, size_t dims, size_t outputs) {
  random_source.seed(7);
  Problem p(rows, dims, outputs);
  std::normal_distribution<float> normal;
  for (size_t i = 0; i < p.x.size; ++i) {
    p.x[i] = normal(random_source);
  }
  std::vector<float> result(rows * (outputs + 3 * dims + 2));
  float* y = result.data();
  float* dx = y + rows * outputs;
  float_product(p.x.data(), rows, dims, p.weight(), y);
  transposed_product(y, rows, dims, p.weight(), dx);
  float* codes = dx + rows * dims;
  for (bool half_away : {true, false}) {
    float* scale = codes + rows * dims;
    RowQuantizer quantizer{p.x.data(), FloatType::float32, nullptr, dims, half_away,
                           1e-6f,      half_away,          codes,   scale};
    kernels().quantize_rows(quantizer, 0, rows);
    for (size_t i = 0; i < rows * dims; ++i) {
      require(std::abs(codes[i]) <= 127 && codes[i] == std::floor(codes[i]),
              "a code is no whole number", kernels().name);
    }
    codes = scale + rows;
  }
  return result;
}

void check_halves(const std::string& where) {
  Buffer<uint16_t> x(1 << 16);
  for (size_t i = 0; i < x.size; ++i) {
    x[i] = i;
  }
  Buffer<float> codes(x.size), scale(x.size);
  for (FloatType type : {FloatType::float16, FloatType::bfloat16}) {
    RowQuantizer quantizer{x.data(), type, nullptr, 1, false, 0, false, codes.data(), scale.data()};
    kernels().quantize_rows(quantizer, 0, x.size);
    const uint16_t one = type == FloatType::float16 ? 0x3c00 : 0x3f80;
    require(codes[one] == 127 && scale[one] == 127, "1 is read wrongly", where);
    require(codes[one | 0x8000] == -127, "-1 is read wrongly", where);
    require(std::isnan(codes[0x7fff]) && std::isnan(scale[0xffff]), "NaN is lost", where);
    require(codes[0] == 0 && scale[0] == 127 / 1e-5f, "0 is read wrongly", where);
  }
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
void check_dense(size_t rows, size_t dims, size_t outputs, const std::vector<double>& weight,
                 Product&& product, const std::string& where) {
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
      require(std::abs(y[m * outputs + n] - want) <= 1e-4 * size, "a dense sum is wrong", where);
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
      [&](const float* x, size_t count, float* y) { quantized_product(x, count, dims, matrix, y); },
      where);
}

void check_dense_products(const std::string& name) {
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

void check_callers_and_fork() {
  const auto work = [](unsigned seed) {
    std::mt19937 source(seed);
    for (int turn = 0; turn < 20; ++turn) {
      const size_t items = source() % 5000, step = source() % 50 + 1;
      std::vector<int> seen(items);
      parallel_for(items, step, [&](size_t first, size_t last) {
        for (size_t i = first; i < last; ++i) {
          ++seen[i];
        }
      });
      for (int count : seen) {
        require(count == 1, "an item was not met once", "threads");
      }
    }
  };
  for (size_t count : {2, 3, 5, 1, 2}) {
    set_threads(count);
    std::vector<std::thread> callers;
    for (unsigned seed = 0; seed < 3; ++seed) {
      callers.emplace_back(work, seed);
    }
    for (auto& caller : callers) {
      caller.join();
    }
  }
  std::fflush(stdout);
  const pid_t child = fork();
  if (child == 0) {
    work(9);
    _exit(0);
  }
  int status = 1;
  waitpid(child, &status, 0);
  require(status == 0, "a child of fork does not compute", "threads");
  work(10);
}

}  // namespace

int main(int count, char** wanted) {
  const auto names = kernel_names();
  for (int i = 1; i < count; ++i) {
    bool found = false;
    for (const auto& name : names) {
      found |= name == wanted[i];
    }
    require(found, "is not offered by this processor", wanted[i]);
  }
  set_threads(2);
  std::vector<float> first;
  for (const auto& name : names) {
    use_kernels(name);
    for (size_t dims : {1, 31, 33, 63, 100, 256, 257, 1000}) {
      for (size_t rows : {1, 2, 3, 4, 5, 6, 7, 13}) {
        for (size_t outputs : {1, 3, 4, 37}) {
          Problem p(rows, dims, outputs);
          check_products(p, name + " " + std::to_string(rows) + " x " + std::to_string(dims) +
                                " x " + std::to_string(outputs));
        }
      }
    }
    Problem large(30, 300, 500);
    check_products(large, name + " large");
    check_bad_rows(name);
    check_halves(name);
    check_dense_products(name);
    const auto bits = fractions(5, 333, 41);
    first = first.empty() ? bits : first;
    require(std::memcmp(bits.data(), first.data(), 4 * bits.size()) == 0, "other bits", name);
    std::printf("%s\n", name.c_str());
  }
  check_callers_and_fork();
  std::printf("threads\n");
}
