#include "instruction_sets/arm_features.h"

#if defined(__APPLE__)
#include <sys/sysctl.h>

#include <cstddef>
#else
#include <sys/auxv.h>
#endif

namespace mmfree {

#if defined(__APPLE__)

namespace {

bool has(const char* feature) {
  int value = 0;
  size_t size = sizeof(value);
  return sysctlbyname(feature, &value, &size, nullptr, 0) == 0 && value == 1;
}

}  // namespace

bool has_dot_products() {
  return has("hw.optional.arm.FEAT_DotProd");
}

bool has_int8_matrices() {
  return has("hw.optional.arm.FEAT_I8MM");
}

#else

bool has_dot_products() {
  constexpr unsigned long kAsimdDotProducts = 1UL << 20;
  return getauxval(AT_HWCAP) & kAsimdDotProducts;
}

bool has_int8_matrices() {
  constexpr unsigned long kInt8Matrices = 1UL << 13;
  return getauxval(AT_HWCAP2) & kInt8Matrices;
}

#endif

}  // namespace mmfree
