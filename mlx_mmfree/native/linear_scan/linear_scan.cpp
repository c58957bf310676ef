#include "linear_scan/linear_scan.h"

#include <algorithm>

#include "mlx/allocator.h"
#include "runtime/contiguous.h"
#include "runtime/thread_pool.h"

// These loops are compiled for several instruction sets, and the loader chooses one.
#if defined(__x86_64__) && defined(__linux__)
#define MMFREE_CLONES __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define MMFREE_CLONES
#endif

namespace mmfree {

namespace {

// Dims of one item of work, whole lines of the cache.
constexpr size_t kItemDims = 128;
// Numbers of one piece of work. Fewer are done by the caller alone, because another thread wakes up
// too late.
constexpr size_t kPieceValues = 16 << 10;

struct Size {
  size_t batch, length, dims;

  explicit Size(const mx::Shape& shape) : batch(shape[0]), length(shape[1]), dims(shape[2]) {
  }
};

// An array (B, L, D) whose rows and steps lie apart by any distance, none where it is broadcast.
struct Steps {
  const float* data;
  size_t row, step;

  explicit Steps(const mx::array& x)
      : data(x.data<float>()), row(distance(x, 0)), step(distance(x, 1)) {
  }

 private:
  static size_t distance(const mx::array& x, int axis) {
    return x.shape(axis) == 1 ? 0 : static_cast<size_t>(x.strides(axis));
  }
};

// The array itself if the numbers of each step lie one behind the other, else a copy.
mx::array with_steps(const mx::array& x, mx::Stream stream) {
  const bool is_forward = x.strides(0) >= 0 && x.strides(1) >= 0;
  return is_forward && (x.shape(2) == 1 || x.strides(2) == 1) ? x : contiguous(x, stream);
}

// Calls scan(batch row, first channel, channels) for all rows.
template <class F>
void share(const Size& size, F&& scan) {
  const size_t blocks = (size.dims + kItemDims - 1) / kItemDims, items = size.batch * blocks;
  const size_t least = kPieceValues / (std::max<size_t>(size.length, 1) * kItemDims);
  const size_t step = threads() == 1 ? items : std::max<size_t>(least, 1);
  parallel_for(items, step, [&](size_t item, size_t last) {
    while (item < last) {
      const size_t row = item / blocks, end = std::min(last, (row + 1) * blocks);
      const size_t first = item % blocks * kItemDims;
      const size_t stop = std::min((end - row * blocks) * kItemDims, size.dims);
      scan(row, first, stop - first);
      item = end;
    }
  });
}

void allocate(Arrays& outputs) {
  for (auto& output : outputs) {
    output.set_data(mx::allocator::malloc(output.nbytes()));
  }
}

}  // namespace

// f, i, states: (L, width), steps `f_step`, `i_step` and `dims` numbers apart, s0, final: (width,)
MMFREE_CLONES
void scan_row(const float* __restrict__ f, size_t f_step, const float* __restrict__ i,
              size_t i_step, const float* s0, float* states, float* final, size_t length,
              size_t dims, size_t width) {
  const float* previous = s0;
  for (size_t t = 0; t < length; ++t) {
    float* __restrict__ current = states + t * dims;
    for (size_t d = 0; d < width; ++d) {
      current[d] = f[t * f_step + d] * previous[d] + i[t * i_step + d];
    }
    previous = current;
  }
  std::copy_n(previous, width, final);
}

// f: (L, width), steps `f_step` numbers apart, states, d_states, d_f, d_i: (L, width), steps `dims`
// numbers apart, s0, d_final, d_s0: (width,)
MMFREE_CLONES
void scan_gradient_row(const float* __restrict__ f, size_t f_step, const float* s0,
                       const float* states, const float* __restrict__ d_states,
                       const float* __restrict__ d_final, float* __restrict__ d_f,
                       float* __restrict__ d_i, float* __restrict__ d_s0, size_t length,
                       size_t dims, size_t width) {
  std::copy_n(d_final, width, d_s0);
  for (size_t t = length; t-- > 0;) {
    const float* previous = t > 0 ? states + (t - 1) * dims : s0;
    for (size_t d = 0; d < width; ++d) {
      float gradient = d_s0[d] + d_states[t * dims + d];
      d_i[t * dims + d] = gradient;
      d_f[t * dims + d] = gradient * previous[d];
      d_s0[d] = gradient * f[t * f_step + d];
    }
  }
}

std::pair<mx::array, mx::array> linear_scan(const mx::array& f, const mx::array& i,
                                            const mx::array& s0) {
  require(
      f.ndim() == 3 && i.shape() == f.shape() && s0.shape() == mx::Shape{f.shape(0), f.shape(2)},
      "[linear_scan] 'f' and 'i' must be (B, L, D) and 's0' (B, D) of the same sizes.");
  require(f.dtype() == mx::float32 && i.dtype() == mx::float32 && s0.dtype() == mx::float32,
          "[linear_scan] 'f', 'i' and 's0' must be float32.");
  const auto outputs = LinearScan::call({f, i, s0}, {});
  return {outputs[0], outputs[1]};
}

void LinearScan::eval_cpu(const Arrays& inputs, Arrays& outputs) {
  allocate(outputs);
  const auto f = with_steps(inputs[0], stream()), i = with_steps(inputs[1], stream());
  const auto s0 = contiguous(inputs[2], stream());
  dispatch([size = Size(inputs[0].shape()), f = Steps(f), i = Steps(i), s0 = s0.data<float>(),
            states = outputs[0].data<float>(), final = outputs[1].data<float>()]() {
    share(size, [&](size_t row, size_t first, size_t width) {
      const size_t state = row * size.dims + first;
      scan_row(f.data + row * f.row + first, f.step, i.data + row * i.row + first, i.step,
               s0 + state, states + row * size.length * size.dims + first, final + state,
               size.length, size.dims, width);
    });
  });
}

Arrays LinearScan::vjp(const Arrays& primals, const Arrays& cotangents,
                       const std::vector<int>& argnums, const Arrays& outputs) {
  const auto gradients = LinearScanGradient::call(
      {primals[0], primals[2], outputs[0], cotangents[0], cotangents[1]}, {}, stream());
  Arrays wanted;
  for (int argnum : argnums) {
    wanted.push_back(gradients[argnum]);
  }
  return wanted;
}

OutputForms LinearScan::output_forms(const Arguments& arguments) const {
  return {{arguments[0]->shape(), arguments[2]->shape()}, {mx::float32, mx::float32}};
}

void LinearScanGradient::eval_cpu(const Arrays& inputs, Arrays& outputs) {
  allocate(outputs);
  const auto f = with_steps(inputs[0], stream());
  const auto data = [&](size_t n) { return contiguous(inputs[n], stream()).data<float>(); };
  dispatch([size = Size(inputs[0].shape()), f = Steps(f), s0 = data(1), states = data(2),
            d_states = data(3), d_final = data(4), d_f = outputs[0].data<float>(),
            d_i = outputs[1].data<float>(), d_s0 = outputs[2].data<float>()]() {
    share(size, [&](size_t row, size_t first, size_t width) {
      const size_t state = row * size.dims + first;
      const size_t start = row * size.length * size.dims + first;
      scan_gradient_row(f.data + row * f.row + first, f.step, s0 + state, states + start,
                        d_states + start, d_final + state, d_f + start, d_i + start, d_s0 + state,
                        size.length, size.dims, width);
    });
  });
}

OutputForms LinearScanGradient::output_forms(const Arguments& arguments) const {
  const auto &f = arguments[0]->shape(), &s0 = arguments[1]->shape();
  return {{f, f, s0}, {mx::float32, mx::float32, mx::float32}};
}

}  // namespace mmfree
