#pragma once

#include <cstddef>

// Products of floats by a BLAS library, shared out over the threads of this extension.

namespace mmfree {

// The signatures of cblas_sgemm and cblas_dgemm with 32-bit integers.
template <class T>
using Gemm = void (*)(int order, int transpose_a, int transpose_b, int m, int n, int k, T alpha,
                      const T* a, int lda, const T* b, int ldb, T beta, T* c, int ldc);

// Sets the product of one thread that computes the pieces of `shared_gemm`.
template <class T>
void set_gemm(Gemm<T> gemm);

// C = alpha op(A) op(B) + beta C. Nobody waits for a thread that comes late, because the others
// take its pieces. The pieces depend on the sizes and on the number of threads only.
template <class T>
void shared_gemm(int order, int transpose_a, int transpose_b, int m, int n, int k, T alpha,
                 const T* a, int lda, const T* b, int ldb, T beta, T* c, int ldc);

}  // namespace mmfree
