#include "rms_norm/rms_norm.h"

#include <algorithm>

#include "mlx/allocator.h"
#include "mlx/backend/cpu/encoder.h"
#include "rms_norm/kernels.h"
#include "runtime/contiguous.h"
#include "runtime/float_type.h"
#include "runtime/kernels.h"
#include "runtime/thread_pool.h"
#include "runtime/workspace.h"

namespace mmfree {

namespace {

// Values of one piece of work. Fewer are done by the caller alone, because another thread wakes up
// too late.
constexpr size_t kPieceValues = 16 << 10;
// Rows whose gradients of the weight are one sum. They do not depend on the number of threads.
constexpr size_t kSumRows = 64;

void allocate(Arrays& outputs) {
  for (auto& output : outputs) {
    output.set_data(mx::allocator::malloc(output.nbytes()));
  }
}

void normalize(const NormRows& rows, size_t count) {
  const auto& set = table<RmsNormKernels>(kernels());
  const size_t own = round_up(2 * rows.dims, 16);
  auto* scratch = static_cast<float*>(workspace(threads() * own * sizeof(float)));
  const size_t step = std::max<size_t>(kPieceValues / rows.dims, 1);
  parallel_region(count, step, threads(), [&](Claims& claims) {
    for (size_t first, last; claims.next(first, last);) {
      set.normalize(rows, first, last, scratch + claims.thread() * own);
    }
  });
}

void differentiate(const NormGradientRows& rows, size_t count, float* d_weight) {
  const auto& set = table<RmsNormKernels>(kernels());
  const size_t dims = rows.dims, own = round_up(3 * dims, 16);
  const size_t sums = (count + kSumRows - 1) / kSumRows;
  auto* scratch = static_cast<float*>(workspace((threads() * own + sums * dims) * sizeof(float)));
  float* parts = scratch + threads() * own;
  const size_t step = std::max<size_t>(kPieceValues / (dims * kSumRows), 1);
  parallel_region(sums, step, threads(), [&](Claims& claims) {
    for (size_t sum, last; claims.next(sum, last);) {
      for (; sum < last; ++sum) {
        set.differentiate(rows, sum * kSumRows, std::min((sum + 1) * kSumRows, count),
                          parts + sum * dims, scratch + claims.thread() * own);
      }
    }
  });
  std::fill_n(d_weight, dims, 0.0f);
  for (size_t sum = 0; sum < sums; ++sum) {
    const float* part = parts + sum * dims;
    for (size_t j = 0; j < dims; ++j) {
      d_weight[j] += part[j];
    }
  }
}

}  // namespace

mx::array rms_norm(const mx::array& x, const std::optional<mx::array>& weight, float eps) {
  require(x.ndim() >= 1 && x.shape(-1) > 0 && is_float(x),
          "[rms_norm] 'x' must be floats (..., D) with D > 0.");
  require(!weight || (is_float(*weight) && weight->shape() == mx::Shape{x.shape(-1)}),
          "[rms_norm] 'weight' must be floats (D,).");
  return RmsNorm::call({x, weight}, {eps})[0];
}

void RmsNorm::eval_cpu(const Arrays& inputs, Arrays& outputs) {
  allocate(outputs);
  const auto given = arguments(inputs);
  const NormRows rows{floats_of(given[0], stream()), floats_of(given[1], stream()),
                      static_cast<size_t>(given[0]->shape(-1)), options_.eps,
                      outputs[0].data<void>()};
  mx::cpu::get_command_encoder(stream()).dispatch(
      [rows, count = outputs[0].size() / rows.dims]() { normalize(rows, count); });
}

Arrays RmsNorm::vjp(const Arrays& primals, const Arrays& cotangents,
                    const std::vector<int>& argnums, const Arrays& outputs) {
  auto given = arguments(primals);
  given.push_back(cotangents[0]);
  given.push_back(std::nullopt);
  const auto gradients = RmsNormGradient::call(std::move(given), options_, stream());
  Arrays wanted;
  for (int argnum : argnums) {
    wanted.push_back(mx::astype(gradients[argnum], primals[argnum].dtype(), stream()));
  }
  return wanted;
}

OutputForms RmsNorm::output_forms(const Arguments& arguments) const {
  return {{arguments[0]->shape()}, {arguments[0]->dtype()}};
}

void RmsNormGradient::eval_cpu(const Arrays& inputs, Arrays& outputs) {
  allocate(outputs);
  const auto given = arguments(inputs);
  const auto floats = [&](size_t n) { return floats_of(given[n], stream()); };
  const NormGradientRows rows{floats(0),
                              floats(2),
                              floats(1),
                              static_cast<const float*>(floats(3).data),
                              static_cast<size_t>(given[0]->shape(-1)),
                              options_.eps,
                              outputs[0].data<void>()};
  mx::cpu::get_command_encoder(stream()).dispatch(
      [rows, count = outputs[0].size() / rows.dims, d_weight = outputs[1].data<float>()]() {
        differentiate(rows, count, d_weight);
      });
}

OutputForms RmsNormGradient::output_forms(const Arguments& arguments) const {
  const auto& x = *arguments[0];
  return {{x.shape(), {x.shape(-1)}}, {x.dtype(), mx::float32}};
}

}  // namespace mmfree
