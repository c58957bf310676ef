#pragma once

#include <cstddef>

// Products of floats by a BLAS library, shared out over the threads of this extension.

namespace mmfree {

// The signatures of cblas_sgemm and cblas_dgemm with 32-bit integers.
template <class T>
using Gemm = void (*)(int order, int transpose_a, int transpose_b, int m, int n, int k, T alpha,
                      const T* a, int lda, const T* b, int ldb, T beta, T* c, int ldc);

// Sets the product of one thread to which the pieces of `shared_gemm` go.
template <class T>
void set_gemm(Gemm<T> gemm);

// C = alpha op(A) op(B) + beta C. A thread that does not come is not waited for: others take the
// pieces that it has not begun. Which pieces there are depends on sizes and number of threads only.
template <class T>
void shared_gemm(int order, int transpose_a, int transpose_b, int m, int n, int k, T alpha,
                 const T* a, int lda, const T* b, int ldb, T beta, T* c, int ldc);

}  // namespace mmfree
