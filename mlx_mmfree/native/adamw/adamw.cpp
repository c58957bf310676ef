#include "adamw/adamw.h"

#include <algorithm>

#include "adamw/kernels.h"
#include "mlx/allocator.h"
#include "runtime/contiguous.h"
#include "runtime/kernels.h"
#include "runtime/thread_pool.h"
#include "runtime/workspace.h"

namespace mmfree {

namespace {

// Numbers of one piece of work. Fewer are done by the caller alone, because another thread wakes up
// too late.
constexpr size_t kPieceValues = 16 << 10;
// Rows and columns of a gradient that are turned at once. Its rows lie in one line of the cache.
constexpr size_t kRows = 16, kColumns = 128;

struct Update {
  AdamFactors factors;
  const float* gradient;
  float *parameter, *m, *v;

  void operator()(const float* own_gradient, size_t first, size_t count) const {
    table<AdamwKernels>(kernels()).update(factors, own_gradient, count, parameter + first,
                                          m + first, v + first);
  }
};

// A gradient whose columns lie one behind the other, as that of a transposed matrix does.
void update_turned(const Update& update, size_t rows, size_t columns) {
  constexpr size_t own = kRows * kColumns;
  auto* scratch = static_cast<float*>(workspace(threads() * own * sizeof(float)));
  const size_t blocks = (rows + kRows - 1) / kRows;
  const size_t step = std::max<size_t>(kPieceValues / (kRows * columns), 1);
  parallel_region(blocks, step, threads(), [&](Claims& claims) {
    float* turned = scratch + claims.thread() * own;
    for (size_t block, last; claims.next(block, last);) {
      for (size_t row = block * kRows; row < std::min(last * kRows, rows); row += kRows) {
        const size_t height = std::min(kRows, rows - row);
        for (size_t start = 0; start < columns; start += kColumns) {
          const size_t width = std::min(kColumns, columns - start);
          for (size_t c = 0; c < width; ++c) {
            for (size_t r = 0; r < height; ++r) {
              turned[r * kColumns + c] = update.gradient[(start + c) * rows + row + r];
            }
          }
          for (size_t r = 0; r < height; ++r) {
            update(turned + r * kColumns, (row + r) * columns + start, width);
          }
        }
      }
    }
  });
}

}  // namespace

std::tuple<mx::array, mx::array, mx::array> adamw(const mx::array& parameter,
                                                  const mx::array& gradient, const mx::array& m,
                                                  const mx::array& v, const mx::array& factors,
                                                  double b1, double b2, float eps) {
  for (const auto& x : {parameter, gradient, m, v}) {
    require(x.dtype() == mx::float32 && x.shape() == parameter.shape(),
            "[adamw] 'parameter', 'gradient', 'm' and 'v' must be float32 of one shape.");
  }
  require(factors.dtype() == mx::float32 && factors.shape() == mx::Shape{3},
          "[adamw] 'factors' must be float32 (3,).");
  const auto outputs = Adamw::call({parameter, gradient, m, v, factors}, {b1, b2, eps});
  return {outputs[0], outputs[1], outputs[2]};
}

void Adamw::eval_cpu(const Arrays& inputs, Arrays& outputs) {
  const size_t source[] = {0, 2, 3};
  for (size_t n = 0; n < 3; ++n) {
    take(inputs[source[n]], outputs[n], stream());
  }
  const mx::array& given = inputs[1];
  const bool is_turned =
      given.ndim() == 2 && !given.flags().row_contiguous && given.flags().col_contiguous;
  const mx::array gradient = is_turned ? given : contiguous(given, stream());
  const mx::array factors = contiguous(inputs[4], stream());
  const auto [b1, b2, eps] = options_;
  Update update{{0.0f, static_cast<float>(b1), static_cast<float>(1 - b1), static_cast<float>(b2),
                 static_cast<float>(1 - b2), 0.0f, 0.0f, eps},
                gradient.data<float>(),
                outputs[0].data<float>(),
                outputs[1].data<float>(),
                outputs[2].data<float>()};
  const size_t size = given.size(), rows = is_turned ? given.shape(0) : 0;
  dispatch([update, size, rows, own = factors.data<float>()]() mutable {
    update.factors.decay = own[0];
    update.factors.numerator = own[1];
    update.factors.denominator = own[2];
    if (rows) {
      update_turned(update, rows, size / rows);
      return;
    }
    parallel_for(size, kPieceValues, [&](size_t first, size_t last) {
      update(update.gradient + first, first, last - first);
    });
  });
}

OutputForms Adamw::output_forms(const Arguments& arguments) const {
  const auto& shape = arguments[0]->shape();
  return {{shape, shape, shape}, {mx::float32, mx::float32, mx::float32}};
}

}  // namespace mmfree
