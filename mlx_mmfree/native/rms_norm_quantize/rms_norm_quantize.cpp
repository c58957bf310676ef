#include "rms_norm_quantize/rms_norm_quantize.h"

#include <algorithm>

#include "mlx/allocator.h"
#include "rms_norm/rms_norm.h"
#include "rms_norm_quantize/kernels.h"
#include "runtime/contiguous.h"
#include "runtime/float_type.h"
#include "runtime/kernels.h"
#include "runtime/thread_pool.h"

namespace mmfree {

namespace {

// Values of one piece of work. Fewer are done by the caller alone, because another thread wakes up
// too late.
constexpr size_t kPieceValues = 16 << 10;

void check(const mx::array& x, const std::optional<mx::array>& weight, std::optional<float> eps) {
  require(x.ndim() >= 1 && x.shape(-1) > 0, "[rms_norm_quantize] 'x' must be (..., D) with D > 0.");
  require(is_float(x), "[rms_norm_quantize] 'x' must be float32, float16 or bfloat16.");
  require(!weight ||
              (eps && weight->dtype() == mx::float32 && weight->shape() == mx::Shape{x.shape(-1)}),
          "[rms_norm_quantize] 'weight' must be (D,) float32 and come with 'eps'.");
}

// Allocates the outputs, of which the first has the rows.
RowQuantizer quantizer_of(const Arrays& inputs, const RmsNormQuantizeOptions& options,
                          Arrays& outputs, mx::Stream stream) {
  for (auto& output : outputs) {
    output.set_data(mx::allocator::malloc(output.nbytes()));
  }
  return {floats_of(inputs[0], stream),
          inputs.size() > 1 ? contiguous(inputs[1], stream).data<float>() : nullptr,
          static_cast<size_t>(inputs[0].shape(-1)),
          options.eps.has_value(),
          options.eps.value_or(0.0f),
          options.half_away,
          outputs[0].data<float>(),
          outputs.size() > 1 ? outputs[1].data<float>() : nullptr};
}

// Calls body(loops, first, last) for all rows.
template <class F>
void share(size_t rows, size_t dims, F&& body) {
  const auto& set = table<RmsNormQuantizeKernels>(kernels());
  parallel_for(rows, std::max<size_t>(kPieceValues / dims, 1),
               [&](size_t first, size_t last) { body(set, first, last); });
}

}  // namespace

std::pair<mx::array, mx::array> rms_norm_quantize(const mx::array& x,
                                                  const std::optional<mx::array>& weight,
                                                  std::optional<float> eps, bool half_away) {
  check(x, weight, eps);
  const auto outputs = RmsNormQuantize::call({x, weight}, {eps, half_away});
  return {outputs[0], outputs[1]};
}

mx::array rms_norm_round(const mx::array& x, const std::optional<mx::array>& weight,
                         std::optional<float> eps, bool half_away) {
  check(x, weight, eps);
  return RmsNormRound::call({x, weight}, {eps, half_away})[0];
}

void RmsNormQuantize::eval_cpu(const Arrays& inputs, Arrays& outputs) {
  const RowQuantizer quantizer = quantizer_of(inputs, options_, outputs, stream());
  dispatch([quantizer, rows = outputs[1].size()]() {
    share(rows, quantizer.dims, [&](const auto& set, size_t first, size_t last) {
      set.quantize_rows(quantizer, first, last);
    });
  });
}

Arrays RmsNormQuantize::vjp(const Arrays& primals, const Arrays& cotangents,
                            const std::vector<int>& argnums, const Arrays& outputs) {
  const auto given = arguments(primals);
  const mx::array scale = mx::stop_gradient(outputs[1], stream());
  if (!options_.eps) {
    return {mx::astype(mx::multiply(cotangents[0], scale, stream()), given[0]->dtype(), stream())};
  }
  const auto gradients =
      RmsNormGradient::call({given[0], given[1], cotangents[0], scale}, {*options_.eps}, stream());
  Arrays wanted;
  for (int argnum : argnums) {
    wanted.push_back(gradients[argnum]);
  }
  return wanted;
}

OutputForms RmsNormQuantize::output_forms(const Arguments& arguments) const {
  const auto& codes = arguments[0]->shape();
  auto scale = codes;
  scale.back() = 1;
  return {{codes, scale}, {mx::float32, mx::float32}};
}

void RmsNormRound::eval_cpu(const Arrays& inputs, Arrays& outputs) {
  const RowQuantizer quantizer = quantizer_of(inputs, options_, outputs, stream());
  const size_t rows = outputs[0].size() / quantizer.dims;
  dispatch([quantizer, rows]() {
    share(rows, quantizer.dims, [&](const auto& set, size_t first, size_t last) {
      set.round_rows(quantizer, first, last);
    });
  });
}

OutputForms RmsNormRound::output_forms(const Arguments& arguments) const {
  return {{arguments[0]->shape()}, {mx::float32}};
}

}  // namespace mmfree
