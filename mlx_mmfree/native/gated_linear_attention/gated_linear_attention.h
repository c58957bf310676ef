#pragma once

#include <optional>
#include <tuple>
#include <utility>

#include "mlx/array.h"
#include "runtime/operation.h"

namespace mmfree {

// S_t = diag(f_t) S_{t-1} + k_t^T v_t and o_t = q_t S_t with q, k (B, H, L, K), v (B, H, L, V), f
// (B, H, L, K), (B, H, L, 1) or none, and the state (B, H, K, V), all float32 and not empty.
// Returns o (B, H, L, V), which lies in memory as (B, L, H, V), and the last state.
std::pair<mx::array, mx::array> gated_linear_attention(const mx::array& q, const mx::array& k,
                                                       const mx::array& v,
                                                       const std::optional<mx::array>& f,
                                                       const mx::array& state);

// The rule of its gradient's own gradient is given for calls with gates or without.
struct GatedLinearAttentionOptions {
  bool has_gates;

  bool operator==(const GatedLinearAttentionOptions&) const = default;
  auto values() const {
    return std::tuple(has_gates);
  }
};

// The arguments are q, k, v, the state and f.
class GatedLinearAttention : public Operation<GatedLinearAttention, GatedLinearAttentionOptions> {
 public:
  using Operation::Operation;

  void eval_cpu(const Arrays& inputs, Arrays& outputs) override;
  Arrays vjp(const Arrays& primals, const Arrays& cotangents, const std::vector<int>& argnums,
             const Arrays& outputs) override;
  OutputForms output_forms(const Arguments& arguments) const;
  DEFINE_NAME(GatedLinearAttention)
};

// The arguments are q, k, v, the state, the gradients of both results and f. Returns the gradients
// of q, k, v, the state and, if there are any, the gates. Its own gradient is that of the
// definition.
class GatedLinearAttentionGradient
    : public Defined<GatedLinearAttentionGradient, GatedLinearAttentionOptions> {
 public:
  using Defined::Defined;

  void eval_cpu(const Arrays& inputs, Arrays& outputs) override;
  OutputForms output_forms(const Arguments& arguments) const;
  DEFINE_NAME(GatedLinearAttentionGradient)
};

}  // namespace mmfree
