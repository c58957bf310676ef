#include "instruction_sets/kernel_set.h"
#include "instruction_sets/portable_vectors.h"

namespace mmfree {

namespace {

using Bytes = uint8_t __attribute__((vector_size(16)));
using SignedBytes = int8_t __attribute__((vector_size(16)));
using Shorts = int16_t __attribute__((vector_size(32)));
using Ints = int32_t __attribute__((vector_size(64)));

// Vectors that the compiler itself offers, for every processor.
struct Portable {
  static constexpr size_t kBytes = 16, kStreamRows = 1, kTileRows = 2;
  static constexpr bool kPartialSums = true, kInterleaves = false;
  using Sum = Ints;
  using Codes = Bytes;
  using Partial = Shorts;

  MMFREE_INLINE static Sum zero() {
    return Ints{};
  }
  MMFREE_INLINE static Bytes load(const uint8_t* bytes) {
    Bytes packed;
    memcpy(&packed, bytes, sizeof(packed));
    return packed;
  }
  MMFREE_INLINE static SignedBytes activations(const int8_t* codes) {
    SignedBytes x;
    memcpy(&x, codes, sizeof(x));
    return x;
  }
  template <int k>
  MMFREE_INLINE static Codes codes(Bytes packed) {
    return (packed >> (2 * k)) & 3;
  }
  // at most 2 * 128 in magnitude each, and sixteen of them in a block
  MMFREE_INLINE static Partial dot(Partial partial, Codes codes, SignedBytes x) {
    return partial + __builtin_convertvector(codes, Shorts) * __builtin_convertvector(x, Shorts);
  }
  MMFREE_INLINE static Sum widen(Sum sum, Partial partial) {
    return sum + __builtin_convertvector(partial, Ints);
  }
  MMFREE_INLINE static int32_t total(Sum sum) {
    int32_t result = 0;
    for (int lane = 0; lane < 16; ++lane) {
      result += sum[lane];
    }
    return result;
  }
  MMFREE_INLINE static void totals(Sum a, Sum b, Sum c, Sum d, int32_t* result) {
    result[0] = total(a);
    result[1] = total(b);
    result[2] = total(c);
    result[3] = total(d);
  }

  static constexpr size_t kLanes = 4, kFloatRows = 1, kTransposedRows = 2, kTransposedShifts = 1;
  using Floats = float __attribute__((vector_size(16)));
  using Words = uint32_t __attribute__((vector_size(16)));

  template <int s>
  MMFREE_INLINE static Floats trits(Words words) {
    using Integers = int32_t __attribute__((vector_size(16)));
    return __builtin_convertvector((Integers)((words >> (2 * s)) & 3), Floats) - 1.0f;
  }
  MMFREE_INLINE static Floats broadcast(float x) {
    return Floats{x, x, x, x};
  }
  MMFREE_INLINE static Floats multiply_add(Floats x, Floats trits, Floats sum) {
    return sum + x * trits;
  }
};

bool is_supported() {
  return true;
}

}  // namespace

extern const Kernels portable_kernels;
constinit const Kernels portable_kernels =
    kernel_set<Portable, DensePortable>("portable", is_supported);

}  // namespace mmfree
