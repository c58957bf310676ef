#include "runtime/workspace.h"

#include <cstdlib>
#include <memory>
#include <new>

namespace mmfree {

void* workspace(size_t bytes) {
  struct Free {
    void operator()(void* memory) const {
      std::free(memory);
    }
  };
  static thread_local std::unique_ptr<void, Free> memory;
  static thread_local size_t size = 0;
  if (bytes > size) {
    const size_t rounded = (bytes + 4095) / 4096 * 4096;
    memory.reset();
    size = 0;
    memory.reset(std::aligned_alloc(64, rounded));
    if (!memory) {
      throw std::bad_alloc();
    }
    size = rounded;
  }
  return memory.get();
}

}  // namespace mmfree
