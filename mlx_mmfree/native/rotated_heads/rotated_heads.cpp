#include "rotated_heads/rotated_heads.h"

#include <algorithm>

#include "mlx/allocator.h"
#include "rotated_heads/kernels.h"
#include "runtime/contiguous.h"
#include "runtime/float_type.h"
#include "runtime/kernels.h"
#include "runtime/thread_pool.h"
#include "runtime/workspace.h"

namespace mmfree {

namespace {

// Values of one piece of work. Fewer are done by the caller alone, because another thread wakes up
// too late.
constexpr size_t kPieceValues = 16 << 10;

using Move = void (*)(const TokenHeads&, size_t first, size_t last, float* scratch);

void allocate(Arrays& outputs) {
  for (auto& output : outputs) {
    output.set_data(mx::allocator::malloc(output.nbytes()));
  }
}

void* values_of(const mx::array& x, mx::Stream stream) {
  return const_cast<void*>(contiguous(x, stream).data<void>());
}

// The sizes and the angles. `queries` has the form of the array of queries.
TokenHeads token_heads(const mx::array& queries, const mx::array& cosines, const mx::array& sines,
                       const RotatedHeadsOptions& options, mx::Stream stream) {
  const size_t length = queries.shape(2), dims = queries.shape(3);
  return {length,
          static_cast<size_t>(options.queries),
          static_cast<size_t>(options.groups),
          dims,
          float_type(queries.dtype()),
          nullptr,
          {},
          static_cast<const float*>(values_of(cosines, stream)),
          static_cast<const float*>(values_of(sines, stream)),
          cosines.shape(0) == 1 ? 0 : length * (dims / 2),
          options.is_interleaved};
}

void share(const TokenHeads& heads, size_t tokens, Move move) {
  const size_t own = round_up(2 * heads.dims, 16);
  auto* scratch = static_cast<float*>(workspace(threads() * own * sizeof(float)));
  const size_t values = (heads.queries + 2 * heads.groups) * heads.dims;
  const size_t step = std::max<size_t>(kPieceValues / values, 1);
  parallel_region(tokens, step, threads(), [&](Claims& claims) {
    for (size_t first, last; claims.next(first, last);) {
      move(heads, first, last, scratch + claims.thread() * own);
    }
  });
}

}  // namespace

std::tuple<mx::array, mx::array, mx::array> rotated_heads(const mx::array& projected,
                                                          const mx::array& cosines,
                                                          const mx::array& sines, int num_heads,
                                                          int num_kv_heads, bool is_interleaved) {
  require(num_heads > 0 && num_kv_heads > 0,
          "[rotated_heads] 'num_heads' and 'num_kv_heads' must be positive.");
  const int64_t heads = int64_t{num_heads} + 2 * int64_t{num_kv_heads};
  require(projected.ndim() == 3 && is_float(projected) && projected.shape(2) > 0 &&
              projected.shape(2) % (2 * heads) == 0,
          "[rotated_heads] 'projected' must be floats (B, L, (H + 2G) K) with an even K > 0.");
  const int dims = static_cast<int>(projected.shape(2) / heads);
  for (const auto& angles : {cosines, sines}) {
    require(angles.dtype() == mx::float32 && angles.ndim() == 3 &&
                (angles.shape(0) == 1 || angles.shape(0) == projected.shape(0)) &&
                angles.shape(1) == projected.shape(1) && angles.shape(2) == dims / 2,
            "[rotated_heads] 'cosines' and 'sines' must be float32 (1 or B, L, K / 2).");
  }
  require(cosines.shape(0) == sines.shape(0),
          "[rotated_heads] 'cosines' and 'sines' must have the same shape.");
  const auto outputs =
      RotatedHeads::call({projected, cosines, sines}, {num_heads, num_kv_heads, is_interleaved});
  return {outputs[0], outputs[1], outputs[2]};
}

void RotatedHeads::eval_cpu(const Arrays& inputs, Arrays& outputs) {
  allocate(outputs);
  auto heads = token_heads(outputs[0], inputs[1], inputs[2], options_, stream());
  heads.tokens = values_of(inputs[0], stream());
  for (size_t n = 0; n < 3; ++n) {
    heads.arrays[n] = outputs[n].data<void>();
  }
  const size_t tokens = static_cast<size_t>(inputs[0].shape(0)) * heads.length;
  dispatch(
      [heads, tokens]() { share(heads, tokens, table<RotatedHeadsKernels>(kernels()).split); });
}

Arrays RotatedHeads::vjp(const Arrays& primals, const Arrays& cotangents,
                         const std::vector<int>& argnums, const Arrays& outputs) {
  Arrays wanted;
  for (int argnum : argnums) {
    if (argnum > 0) {
      wanted.push_back(mx::zeros_like(primals[argnum], stream()));
      continue;
    }
    wanted.push_back(RotatedHeadsGradient::call(
        {cotangents[0], cotangents[1], cotangents[2], primals[1], primals[2]}, options_,
        stream())[0]);
  }
  return wanted;
}

OutputForms RotatedHeads::output_forms(const Arguments& arguments) const {
  const auto& tokens = *arguments[0];
  const int batch = tokens.shape(0), length = tokens.shape(1);
  const int dims = tokens.shape(2) / (options_.queries + 2 * options_.groups);
  const mx::Shape own = {batch, options_.groups, length, dims};
  return {{{batch, options_.queries, length, dims}, own, own},
          {tokens.dtype(), tokens.dtype(), tokens.dtype()}};
}

void RotatedHeadsGradient::eval_cpu(const Arrays& inputs, Arrays& outputs) {
  allocate(outputs);
  auto heads = token_heads(inputs[0], inputs[3], inputs[4], options_, stream());
  heads.tokens = outputs[0].data<void>();
  for (size_t n = 0; n < 3; ++n) {
    heads.arrays[n] = values_of(inputs[n], stream());
  }
  const size_t tokens = static_cast<size_t>(inputs[0].shape(0)) * heads.length;
  dispatch([heads, tokens]() { share(heads, tokens, table<RotatedHeadsKernels>(kernels()).join); });
}

OutputForms RotatedHeadsGradient::output_forms(const Arguments& arguments) const {
  const auto& queries = *arguments[0];
  const int heads = options_.queries + 2 * options_.groups;
  return {{{queries.shape(0), queries.shape(2), heads * queries.shape(3)}}, {queries.dtype()}};
}

}  // namespace mmfree
