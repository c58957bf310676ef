#include "mlgru_step/mlgru_step.h"

#include <algorithm>

#include "mlgru_step/kernels.h"
#include "mlx/allocator.h"
#include "rms_norm_quantize/kernels.h"
#include "runtime/contiguous.h"
#include "runtime/float_type.h"
#include "runtime/floats.h"
#include "runtime/kernels.h"
#include "runtime/thread_pool.h"
#include "runtime/workspace.h"

namespace mmfree {

namespace {

// Channels of a piece. They are a multiple of the channels that are computed at a time.
constexpr size_t kPieceChannels = 256;
// Fewer values than these are done by the caller alone, because another thread wakes up too late.
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

}  // namespace

std::pair<mx::array, mx::array> mlgru_step(const mx::array& gates, const mx::array& state,
                                           const mx::array& weight, float eps,
                                           const std::optional<mx::array>& lower_bound,
                                           const std::optional<mx::array>& valid) {
  require(gates.ndim() == 3 && state.ndim() == 2 && gates.shape(0) == state.shape(0) &&
              gates.shape(2) == 3 * static_cast<int64_t>(state.shape(1)) && state.shape(1) > 0,
          "[mlgru_step] 'gates' must be (B, L, 3E) and 'state' (B, E).");
  require(is_float(gates) && is_float(weight) && state.dtype() == mx::float32,
          "[mlgru_step] 'gates' and 'weight' must be floats and 'state' float32.");
  const mx::Shape dims = {state.shape(1)};
  require(weight.shape() == dims &&
              (!lower_bound || (lower_bound->shape() == dims && is_float(*lower_bound))),
          "[mlgru_step] 'weight' and 'lower_bound' must be (E,).");
  require(!valid || (valid->dtype() == mx::bool_ && valid->ndim() == 2 &&
                     valid->shape(0) == gates.shape(0) && valid->shape(1) == gates.shape(1)),
          "[mlgru_step] 'valid' must be booleans (B, L).");
  const auto outputs = MlgruStep::call({gates, state, weight, lower_bound, valid}, {eps});
  return {outputs[0], outputs[1]};
}

void MlgruStep::eval_cpu(const Arrays& inputs, Arrays& outputs) {
  for (auto& output : outputs) {
    output.set_data(mx::allocator::malloc(output.nbytes()));
  }
  const auto given = arguments(inputs);
  const auto floats = [&](size_t n) { return floats_of(given[n], stream()); };
  const auto state = contiguous(*given[1], stream());
  const Call call{{floats(0), state.data<float>(), floats(2), floats(3),
                   given[4] ? contiguous(*given[4], stream()).data<bool>() : nullptr,
                   static_cast<size_t>(inputs[0].shape(1)), static_cast<size_t>(state.shape(1)),
                   nullptr, outputs[0].data<void>(), outputs[1].data<float>()},
                  static_cast<size_t>(state.shape(0)),
                  options_.eps};
  dispatch([call]() { compute(call); });
}

OutputForms MlgruStep::output_forms(const Arguments& arguments) const {
  auto y = arguments[0]->shape();
  y.back() /= 3;
  return {{y, arguments[1]->shape()}, {arguments[0]->dtype(), mx::float32}};
}

}  // namespace mmfree
