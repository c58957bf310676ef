// What a Metal kernel sees on the host: the part of Metal's library that the kernels use, on the
// machine of machine.cpp. Compiled by clang for x86-64 together with the kernel; loads and stores of
// the kernel arrive there as __tsan_* calls.
#pragma once

typedef unsigned char uchar;
typedef unsigned short ushort;
typedef unsigned int uint;
typedef unsigned long ulong;
typedef signed char int8_t;
typedef unsigned char uint8_t;
typedef unsigned int uint32_t;
typedef int int32_t;
typedef long int64_t;
typedef unsigned long uint64_t;
typedef unsigned long size_t;
typedef _Float16 half;
typedef __bf16 bfloat;
typedef half float16_t;
typedef bfloat bfloat16_t;
typedef uint uint3 __attribute__((ext_vector_type(3)));
template <class T, int N> using vec = T __attribute__((ext_vector_type(N)));
typedef vec<uint, 2> uint2;
typedef vec<uint, 4> uint4;
typedef vec<half, 2> half2;
typedef vec<half, 4> half4;
typedef vec<float, 2> float2;
typedef vec<float, 4> float4;
// vectors convert, which C++ does not write as a call
inline float2 as_float2(float x) { return x; }
inline float2 as_float2(half2 x) { return __builtin_convertvector(x, float2); }
#define float2(...) as_float2(__VA_ARGS__)
typedef ulong ulong2 __attribute__((ext_vector_type(2)));

struct Attributes {
  uint3 threadgroup_position_in_grid, thread_position_in_grid;
  uint3 threads_per_threadgroup, threadgroups_per_grid;
  uint thread_index_in_threadgroup, thread_index_in_simdgroup;
  uint simdgroup_index_in_threadgroup, simdgroups_per_threadgroup;
};
struct Buffer {  // the same in emulator.py
  char* data;
  ulong bytes;
  const char* name;
  ulong is_output, loaded, stored;
};
struct Launch {  // the same in emulator.py
  Buffer* buffers;
  uint number_of_buffers, seed, groups[3], threads, shared_bytes;
  char error[400];
};

#pragma clang attribute push(__attribute__((no_sanitize("thread"))), apply_to = function)
namespace machine {
constexpr uint MAX_THREADS = 1024, STACK = 1 << 16, LIMIT = 1 << 15, MANY = ~0u;
enum State { READY, AT_SIMD, AT_SIMD_BARRIER, AT_BARRIER, DONE };
struct Lane {
  void* stack_pointer;
  State state;
  const char* place;
  uint line, turn;
  Attributes attributes;
};

extern Launch* run;
extern Lane* current;
// what the lanes of each SIMD group hand to each other; two turns, as lanes resume one by one
extern char table[2][MAX_THREADS][64];

void leave(State state, const char* place, uint line);
void declare_shared(void* data, uint bytes, const char* name);
void run_grid(Launch* launch, void (*start)(const Attributes&));
inline uint thread_number() { return current->attributes.thread_index_in_threadgroup + 1; }

template <class T> static char (*exchange(T value, const char* place, uint line))[64] {
  uint thread = thread_number() - 1, turn = current->turn++ & 1;
  *(T*)table[turn][thread] = value;
  leave(AT_SIMD, place, line);
  return &table[turn][thread / 32 * 32];
}
}  // namespace machine

#define PLACE uint line = __builtin_LINE()
namespace metal {
enum class mem_flags { mem_none = 0, mem_device = 1, mem_threadgroup = 2 };
static void threadgroup_barrier(mem_flags, PLACE) {
  machine::leave(machine::AT_BARRIER, "threadgroup_barrier", line);
}
static void simdgroup_barrier(mem_flags, PLACE) {
  machine::leave(machine::AT_SIMD_BARRIER, "simdgroup_barrier", line);
}
static float simd_sum(float value, PLACE) {
  auto values = machine::exchange(value, "simd_sum", line);
  float sum[32];
  for (uint n = 0; n < 32; n++) sum[n] = *(float*)values[n];
  for (uint step = 16; step; step /= 2)
    for (uint n = 0; n < step; n++) sum[n] += sum[n + step];
  return sum[0];
}
static float simd_max(float value, PLACE) {
  auto values = machine::exchange(value, "simd_max", line);
  float largest = *(float*)values[0];
  for (uint n = 1; n < 32; n++) largest = __builtin_fmaxf(largest, *(float*)values[n]);
  return largest;
}
static float simd_shuffle_xor(float value, uint mask, PLACE) {
  auto values = machine::exchange(value, "simd_shuffle_xor", line);
  return *(float*)values[(machine::thread_number() - 1) % 32 ^ mask];
}
// A lane holds two neighbours of one row of an 8x8 matrix; Metal does not say which.
static uint matrix_row() { return (machine::thread_number() - 1) % 32 / 4; }
static uint matrix_column() { return (machine::thread_number() - 1) % 4 * 2; }
}  // namespace metal
#pragma clang attribute pop

