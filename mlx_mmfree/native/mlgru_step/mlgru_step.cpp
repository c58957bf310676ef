#include "mlgru_step/mlgru_step.h"

#include <algorithm>
#include <memory>
#include <stdexcept>

#include "instruction_sets/kernels.h"
#include "linear_scan/linear_scan.h"
#include "mlx/allocator.h"
#include "mlx/backend/cpu/encoder.h"
#include "mlx/fast.h"
#include "mlx/ops.h"
#include "mlx/transforms.h"
#include "mlx/utils.h"
#include "runtime/contiguous.h"
#include "runtime/float_type.h"
#include "runtime/floats.h"
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
  const size_t dims = first.dims, length = first.rows, rows = call.batch * length;
  const size_t count = threads();
  float* inverse = static_cast<float*>(workspace((rows + count * dims + 16) * sizeof(float)));
  float* scratch = inverse + rows;
  const size_t step = std::max<size_t>(16 * kSharedValues / std::max<size_t>(dims, 1), 1);
  parallel_region(rows, step, count, [&](Claims& claims) {
    for (size_t row, last; claims.next(row, last);) {
      for (; row < last; ++row) {
        inverse[row] = set.rms_inverse(first.gates, (3 * row + 2) * dims, dims, call.eps,
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
      set.recur(own, channel, std::min(channel + kPieceChannels, dims));
    }
  });
}

// The same in differentiable operations.
Arrays compose(const Arrays& inputs, const MlgruOptions& options, mx::Stream s) {
  const auto one = mx::array(1.0f);
  const auto float32 = [&](const mx::array& x) { return mx::astype(x, mx::float32, s); };
  const auto silu = [&](const mx::array& x) { return mx::multiply(x, mx::sigmoid(x, s), s); };
  const auto gates = mx::split(float32(inputs[0]), 3, -1, s);
  auto f = mx::sigmoid(gates[1], s);
  if (options.has_lower_bound) {
    const auto bound = float32(inputs[3]);
    f = mx::add(bound, mx::multiply(mx::subtract(one, bound, s), f, s), s);
  }
  auto i = mx::multiply(silu(gates[0]), mx::subtract(one, f, s), s);
  if (options.has_valid) {
    const auto valid = mx::expand_dims(inputs.back(), -1, s);
    f = mx::where(valid, f, one, s);
    i = mx::where(valid, i, mx::array(0.0f), s);
  }
  const auto [h, last] = linear_scan(f, i, inputs[1]);
  const auto normed = mx::fast::rms_norm(gates[2], float32(inputs[2]), options.eps, s);
  const auto y = mx::multiply(normed, silu(h), s);
  return {mx::astype(y, inputs[0].dtype(), s), last};
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

void MlgruStep::eval_gpu(const Arrays&, Arrays&) {
  throw std::runtime_error("[mlgru_step] the native backend runs on the CPU only.");
}

Arrays MlgruStep::vjp(const Arrays& primals, const Arrays& cotangents,
                      const std::vector<int>& argnums, const Arrays&) {
  Arrays wanted;
  for (int argnum : argnums) {
    wanted.push_back(primals[argnum]);
  }
  const auto call = [&](const Arrays& floats) -> Arrays {
    Arrays inputs = primals;
    for (size_t n = 0; n < floats.size(); ++n) {
      inputs[argnums[n]] = floats[n];
    }
    return compose(inputs, options_, stream());
  };
  return mx::vjp(call, wanted, cotangents).second;
}

std::pair<Arrays, std::vector<int>> MlgruStep::vmap(const Arrays& inputs,
                                                    const std::vector<int>& axes) {
  const auto call = [this](const Arrays& mapped) { return compose(mapped, options_, stream()); };
  return {mx::vmap(call, axes, {0, 0})(inputs), {0, 0}};
}

Shapes MlgruStep::output_shapes(const Arrays& inputs) {
  return result_shapes(inputs);
}

bool MlgruStep::is_equivalent(const mx::Primitive& other) const {
  return options_ == static_cast<const MlgruStep&>(other).options_;
}

}  // namespace mmfree
