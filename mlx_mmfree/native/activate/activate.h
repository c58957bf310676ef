#pragma once

#include <string>
#include <tuple>

#include "gated_activation/activations.h"
#include "mlx/array.h"
#include "runtime/operation.h"

namespace mmfree {

// a(x) for floats of any shape, computed in float32. The result has the dtype of x, but float32 for
// the square of ReLU, which overflows float16.
mx::array activate(const mx::array& x, const std::string& activation);

struct ActivateOptions {
  Activation activation;

  bool operator==(const ActivateOptions&) const = default;
  auto values() const {
    return std::tuple(name_of(activation));
  }
};

// The argument is x.
class Activate : public Operation<Activate, ActivateOptions> {
 public:
  using Operation::Operation;

  void eval_cpu(const Arrays& inputs, Arrays& outputs) override;
  Arrays vjp(const Arrays& primals, const Arrays& cotangents, const std::vector<int>& argnums,
             const Arrays& outputs) override;
  OutputForms output_forms(const Arguments& arguments) const;
  DEFINE_NAME(Activate)
};

// The arguments are x and the gradient of the result. Returns that of x. Its own gradient is that
// of the definition.
class ActivateGradient : public Defined<ActivateGradient, ActivateOptions> {
 public:
  using Defined::Defined;

  void eval_cpu(const Arrays& inputs, Arrays& outputs) override;
  OutputForms output_forms(const Arguments& arguments) const;
  DEFINE_NAME(ActivateGradient)
};

}  // namespace mmfree
