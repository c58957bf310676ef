#pragma once

#include <cstddef>

namespace mmfree {

// Memory of the calling thread, aligned to 64 bytes, which lasts until the thread calls again. It
// grows to the largest size asked for and is kept, so that repeated products allocate nothing.
void* workspace(size_t bytes);

constexpr size_t round_up(size_t value, size_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

// Cuts one block of memory into parts, each aligned to a cache line.
class Cutter {
 public:
  explicit Cutter(void* memory) : memory_(static_cast<char*>(memory)) {
  }
  template <class T>
  T* take(size_t count) {
    T* part = reinterpret_cast<T*>(memory_ + size_);
    size_ += round_up(count * sizeof(T), 64);
    return part;
  }
  size_t size() const {
    return size_;
  }

 private:
  char* memory_;
  size_t size_ = 0;
};

}  // namespace mmfree
