#pragma once

#include <tuple>

#include "mlx/array.h"
#include "runtime/operation.h"

namespace mmfree {

// Splits projected tokens (B, L, (H + 2G) K) into queries (B, H, L, K), keys and values (B, G, L,
// K), and rotates queries and keys by the angles whose cosines and sines, float32 (1 or B, L, K /
// 2), are given.
std::tuple<mx::array, mx::array, mx::array> rotated_heads(const mx::array& projected,
                                                          const mx::array& cosines,
                                                          const mx::array& sines, int num_heads,
                                                          int num_kv_heads, bool is_interleaved);

struct RotatedHeadsOptions {
  int queries, groups;
  bool is_interleaved;

  bool operator==(const RotatedHeadsOptions&) const = default;
  auto values() const {
    return std::tuple(queries, groups, is_interleaved);
  }
};

// The arguments are the tokens, the cosines and the sines.
class RotatedHeads : public Operation<RotatedHeads, RotatedHeadsOptions> {
 public:
  using Operation::Operation;

  void eval_cpu(const Arrays& inputs, Arrays& outputs) override;
  Arrays vjp(const Arrays& primals, const Arrays& cotangents, const std::vector<int>& argnums,
             const Arrays& outputs) override;
  OutputForms output_forms(const Arguments& arguments) const;
  DEFINE_NAME(RotatedHeads)
};

// The arguments are the gradients of queries, keys and values, the cosines and the sines. Returns
// the gradient of the tokens. Its own gradient is that of the definition.
class RotatedHeadsGradient : public Defined<RotatedHeadsGradient, RotatedHeadsOptions> {
 public:
  using Defined::Defined;

  void eval_cpu(const Arrays& inputs, Arrays& outputs) override;
  OutputForms output_forms(const Arguments& arguments) const;
  DEFINE_NAME(RotatedHeadsGradient)
};

}  // namespace mmfree
