#include "attention_step/attention_step.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <stdexcept>

#include "attention_step/attend.h"
#include "mlx/allocator.h"
#include "mlx/backend/common/utils.h"
#include "mlx/backend/cpu/encoder.h"
#include "mlx/fast.h"
#include "mlx/ops.h"
#include "mlx/transforms.h"
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

int slots_after(const mx::array& keys, const mx::array& positions,
                const AttentionOptions& options) {
  const int slots = std::min(positions.shape(1), keys.shape(2) - 1) + 1;
  const int64_t kept = static_cast<int64_t>(options.sinks) + options.window;
  return options.window ? static_cast<int>(std::min<int64_t>(slots, kept)) : slots;
}

Shapes result_shapes(const Arrays& inputs, const AttentionOptions& options) {
  const auto& keys = inputs[1];
  return {{keys.shape(0), 1, options.num_heads * keys.shape(3)},
          keys.shape(),
          inputs[2].shape(),
          {keys.shape(0), slots_after(keys, inputs[3], options)}};
}

// The same in differentiable operations.
Arrays compose(const Arrays& inputs, const AttentionOptions& options, mx::Stream s) {
  const auto &keys = inputs[1], &positions = inputs[3];
  const int batch = keys.shape(0), groups = keys.shape(1), room = keys.shape(2);
  const int dims = keys.shape(3), heads = options.num_heads;
  const int slots = slots_after(keys, positions, options);
  const auto number = [](int value) { return mx::array(value, mx::int32); };
  const auto places = [&](int count) { return mx::arange(0, count, 1, mx::int32, s); };
  const auto last = positions.shape(1) ? mx::add(mx::max(positions, 1, false, s), number(1), s)
                                       : mx::zeros({batch}, mx::int32, s);
  const auto column = mx::expand_dims(last, 1, s);
  auto place = column, held = mx::broadcast_to(places(slots), {batch, slots}, s);
  if (options.window) {
    const auto sinks = number(options.sinks), window = number(options.window);
    const auto turned = mx::add(sinks, mx::remainder(mx::subtract(column, sinks, s), window, s), s);
    place = mx::where(mx::less(column, sinks, s), column, turned, s);
    const auto latest =
        mx::subtract(column, mx::remainder(mx::subtract(column, held, s), window, s), s);
    held = mx::where(mx::less(held, sinks, s), held, latest, s);
  }
  const auto is_held = mx::less_equal(places(slots), column, s);
  held = mx::where(is_held, held, number(-1), s);

  const auto parts = mx::split(mx::reshape(inputs[0], {batch, heads + 2 * groups, 1, dims}, s),
                               mx::Shape{heads, heads + groups}, 1, s);
  const auto prepared = [&](mx::array x, size_t norm) {
    if (options.has_norms) {
      x = mx::fast::rms_norm(x, inputs[inputs.size() - norm], options.norm_eps, s);
    }
    return options.has_wavelengths ? mx::fast::rope(x, dims, options.is_interleaved, std::nullopt,
                                                    1.0f, last, inputs[4], s)
                                   : x;
  };
  const auto is_new = mx::expand_dims(mx::equal(places(room), place, s), {1, 3}, s);
  const auto written = [&](const mx::array& buffer, const mx::array& x) {
    return mx::where(is_new, mx::astype(x, buffer.dtype(), s), buffer, s);
  };
  const auto new_keys = written(keys, prepared(parts[1], 1));
  const auto new_values = written(inputs[2], parts[2]);
  const auto seen = [&](const mx::array& buffer) {
    const auto used = mx::slice(buffer, {0, 0, 0, 0}, {batch, groups, slots, dims}, s);
    return mx::astype(used, mx::float32, s);
  };
  const auto scale = mx::array(static_cast<float>(1.0 / std::sqrt(static_cast<double>(dims))));
  const auto queries = mx::multiply(mx::astype(prepared(parts[0], 2), mx::float32, s), scale, s);
  const auto scores = mx::matmul(mx::reshape(queries, {batch, groups, heads / groups, dims}, s),
                                 mx::swapaxes(seen(new_keys), 2, 3, s), s);
  const auto hidden = mx::array(-std::numeric_limits<float>::infinity());
  const auto weights =
      mx::softmax(mx::where(mx::expand_dims(is_held, {1, 2}, s), scores, hidden, s), -1, false, s);
  const auto y = mx::reshape(mx::matmul(weights, seen(new_values), s), {batch, 1, heads * dims}, s);
  return {mx::astype(y, inputs[0].dtype(), s), new_keys, new_values, held};
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
      static_cast<size_t>(options_.window),
      static_cast<size_t>(options_.sinks),
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

void AttentionStep::eval_gpu(const Arrays&, Arrays&) {
  throw std::runtime_error("[attention_step] the native backend runs on the CPU only.");
}

Arrays AttentionStep::vjp(const Arrays& primals, const Arrays& cotangents,
                          const std::vector<int>& argnums, const Arrays&) {
  Arrays wanted;
  for (int argnum : argnums) {
    wanted.push_back(primals[argnum]);
  }
  const auto call = [&](const Arrays& values) -> Arrays {
    Arrays inputs = primals;
    for (size_t n = 0; n < values.size(); ++n) {
      inputs[argnums[n]] = values[n];
    }
    return compose(inputs, options_, stream());
  };
  return mx::vjp(call, wanted, cotangents).second;
}

std::pair<Arrays, std::vector<int>> AttentionStep::vmap(const Arrays& inputs,
                                                        const std::vector<int>& axes) {
  const auto call = [this](const Arrays& mapped) { return compose(mapped, options_, stream()); };
  const std::vector<int> results(4, 0);
  return {mx::vmap(call, axes, results)(inputs), results};
}

Shapes AttentionStep::output_shapes(const Arrays& inputs) {
  return result_shapes(inputs, options_);
}

bool AttentionStep::is_equivalent(const mx::Primitive& other) const {
  return options_ == static_cast<const AttentionStep&>(other).options_;
}

}  // namespace mmfree
