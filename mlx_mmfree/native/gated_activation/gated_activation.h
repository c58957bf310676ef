#pragma once

#include <optional>
#include <string>
#include <tuple>

#include "gated_activation/activations.h"
#include "mlx/array.h"
#include "runtime/operation.h"

namespace mmfree {

// a(gate) * up for floats (..., D) of one dtype, computed in float32. The result has their dtype,
// but float32 for the square of ReLU, which overflows float16. Without `up`, gate (..., 2 D) holds
// both, the gate first.
mx::array gated_activation(const mx::array& gate, const std::optional<mx::array>& up,
                           const std::string& activation);

struct GatedActivationOptions {
  Activation activation;

  bool operator==(const GatedActivationOptions&) const = default;
  auto values() const {
    return std::tuple(name_of(activation));
  }
};

// The arguments are gate and up, which may be missing.
class GatedActivation : public Operation<GatedActivation, GatedActivationOptions> {
 public:
  using Operation::Operation;

  void eval_cpu(const Arrays& inputs, Arrays& outputs) override;
  Arrays vjp(const Arrays& primals, const Arrays& cotangents, const std::vector<int>& argnums,
             const Arrays& outputs) override;
  OutputForms output_forms(const Arguments& arguments) const;
  DEFINE_NAME(GatedActivation)
};

// The arguments are gate, up and the gradient of the result. Returns the gradients of those of
// the first two that are given. Its own gradient is that of the definition.
class GatedActivationGradient : public Defined<GatedActivationGradient, GatedActivationOptions> {
 public:
  using Defined::Defined;

  void eval_cpu(const Arrays& inputs, Arrays& outputs) override;
  OutputForms output_forms(const Arguments& arguments) const;
  DEFINE_NAME(GatedActivationGradient)
};

}  // namespace mmfree
