#include "mlgru_step/mlgru_step.h"

#include <algorithm>
#include <memory>
#include <stdexcept>

#include "mlgru_step/kernels.h"
#include "mlx/allocator.h"
#include "mlx/backend/cpu/encoder.h"
#include "mlx/utils.h"
#include "rms_norm_quantize/kernels.h"
#include "runtime/contiguous.h"
#include "runtime/float_type.h"
#include "runtime/floats.h"
#include "runtime/kernels.h"
#include "runtime/thread_pool.h"
#include "runtime/workspace.h"

namespace mmfree {

namespace {

using Arrays = std::vector<mx::array>;
using Shapes = std::vector<mx::Shape>;

// Channels of a piece, a multiple of those that are computed at a time.
constexpr size_t kPieceChannels = 256;
// Values below which the caller is done before another thread wakes up.
constexpr size_t kSharedValues = 512;

struct Call {
  RecurrenceStep step;  // of the first sequence
  size_t batch;
  float eps;
};

void compute(const Call& call) {
  const RecurrenceStep& first = call.step;
  const Kernels& set = kernels();
  const auto& loops = table<MlgruStepKernels>(set);
  const auto& norm = table<RmsNormQuantizeKernels>(set);
  const size_t dims = first.dims, length = first.rows, rows = call.batch * length;
  const size_t count = threads();
  float* inverse = static_cast<float*>(workspace((rows + count * dims + 16) * sizeof(float)));
  float* scratch = inverse + rows;
  const size_t step = std::max<size_t>(16 * kSharedValues / std::max<size_t>(dims, 1), 1);
  parallel_region(rows, step, count, [&](Claims& claims) {
    for (size_t row, last; claims.next(row, last);) {
      for (; row < last; ++row) {
        inverse[row] = norm.rms_inverse(first.gates, (3 * row + 2) * dims, dims, call.eps,
                                        scratch + claims.thread() * dims);
      }
    }
  });
  const size_t pieces = (dims + kPieceChannels - 1) / kPieceChannels;
  const size_t items = call.batch * pieces;
  parallel_for(items, rows * dims <= kSharedValues ? items : 1, [&](size_t item, size_t last) {
    for (; item < last; ++item) {
      const size_t b = item / pieces, channel = item % pieces * kPieceChannels;
      RecurrenceStep own = first;
      own.gates = offset(first.gates, 3 * b * length * dims);
      own.state += b * dims;
      own.valid += first.valid ? b * length : 0;
      own.inverse = inverse + b * length;
      own.y = static_cast<char*>(first.y) + b * length * dims * size_of(first.gates.type);
      own.last += b * dims;
      loops.recur(own, channel, std::min(channel + kPieceChannels, dims));
    }
  });
}

void require(bool condition, const char* message) {
  if (!condition) {
    throw std::invalid_argument(std::string("[mlgru_step] ") + message);
  }
}

Shapes result_shapes(const Arrays& inputs) {
  auto shape = inputs[0].shape();
  shape.back() /= 3;
  return {shape, inputs[1].shape()};
}

}  // namespace

std::pair<mx::array, mx::array> mlgru_step(const mx::array& gates, const mx::array& state,
                                           const mx::array& weight, float eps,
                                           const std::optional<mx::array>& lower_bound,
                                           const std::optional<mx::array>& valid) {
  require(gates.ndim() == 3 && state.ndim() == 2 && gates.shape(0) == state.shape(0) &&
              gates.shape(2) == 3 * static_cast<int64_t>(state.shape(1)) && state.shape(1) > 0,
          "'gates' must be (B, L, 3E) and 'state' (B, E).");
  require(is_float(gates) && is_float(weight) && state.dtype() == mx::float32,
          "'gates' and 'weight' must be floats and 'state' float32.");
  const mx::Shape dims = {state.shape(1)};
  require(weight.shape() == dims &&
              (!lower_bound || (lower_bound->shape() == dims && is_float(*lower_bound))),
          "'weight' and 'lower_bound' must be (E,).");
  require(!valid || (valid->dtype() == mx::bool_ && valid->ndim() == 2 &&
                     valid->shape(0) == gates.shape(0) && valid->shape(1) == gates.shape(1)),
          "'valid' must be booleans (B, L).");
  Arrays inputs = {gates, state, weight};
  for (const auto& optional : {lower_bound, valid}) {
    if (optional) {
      inputs.push_back(*optional);
    }
  }
  const MlgruOptions options{eps, lower_bound.has_value(), valid.has_value()};
  auto shapes = result_shapes(inputs);
  const auto outputs = mx::array::make_arrays(
      std::move(shapes), {gates.dtype(), mx::float32},
      std::make_shared<MlgruStep>(mx::to_stream({}), options), std::move(inputs));
  return {outputs[0], outputs[1]};
}

void MlgruStep::eval_cpu(const Arrays& inputs, Arrays& outputs) {
  for (auto& output : outputs) {
    output.set_data(mx::allocator::malloc(output.nbytes()));
  }
  const auto data = [&](size_t input) { return contiguous(inputs[input], stream()); };
  const auto floats = [&](size_t input) {
    const auto values = data(input);
    return Floats{values.data<void>(), float_type(values.dtype())};
  };
  const Call call{{floats(0), data(1).data<float>(), floats(2),
                   options_.has_lower_bound ? floats(3) : Floats{nullptr, FloatType::float32},
                   options_.has_valid ? data(inputs.size() - 1).data<bool>() : nullptr,
                   static_cast<size_t>(inputs[0].shape(1)), static_cast<size_t>(inputs[1].shape(1)),
                   nullptr, outputs[0].data<void>(), outputs[1].data<float>()},
                  static_cast<size_t>(inputs[0].shape(0)),
                  options_.eps};
  mx::cpu::get_command_encoder(stream()).dispatch([call]() { compute(call); });
}

Shapes MlgruStep::output_shapes(const Arrays& inputs) {
  return result_shapes(inputs);
}

}  // namespace mmfree
