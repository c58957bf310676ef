#pragma once

#include <optional>
#include <tuple>

#include "mlx/array.h"
#include "runtime/operation.h"

namespace mmfree {

// Softmax attention of queries (B, H, L, K) to keys (B, G, N, K) and values (B, G, N, V). H / G
// query heads share each key head. A mask is booleans that broadcast to (B, 1, L, N). Without one,
// a query sees all keys or, if causal, those up to its own place. Returns (B, H, L, V) in the dtype
// of the queries, computed in float32. It lies in memory as (B, L, H, V).
mx::array attention(const mx::array& queries, const mx::array& keys, const mx::array& values,
                    const std::optional<mx::array>& mask, bool is_causal);

struct AttentionOptions {
  bool is_causal;

  bool operator==(const AttentionOptions&) const = default;
  auto values() const {
    return std::tuple(is_causal);
  }
};

// The arguments are queries, keys, values and the mask (B, 1, L, N). Beside the result it returns
// the log of the sum of e^score of each query, float32 (B, H, L), from which the gradient makes the
// weights anew.
class Attention : public Operation<Attention, AttentionOptions> {
 public:
  using Operation::Operation;

  void eval_cpu(const Arrays& inputs, Arrays& outputs) override;
  Arrays vjp(const Arrays& primals, const Arrays& cotangents, const std::vector<int>& argnums,
             const Arrays& outputs) override;
  OutputForms output_forms(const Arguments& arguments) const;
  DEFINE_NAME(Attention)
};

// The arguments are queries, keys, values, the mask, the two results and the gradient of the first
// one, all in float32 but the mask. Returns the gradients of queries, keys and values. Its own
// gradient is that of the definition.
class AttentionGradient : public Defined<AttentionGradient, AttentionOptions> {
 public:
  using Defined::Defined;

  void eval_cpu(const Arrays& inputs, Arrays& outputs) override;
  OutputForms output_forms(const Arguments& arguments) const;
  DEFINE_NAME(AttentionGradient)
};

}  // namespace mmfree
