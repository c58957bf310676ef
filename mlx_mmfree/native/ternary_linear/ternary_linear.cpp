#include "ternary_linear/ternary_linear.h"

#include <algorithm>
#include <array>

#include "mlx/allocator.h"
#include "runtime/contiguous.h"
#include "runtime/float_type.h"
#include "runtime/kernels.h"
#include "runtime/thread_pool.h"
#include "runtime/workspace.h"
#include "ternary_linear/kernels.h"
#include "ternary_matmul/ternary_matmul.h"

namespace mmfree {

namespace {

// Values of one piece of work. Fewer are done by the caller alone, because another thread wakes up
// too late.
constexpr size_t kPieceValues = 16 << 10;
// Columns of one piece of the sums. A row of a piece is a page of memory.
constexpr size_t kPieceColumns = 1 << 10;
// Blocks of a sum, as `ops/long_sums.py` has them.
constexpr size_t kBlocks = 64;

// The number of sums, after which the rest begins.
size_t columns(size_t size) {
  return size > kBlocks ? size / kBlocks : 0;
}

bool is_scale(const mx::array& scale) {
  return scale.dtype() == mx::float32 && scale.shape() == mx::Shape{1};
}

void add(const SizeSums& sums) {
  const auto& set = table<TernaryLinearKernels>(kernels());
  auto* scratch = static_cast<float*>(workspace(threads() * kPieceColumns * sizeof(float)));
  parallel_region(sums.columns, kPieceColumns, threads(), [&](Claims& claims) {
    for (size_t first, last; claims.next(first, last);) {
      // the caller alone gets all columns at once
      for (; first < last; first += kPieceColumns) {
        set.add_sizes(sums, first, std::min(first + kPieceColumns, last),
                      scratch + claims.thread() * kPieceColumns);
      }
    }
  });
}

size_t rows_of_piece(size_t dims) {
  return std::max<size_t>(kPieceValues / std::max<size_t>(dims, 1), 1);
}

}  // namespace

mx::array size_sums(const mx::array& weight) {
  require(is_float(weight), "[size_sums] 'weight' must be floats.");
  return SizeSumsOf::call({weight}, {})[0];
}

mx::array pack_rounded(const mx::array& weight, const mx::array& scale) {
  require(is_float(weight) && weight.ndim() == 2, "[pack_rounded] 'weight' must be floats (N, D).");
  require(is_scale(scale), "[pack_rounded] 'scale' must be float32 (1,).");
  return PackRounded::call({weight, scale}, {})[0];
}

mx::array unpack_scaled(const mx::array& packed, const mx::array& scale, int dims) {
  require(dims >= 0 && packed.dtype() == mx::uint32 && packed.ndim() == 2 &&
              packed.shape(1) == packed_words(dims),
          "[unpack_scaled] 'packed' must be uint32 (N, D / 16), padded.");
  require(is_scale(scale), "[unpack_scaled] 'scale' must be float32 (1,).");
  return UnpackScaled::call({packed, scale}, {dims})[0];
}

void SizeSumsOf::eval_cpu(const Arrays& inputs, Arrays& outputs) {
  mx::array& output = outputs[0];
  output.set_data(mx::allocator::malloc(output.nbytes()));
  const Floats weight = floats_of(inputs[0], stream());
  const size_t size = inputs[0].size(), count = columns(size), start = kBlocks * count;
  float* sums = output.data<float>();
  dispatch([=]() {
    add({weight, kBlocks, count, sums});
    add({offset(weight, start), 1, size - start, sums + count});
  });
}

OutputForms SizeSumsOf::output_forms(const Arguments& arguments) const {
  const size_t size = arguments[0]->size();
  const size_t count = columns(size);
  return {{{static_cast<int>(count + size - kBlocks * count)}}, {mx::float32}};
}

void PackRounded::eval_cpu(const Arrays& inputs, Arrays& outputs) {
  mx::array& output = outputs[0];
  output.set_data(mx::allocator::malloc(output.nbytes()));
  const mx::array scale = contiguous(inputs[1], stream());
  RowPacker packer{floats_of(inputs[0], stream()), static_cast<size_t>(inputs[0].shape(1)), 0.0f,
                   4 * static_cast<size_t>(output.shape(1)), output.data<uint8_t>()};
  dispatch([packer, rows = output.shape(0), own = scale.data<float>()]() mutable {
    packer.inverse = 1.0f / *own;
    const auto& set = table<TernaryLinearKernels>(kernels());
    parallel_for(rows, rows_of_piece(packer.dims),
                 [&](size_t first, size_t last) { set.pack_rows(packer, first, last); });
  });
}

OutputForms PackRounded::output_forms(const Arguments& arguments) const {
  const auto& shape = arguments[0]->shape();
  return {{{shape[0], static_cast<int>(packed_words(shape[1]))}}, {mx::uint32}};
}

void UnpackScaled::eval_cpu(const Arrays& inputs, Arrays& outputs) {
  mx::array& output = outputs[0];
  output.set_data(mx::allocator::malloc(output.nbytes()));
  const mx::array packed = contiguous(inputs[0], stream()), scale = contiguous(inputs[1], stream());
  RowUnpacker unpacker{packed.data<uint8_t>(), 4 * static_cast<size_t>(packed.shape(1)),
                       static_cast<size_t>(options_.dims), nullptr, output.data<float>()};
  dispatch([unpacker, rows = output.shape(0), own = scale.data<float>()]() mutable {
    std::array<float, 256 * 4> values;
    for (size_t n = 0; n < values.size(); ++n) {
      const int code = n / 4 >> 2 * (n % 4) & 3;
      values[n] = static_cast<float>(code - 1) * *own;
    }
    unpacker.table = values.data();
    const auto& set = table<TernaryLinearKernels>(kernels());
    parallel_for(rows, rows_of_piece(unpacker.dims),
                 [&](size_t first, size_t last) { set.unpack_rows(unpacker, first, last); });
  });
}

OutputForms UnpackScaled::output_forms(const Arguments& arguments) const {
  return {{{arguments[0]->shape(0), options_.dims}}, {mx::float32}};
}

}  // namespace mmfree
