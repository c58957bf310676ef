#include "rms_norm_quantize/rms_norm_quantize.h"

#include <algorithm>
#include <memory>
#include <stdexcept>

#include "mlx/allocator.h"
#include "mlx/backend/cpu/encoder.h"
#include "mlx/fast.h"
#include "mlx/ops.h"
#include "mlx/transforms.h"
#include "mlx/utils.h"
#include "rms_norm_quantize/kernels.h"
#include "runtime/float_type.h"
#include "runtime/kernels.h"
#include "runtime/thread_pool.h"

namespace mmfree {

namespace {

using Arrays = std::vector<mx::array>;
using Shapes = std::vector<mx::Shape>;

// Values of one piece of work: fewer are done before another thread wakes up.
constexpr size_t kPieceValues = 16 << 10;

Arrays make(std::shared_ptr<mx::Primitive> primitive, const Arrays& inputs) {
  Arrays contiguous;
  for (const auto& input : inputs) {
    contiguous.push_back(mx::contiguous(input, false, primitive->stream()));
  }
  auto shapes = primitive->output_shapes(inputs);
  return mx::array::make_arrays(std::move(shapes), {mx::float32, mx::float32}, primitive,
                                contiguous);
}

}  // namespace

std::pair<mx::array, mx::array> rms_norm_quantize(const mx::array& x,
                                                  const std::optional<mx::array>& weight,
                                                  std::optional<float> eps, bool half_away) {
  if (x.ndim() < 1 || x.shape(-1) == 0) {
    throw std::invalid_argument("[rms_norm_quantize] 'x' must be (..., D) with D > 0.");
  }
  if (x.dtype() != mx::float32 && x.dtype() != mx::float16 && x.dtype() != mx::bfloat16) {
    throw std::invalid_argument("[rms_norm_quantize] 'x' must be float32, float16 or bfloat16.");
  }
  if (weight &&
      (!eps || weight->dtype() != mx::float32 || weight->shape() != mx::Shape{x.shape(-1)})) {
    throw std::invalid_argument(
        "[rms_norm_quantize] 'weight' must be (D,) float32 and come with 'eps'.");
  }
  Arrays inputs = {x};
  if (weight) {
    inputs.push_back(*weight);
  }
  auto outputs = make(std::make_shared<RmsNormQuantize>(mx::to_stream({}), eps, half_away), inputs);
  return {outputs[0], outputs[1]};
}

void RmsNormQuantize::eval_cpu(const Arrays& inputs, Arrays& outputs) {
  for (auto& output : outputs) {
    output.set_data(mx::allocator::malloc(output.nbytes()));
  }
  const auto& x = inputs[0];
  const RowQuantizer quantizer{
      {x.data<void>(), float_type(x.dtype())},
      inputs.size() > 1 ? inputs[1].data<float>() : nullptr,
      static_cast<size_t>(x.shape(-1)),
      eps_.has_value(),
      eps_.value_or(0.0f),
      half_away_,
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

void RmsNormQuantize::eval_gpu(const Arrays&, Arrays&) {
  throw std::runtime_error("[rms_norm_quantize] the native backend runs on the CPU only.");
}

Arrays RmsNormQuantize::vjp(const Arrays& primals, const Arrays& cotangents,
                            const std::vector<int>& argnums, const Arrays& outputs) {
  const auto scaled = mx::multiply(cotangents[0], outputs[1], stream());
  const auto normalize = [this](const Arrays& inputs) -> Arrays {
    auto y = mx::astype(inputs[0], mx::float32, stream());
    if (eps_) {
      const auto weight = inputs.size() > 1 ? std::optional(inputs[1]) : std::nullopt;
      y = mx::fast::rms_norm(y, weight, *eps_, stream());
    }
    return {y};
  };
  const auto gradients = mx::vjp(normalize, primals, {scaled}).second;
  Arrays wanted;
  for (int argnum : argnums) {
    wanted.push_back(gradients[argnum]);
  }
  return wanted;
}

std::pair<Arrays, std::vector<int>> RmsNormQuantize::vmap(const Arrays& inputs,
                                                          const std::vector<int>& axes) {
  const auto x = axes[0] > 0 ? mx::moveaxis(inputs[0], axes[0], 0, stream()) : inputs[0];
  const auto again = [this](const Arrays& inputs) {
    return make(std::make_shared<RmsNormQuantize>(stream(), eps_, half_away_), inputs);
  };
  if (inputs.size() == 1 || axes[1] < 0) {
    Arrays all = inputs;
    all[0] = x;
    return {again(all), {0, 0}};
  }
  Arrays codes, scales;
  for (int k = 0; k < inputs[1].shape(axes[1]); ++k) {
    auto outputs = again(
        {axes[0] < 0 ? x : mx::take(x, k, 0, stream()), mx::take(inputs[1], k, axes[1], stream())});
    codes.push_back(outputs[0]);
    scales.push_back(outputs[1]);
  }
  return {{mx::stack(codes, 0, stream()), mx::stack(scales, 0, stream())}, {0, 0}};
}

Shapes RmsNormQuantize::output_shapes(const Arrays& inputs) {
  auto scale = inputs[0].shape();
  scale.back() = 1;
  return {inputs[0].shape(), scale};
}

bool RmsNormQuantize::is_equivalent(const mx::Primitive& other) const {
  const auto& same = static_cast<const RmsNormQuantize&>(other);
  return eps_ == same.eps_ && half_away_ == same.half_away_;
}

}  // namespace mmfree
