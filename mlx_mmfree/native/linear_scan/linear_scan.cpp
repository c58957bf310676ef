#include "linear_scan/linear_scan.h"

#include <algorithm>
#include <memory>
#include <stdexcept>

#include "mlx/allocator.h"
#include "mlx/backend/cpu/encoder.h"
#include "mlx/ops.h"
#include "mlx/utils.h"

// One portable library whose loops are compiled for several instruction sets and chosen at load.
#if defined(__x86_64__) && defined(__linux__)
#define MMFREE_CLONES __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define MMFREE_CLONES
#endif

namespace mmfree {

namespace {

using Arrays = std::vector<mx::array>;
using Shapes = std::vector<mx::Shape>;

struct Size {
  size_t batch, length, dims;

  explicit Size(const mx::Shape& shape) : batch(shape[0]), length(shape[1]), dims(shape[2]) {
  }
};

void allocate(Arrays& outputs) {
  for (auto& output : outputs) {
    output.set_data(mx::allocator::malloc(output.nbytes()));
  }
}

[[noreturn]] void refuse_gpu() {
  throw std::runtime_error("[linear_scan] the native backend runs on the CPU only.");
}

Arrays make(std::shared_ptr<mx::Primitive> primitive, Shapes shapes, const Arrays& inputs) {
  Arrays contiguous;
  for (const auto& input : inputs) {
    contiguous.push_back(mx::contiguous(input, false, primitive->stream()));
  }
  std::vector<mx::Dtype> dtypes(shapes.size(), mx::float32);
  return mx::array::make_arrays(std::move(shapes), dtypes, primitive, contiguous);
}

// Makes the mapped axis part of the batch: (V, B, ...) -> (V * B, ...), repeating unmapped inputs.
std::pair<Arrays, std::vector<int>> batched(mx::Primitive& primitive, const Arrays& inputs,
                                            const std::vector<int>& axes,
                                            Arrays (*call)(const Arrays&, mx::Stream)) {
  auto stream = primitive.stream();
  int mapped = 0;
  for (size_t k = 0; k < inputs.size(); ++k) {
    if (axes[k] >= 0) {
      mapped = inputs[k].shape(axes[k]);
    }
  }
  Arrays flat;
  for (size_t k = 0; k < inputs.size(); ++k) {
    auto x = axes[k] >= 0 ? mx::moveaxis(inputs[k], axes[k], 0, stream)
                          : mx::expand_dims(inputs[k], 0, stream);
    auto shape = x.shape();
    shape[0] = mapped;
    flat.push_back(mx::flatten(mx::broadcast_to(x, shape, stream), 0, 1, stream));
  }
  auto outputs = call(flat, stream);
  for (auto& output : outputs) {
    output = mx::unflatten(output, 0, {mapped, output.shape(0) / mapped}, stream);
  }
  return {outputs, std::vector<int>(outputs.size(), 0)};
}

Arrays call_scan(const Arrays& inputs, mx::Stream stream) {
  auto primitive = std::make_shared<LinearScan>(stream);
  return make(primitive, primitive->output_shapes(inputs), inputs);
}

Arrays call_gradient(const Arrays& inputs, mx::Stream stream) {
  auto primitive = std::make_shared<LinearScanGradient>(stream);
  return make(primitive, primitive->output_shapes(inputs), inputs);
}

}  // namespace

// f, i, states: (L, D) of one batch row, s0, final: (D,)
MMFREE_CLONES
void scan_row(const float* __restrict__ f, const float* __restrict__ i, const float* s0,
              float* states, float* final, size_t length, size_t dims) {
  const float* previous = s0;
  for (size_t t = 0; t < length; ++t) {
    float* __restrict__ current = states + t * dims;
    for (size_t d = 0; d < dims; ++d) {
      current[d] = f[t * dims + d] * previous[d] + i[t * dims + d];
    }
    previous = current;
  }
  std::copy_n(previous, dims, final);
}

// f, states, d_states, d_f, d_i: (L, D) of one batch row, s0, d_final, d_s0: (D,)
MMFREE_CLONES
void scan_gradient_row(const float* __restrict__ f, const float* s0, const float* states,
                       const float* __restrict__ d_states, const float* __restrict__ d_final,
                       float* __restrict__ d_f, float* __restrict__ d_i, float* __restrict__ d_s0,
                       size_t length, size_t dims) {
  std::copy_n(d_final, dims, d_s0);
  for (size_t t = length; t-- > 0;) {
    const float* previous = t > 0 ? states + (t - 1) * dims : s0;
    for (size_t d = 0; d < dims; ++d) {
      float gradient = d_s0[d] + d_states[t * dims + d];
      d_i[t * dims + d] = gradient;
      d_f[t * dims + d] = gradient * previous[d];
      d_s0[d] = gradient * f[t * dims + d];
    }
  }
}

std::pair<mx::array, mx::array> linear_scan(const mx::array& f, const mx::array& i,
                                            const mx::array& s0) {
  if (f.ndim() != 3 || i.shape() != f.shape() || s0.shape() != mx::Shape{f.shape(0), f.shape(2)}) {
    throw std::invalid_argument(
        "[linear_scan] 'f' and 'i' must be (B, L, D) and 's0' (B, D) of the same sizes.");
  }
  if (f.dtype() != mx::float32 || i.dtype() != mx::float32 || s0.dtype() != mx::float32) {
    throw std::invalid_argument("[linear_scan] 'f', 'i' and 's0' must be float32.");
  }
  auto outputs = call_scan({f, i, s0}, mx::to_stream({}));
  return {outputs[0], outputs[1]};
}

void LinearScan::eval_cpu(const Arrays& inputs, Arrays& outputs) {
  allocate(outputs);
  auto& encoder = mx::cpu::get_command_encoder(stream());
  encoder.dispatch([size = Size(inputs[0].shape()), f = inputs[0].data<float>(),
                    i = inputs[1].data<float>(), s0 = inputs[2].data<float>(),
                    states = outputs[0].data<float>(), final = outputs[1].data<float>()]() {
    for (size_t b = 0; b < size.batch; ++b) {
      size_t row = b * size.length * size.dims, state = b * size.dims;
      scan_row(f + row, i + row, s0 + state, states + row, final + state, size.length, size.dims);
    }
  });
}

void LinearScan::eval_gpu(const Arrays&, Arrays&) {
  refuse_gpu();
}

Shapes LinearScan::output_shapes(const Arrays& inputs) {
  return {inputs[0].shape(), inputs[2].shape()};
}

std::pair<Arrays, std::vector<int>> LinearScan::vmap(const Arrays& inputs,
                                                     const std::vector<int>& axes) {
  return batched(*this, inputs, axes, call_scan);
}

Arrays LinearScan::vjp(const Arrays& primals, const Arrays& cotangents,
                       const std::vector<int>& argnums, const Arrays& outputs) {
  auto gradients =
      call_gradient({primals[0], primals[2], outputs[0], cotangents[0], cotangents[1]}, stream());
  Arrays wanted;
  for (int argnum : argnums) {
    wanted.push_back(gradients[argnum]);
  }
  return wanted;
}

void LinearScanGradient::eval_cpu(const Arrays& inputs, Arrays& outputs) {
  allocate(outputs);
  auto& encoder = mx::cpu::get_command_encoder(stream());
  encoder.dispatch([size = Size(inputs[0].shape()), f = inputs[0].data<float>(),
                    s0 = inputs[1].data<float>(), states = inputs[2].data<float>(),
                    d_states = inputs[3].data<float>(), d_final = inputs[4].data<float>(),
                    d_f = outputs[0].data<float>(), d_i = outputs[1].data<float>(),
                    d_s0 = outputs[2].data<float>()]() {
    for (size_t b = 0; b < size.batch; ++b) {
      size_t row = b * size.length * size.dims, state = b * size.dims;
      scan_gradient_row(f + row, s0 + state, states + row, d_states + row, d_final + state,
                        d_f + row, d_i + row, d_s0 + state, size.length, size.dims);
    }
  });
}

void LinearScanGradient::eval_gpu(const Arrays&, Arrays&) {
  refuse_gpu();
}

Shapes LinearScanGradient::output_shapes(const Arrays& inputs) {
  return {inputs[0].shape(), inputs[0].shape(), inputs[1].shape()};
}

std::pair<Arrays, std::vector<int>> LinearScanGradient::vmap(const Arrays& inputs,
                                                             const std::vector<int>& axes) {
  return batched(*this, inputs, axes, call_gradient);
}

}  // namespace mmfree
