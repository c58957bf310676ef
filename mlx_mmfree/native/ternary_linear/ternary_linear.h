#pragma once

#include "mlx/array.h"
#include "runtime/operation.h"

namespace mmfree {

// What a ternary linear layer is trained with, beside products. None of these has a gradient.

// The numbers that the first round of a long sum makes of the sizes of all weights, float32: the
// sums of 64 blocks, and then the rest. Up to 64 weights are all rest.
mx::array size_sums(const mx::array& weight);

// Packs clip(round(weight / scale), -1, 1) for floats (N, D) and a scale (1,) float32. Returns
// uint32 (N, padded D / 16).
mx::array pack_rounded(const mx::array& weight, const mx::array& scale);

// Unpacks trits times their scale, float32 (N, dims).
mx::array unpack_scaled(const mx::array& packed, const mx::array& scale, int dims);

struct NoOptions {
  bool operator==(const NoOptions&) const = default;
};

class SizeSumsOf : public Operation<SizeSumsOf, NoOptions> {
 public:
  using Operation::Operation;

  void eval_cpu(const Arrays& inputs, Arrays& outputs) override;
  OutputForms output_forms(const Arguments& arguments) const;
  DEFINE_NAME(SizeSumsOf)
};

// The arguments are the weight and the scale.
class PackRounded : public Operation<PackRounded, NoOptions> {
 public:
  using Operation::Operation;

  void eval_cpu(const Arrays& inputs, Arrays& outputs) override;
  OutputForms output_forms(const Arguments& arguments) const;
  DEFINE_NAME(PackRounded)
};

struct UnpackOptions {
  int dims;

  bool operator==(const UnpackOptions&) const = default;
};

// The arguments are the packed trits and the scale.
class UnpackScaled : public Operation<UnpackScaled, UnpackOptions> {
 public:
  using Operation::Operation;

  void eval_cpu(const Arrays& inputs, Arrays& outputs) override;
  OutputForms output_forms(const Arguments& arguments) const;
  DEFINE_NAME(UnpackScaled)
};

}  // namespace mmfree
