#pragma once

#include <optional>
#include <vector>

#include "mlx/array.h"
#include "mlx/primitives.h"

namespace mmfree {

namespace mx = mlx::core;

// Softmax attention of queries (B, H, L, K) to keys (B, G, N, K) and values (B, G, N, V), of which
// H / G heads each share one. Without a mask, booleans (B, 1, L, N) or less, a query sees all keys
// or, causal, those up to its own place. Returns (B, H, L, V) in the queries' type, computed in
// float32; in memory it is (B, L, H, V).
mx::array attention(const mx::array& queries, const mx::array& keys, const mx::array& values,
                    const std::optional<mx::array>& mask, bool is_causal);

// Inputs: queries, keys, values, then the mask (B, 1, L, N) if there is one.
class Attention : public mx::UnaryPrimitive {
 public:
  Attention(mx::Stream stream, bool is_causal) : UnaryPrimitive(stream), is_causal_(is_causal) {
  }

  void eval_cpu(const std::vector<mx::array>& inputs, mx::array& output) override;
  void eval_gpu(const std::vector<mx::array>& inputs, mx::array& output) override;
  std::pair<std::vector<mx::array>, std::vector<int>> vmap(const std::vector<mx::array>& inputs,
                                                           const std::vector<int>& axes) override;
  std::vector<mx::Shape> output_shapes(const std::vector<mx::array>& inputs) override;
  bool is_equivalent(const mx::Primitive& other) const override;
  DEFINE_NAME(Attention)

 private:
  bool is_causal_;
};

}  // namespace mmfree
