#pragma once

// Checks that threads share out their work: each item once, whoever comes late
// or not at all.

#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "blas/shared_gemm.h"
#include "check.h"
#include "runtime/thread_pool.h"

namespace {

void meet_each_item_once(unsigned seed) {
  std::mt19937 source(seed);
  for (int turn = 0; turn < 20; ++turn) {
    const size_t items = source() % 5000, step = source() % 50 + 1;
    std::vector<int> seen(items);
    parallel_for(items, step, [&](size_t first, size_t last) {
      for (size_t i = first; i < last; ++i) {
        ++seen[i];
      }
    });
    for (int count : seen) {
      require(count == 1, "an item was not met once", "threads");
    }
  }
}

void check_callers() {
  for (size_t count : {2, 3, 5, 1, 2}) {
    set_threads(count);
    std::vector<std::thread> callers;
    for (unsigned seed = 0; seed < 3; ++seed) {
      callers.emplace_back(meet_each_item_once, seed);
    }
    for (auto &caller : callers) {
      caller.join();
    }
  }
  parallel_for(0, 0, [](size_t, size_t) {
    require(false, "there was nothing to do", "threads");
  });
}

void check_fork() {
  std::fflush(stdout);
  const pid_t child = fork();
  if (child == 0) {
    meet_each_item_once(9);
    _exit(0);
  }
  int status = 1;
  waitpid(child, &status, 0);
  require(status == 0, "a child of fork does not compute", "threads");
  meet_each_item_once(10);
}

// Each other thread keeps its first piece until all but such pieces are done:
// the rest of its share has to be taken from it.
void check_stealing() {
  for (size_t count : {2, 3, 5}) {
    set_threads(count);
    constexpr size_t kItems = 64;
    std::atomic<size_t> held{0}, done{0};
    std::vector<size_t> owner(kItems, count);
    parallel_region(kItems, 1, count, [&](Claims &claims) {
      for (size_t item, last; claims.next(item, last);) {
        owner[item] = claims.thread();
        if (claims.thread() == 0) {
          while (held == 0) {
            std::this_thread::yield();
          }
        } else {
          ++held;
          while (done + held < kItems) {
            std::this_thread::yield();
          }
        }
        ++done;
      }
    });
    size_t own = 0;
    for (size_t thread : owner) {
      require(thread < count, "an item was left out", "stealing");
      own += thread == 0;
    }
    require(done == kItems && own == kItems - held,
            "a share was not taken over", "stealing");
  }
}

// The definition.
void gemm(int order, int transpose_a, int transpose_b, int m, int n, int k,
          float alpha, const float *a, int lda, const float *b, int ldb,
          float beta, float *c, int ldc) {
  const auto at = [&](int row, int column, int stride, bool is_transposed) {
    return is_transposed == (order == 101) ? column * stride + row
                                           : row * stride + column;
  };
  for (int i = 0; i < m; ++i) {
    for (int j = 0; j < n; ++j) {
      float sum = 0;
      for (int p = 0; p < k; ++p) {
        sum += a[at(i, p, lda, transpose_a != 111)] *
               b[at(p, j, ldb, transpose_b != 111)];
      }
      float &result = c[at(i, j, ldc, false)];
      result = alpha * sum + beta * result;
    }
  }
}

void check_gemm() {
  set_gemm<float>(gemm);
  const int sizes[][3] = {
      {1, 1, 1}, {300, 70, 64}, {5, 900, 300}, {520, 3, 800}, {40, 9, 0}};
  for (const auto &[m, n, k] : sizes) {
    for (int choice = 0; choice < 8; ++choice) {
      const int order = choice & 1 ? 102 : 101;
      const int transpose_a = choice & 2 ? 112 : 111,
                transpose_b = choice & 4 ? 112 : 111;
      // rows lie farther apart than they are long
      const auto stride = [&](int rows, int columns, bool is_transposed) {
        return ((order == 101) != is_transposed ? columns : rows) + 3;
      };
      const int lda = stride(m, k, choice & 2), ldb = stride(k, n, choice & 4);
      const int ldc = stride(m, n, false);
      Buffer<float> a(lda * (std::max(m, k) + 1)),
          b(ldb * (std::max(k, n) + 1));
      Buffer<float> c(ldc * (std::max(m, n) + 1)), want(c.size);
      for (auto *values : {&a, &b, &c}) {
        for (size_t i = 0; i < values->size; ++i) {
          (*values)[i] = draw(-8, 8);
        }
      }
      std::copy_n(c.data(), c.size, want.data());
      gemm(order, transpose_a, transpose_b, m, n, k, 2, a.data(), lda, b.data(),
           ldb, 3, want.data(), ldc);
      shared_gemm<float>(order, transpose_a, transpose_b, m, n, k, 2, a.data(),
                         lda, b.data(), ldb, 3, c.data(), ldc);
      for (size_t i = 0; i < c.size; ++i) {
        require(c[i] == want[i], "a product is wrong",
                "gemm " + std::to_string(choice));
      }
    }
  }
}

void check_threads() {
  check_callers();
  check_stealing();
  for (size_t count : {1, 2, 3}) {
    set_threads(count);
    check_gemm();
  }
  // the thread sanitizer knows no threads in a child
#if !defined(__SANITIZE_THREAD__)
  check_fork();
#endif
}

} // namespace
