// Checks the kernels without MLX: built with sanitizers, or for another
// processor. Usage: kernel_check NAME..., the instruction sets that must be
// there; prints what it checked.

#include <cstdio>
#include <cstring>
#include <string>
#include <vector>

#include "check.h"
// written by the test: includes what checks each operation and lists them
#include "checks.h"
#include "instruction_sets/kernels.h"
#include "runtime/thread_pool.h"
#include "thread_check.h"

namespace {

// Checks every operation, and returns what must have the same bits with each
// instruction set.
std::vector<float> check_all(const std::string& name) {
  std::vector<float> bits;
#define MMFREE_CHECK(operation)                 \
  for (float value : check_##operation(name)) { \
    bits.push_back(value);                      \
  }
  MMFREE_CHECKS(MMFREE_CHECK)
#undef MMFREE_CHECK
  return bits;
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
    const auto bits = check_all(name);
    first = first.empty() ? bits : first;
    require(std::memcmp(bits.data(), first.data(), 4 * bits.size()) == 0, "other bits", name);
    std::printf("%s\n", name.c_str());
  }
  check_threads();
  std::printf("threads\n");
}
