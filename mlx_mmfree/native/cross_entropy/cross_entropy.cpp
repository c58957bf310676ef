#include "cross_entropy/cross_entropy.h"

#include <algorithm>

#include "cross_entropy/kernels.h"
#include "mlx/allocator.h"
#include "runtime/contiguous.h"
#include "runtime/float_type.h"
#include "runtime/kernels.h"
#include "runtime/thread_pool.h"

namespace mmfree {

namespace {

// Logits of one piece of work. Fewer are done by the caller alone, because another thread wakes up
// too late.
constexpr size_t kPieceLogits = 16 << 10;

void allocate(Arrays& outputs) {
  for (auto& output : outputs) {
    output.set_data(mx::allocator::malloc(output.nbytes()));
  }
}

size_t piece(size_t classes) {
  return std::max<size_t>(kPieceLogits / classes, 1);
}

}  // namespace

mx::array cross_entropy(const mx::array& logits, const mx::array& targets) {
  require(logits.ndim() >= 1 && logits.shape(-1) > 0 && is_float(logits),
          "[cross_entropy] 'logits' must be floats (..., V) with V > 0.");
  const mx::Shape rows(logits.shape().begin(), logits.shape().end() - 1);
  require(targets.shape() == rows && targets.dtype() == mx::int32,
          "[cross_entropy] 'targets' must be int32 (...).");
  return CrossEntropy::call({logits, targets}, {})[0];
}

void CrossEntropy::eval_cpu(const Arrays& inputs, Arrays& outputs) {
  allocate(outputs);
  const CrossEntropyRows rows{
      floats_of(inputs[0], stream()), contiguous(inputs[1], stream()).data<int32_t>(),
      static_cast<size_t>(inputs[0].shape(-1)), outputs[0].data<float>(), outputs[1].data<float>()};
  dispatch([rows, count = outputs[0].size()]() {
    const auto& set = table<CrossEntropyKernels>(kernels());
    parallel_for(count, piece(rows.classes),
                 [&](size_t first, size_t last) { set.compute(rows, first, last); });
  });
}

Arrays CrossEntropy::vjp(const Arrays& primals, const Arrays& cotangents,
                         const std::vector<int>& argnums, const Arrays& outputs) {
  Arrays wanted;
  for (int argnum : argnums) {
    if (argnum == 0) {
      // the logs follow from the logits, whose gradient says all
      const auto logs = mx::stop_gradient(outputs[1], stream());
      wanted.push_back(CrossEntropyGradient::call({primals[0], primals[1], logs, cotangents[0]}, {},
                                                  stream())[0]);
    } else {
      wanted.push_back(mx::zeros_like(primals[argnum], stream()));
    }
  }
  return wanted;
}

OutputForms CrossEntropy::output_forms(const Arguments& arguments) const {
  const auto& rows = arguments[1]->shape();
  return {{rows, rows}, {mx::float32, mx::float32}};
}

void CrossEntropyGradient::eval_cpu(const Arrays& inputs, Arrays& outputs) {
  allocate(outputs);
  const auto numbers = [&](size_t n) { return contiguous(inputs[n], stream()).data<float>(); };
  const CrossEntropyGradientRows rows{floats_of(inputs[0], stream()),
                                      contiguous(inputs[1], stream()).data<int32_t>(),
                                      static_cast<size_t>(inputs[0].shape(-1)),
                                      numbers(2),
                                      numbers(3),
                                      outputs[0].data<void>()};
  dispatch([rows, count = inputs[1].size()]() {
    const auto& set = table<CrossEntropyKernels>(kernels());
    parallel_for(count, piece(rows.classes),
                 [&](size_t first, size_t last) { set.differentiate(rows, first, last); });
  });
}

OutputForms CrossEntropyGradient::output_forms(const Arguments& arguments) const {
  return {{arguments[0]->shape()}, {arguments[0]->dtype()}};
}

}  // namespace mmfree
