#pragma once

#include <optional>
#include <tuple>

#include "mlx/array.h"
#include "runtime/operation.h"

namespace mmfree {

// The signed Walsh-Hadamard transform of each block of the last axis, or its inverse, for floats
// (..., D) and signs, float32 (D,), which may be missing. Computed in float32; the result has the
// dtype of x.
mx::array hadamard(const mx::array& x, const std::optional<mx::array>& signs, int block,
                   bool inverse);

struct HadamardOptions {
  int block;
  bool inverse;

  bool operator==(const HadamardOptions&) const = default;
  auto values() const {
    return std::tuple(block, inverse);
  }
};

// The arguments are x and the signs.
class Hadamard : public Operation<Hadamard, HadamardOptions> {
 public:
  using Operation::Operation;

  void eval_cpu(const Arrays& inputs, Arrays& outputs) override;
  Arrays vjp(const Arrays& primals, const Arrays& cotangents, const std::vector<int>& argnums,
             const Arrays& outputs) override;
  OutputForms output_forms(const Arguments& arguments) const;
  DEFINE_NAME(Hadamard)
};

}  // namespace mmfree
