#include "runtime/contiguous.h"

#include <cstring>

#include "mlx/allocator.h"
#include "mlx/backend/common/utils.h"
#include "mlx/backend/cpu/encoder.h"
#include "runtime/float_type.h"

namespace mmfree {

namespace mx = mlx::core;

namespace {

// The items of the last axis are copied at once if they lie one behind the other.
void copy(const char* from, char* to, const mx::Shape& shape, const mx::Strides& strides,
          size_t item, size_t count) {
  size_t axes = shape.size(), bytes = item;
  if (axes > 0 && count > 0 && strides.back() == 1) {
    bytes *= shape.back();
    count /= shape.back();
    --axes;
  }
  std::vector<int> index(axes);
  int64_t offset = 0;
  for (size_t n = 0; n < count; ++n) {
    std::memcpy(to + n * bytes, from + offset * static_cast<int64_t>(item), bytes);
    for (size_t axis = axes; axis-- > 0;) {
      offset += strides[axis];
      if (++index[axis] < shape[axis]) {
        break;
      }
      offset -= strides[axis] * shape[axis];
      index[axis] = 0;
    }
  }
}

}  // namespace

mx::array contiguous(const mx::array& x, mx::Stream stream) {
  if (x.flags().row_contiguous) {
    return x;
  }
  mx::array result(x.shape(), x.dtype(), nullptr, {});
  result.set_data(mx::allocator::malloc(result.nbytes()));
  auto& encoder = mx::cpu::get_command_encoder(stream);
  encoder.add_temporary(result);
  encoder.dispatch([from = x.data<char>(), to = result.data<char>(), shape = x.shape(),
                    strides = x.strides(), item = x.itemsize(),
                    count = x.size()]() { copy(from, to, shape, strides, item, count); });
  return result;
}

void take(const mx::array& input, mx::array& output, mx::Stream stream) {
  if (!input.flags().row_contiguous) {
    output.copy_shared_buffer(contiguous(input, stream));
  } else if (mx::is_donatable(input, output)) {
    output.copy_shared_buffer(input);
  } else {
    output.set_data(mx::allocator::malloc(output.nbytes()));
    mx::cpu::get_command_encoder(stream).dispatch(
        [from = input.data<char>(), to = output.data<char>(), bytes = output.nbytes()]() {
          std::memcpy(to, from, bytes);
        });
  }
}

Floats floats_of(const std::optional<mx::array>& x, mx::Stream stream) {
  if (!x) {
    return {nullptr, FloatType::float32};
  }
  return {contiguous(*x, stream).data<void>(), float_type(x->dtype())};
}

}  // namespace mmfree
