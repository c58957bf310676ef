#pragma once

#include <tuple>

#include "mlx/array.h"
#include "runtime/operation.h"

namespace mmfree {

// One step of AdamW for a parameter, its gradient and its moments, float32 of one shape. `factors`,
// float32 (3,), multiply the parameter, the first moment and the root of the second. Returns the
// new parameter and moments.
std::tuple<mx::array, mx::array, mx::array> adamw(const mx::array& parameter,
                                                  const mx::array& gradient, const mx::array& m,
                                                  const mx::array& v, const mx::array& factors,
                                                  double b1, double b2, float eps);

struct AdamwOptions {
  double b1, b2;
  float eps;

  bool operator==(const AdamwOptions&) const = default;
};

// The arguments are the parameter, the gradient, the moments and the factors. It has no gradient.
class Adamw : public Operation<Adamw, AdamwOptions> {
 public:
  using Operation::Operation;

  void eval_cpu(const Arrays& inputs, Arrays& outputs) override;
  OutputForms output_forms(const Arguments& arguments) const;
  DEFINE_NAME(Adamw)
};

}  // namespace mmfree
