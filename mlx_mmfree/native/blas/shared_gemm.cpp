#include "blas/shared_gemm.h"

#include <algorithm>
#include <atomic>
#include <utility>

#include "runtime/thread_pool.h"
#include "runtime/workspace.h"

namespace mmfree {

namespace {

// The numbers that CBLAS gives to its choices.
constexpr int kRowMajor = 101, kColumnMajor = 102, kNoTranspose = 111;
// The fewest multiplications of a piece. The caller does less work than this alone, because another
// thread wakes up too late.
constexpr size_t kPieceProducts = 1 << 20;
// The fewest rows or columns of a piece, those that more than one piece of each thread must have,
// and their divisor. They are many because every piece arranges the whole other matrix anew.
constexpr size_t kPieceWidth = 128, kGoodWidth = 192, kPieceMultiple = 16;
// Pieces of each thread, so that a late one leaves something to take.
constexpr size_t kPieces = 4;

template <class T>
std::atomic<Gemm<T>> chosen{nullptr};

// The number of items in a piece of a product that has `items` rows of `products` multiplications
// each.
size_t piece(size_t items, size_t products) {
  size_t pieces = kPieces * threads();
  while (pieces > threads() && items < pieces * kGoodWidth) {
    pieces /= 2;
  }
  const size_t wanted = (items + pieces - 1) / pieces;
  const size_t least = (kPieceProducts + products - 1) / std::max<size_t>(products, 1);
  return round_up(std::max({wanted, least, kPieceWidth}), kPieceMultiple);
}

}  // namespace

template <class T>
void set_gemm(Gemm<T> gemm) {
  chosen<T>.store(gemm);
}

template <class T>
void shared_gemm(int order, int transpose_a, int transpose_b, int m, int n, int k, T alpha,
                 const T* a, int lda, const T* b, int ldb, T beta, T* c, int ldc) {
  const Gemm<T> gemm = chosen<T>.load();
  const bool is_known = order == kRowMajor || order == kColumnMajor;
  if (!is_known || m <= 0 || n <= 0 || k <= 0 || threads() == 1) {
    gemm(order, transpose_a, transpose_b, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc);
    return;
  }
  if (order == kColumnMajor) {
    // computes the transposed product, row by row
    std::swap(a, b);
    std::swap(lda, ldb);
    std::swap(transpose_a, transpose_b);
    std::swap(m, n);
  }
  const bool is_by_rows = m >= n;
  const size_t items = is_by_rows ? m : n, others = is_by_rows ? n : m;
  const size_t a_step = transpose_a == kNoTranspose ? lda : 1;
  const size_t b_step = transpose_b == kNoTranspose ? 1 : ldb;
  parallel_for(items, piece(items, others * k), [&](size_t first, size_t last) {
    const int count = static_cast<int>(last - first);
    if (is_by_rows) {
      gemm(kRowMajor, transpose_a, transpose_b, count, n, k, alpha, a + first * a_step, lda, b, ldb,
           beta, c + first * ldc, ldc);
    } else {
      gemm(kRowMajor, transpose_a, transpose_b, m, count, k, alpha, a, lda, b + first * b_step, ldb,
           beta, c + first, ldc);
    }
  });
}

template void set_gemm(Gemm<float>);
template void set_gemm(Gemm<double>);
template void shared_gemm(int, int, int, int, int, int, float, const float*, int, const float*, int,
                          float, float*, int);
template void shared_gemm(int, int, int, int, int, int, double, const double*, int, const double*,
                          int, double, double*, int);

}  // namespace mmfree
