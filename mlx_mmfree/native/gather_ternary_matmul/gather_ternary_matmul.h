#pragma once

#include <tuple>
#include <vector>

#include "mlx/array.h"
#include "runtime/operation.h"

namespace mmfree {

// y = x T[index]^T for each row: x (..., D) float32, packed trits (E, N, padded D / 16) uint32,
// indices (...) uint32 and y (..., N) float32. Of the matrices, only those are read that some row
// names. A row whose index is not below E gives NaN.
mx::array gather_ternary_matmul(const mx::array& x, const mx::array& weight,
                                const mx::array& indices);

struct GatherOptions {
  bool transposed;  // dx = dy T[index]
  int dims;         // of the result's rows

  bool operator==(const GatherOptions&) const = default;
  auto values() const {
    return std::tuple(transposed, dims);
  }
};

class GatherTernaryMatmul : public Operation<GatherTernaryMatmul, GatherOptions> {
 public:
  using Operation::Operation;

  void eval_cpu(const Arrays& inputs, Arrays& outputs) override;
  Arrays jvp(const Arrays& primals, const Arrays& tangents,
             const std::vector<int>& argnums) override;
  Arrays vjp(const Arrays& primals, const Arrays& cotangents, const std::vector<int>& argnums,
             const Arrays& outputs) override;
  OutputForms output_forms(const Arguments& arguments) const;
  DEFINE_NAME(GatherTernaryMatmul)
};

}  // namespace mmfree
