#pragma once

// What the checks of the kernels share.

#include <cstdio>
#include <cstdlib>
#include <memory>
#include <random>
#include <string>

#include "runtime/floats.h"
#include "runtime/kernels.h"

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

// Buffers end where their memory ends, so that a sanitizer sees every read
// beyond them.
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

constexpr Floats kNone{nullptr, FloatType::float32};

Floats floats(Buffer<float>& values) {
  return {values.data(), FloatType::float32};
}

}  // namespace
