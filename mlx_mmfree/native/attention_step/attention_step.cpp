#include "attention_step/attention_step.h"

#include <cstring>
#include <memory>
#include <stdexcept>

#include "attention_step/attend.h"
#include "attention_step/slots.h"
#include "mlx/allocator.h"
#include "mlx/backend/common/utils.h"
#include "mlx/backend/cpu/encoder.h"
#include "mlx/utils.h"
#include "runtime/contiguous.h"
#include "runtime/float_type.h"

namespace mmfree {

namespace {

using Arrays = std::vector<mx::array>;
using Shapes = std::vector<mx::Shape>;

void require(bool condition, const char* message) {
  if (!condition) {
    throw std::invalid_argument(std::string("[attention_step] ") + message);
  }
}

Shapes result_shapes(const Arrays& inputs, const AttentionOptions& options) {
  const auto& keys = inputs[1];
  const Slots slots{options.window, options.sinks};
  return {{keys.shape(0), 1, options.num_heads * keys.shape(3)},
          keys.shape(),
          inputs[2].shape(),
          {keys.shape(0), static_cast<int>(slots.after(inputs[3].shape(1), keys.shape(2)))}};
}

// Each result holds the inputs. While only one does, a buffer that nobody else holds can be seen to
// be free; evaluated arrays drop their inputs anyway, unless a transformation goes on with them.
void release(const Arrays& inputs, Arrays& outputs) {
  for (auto& output : outputs) {
    if (!output.is_tracer() && &output.inputs() != &inputs) {
      output.inputs().clear();
    }
  }
}

// Gives an output the values of an input, and its memory where nothing else holds it.
void take(const mx::array& input, mx::array& output, mx::Stream stream) {
  if (!input.flags().row_contiguous) {
    output.copy_shared_buffer(contiguous(input, stream));
  } else if (mx::is_donatable(input, output)) {
    output.copy_shared_buffer(input);
  } else {
    output.set_data(mx::allocator::malloc(output.nbytes()));
    mx::cpu::get_command_encoder(stream).dispatch(
        [from = input.data<char>(), to = output.data<char>(), bytes = output.nbytes()]() {
          std::memcpy(to, from, bytes);
        });
  }
}

}  // namespace

std::tuple<mx::array, mx::array, mx::array, mx::array> attention_step(
    const mx::array& projected, const mx::array& keys, const mx::array& values,
    const mx::array& positions, int num_heads, const std::optional<mx::array>& wavelengths,
    bool is_interleaved, const std::optional<mx::array>& query_norm,
    const std::optional<mx::array>& key_norm, float norm_eps, int window, int sinks) {
  require(keys.ndim() == 4 && keys.size() > 0 && keys.shape() == values.shape(),
          "'keys' and 'values' must be (B, G, C, K).");
  const int batch = keys.shape(0), groups = keys.shape(1), dims = keys.shape(3);
  require(num_heads > 0 && num_heads % groups == 0, "'num_heads' must be a multiple of G.");
  const int64_t width = (static_cast<int64_t>(num_heads) + 2 * static_cast<int64_t>(groups)) * dims;
  require(projected.ndim() == 3 && projected.shape(0) == batch && projected.shape(1) == 1 &&
              projected.shape(2) == width,
          "'projected' must be (B, 1, (H + 2G) K).");
  require(is_float(projected) && is_float(keys) && is_float(values),
          "'projected', 'keys' and 'values' must be floats.");
  require(positions.ndim() == 2 && positions.shape(0) == batch && positions.dtype() == mx::int32,
          "'positions' must be int32 (B, N).");
  require(window >= 0 && sinks >= 0, "'window' and 'sinks' must not be negative.");
  require(!wavelengths || (dims % 2 == 0 && wavelengths->dtype() == mx::float32 &&
                           wavelengths->shape() == mx::Shape{dims / 2}),
          "'wavelengths' must be float32 (K / 2,).");
  require(query_norm.has_value() == key_norm.has_value(),
          "'query_norm' and 'key_norm' must be given together.");
  Arrays inputs = {projected, keys, values, positions};
  if (wavelengths) {
    inputs.push_back(*wavelengths);
  }
  for (const auto& norm : {query_norm, key_norm}) {
    require(!norm || (norm->shape() == mx::Shape{dims} && is_float(*norm)),
            "'query_norm' and 'key_norm' must be (K,).");
    if (norm) {
      inputs.push_back(*norm);
    }
  }
  const AttentionOptions options{
      num_heads, wavelengths.has_value(), is_interleaved, query_norm.has_value(), norm_eps, window,
      sinks};
  require(positions.shape(1) <= keys.shape(2), "'positions' must be of at most C slots.");
  auto shapes = result_shapes(inputs, options);
  const auto outputs = mx::array::make_arrays(
      std::move(shapes), {projected.dtype(), keys.dtype(), values.dtype(), mx::int32},
      std::make_shared<AttentionStep>(mx::to_stream({}), options), std::move(inputs));
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
  const auto data = [&](size_t input) { return contiguous(inputs[input], stream()); };
  const auto floats = [&](size_t input) {
    const auto values = data(input);
    return Floats{values.data<void>(), float_type(values.dtype())};
  };
  const auto& keys = outputs[1];
  const Floats none{nullptr, FloatType::float32};
  const auto size = [](const mx::array& x, int axis) { return static_cast<size_t>(x.shape(axis)); };
  const AttentionCall call{
      floats(0),
      size(keys, 0),
      static_cast<size_t>(options_.num_heads),
      size(keys, 1),
      size(keys, 3),
      options_.has_norms ? floats(inputs.size() - 2) : none,
      options_.has_norms ? floats(inputs.size() - 1) : none,
      options_.norm_eps,
      options_.has_wavelengths ? data(4).data<float>() : nullptr,
      options_.is_interleaved,
      {options_.window, options_.sinks},
      data(3).data<int32_t>(),
      size(inputs[3], 1),
      outputs[1].data<void>(),
      outputs[2].data<void>(),
      float_type(keys.dtype()),
      float_type(outputs[2].dtype()),
      size(keys, 2),
      outputs[3].data<int32_t>(),
      size(outputs[3], 1),
      outputs[0].data<void>(),
  };
  mx::cpu::get_command_encoder(stream()).dispatch([call]() { attend(call); });
}

Shapes AttentionStep::output_shapes(const Arrays& inputs) {
  return result_shapes(inputs, options_);
}

}  // namespace mmfree
