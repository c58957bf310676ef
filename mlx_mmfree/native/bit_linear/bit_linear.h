#pragma once

#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "instruction_sets/kernels.h"
#include "mlx/array.h"
#include "mlx/primitives.h"

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

// u = x or a(x[..., :D]) * x[..., D:], z = RMSNorm(u), y = [codes(RMSNorm_p(z)) T_p^T scale_p /
// s_p]_p
// + residual; computed in float32, result in the dtype of x. All floats may be of any float type.
mx::array bit_linear(const mx::array& x, const std::vector<ProjectionArrays>& projections,
                     std::optional<float> eps, bool half_away, bool has_codes,
                     const std::string& gate, const std::optional<mx::array>& norm,
                     std::optional<float> norm_eps, const std::optional<mx::array>& residual);

// Inputs: x, then weight, scale and, with eps, norm of each projection, then the norm before them
// and the residual where there are such.
class BitLinear : public mx::UnaryPrimitive {
 public:
  BitLinear(mx::Stream stream, const BitLinearOptions& options)
      : UnaryPrimitive(stream), options_(options) {
  }

  void eval_cpu(const std::vector<mx::array>& inputs, mx::array& output) override;
  void eval_gpu(const std::vector<mx::array>& inputs, mx::array& output) override;
  std::vector<mx::array> vjp(const std::vector<mx::array>& primals,
                             const std::vector<mx::array>& cotangents,
                             const std::vector<int>& argnums,
                             const std::vector<mx::array>& outputs) override;
  std::pair<std::vector<mx::array>, std::vector<int>> vmap(const std::vector<mx::array>& inputs,
                                                           const std::vector<int>& axes) override;
  std::vector<mx::Shape> output_shapes(const std::vector<mx::array>& inputs) override;
  bool is_equivalent(const mx::Primitive& other) const override;
  DEFINE_NAME(BitLinear)

 private:
  BitLinearOptions options_;
};

}  // namespace mmfree
