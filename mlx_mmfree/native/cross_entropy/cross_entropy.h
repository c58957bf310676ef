#pragma once

#include <tuple>

#include "mlx/array.h"
#include "runtime/operation.h"

namespace mmfree {

// log(sum(e^logits)) - logits[target] for floats (..., V) and targets int32 (...). Returns float32
// (...).
mx::array cross_entropy(const mx::array& logits, const mx::array& targets);

struct CrossEntropyOptions {
  bool operator==(const CrossEntropyOptions&) const = default;
  auto values() const {
    return std::tuple();
  }
};

// The arguments are logits and targets. Beside the losses it returns the logs of the sums, float32
// (...), from which the gradient makes the probabilities anew.
class CrossEntropy : public Operation<CrossEntropy, CrossEntropyOptions> {
 public:
  using Operation::Operation;

  void eval_cpu(const Arrays& inputs, Arrays& outputs) override;
  Arrays vjp(const Arrays& primals, const Arrays& cotangents, const std::vector<int>& argnums,
             const Arrays& outputs) override;
  OutputForms output_forms(const Arguments& arguments) const;
  DEFINE_NAME(CrossEntropy)
};

// The arguments are logits, targets, the logs of the sums and the gradient of the losses. Returns
// that of the logits. Its own gradient is that of the definition.
class CrossEntropyGradient : public Defined<CrossEntropyGradient, CrossEntropyOptions> {
 public:
  using Defined::Defined;

  void eval_cpu(const Arrays& inputs, Arrays& outputs) override;
  OutputForms output_forms(const Arguments& arguments) const;
  DEFINE_NAME(CrossEntropyGradient)
};

}  // namespace mmfree
