#include "rms_norm_quantize/rms_norm_quantize.h"

#include <algorithm>

#include "mlx/allocator.h"
#include "mlx/backend/cpu/encoder.h"
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

}  // namespace

std::pair<mx::array, mx::array> rms_norm_quantize(const mx::array& x,
                                                  const std::optional<mx::array>& weight,
                                                  std::optional<float> eps, bool half_away) {
  require(x.ndim() >= 1 && x.shape(-1) > 0, "[rms_norm_quantize] 'x' must be (..., D) with D > 0.");
  require(is_float(x), "[rms_norm_quantize] 'x' must be float32, float16 or bfloat16.");
  require(!weight ||
              (eps && weight->dtype() == mx::float32 && weight->shape() == mx::Shape{x.shape(-1)}),
          "[rms_norm_quantize] 'weight' must be (D,) float32 and come with 'eps'.");
  const auto outputs = RmsNormQuantize::call({x, weight}, {eps, half_away});
  return {outputs[0], outputs[1]};
}

void RmsNormQuantize::eval_cpu(const Arrays& inputs, Arrays& outputs) {
  for (auto& output : outputs) {
    output.set_data(mx::allocator::malloc(output.nbytes()));
  }
  const auto x = contiguous(inputs[0], stream());
  const RowQuantizer quantizer{
      {x.data<void>(), float_type(x.dtype())},
      inputs.size() > 1 ? contiguous(inputs[1], stream()).data<float>() : nullptr,
      static_cast<size_t>(x.shape(-1)),
      options_.eps.has_value(),
      options_.eps.value_or(0.0f),
      options_.half_away,
      outputs[0].data<float>(),
      outputs[1].data<float>(),
  };
  mx::cpu::get_command_encoder(stream()).dispatch([quantizer, rows = outputs[1].size()]() {
    const auto& set = table<RmsNormQuantizeKernels>(kernels());
    const size_t step = std::max<size_t>(kPieceValues / quantizer.dims, 1);
    parallel_for(rows, step,
                 [&](size_t first, size_t last) { set.quantize_rows(quantizer, first, last); });
  });
}

OutputForms RmsNormQuantize::output_forms(const Arguments& arguments) const {
  const auto& codes = arguments[0]->shape();
  auto scale = codes;
  scale.back() = 1;
  return {{codes, scale}, {mx::float32, mx::float32}};
}

}  // namespace mmfree
