#include "hadamard/hadamard.h"

#include <numeric>

#include "hadamard/kernels.h"
#include "mlx/allocator.h"
#include "mlx/ops.h"
#include "runtime/contiguous.h"
#include "runtime/float_type.h"
#include "runtime/kernels.h"
#include "runtime/row_loops.h"

namespace mmfree {

namespace {

void transform(const HadamardBlocks& blocks, size_t count) {
  const auto& set = table<HadamardKernels>(kernels());
  for_rows(count, blocks.block, blocks.block, [&](size_t first, size_t last, float* scratch) {
    set.transform(blocks, first, last, scratch);
  });
}

}  // namespace

mx::array hadamard(const mx::array& x, const std::optional<mx::array>& signs, int block,
                   bool inverse) {
  require(block >= 2 && block <= 8192 && (block & (block - 1)) == 0,
          "[hadamard] 'block' must be a power of two from 2 to 8192.");
  require(x.ndim() >= 1 && x.shape(-1) > 0 && x.shape(-1) % block == 0 && is_float(x),
          "[hadamard] 'x' must be floats (..., D), D a multiple of 'block'.");
  require(!signs || (signs->dtype() == mx::float32 && signs->shape() == mx::Shape{x.shape(-1)}),
          "[hadamard] 'signs' must be float32 (D,).");
  return Hadamard::call({x, signs}, {block, inverse})[0];
}

void Hadamard::eval_cpu(const Arrays& inputs, Arrays& outputs) {
  outputs[0].set_data(mx::allocator::malloc(outputs[0].nbytes()));
  const auto given = arguments(inputs);
  const HadamardBlocks blocks{floats_of(given[0], stream()),
                              given[1] ? contiguous(*given[1], stream()).data<float>() : nullptr,
                              static_cast<size_t>(given[0]->shape(-1)),
                              static_cast<size_t>(options_.block),
                              options_.inverse,
                              outputs[0].data<void>()};
  dispatch([blocks, count = outputs[0].size() / blocks.block]() { transform(blocks, count); });
}

Arrays Hadamard::vjp(const Arrays& primals, const Arrays& cotangents,
                     const std::vector<int>& argnums, const Arrays& outputs) {
  const auto given = arguments(primals);
  // the transform is symmetric
  const auto transformed = [&](const mx::array& x, const std::optional<mx::array>& signs) {
    return call({x, signs}, {options_.block, !options_.inverse}, stream())[0];
  };
  Arrays wanted;
  for (int argnum : argnums) {
    if (argnum == 0) {
      wanted.push_back(transformed(cotangents[0], given[1]));
      continue;
    }
    const auto& moved = options_.inverse ? primals[0] : cotangents[0];
    const auto& kept = options_.inverse ? cotangents[0] : primals[0];
    const auto product =
        mx::multiply(mx::astype(kept, mx::float32, stream()),
                     mx::astype(transformed(moved, {}), mx::float32, stream()), stream());
    std::vector<int> axes(product.ndim() - 1);
    std::iota(axes.begin(), axes.end(), 0);
    wanted.push_back(mx::sum(product, axes, false, stream()));
  }
  return wanted;
}

OutputForms Hadamard::output_forms(const Arguments& arguments) const {
  return {{arguments[0]->shape()}, {arguments[0]->dtype()}};
}

}  // namespace mmfree
