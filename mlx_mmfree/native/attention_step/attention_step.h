#pragma once

#include <optional>
#include <tuple>
#include <vector>

#include "mlx/array.h"
#include "runtime/defined.h"

namespace mmfree {

namespace mx = mlx::core;

struct AttentionOptions {
  int num_heads;
  bool has_wavelengths, is_interleaved, has_norms;
  float norm_eps;
  int window, sinks;  // window 0: none

  bool operator==(const AttentionOptions&) const = default;
};

// Attention of one token to the slots of a state. `projected` (B, 1, (H + 2G) K) holds query, key
// and value heads; queries and keys are normed and rotated, keys and values written into the
// buffers (B, G, C, K) behind the tokens of `positions` (B, N). Returns y (B, 1, H K) and the new
// keys, values and positions. Computed in float32. The buffers are written in place where nothing
// else holds them.
std::tuple<mx::array, mx::array, mx::array, mx::array> attention_step(
    const mx::array& projected, const mx::array& keys, const mx::array& values,
    const mx::array& positions, int num_heads, const std::optional<mx::array>& wavelengths,
    bool is_interleaved, const std::optional<mx::array>& query_norm,
    const std::optional<mx::array>& key_norm, float norm_eps, int window, int sinks);

// Inputs: projected, keys, values, positions, then the wavelengths, the query norm and the key norm
// where there are such.
class AttentionStep : public Defined<AttentionOptions> {
 public:
  using Defined::Defined;

  void eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override;
  std::vector<mx::Shape> output_shapes(const std::vector<mx::array>& inputs) override;
  DEFINE_NAME(AttentionStep)
};

}  // namespace mmfree
