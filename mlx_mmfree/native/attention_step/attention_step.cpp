#include "attention_step/attention_step.h"

#include <limits>

#include "attention_step/attend.h"
#include "attention_step/slots.h"
#include "mlx/allocator.h"
#include "runtime/contiguous.h"
#include "runtime/float_type.h"

namespace mmfree {

namespace {

// Lets go of the inputs that each result holds, so that a buffer which nobody else holds is seen to
// be free. MLX drops the inputs of evaluated arrays too, unless a transformation goes on with them.
void release(const Arrays& inputs, Arrays& outputs) {
  for (auto& output : outputs) {
    if (!output.is_tracer() && &output.inputs() != &inputs) {
      output.inputs().clear();
    }
  }
}

}  // namespace

std::tuple<mx::array, mx::array, mx::array, mx::array> attention_step(
    const mx::array& projected, const mx::array& keys, const mx::array& values,
    const mx::array& positions, int num_heads, const std::optional<mx::array>& wavelengths,
    bool is_interleaved, const std::optional<mx::array>& query_norm,
    const std::optional<mx::array>& key_norm, float norm_eps, std::optional<int> window,
    int sinks) {
  require(keys.ndim() == 4 && keys.size() > 0 && keys.shape() == values.shape(),
          "[attention_step] 'keys' and 'values' must be (B, G, C, K).");
  const int batch = keys.shape(0), groups = keys.shape(1), dims = keys.shape(3);
  require(num_heads > 0 && num_heads % groups == 0,
          "[attention_step] 'num_heads' must be a multiple of G.");
  const int64_t width = (static_cast<int64_t>(num_heads) + 2 * static_cast<int64_t>(groups)) * dims;
  require(projected.ndim() == 3 && projected.shape(0) == batch && projected.shape(1) == 1 &&
              projected.shape(2) == width,
          "[attention_step] 'projected' must be (B, 1, (H + 2G) K).");
  require(is_float(projected) && is_float(keys) && is_float(values),
          "[attention_step] 'projected', 'keys' and 'values' must be floats.");
  require(positions.ndim() == 2 && positions.shape(0) == batch && positions.dtype() == mx::int32,
          "[attention_step] 'positions' must be int32 (B, N).");
  require(
      window.value_or(1) > 0 && sinks >= 0 &&
          int64_t{window.value_or(0)} + sinks <= std::numeric_limits<int>::max(),
      "[attention_step] 'window' must be positive, 'sinks' not negative, and both together below "
      "2**31.");
  require(!wavelengths || (wavelengths->dtype() == mx::float32 && wavelengths->ndim() == 1 &&
                           wavelengths->shape(0) > 0 && wavelengths->shape(0) <= dims / 2),
          "[attention_step] 'wavelengths' must be float32, of K / 2 pairs at most.");
  require(query_norm.has_value() == key_norm.has_value(),
          "[attention_step] 'query_norm' and 'key_norm' must be given together.");
  for (const auto& norm : {query_norm, key_norm}) {
    require(!norm || (norm->shape() == mx::Shape{dims} && is_float(*norm)),
            "[attention_step] 'query_norm' and 'key_norm' must be (K,).");
  }
  require(positions.shape(1) <= keys.shape(2),
          "[attention_step] 'positions' must be of at most C slots.");
  const auto outputs =
      AttentionStep::call({projected, keys, values, positions, wavelengths, query_norm, key_norm},
                          {num_heads, is_interleaved, norm_eps, window.value_or(0), sinks});
  return {outputs[0], outputs[1], outputs[2], outputs[3]};
}

void AttentionStep::eval_cpu(const Arrays& inputs, Arrays& outputs) {
  release(inputs, outputs);
  for (size_t n : {0, 3}) {
    outputs[n].set_data(mx::allocator::malloc(outputs[n].nbytes()));
  }
  for (size_t n : {1, 2}) {
    take(inputs[n], outputs[n], stream());
  }
  const auto given = arguments(inputs);
  const auto floats = [&](size_t n) { return floats_of(given[n], stream()); };
  const auto& keys = outputs[1];
  const auto size = [](const mx::array& x, int axis) { return static_cast<size_t>(x.shape(axis)); };
  const AttentionCall call{
      floats(0),
      size(keys, 0),
      static_cast<size_t>(options_.num_heads),
      size(keys, 1),
      size(keys, 3),
      floats(5),
      floats(6),
      options_.norm_eps,
      given[4] ? contiguous(*given[4], stream()).data<float>() : nullptr,
      given[4] ? 2 * size(*given[4], 0) : 0,
      options_.is_interleaved,
      {options_.window, options_.sinks},
      contiguous(*given[3], stream()).data<int32_t>(),
      size(*given[3], 1),
      outputs[1].data<void>(),
      outputs[2].data<void>(),
      float_type(keys.dtype()),
      float_type(outputs[2].dtype()),
      size(keys, 2),
      outputs[3].data<int32_t>(),
      size(outputs[3], 1),
      outputs[0].data<void>(),
  };
  dispatch([call]() { attend(call); });
}

OutputForms AttentionStep::output_forms(const Arguments& arguments) const {
  const auto &projected = *arguments[0], &keys = *arguments[1], &values = *arguments[2];
  const Slots slots{options_.window, options_.sinks};
  const int batch = keys.shape(0);
  const int used = static_cast<int>(slots.after(arguments[3]->shape(1), keys.shape(2)));
  return {
      {{batch, 1, options_.num_heads * keys.shape(3)}, keys.shape(), values.shape(), {batch, used}},
      {projected.dtype(), keys.dtype(), values.dtype(), mx::int32}};
}

}  // namespace mmfree
