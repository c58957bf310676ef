#include "rms_norm/rms_norm.h"

#include <algorithm>

#include "mlx/allocator.h"
#include "rms_norm/kernels.h"
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

void normalize(const NormRows& rows, size_t count) {
  const auto& set = table<RmsNormKernels>(kernels());
  for_rows(count, rows.dims, 2 * rows.dims, [&](size_t first, size_t last, float* scratch) {
    set.normalize(rows, first, last, scratch);
  });
}

void differentiate(const NormGradientRows& rows, size_t count, float* d_weight) {
  const auto& set = table<RmsNormKernels>(kernels());
  const size_t dims = rows.dims;
  const float* sums = sum_rows(count, dims, dims, 3 * dims,
                               [&](size_t first, size_t last, float* part, float* scratch) {
                                 set.differentiate(rows, first, last, part, scratch);
                               });
  std::copy_n(sums, dims, d_weight);
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
  dispatch([rows, count = outputs[0].size() / rows.dims]() { normalize(rows, count); });
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
  dispatch([rows, count = outputs[0].size() / rows.dims, d_weight = outputs[1].data<float>()]() {
    differentiate(rows, count, d_weight);
  });
}

OutputForms RmsNormGradient::output_forms(const Arguments& arguments) const {
  const auto& x = *arguments[0];
  return {{x.shape(), {x.shape(-1)}}, {x.dtype(), mx::float32}};
}

}  // namespace mmfree
