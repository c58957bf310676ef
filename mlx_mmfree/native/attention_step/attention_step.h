#pragma once

#include <optional>
#include <tuple>

#include "mlx/array.h"
#include "runtime/operation.h"

namespace mmfree {

struct AttentionStepOptions {
  int num_heads;
  bool is_interleaved;
  float norm_eps;
  int window, sinks;  // 0: no window

  bool operator==(const AttentionStepOptions&) const = default;
  auto values() const {
    return std::tuple(num_heads, is_interleaved, norm_eps, window, sinks);
  }
};

// Attention of one token to the slots of a state. `projected` (B, 1, (H + 2G) K) holds the query,
// key and value heads. Queries and keys are normed and rotated. Keys and values are written into
// the buffers (B, G, C, K) behind the tokens of `positions` (B, N). Returns y (B, 1, H K) and the
// new keys, values and positions, computed in float32. A buffer that nothing else holds is written
// in place.
std::tuple<mx::array, mx::array, mx::array, mx::array> attention_step(
    const mx::array& projected, const mx::array& keys, const mx::array& values,
    const mx::array& positions, int num_heads, const std::optional<mx::array>& wavelengths,
    bool is_interleaved, const std::optional<mx::array>& query_norm,
    const std::optional<mx::array>& key_norm, float norm_eps, std::optional<int> window, int sinks);

// The arguments are projected, keys, values, positions, wavelengths, query norm and key norm.
class AttentionStep : public Defined<AttentionStep, AttentionStepOptions> {
 public:
  using Defined::Defined;

  void eval_cpu(const Arrays& inputs, Arrays& outputs) override;
  OutputForms output_forms(const Arguments& arguments) const;
  DEFINE_NAME(AttentionStep)
};

}  // namespace mmfree
