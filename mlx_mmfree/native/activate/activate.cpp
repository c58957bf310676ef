#include "activate/activate.h"

#include "activate/kernels.h"
#include "mlx/allocator.h"
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

mx::array activate(const mx::array& x, const std::string& activation) {
  require(is_float(x), "[activate] 'x' must be floats.");
  const Activation chosen = activation_of(activation, "[activate] 'activation' is unknown.");
  require(chosen != Activation::none, "[activate] 'activation' is unknown.");
  return Activate::call({x}, {chosen})[0];
}

void Activate::eval_cpu(const Arrays& inputs, Arrays& outputs) {
  mx::array& y = outputs[0];
  y.set_data(mx::allocator::malloc(y.nbytes()));
  const ActivateValues values{floats_of(inputs[0], stream()), options_.activation, y.data<void>(),
                              float_type(y.dtype())};
  dispatch([values, count = y.size()]() {
    const auto& set = table<ActivateKernels>(kernels());
    parallel_for(count, kPieceValues,
                 [&](size_t first, size_t last) { set.compute(values, first, last); });
  });
}

Arrays Activate::vjp(const Arrays& primals, const Arrays& cotangents, const std::vector<int>&,
                     const Arrays&) {
  return ActivateGradient::call({primals[0], cotangents[0]}, options_, stream());
}

OutputForms Activate::output_forms(const Arguments& arguments) const {
  const auto& x = *arguments[0];
  return {{x.shape()}, {options_.activation == Activation::relu2 ? mx::float32 : x.dtype()}};
}

void ActivateGradient::eval_cpu(const Arrays& inputs, Arrays& outputs) {
  mx::array& d_x = outputs[0];
  d_x.set_data(mx::allocator::malloc(d_x.nbytes()));
  const ActivateGradientValues values{floats_of(inputs[0], stream()),
                                      floats_of(inputs[1], stream()), options_.activation,
                                      d_x.data<void>()};
  dispatch([values, count = d_x.size()]() {
    const auto& set = table<ActivateKernels>(kernels());
    parallel_for(count, kPieceValues,
                 [&](size_t first, size_t last) { set.differentiate(values, first, last); });
  });
}

OutputForms ActivateGradient::output_forms(const Arguments& arguments) const {
  return {{arguments[0]->shape()}, {arguments[0]->dtype()}};
}

}  // namespace mmfree