// What follows is instrumented as the kernel is: its loads and stores are the kernel's own.
#define kernel
#define device __attribute__((opencl_global))
#define constant __attribute__((opencl_constant))
#define threadgroup __attribute__((opencl_local))
#define thread

template <class To, class From> inline To as_type(From value) {
  return __builtin_bit_cast(To, value);
}
namespace metal {
#define FOR_NUMBERS(T) \
  inline T max(T a, T b) { return a < b ? b : a; } \
  inline T min(T a, T b) { return b < a ? b : a; }
FOR_NUMBERS(int) FOR_NUMBERS(uint) FOR_NUMBERS(long) FOR_NUMBERS(ulong)
inline float max(float a, float b) { return __builtin_fmaxf(a, b); }
inline float min(float a, float b) { return __builtin_fminf(a, b); }
inline float abs(float x) { return __builtin_fabsf(x); }
inline float rint(float x) { return __builtin_rintf(x); }
inline float select(float a, float b, bool takes_b) { return takes_b ? b : a; }
inline float round(float x) { return __builtin_roundf(x); }
inline float floor(float x) { return __builtin_floorf(x); }
inline float fma(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
inline float2 fma(float2 a, float2 b, float2 c) { return __builtin_elementwise_fma(a, b, c); }
inline float4 fma(float4 a, float4 b, float4 c) { return __builtin_elementwise_fma(a, b, c); }
inline float exp(float x) { return __builtin_expf(x); }
inline float log(float x) { return __builtin_logf(x); }
#define INFINITY __builtin_inff()
inline bool isnan(float x) { return __builtin_isnan(x); }
namespace precise {
inline float rsqrt(float x) { return 1.0f / __builtin_sqrtf(x); }
inline float exp(float x) { return __builtin_expf(x); }
}

template <class T, int C, int R> struct simdgroup_matrix {
  static_assert(C == 8 && R == 8, "only 8x8 matrices");
  T elements[2];
};
template <class T, int C, int R> inline simdgroup_matrix<T, C, R> make_filled_simdgroup_matrix(T x) {
  return {{x, x}};
}
template <class T>
void simdgroup_load(simdgroup_matrix<T, 8, 8>& matrix, const threadgroup T* source, ulong line_length,
                    ulong2 origin = 0, bool transpose = false, PLACE) {
  machine::exchange(0, "simdgroup_load", line);
  for (uint n = 0; n < 2; n++) {
    ulong row = matrix_row(), column = matrix_column() + n;
    matrix.elements[n] = transpose ? source[(origin.y + column) * line_length + origin.x + row]
                                   : source[(origin.y + row) * line_length + origin.x + column];
  }
}
template <class T>
void simdgroup_store(simdgroup_matrix<T, 8, 8> matrix, threadgroup T* target, ulong line_length,
                     PLACE) {
  machine::exchange(0, "simdgroup_store", line);
  for (uint n = 0; n < 2; n++)
    target[matrix_row() * line_length + matrix_column() + n] = matrix.elements[n];
}
template <class D, class A, class B, class C>
__attribute__((no_sanitize("thread"), noinline)) void simdgroup_multiply_accumulate(
    simdgroup_matrix<D, 8, 8>& d, simdgroup_matrix<A, 8, 8> a, simdgroup_matrix<B, 8, 8> b,
    simdgroup_matrix<C, 8, 8> c, PLACE) {
  struct Both { A a[2]; B b[2]; };
  auto values = machine::exchange(Both{{a.elements[0], a.elements[1]}, {b.elements[0], b.elements[1]}},
                                  "simdgroup_multiply_accumulate", line);
  uint row = matrix_row(), column = matrix_column();
  for (uint n = 0; n < 2; n++) {
    float sum = (float)c.elements[n];
    for (uint k = 0; k < 8; k++)
      sum += (float)((Both*)values[4 * row + k / 2])->a[k % 2] *
             (float)((Both*)values[4 * k + column / 2])->b[n];
    d.elements[n] = (D)sum;
  }
}
}  // namespace metal
using namespace metal;
