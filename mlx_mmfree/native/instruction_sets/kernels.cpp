#include "instruction_sets/kernels.h"

#include <atomic>
#include <stdexcept>

#include "instruction_sets/kernel_set.h"
#include "runtime/kernels.h"

namespace mmfree {

#if defined(__x86_64__)
extern const Kernels avx512_vnni_kernels, avx_vnni_kernels, avx2_kernels;
#elif defined(__aarch64__)
extern const Kernels neon_i8mm_kernels, neon_dotprod_kernels;
#endif
extern const Kernels portable_kernels;

namespace {

constexpr const Kernels* kFastestFirst[] = {
#if defined(__x86_64__)
    &avx512_vnni_kernels,
    &avx_vnni_kernels,
    &avx2_kernels,
#elif defined(__aarch64__)
    &neon_i8mm_kernels,
    &neon_dotprod_kernels,
#endif
    &portable_kernels,
};

std::atomic<const Kernels*> chosen{nullptr};

}  // namespace

const Kernels& kernels() {
  const Kernels* current = chosen.load(std::memory_order_acquire);
  if (!current) {
    for (const Kernels* set : kFastestFirst) {
      if (set->is_supported()) {
        current = set;
        break;
      }
    }
    chosen.store(current, std::memory_order_release);
  }
  return *current;
}

template <class Table>
const Table& table(const Kernels& set) {
  return set;
}

#define MMFREE_INSTANTIATE(Table) template const Table& table(const Kernels&);
MMFREE_KERNEL_TABLES(MMFREE_INSTANTIATE)
#undef MMFREE_INSTANTIATE

std::string kernel_name() {
  return kernels().name;
}

void use_kernels(const std::string& name) {
  std::string known;
  for (const Kernels* set : kFastestFirst) {
    if (!set->is_supported()) {
      continue;
    }
    if (name == set->name) {
      chosen.store(set, std::memory_order_release);
      return;
    }
    known += (known.empty() ? "" : ", ") + std::string(set->name);
  }
  throw std::invalid_argument("[use_kernels] 'name' must be one of " + known + " but got '" + name +
                              "'.");
}

std::vector<std::string> kernel_names() {
  std::vector<std::string> names;
  for (const Kernels* set : kFastestFirst) {
    if (set->is_supported()) {
      names.push_back(set->name);
    }
  }
  return names;
}

}  // namespace mmfree
