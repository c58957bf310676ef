#pragma once

#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "bit_linear/kernels.h"
#include "mlx/array.h"
#include "runtime/defined.h"

namespace mmfree {

namespace mx = mlx::core;

// Packed trits (N, padded D / 16) uint32, scale (1,) or (N,) float32, weight of a norm (D,) or
// none.
using ProjectionArrays = std::tuple<mx::array, mx::array, std::optional<mx::array>>;

struct BitLinearOptions {
  std::optional<float> eps;  // of the projections' norms
  bool half_away = false, has_codes = true;
  Activation gate = Activation::none;
  std::optional<float> norm_eps;  // of the norm before them
  bool has_residual = false;
  size_t projections = 1;

  bool operator==(const BitLinearOptions&) const = default;
};

// As `bit_linear` takes it.
std::string name_of(Activation activation);

// u = x or a(x[..., :D]) * x[..., D:], z = RMSNorm(u), y = [codes(RMSNorm_p(z)) T_p^T scale_p /
// s_p]_p
// + residual; computed in float32, result in the dtype of x. All floats may be of any float type.
mx::array bit_linear(const mx::array& x, const std::vector<ProjectionArrays>& projections,
                     std::optional<float> eps, bool half_away, bool has_codes,
                     const std::string& gate, const std::optional<mx::array>& norm,
                     std::optional<float> norm_eps, const std::optional<mx::array>& residual);

// Inputs: x, then weight, scale and, with eps, norm of each projection, then the norm before them
// and the residual where there are such.
class BitLinear : public Defined<BitLinearOptions> {
 public:
  using Defined::Defined;

  void eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override;
  std::vector<mx::Shape> output_shapes(const std::vector<mx::array>& inputs) override;
  DEFINE_NAME(BitLinear)
};

}  // namespace mmfree
