// Metal's language and library as far as the kernels use them, for clang to check their texts and to
// make machine code that can be counted; none of it runs. Address spaces are real, bfloat converts
// only where the text says so, and functions have Metal's overloads, so that a call which fits two
// of them is an error.
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
// of all scalar types only a scoped enumeration converts by cast alone
enum class bfloat : ushort {};
typedef half float16_t;
typedef bfloat bfloat16_t;

#define VECTORS(T) \
  typedef T T##2 __attribute__((ext_vector_type(2))); \
  typedef T T##3 __attribute__((ext_vector_type(3))); \
  typedef T T##4 __attribute__((ext_vector_type(4)));
VECTORS(bool) VECTORS(char) VECTORS(uchar) VECTORS(short) VECTORS(ushort) VECTORS(int)
VECTORS(uint) VECTORS(long) VECTORS(ulong) VECTORS(half) VECTORS(float)

// vectors convert, which C++ does not write as a call
inline float2 as_float2(float x) { return x; }
inline float2 as_float2(half2 x) { return __builtin_convertvector(x, float2); }
#define float2(...) as_float2(__VA_ARGS__)

template <class T, int N> using vec = T __attribute__((ext_vector_type(N)));

#define kernel
#define device __attribute__((opencl_global))
#define constant __attribute__((opencl_constant))
#define threadgroup __attribute__((opencl_local))
// a word of Metal that no variable can have for its name
#define thread

template <class To, class From> inline To as_type(From value) {
  return __builtin_bit_cast(To, value);
}

namespace metal {
#define OF_VECTORS(F, T) F(T, bool) F(T##2, bool2) F(T##3, bool3) F(T##4, bool4)
#define OF_NUMBERS(T, B) \
  inline T max(T a, T b) { return __builtin_elementwise_max(a, b); } \
  inline T min(T a, T b) { return __builtin_elementwise_min(a, b); } \
  inline T clamp(T x, T low, T high) { return min(max(x, low), high); } \
  T select(T, T, B);
#define OF_SIGNED(T, B) \
  OF_NUMBERS(T, B) inline T abs(T x) { return __builtin_elementwise_abs(x); }
#define OF_UNSIGNED(T, B) OF_NUMBERS(T, B) inline T abs(T x) { return x; }
#define OF_FLOATS(T, B) OF_SIGNED(T, B) \
  inline T fma(T a, T b, T c) { return __builtin_elementwise_fma(a, b, c); } \
  inline T rint(T x) { return __builtin_elementwise_rint(x); } \
  inline T round(T x) { return __builtin_elementwise_round(x); } \
  inline T floor(T x) { return __builtin_elementwise_floor(x); }
OF_VECTORS(OF_SIGNED, char) OF_VECTORS(OF_SIGNED, short) OF_VECTORS(OF_SIGNED, int)
OF_VECTORS(OF_SIGNED, long) OF_VECTORS(OF_UNSIGNED, uchar) OF_VECTORS(OF_UNSIGNED, ushort)
OF_VECTORS(OF_UNSIGNED, uint) OF_VECTORS(OF_UNSIGNED, ulong)
OF_VECTORS(OF_FLOATS, half) OF_VECTORS(OF_FLOATS, float)
bfloat max(bfloat, bfloat), min(bfloat, bfloat), clamp(bfloat, bfloat, bfloat), abs(bfloat);
bfloat select(bfloat, bfloat, bool), fma(bfloat, bfloat, bfloat);
bfloat rint(bfloat), round(bfloat), floor(bfloat);
half exp(half);
bfloat exp(bfloat);
float exp(float);
half log(half);
bfloat log(bfloat);
float log(float);
#define INFINITY __builtin_inff()
bool isnan(half), isnan(bfloat), isnan(float);
namespace precise {
float exp(float), rsqrt(float);
}

// Barriers and the operations of matrices are instructions, of which machine code shows the name.
enum class mem_flags { mem_none = 0, mem_device = 1, mem_threadgroup = 2 };
inline void threadgroup_barrier(mem_flags) { asm volatile("threadgroup_barrier" ::: "memory"); }
inline void simdgroup_barrier(mem_flags) { asm volatile("simdgroup_barrier" ::: "memory"); }
half simd_sum(half), simd_max(half);
float simd_sum(float), simd_max(float), simd_shuffle_xor(float, ushort);
int simd_sum(int), simd_max(int);
uint simd_sum(uint), simd_max(uint);

template <class T, int C, int R> struct simdgroup_matrix {
  static_assert(C == 8 && R == 8, "only 8x8 matrices");
  T elements;
};
template <class T, int C, int R> inline simdgroup_matrix<T, C, R> make_filled_simdgroup_matrix(T x) {
  return {x};
}
#define OF_MATRICES(SPACE) \
  template <class T> \
  inline void simdgroup_load(simdgroup_matrix<T, 8, 8>& to, const SPACE T* from, ulong line = 8, \
                             ulong2 origin = 0, bool transpose = false) { \
    asm volatile("simdgroup_load %0, %1" : "=w"(to.elements) : "m"(*from)); \
  } \
  template <class T> \
  inline void simdgroup_store(simdgroup_matrix<T, 8, 8> from, SPACE T* to, ulong line = 8, \
                              ulong2 origin = 0, bool transpose = false) { \
    asm volatile("simdgroup_store %1, %0" : "=m"(*to) : "w"(from.elements)); \
  }
OF_MATRICES(device) OF_MATRICES(threadgroup)
template <class D, class A, class B, class C>
inline void simdgroup_multiply_accumulate(simdgroup_matrix<D, 8, 8>& d, simdgroup_matrix<A, 8, 8> a,
                                          simdgroup_matrix<B, 8, 8> b, simdgroup_matrix<C, 8, 8> c) {
  static_assert(__is_same(C, D), "sums of another type");
  d = c;
  asm volatile("simdgroup_multiply %0, %1, %2" : "+w"(d.elements) : "w"(a.elements), "w"(b.elements));
}
}  // namespace metal
using namespace metal;
