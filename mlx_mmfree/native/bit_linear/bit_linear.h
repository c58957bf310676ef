#pragma once

#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "bit_linear/kernels.h"
#include "gated_activation/activations.h"
#include "mlx/array.h"
#include "runtime/operation.h"

namespace mmfree {

// Packed trits (N, padded D / 16) uint32, a scale (1,) or (N,) float32, and the weight of a norm
// (D,) or none.
using ProjectionArrays = std::tuple<mx::array, mx::array, std::optional<mx::array>>;

struct BitLinearOptions {
  std::optional<float> eps;  // of the projections' norms
  bool half_away = false, has_codes = true;
  Activation gate = Activation::none;
  std::optional<float> norm_eps;  // of the norm before them

  bool operator==(const BitLinearOptions&) const = default;
  auto values() const {
    return std::tuple(eps, half_away, has_codes, name_of(gate), norm_eps);
  }
};

// u = x or a(x[..., :D]) * x[..., D:], z = RMSNorm(u) and
// y = [codes(RMSNorm_p(z)) T_p^T scale_p / s_p]_p + residual, computed in float32. The result has
// the dtype of x. All floats may be of any float type.
mx::array bit_linear(const mx::array& x, const std::vector<ProjectionArrays>& projections,
                     std::optional<float> eps, bool half_away, bool has_codes,
                     const std::string& gate, const std::optional<mx::array>& norm,
                     std::optional<float> norm_eps, const std::optional<mx::array>& residual);

// The arguments are x, the norm before the projections and the residual, then the weight, the scale
// and the norm of each projection.
class BitLinear : public Defined<BitLinear, BitLinearOptions> {
 public:
  using Defined::Defined;

  void eval_cpu(const Arrays& inputs, Arrays& outputs) override;
  OutputForms output_forms(const Arguments& arguments) const;
  DEFINE_NAME(BitLinear)
};

}  // namespace mmfree
