#include "contiguous.h"

#include <cstring>

#include "mlx/allocator.h"
#include "mlx/backend/cpu/encoder.h"

namespace mmfree {

namespace mx = mlx::core;

namespace {

void copy(const char* from, char* to, const mx::Shape& shape, const mx::Strides& strides,
          size_t item, size_t count) {
  std::vector<int> index(shape.size());
  int64_t offset = 0;
  for (size_t n = 0; n < count; ++n) {
    std::memcpy(to + n * item, from + offset * static_cast<int64_t>(item), item);
    for (size_t axis = shape.size(); axis-- > 0;) {
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

}  // namespace mmfree
