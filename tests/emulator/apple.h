// Metal's language and library as far as the kernels use them, for clang to make code of that Mesa's
// compiler for Apple's GPUs takes. What a GPU does in one instruction is a built-in function of OpenCL,
// declared by the name that it has in machine code.
#pragma once

typedef signed char int8_t;
typedef unsigned char uchar, uint8_t;
typedef short int16_t;
typedef unsigned short ushort, uint16_t;
typedef int int32_t;
typedef unsigned int uint, uint32_t;
typedef long int64_t;
typedef unsigned long ulong, uint64_t, size_t;
typedef _Float16 half;
typedef __bf16 bfloat;
typedef half float16_t;
typedef bfloat bfloat16_t;

#define VECTORS(T) \
  typedef T T##2 __attribute__((ext_vector_type(2))); \
  typedef T T##3 __attribute__((ext_vector_type(3))); \
  typedef T T##4 __attribute__((ext_vector_type(4)));
VECTORS(char) VECTORS(uchar) VECTORS(short) VECTORS(ushort) VECTORS(int) VECTORS(uint)
VECTORS(long) VECTORS(ulong) VECTORS(half) VECTORS(float)
// vectors convert, which C++ does not write as a call
inline float2 as_float2(float x) { return x; }
inline float2 as_float2(half2 x) { return __builtin_convertvector(x, float2); }
#define float2(...) as_float2(__VA_ARGS__)
template <class T, int N> using vec = T __attribute__((ext_vector_type(N)));

#define kernel
#define thread
#define device __attribute__((opencl_global))
#define constant __attribute__((opencl_constant))
#define threadgroup __attribute__((opencl_local))
#define METAL_FUNC inline __attribute__((always_inline))
#define MLX_MTL_CONST static constant constexpr const
#define INFINITY __builtin_inff()
template <class To, class From> inline To as_type(From value) {
  return __builtin_bit_cast(To, value);
}

#define PLACE __attribute__((const))
#define TOGETHER __attribute__((convergent))
extern "C" {
PLACE ulong thread_in_group(uint) __asm("_Z12get_local_idj");
PLACE ulong thread_in_grid(uint) __asm("_Z13get_global_idj");
PLACE ulong group_in_grid(uint) __asm("_Z12get_group_idj");
PLACE ulong threads_of_group(uint) __asm("_Z14get_local_sizej");
PLACE ulong groups_of_grid(uint) __asm("_Z14get_num_groupsj");
PLACE uint lane_in_simdgroup() __asm("_Z22get_sub_group_local_idv");
PLACE uint simdgroup_in_group() __asm("_Z16get_sub_group_idv");
PLACE uint simdgroups_of_group() __asm("_Z18get_num_sub_groupsv");
PLACE float native_exp2(float) __asm("_Z11native_exp2f");
PLACE float native_log2(float) __asm("_Z11native_log2f");
PLACE float native_rsqrt(float) __asm("_Z12native_rsqrtf");
TOGETHER void barrier(uint) __asm("_Z7barrierj");
TOGETHER void barrier_of_simdgroup(uint) __asm("_Z17sub_group_barrierj");
TOGETHER float sum_of_lanes(float) __asm("_Z20sub_group_reduce_addf");
TOGETHER int sum_of_ints(int) __asm("_Z20sub_group_reduce_addi");
TOGETHER uint largest_of_lanes(uint) __asm("_Z20sub_group_reduce_maxj");
TOGETHER float shuffled(float, uint) __asm("_Z21sub_group_shuffle_xorfj");
}

namespace metal {
#define OF_NUMBERS(T) \
  inline T max(T a, T b) { return a < b ? b : a; } \
  inline T min(T a, T b) { return b < a ? b : a; } \
  inline T clamp(T x, T low, T high) { return min(max(x, low), high); } \
  inline T select(T a, T b, bool c) { return c ? b : a; }
OF_NUMBERS(int) OF_NUMBERS(uint) OF_NUMBERS(long) OF_NUMBERS(ulong) OF_NUMBERS(float)
#define OF_FLOATS(T) \
  inline T fma(T a, T b, T c) { return __builtin_elementwise_fma(a, b, c); } \
  inline T abs(T x) { return __builtin_elementwise_abs(x); } \
  inline T rint(T x) { return __builtin_elementwise_rint(x); } \
  inline T round(T x) { return __builtin_elementwise_round(x); } \
  inline T floor(T x) { return __builtin_elementwise_floor(x); }
OF_FLOATS(float) OF_FLOATS(float2) OF_FLOATS(float4) OF_FLOATS(half) OF_FLOATS(half2) OF_FLOATS(half4)
inline int abs(int x) { return x < 0 ? -x : x; }
inline bool isnan(float x) { return x != x; }
inline float exp(float x) { return native_exp2(1.44269504f * x); }
inline float log(float x) { return 0.69314718f * native_log2(x); }
namespace precise {
inline float exp(float x) { return native_exp2(1.44269504f * x); }
inline float rsqrt(float x) { return native_rsqrt(x); }
}
enum class mem_flags { mem_none = 0, mem_device = 1, mem_threadgroup = 2 };
inline void threadgroup_barrier(mem_flags) { barrier(1); }
inline void simdgroup_barrier(mem_flags) { barrier_of_simdgroup(1); }
inline float simd_sum(float x) { return sum_of_lanes(x); }
inline int simd_sum(int x) { return sum_of_ints(x); }
// The largest float is one instruction, of which Mesa knows nothing: that of whole numbers stands for it.
inline float simd_max(float x) { return as_type<float>(largest_of_lanes(as_type<uint>(x))); }
inline uint simd_max(uint x) { return largest_of_lanes(x); }
inline float simd_shuffle_xor(float x, ushort mask) { return shuffled(x, mask); }
}  // namespace metal
using namespace metal;
