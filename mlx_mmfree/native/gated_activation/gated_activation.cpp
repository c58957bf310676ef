#include "gated_activation/gated_activation.h"

#include <algorithm>
#include <utility>

#include "mlx/allocator.h"
#include "runtime/contiguous.h"
#include "runtime/float_type.h"
#include "runtime/kernels.h"
#include "runtime/thread_pool.h"
#include "runtime/workspace.h"

namespace mmfree {

namespace {

// Values of one piece of work. Fewer are done by the caller alone, because another thread wakes up
// too late.
constexpr size_t kPieceValues = 16 << 10;

// The distance of the rows if they all lie at one distance from the next and their values side by
// side, else 0.
size_t row_distance(const mx::array& x) {
  const int last = x.ndim() - 1;
  if (x.shape(last) > 1 && x.strides(last) != 1) {
    return 0;
  }
  int64_t distance = 0, rows = 1;
  for (int axis = last - 1; axis >= 0; --axis) {
    if (x.shape(axis) == 1) {
      continue;
    }
    if (rows > 1 && x.strides(axis) != rows * distance) {
      return 0;
    }
    distance = rows > 1 ? distance : x.strides(axis);
    rows *= x.shape(axis);
  }
  return rows > 1 ? std::max<int64_t>(distance, 0) : x.shape(last);
}

FloatRows rows_of(const mx::array& x, mx::Stream stream) {
  if (const size_t distance = row_distance(x)) {
    return {{x.data<void>(), float_type(x.dtype())}, distance};
  }
  return {floats_of(x, stream), static_cast<size_t>(x.shape(-1))};
}

// The rows of gate and up, which may be the halves of one array.
std::pair<FloatRows, FloatRows> gate_and_up(const Arguments& given, mx::Stream stream) {
  const FloatRows gate = rows_of(*given[0], stream);
  if (given[1]) {
    return {gate, rows_of(*given[1], stream)};
  }
  return {gate, {offset(gate.floats, given[0]->shape(-1) / 2), gate.stride}};
}

void allocate(Arrays& outputs) {
  for (auto& output : outputs) {
    output.set_data(mx::allocator::malloc(output.nbytes()));
  }
}

// Calls body(first, last, scratch) for all rows, with so many rows of scratch.
template <class F>
void share(size_t rows, size_t dims, size_t scratch_rows, F&& body) {
  const size_t own = round_up(scratch_rows * dims, 16);
  auto* scratch = static_cast<float*>(workspace(threads() * own * sizeof(float)));
  parallel_region(rows, std::max<size_t>(kPieceValues / dims, 1), threads(), [&](Claims& claims) {
    for (size_t first, last; claims.next(first, last);) {
      body(first, last, scratch + claims.thread() * own);
    }
  });
}

}  // namespace

mx::array gated_activation(const mx::array& gate, const std::optional<mx::array>& up,
                           const std::string& activation) {
  require(gate.ndim() >= 1 && gate.shape(-1) > 0 &&
              (up ? gate.shape() == up->shape() : gate.shape(-1) % 2 == 0),
          "[gated_activation] 'gate' and 'up' must be (..., D) with D > 0.");
  require(is_float(gate) && (!up || gate.dtype() == up->dtype()),
          "[gated_activation] 'gate' and 'up' must be floats of one dtype.");
  const Activation chosen =
      activation_of(activation, "[gated_activation] 'activation' is unknown.");
  require(chosen != Activation::none, "[gated_activation] 'activation' is unknown.");
  return GatedActivation::call({gate, up}, {chosen})[0];
}

void GatedActivation::eval_cpu(const Arrays& inputs, Arrays& outputs) {
  allocate(outputs);
  const mx::array& y = outputs[0];
  const auto [gate, up] = gate_and_up(arguments(inputs), stream());
  const GatedRows rows{gate,
                       up,
                       static_cast<size_t>(y.shape(-1)),
                       options_.activation,
                       outputs[0].data<void>(),
                       float_type(y.dtype())};
  dispatch([rows, count = y.size() / rows.dims]() {
    const auto& set = table<GatedActivationKernels>(kernels());
    share(count, rows.dims, 2, [&](size_t first, size_t last, float* scratch) {
      set.compute(rows, first, last, scratch);
    });
  });
}

Arrays GatedActivation::vjp(const Arrays& primals, const Arrays& cotangents,
                            const std::vector<int>& argnums, const Arrays& outputs) {
  auto given = arguments(primals);
  given.push_back(cotangents[0]);
  const auto gradients = GatedActivationGradient::call(std::move(given), options_, stream());
  Arrays wanted;
  for (int argnum : argnums) {
    wanted.push_back(gradients[argnum]);
  }
  return wanted;
}

OutputForms GatedActivation::output_forms(const Arguments& arguments) const {
  const auto& gate = *arguments[0];
  auto shape = gate.shape();
  shape.back() /= arguments[1] ? 1 : 2;
  return {{shape}, {options_.activation == Activation::relu2 ? mx::float32 : gate.dtype()}};
}

void GatedActivationGradient::eval_cpu(const Arrays& inputs, Arrays& outputs) {
  allocate(outputs);
  const auto given = arguments(inputs);
  const auto [gate, up] = gate_and_up(given, stream());
  const size_t dims = given[2]->shape(-1);
  const bool are_halves = !given[1];
  char* d_gate = outputs[0].data<char>();
  const GatedGradientRows all{
      gate,
      up,
      rows_of(*given[2], stream()),
      dims,
      options_.activation,
      d_gate,
      are_halves ? d_gate + dims * outputs[0].itemsize() : outputs[1].data<char>(),
      are_halves ? 2 * dims : dims};
  const size_t count = given[2]->size() / dims;
  dispatch([all, count]() {
    const auto& set = table<GatedActivationKernels>(kernels());
    share(count, all.dims, 4, [&](size_t first, size_t last, float* scratch) {
      set.differentiate(all, first, last, scratch);
    });
  });
}

OutputForms GatedActivationGradient::output_forms(const Arguments& arguments) const {
  const auto& gate = *arguments[0];
  if (!arguments[1]) {
    return {{gate.shape()}, {gate.dtype()}};
  }
  return {{gate.shape(), gate.shape()}, {gate.dtype(), gate.dtype()}};
}

}  // namespace mmfree
