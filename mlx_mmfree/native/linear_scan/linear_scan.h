#pragma once

#include <utility>

#include "mlx/array.h"
#include "runtime/operation.h"

namespace mmfree {

// s_t = f_t * s_{t-1} + i_t with f, i (B, L, D) and s0 (B, D), all float32. Each element takes one
// multiplication and one addition. Returns all states (B, L, D) and the last one (B, D).
std::pair<mx::array, mx::array> linear_scan(const mx::array& f, const mx::array& i,
                                            const mx::array& s0);

struct LinearScanOptions {
  bool operator==(const LinearScanOptions&) const = default;
};

// The gradient has a kernel of its own, because the definition keeps several arrays for each step.
class LinearScan : public Operation<LinearScan, LinearScanOptions> {
 public:
  using Operation::Operation;

  void eval_cpu(const Arrays& inputs, Arrays& outputs) override;
  Arrays vjp(const Arrays& primals, const Arrays& cotangents, const std::vector<int>& argnums,
             const Arrays& outputs) override;
  OutputForms output_forms(const Arguments& arguments) const;
  DEFINE_NAME(LinearScan)
};

// The arguments are f, s0, states, d_states and d_final. Returns d_f and d_i (B, L, D), and d_s0
// (B, D).
class LinearScanGradient : public Operation<LinearScanGradient, LinearScanOptions> {
 public:
  using Operation::Operation;

  void eval_cpu(const Arrays& inputs, Arrays& outputs) override;
  OutputForms output_forms(const Arguments& arguments) const;
  DEFINE_NAME(LinearScanGradient)
};

}  // namespace mmfree
