#pragma once

#include <optional>
#include <tuple>
#include <utility>

#include "mlx/array.h"
#include "runtime/operation.h"

namespace mmfree {

// S_t = diag(f_t) S_{t-1} + k_t^T (v_t - a_t S_{t-1}) and o_t = q_t S_t with q, k, a (B, H, L, K),
// v (B, H, L, V), f (B, H, L, K) or (B, H, L, 1), and the state (B, H, K, V), all float32 and not
// empty. With b (B, H, L, K), S_t = diag(f_t) S_{t-1} + k_t^T v_t - b_t^T (a_t S_{t-1}).
// Returns o (B, H, L, V), which lies in memory as (B, L, H, V), and the last state.
std::pair<mx::array, mx::array> gated_delta_rule(const mx::array& q, const mx::array& k,
                                                 const mx::array& v, const mx::array& a,
                                                 const mx::array& f, const mx::array& state,
                                                 const std::optional<mx::array>& b);

struct GatedDeltaRuleOptions {
  bool has_removal;

  bool operator==(const GatedDeltaRuleOptions&) const = default;
  auto values() const {
    return std::tuple(has_removal);
  }
};

// The arguments are q, k, v, a, f, the state and b.
class GatedDeltaRule : public Operation<GatedDeltaRule, GatedDeltaRuleOptions> {
 public:
  using Operation::Operation;

  void eval_cpu(const Arrays& inputs, Arrays& outputs) override;
  Arrays vjp(const Arrays& primals, const Arrays& cotangents, const std::vector<int>& argnums,
             const Arrays& outputs) override;
  OutputForms output_forms(const Arguments& arguments) const;
  DEFINE_NAME(GatedDeltaRule)
};

// The arguments are q, k, v, a, f, the state, the gradients of both results and b. Returns the
// gradients of all arguments of the operation. Its own gradient is that of the definition.
class GatedDeltaRuleGradient : public Defined<GatedDeltaRuleGradient, GatedDeltaRuleOptions> {
 public:
  using Defined::Defined;

  void eval_cpu(const Arrays& inputs, Arrays& outputs) override;
  OutputForms output_forms(const Arguments& arguments) const;
  DEFINE_NAME(GatedDeltaRuleGradient)
};

}  // namespace mmfree
