#include "layer_norm/layer_norm.h"

#include <algorithm>

#include "layer_norm/kernels.h"
#include "mlx/allocator.h"
#include "runtime/contiguous.h"
#include "runtime/float_type.h"
#include "runtime/kernels.h"
#include "runtime/row_loops.h"

namespace mmfree {

namespace {

void allocate(Arrays& outputs) {
  for (auto& output : outputs) {
    output.set_data(mx::allocator::malloc(output.nbytes()));
  }
}

void normalize(const LayerNormRows& rows, size_t count) {
  const auto& set = table<LayerNormKernels>(kernels());
  for_rows(count, rows.dims, 3 * rows.dims, [&](size_t first, size_t last, float* scratch) {
    set.normalize(rows, first, last, scratch);
  });
}

void differentiate(const LayerNormGradientRows& rows, size_t count, float* d_weight,
                   float* d_bias) {
  const auto& set = table<LayerNormKernels>(kernels());
  const size_t dims = rows.dims;
  const float* sums = sum_rows(count, dims, 2 * dims, 3 * dims,
                               [&](size_t first, size_t last, float* part, float* scratch) {
                                 set.differentiate(rows, first, last, part, scratch);
                               });
  std::copy_n(sums, dims, d_weight);
  std::copy_n(sums + dims, dims, d_bias);
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
  dispatch([rows, count = outputs[0].size() / rows.dims]() { normalize(rows, count); });
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
  dispatch([rows, count = outputs[0].size() / rows.dims, d_weight = outputs[1].data<float>(),
            d_bias = outputs[2].data<float>()]() { differentiate(rows, count, d_weight, d_bias); });
}

OutputForms LayerNormGradient::output_forms(const Arguments& arguments) const {
  const auto& x = *arguments[0];
  return {{x.shape(), {x.shape(-1)}, {x.shape(-1)}}, {x.dtype(), mx::float32, mx::float32}};
}

}  // namespace mmfree
