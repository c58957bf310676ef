#include "layer_norm/layer_norm.h"

#include <algorithm>

#include "layer_norm/kernels.h"
#include "mlx/allocator.h"
#include "mlx/backend/cpu/encoder.h"
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

void normalize(const LayerNormRows& rows, size_t count) {
  const auto& set = table<LayerNormKernels>(kernels());
  const size_t own = round_up(3 * rows.dims, 16);
  auto* scratch = static_cast<float*>(workspace(threads() * own * sizeof(float)));
  const size_t step = std::max<size_t>(kPieceValues / rows.dims, 1);
  parallel_region(count, step, threads(), [&](Claims& claims) {
    for (size_t first, last; claims.next(first, last);) {
      set.normalize(rows, first, last, scratch + claims.thread() * own);
    }
  });
}

void differentiate(const LayerNormGradientRows& rows, size_t count, float* d_weight,
                   float* d_bias) {
  const auto& set = table<LayerNormKernels>(kernels());
  const size_t dims = rows.dims, own = round_up(3 * dims, 16);
  const size_t sums = (count + kSumRows - 1) / kSumRows;
  auto* scratch =
      static_cast<float*>(workspace((threads() * own + sums * 2 * dims) * sizeof(float)));
  float* parts = scratch + threads() * own;
  const size_t step = std::max<size_t>(kPieceValues / (dims * kSumRows), 1);
  parallel_region(sums, step, threads(), [&](Claims& claims) {
    for (size_t sum, last; claims.next(sum, last);) {
      for (; sum < last; ++sum) {
        set.differentiate(rows, sum * kSumRows, std::min((sum + 1) * kSumRows, count),
                          parts + sum * 2 * dims, scratch + claims.thread() * own);
      }
    }
  });
  for (size_t j = 0; j < dims; ++j) {
    double of_weight = 0, of_bias = 0;
    for (size_t sum = 0; sum < sums; ++sum) {
      of_weight += parts[sum * 2 * dims + j];
      of_bias += parts[(sum * 2 + 1) * dims + j];
    }
    d_weight[j] = static_cast<float>(of_weight);
    d_bias[j] = static_cast<float>(of_bias);
  }
}

}  // namespace

mx::array layer_norm(const mx::array& x, const std::optional<mx::array>& weight,
                     const std::optional<mx::array>& bias, float eps) {
  require(x.ndim() >= 1 && x.shape(-1) > 0 && is_float(x),
          "[layer_norm] 'x' must be floats (..., D) with D > 0.");
  for (const auto& given : {weight, bias}) {
    require(!given || (is_float(*given) && given->shape() == mx::Shape{x.shape(-1)}),
            "[layer_norm] 'weight' and 'bias' must be floats (D,).");
  }
  return LayerNorm::call({x, weight, bias}, {eps})[0];
}

void LayerNorm::eval_cpu(const Arrays& inputs, Arrays& outputs) {
  allocate(outputs);
  const auto given = arguments(inputs);
  const LayerNormRows rows{floats_of(given[0], stream()),
                           floats_of(given[1], stream()),
                           floats_of(given[2], stream()),
                           static_cast<size_t>(given[0]->shape(-1)),
                           options_.eps,
                           outputs[0].data<void>()};
  mx::cpu::get_command_encoder(stream()).dispatch(
      [rows, count = outputs[0].size() / rows.dims]() { normalize(rows, count); });
}

Arrays LayerNorm::vjp(const Arrays& primals, const Arrays& cotangents,
                      const std::vector<int>& argnums, const Arrays& outputs) {
  auto given = arguments(primals);
  const bool has_weight = given[1].has_value();
  given[2] = cotangents[0];
  const auto gradients = LayerNormGradient::call(std::move(given), options_, stream());
  Arrays wanted;
  for (int argnum : argnums) {
    // without a weight, the bias is the second of the primals
    const auto& gradient = gradients[argnum > 0 && !has_weight ? 2 : argnum];
    wanted.push_back(mx::astype(gradient, primals[argnum].dtype(), stream()));
  }
  return wanted;
}

OutputForms LayerNorm::output_forms(const Arguments& arguments) const {
  return {{arguments[0]->shape()}, {arguments[0]->dtype()}};
}

void LayerNormGradient::eval_cpu(const Arrays& inputs, Arrays& outputs) {
  allocate(outputs);
  const auto given = arguments(inputs);
  const auto floats = [&](size_t n) { return floats_of(given[n], stream()); };
  const LayerNormGradientRows rows{floats(0),    floats(2),
                                   floats(1),    static_cast<size_t>(given[0]->shape(-1)),
                                   options_.eps, outputs[0].data<void>()};
  mx::cpu::get_command_encoder(stream()).dispatch(
      [rows, count = outputs[0].size() / rows.dims, d_weight = outputs[1].data<float>(),
       d_bias = outputs[2].data<float>()]() { differentiate(rows, count, d_weight, d_bias); });
}

OutputForms LayerNormGradient::output_forms(const Arguments& arguments) const {
  const auto& x = *arguments[0];
  return {{x.shape(), {x.shape(-1)}, {x.shape(-1)}}, {x.dtype(), mx::float32, mx::float32}};
}

}  // namespace mmfree
