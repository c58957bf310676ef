#pragma once

#include <cstdint>
#include <tuple>
#include <vector>

#include "mlx/array.h"
#include "runtime/operation.h"

namespace mmfree {

// The most inputs for which sums of codes, and what they are made of, fit 32 bits with every
// instruction set.
constexpr int kMostCodes = 1 << 22;

// The words of a packed row, which is padded to whole pairs of words.
inline int64_t packed_words(int dims) {
  return (static_cast<int64_t>(dims) + 31) / 32 * 2;
}

// y = x T^T with x (..., D) and y (..., N), both float32, and packed trits (N, padded D / 16)
// uint32. With `codes`, x holds whole numbers in [-128, 127], and a row of anything else gives NaN.
mx::array ternary_matmul(const mx::array& x, const mx::array& weight, bool codes);

struct TernaryMatmulOptions {
  bool codes;

  bool operator==(const TernaryMatmulOptions&) const = default;
  auto values() const {
    return std::tuple(codes);
  }
};

// The gradient has a kernel of its own, because the definition unpacks the weight.
class TernaryMatmul : public Operation<TernaryMatmul, TernaryMatmulOptions> {
 public:
  using Operation::Operation;

  void eval_cpu(const Arrays& inputs, Arrays& outputs) override;
  Arrays jvp(const Arrays& primals, const Arrays& tangents,
             const std::vector<int>& argnums) override;
  Arrays vjp(const Arrays& primals, const Arrays& cotangents, const std::vector<int>& argnums,
             const Arrays& outputs) override;
  OutputForms output_forms(const Arguments& arguments) const;
  DEFINE_NAME(TernaryMatmul)
};

struct TransposedOptions {
  int dims;  // D, of the result

  bool operator==(const TransposedOptions&) const = default;
};

// dx = dy T with dy (..., N) and dx (..., D), both float32. The arguments are dy and the packed
// trits.
class TernaryMatmulTransposed : public Operation<TernaryMatmulTransposed, TransposedOptions> {
 public:
  using Operation::Operation;

  void eval_cpu(const Arrays& inputs, Arrays& outputs) override;
  Arrays jvp(const Arrays& primals, const Arrays& tangents,
             const std::vector<int>& argnums) override;
  Arrays vjp(const Arrays& primals, const Arrays& cotangents, const std::vector<int>& argnums,
             const Arrays& outputs) override;
  OutputForms output_forms(const Arguments& arguments) const;
  DEFINE_NAME(TernaryMatmulTransposed)
};

}  // namespace mmfree
