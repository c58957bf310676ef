#include "bit_linear/bit_linear.h"

#include <limits>
#include <memory>
#include <numbers>
#include <stdexcept>

#include "bit_linear/project.h"
#include "mlx/allocator.h"
#include "mlx/backend/cpu/encoder.h"
#include "mlx/fast.h"
#include "mlx/ops.h"
#include "mlx/transforms.h"
#include "mlx/utils.h"
#include "runtime/contiguous.h"
#include "runtime/float_type.h"
#include "ternary_matmul/ternary_matmul.h"

namespace mmfree {

namespace {

using Arrays = std::vector<mx::array>;
using Shapes = std::vector<mx::Shape>;

// Where each array lies among the inputs of the primitive.
struct Positions {
  size_t stride, projections;
  bool has_norms, has_norm, has_residual;

  explicit Positions(const BitLinearOptions& options)
      : stride(options.eps ? 3 : 2),
        projections(options.projections),
        has_norms(options.eps.has_value()),
        has_norm(options.norm_eps.has_value()),
        has_residual(options.has_residual) {
  }
  size_t weight(size_t p) const {
    return 1 + stride * p;
  }
  size_t scale(size_t p) const {
    return weight(p) + 1;
  }
  size_t own_norm(size_t p) const {
    return weight(p) + 2;
  }
  size_t norm() const {
    return weight(projections);
  }
  size_t residual() const {
    return norm() + has_norm;
  }
  bool is_weight(size_t input) const {
    return input > 0 && input < norm() && (input - 1) % stride == 0;
  }
};

Activation activation(const std::string& name) {
  for (const auto& [known, value] :
       {std::pair("", Activation::none), std::pair("silu", Activation::silu),
        std::pair("relu2", Activation::relu2), std::pair("gelu", Activation::gelu),
        std::pair("relu", Activation::relu)}) {
    if (name == known) {
      return value;
    }
  }
  throw std::invalid_argument("[bit_linear] 'gate' is unknown.");
}

mx::array activate(const mx::array& x, Activation gate, mx::Stream s) {
  const auto zero = mx::array(0.0f);
  switch (gate) {
    case Activation::silu:
      return mx::multiply(x, mx::sigmoid(x, s), s);
    case Activation::relu2:
      return mx::square(mx::maximum(x, zero, s), s);
    case Activation::gelu: {
      const auto argument =
          mx::multiply(x, mx::array(static_cast<float>(1 / std::numbers::sqrt2)), s);
      return mx::multiply(mx::multiply(x, mx::array(0.5f), s),
                          mx::add(mx::erf(argument, s), mx::array(1.0f), s), s);
    }
    case Activation::relu:
      return mx::maximum(x, zero, s);
    default:
      return x;
  }
}

mx::array float32(const mx::array& x, mx::Stream s) {
  return mx::astype(x, mx::float32, s);
}

// 8-bit codes of y, with the gradient of y s, and s.
std::pair<mx::array, mx::array> quantize(const mx::array& y, bool half_away, mx::Stream s) {
  const auto most = mx::max(mx::abs(mx::stop_gradient(y, s), s), -1, true, s);
  const auto scale = mx::divide(mx::array(127.0f), mx::maximum(most, mx::array(1e-5f), s), s);
  const auto scaled = mx::multiply(y, scale, s);
  // the float just below 0.5 leaves 0.49999997 at 0
  const auto raised = mx::add(mx::abs(scaled, s), mx::array(0.49999997f), s);
  const auto codes =
      half_away ? mx::multiply(mx::sign(scaled, s), mx::floor(raised, s), s) : mx::round(scaled, s);
  // exactly the codes: the bracket is zero
  const auto zero = mx::subtract(scaled, mx::stop_gradient(scaled, s), s);
  return {mx::add(mx::stop_gradient(codes, s), zero, s), scale};
}

// The same in differentiable operations.
mx::array compose(const Arrays& inputs, const BitLinearOptions& options, mx::Stream s) {
  const Positions at(options);
  auto z = float32(inputs[0], s);
  if (options.gate != Activation::none) {
    const auto halves = mx::split(z, 2, -1, s);
    z = mx::multiply(activate(halves[0], options.gate, s), halves[1], s);
  }
  if (options.norm_eps) {
    z = mx::fast::rms_norm(z, float32(inputs[at.norm()], s), *options.norm_eps, s);
  }
  Arrays results;
  for (size_t p = 0; p < options.projections; ++p) {
    const auto y = options.eps
                       ? mx::fast::rms_norm(z, float32(inputs[at.own_norm(p)], s), *options.eps, s)
                       : z;
    if (options.has_codes) {
      const auto [codes, scale] = quantize(y, options.half_away, s);
      results.push_back(mx::multiply(ternary_matmul(codes, inputs[at.weight(p)], true),
                                     mx::divide(inputs[at.scale(p)], scale, s), s));
    } else {
      results.push_back(
          mx::multiply(ternary_matmul(y, inputs[at.weight(p)], false), inputs[at.scale(p)], s));
    }
  }
  auto y = results.size() == 1 ? results[0] : mx::concatenate(results, -1, s);
  if (options.has_residual) {
    y = mx::add(y, inputs[at.residual()], s);
  }
  return mx::astype(y, inputs[0].dtype(), s);
}

void require(bool condition, const char* message) {
  if (!condition) {
    throw std::invalid_argument(std::string("[bit_linear] ") + message);
  }
}

mx::Shape result_shape(const Arrays& inputs, const BitLinearOptions& options) {
  const Positions at(options);
  int64_t outputs = 0;
  for (size_t p = 0; p < options.projections; ++p) {
    outputs += inputs[at.weight(p)].shape(0);
  }
  require(outputs <= std::numeric_limits<int>::max(), "there are too many outputs.");
  auto shape = inputs[0].shape();
  shape.back() = static_cast<int>(outputs);
  return shape;
}

void check(const Arrays& inputs, const BitLinearOptions& options) {
  const Positions at(options);
  const auto& x = inputs[0];
  require(x.ndim() > 0 && x.shape(-1) > 0, "'x' must be (..., D) with D > 0.");
  const int halves = options.gate == Activation::none ? 1 : 2;
  require(x.shape(-1) % halves == 0, "'x' must have a gate and an up half.");
  const int dims = x.shape(-1) / halves;
  require(!options.has_codes || dims <= kMostCodes, "'x' must have 4194304 inputs at most.");
  for (size_t n = 0; n < inputs.size(); ++n) {
    const bool is_right = at.is_weight(n) ? inputs[n].dtype() == mx::uint32 : is_float(inputs[n]);
    require(is_right, "an argument is of a wrong type.");
  }
  for (size_t p = 0; p < options.projections; ++p) {
    const auto &weight = inputs[at.weight(p)], &scale = inputs[at.scale(p)];
    require(weight.ndim() == 2 && weight.shape(1) == packed_words(dims),
            "a weight must be (N, D / 16), padded.");
    require(scale.dtype() == mx::float32 && scale.ndim() == 1 &&
                (scale.size() == 1 || scale.shape(0) == weight.shape(0)),
            "a scale must be float32 (1,) or (N,).");
    require(!at.has_norms || inputs[at.own_norm(p)].shape() == mx::Shape{dims},
            "a norm must be (D,).");
  }
  require(!at.has_norm || inputs[at.norm()].shape() == mx::Shape{dims}, "a norm must be (D,).");
  require(!at.has_residual || inputs[at.residual()].shape() == result_shape(inputs, options),
          "'residual' must have the shape of the result.");
}

}  // namespace

mx::array bit_linear(const mx::array& x, const std::vector<ProjectionArrays>& projections,
                     std::optional<float> eps, bool half_away, bool has_codes,
                     const std::string& gate, const std::optional<mx::array>& norm,
                     std::optional<float> norm_eps, const std::optional<mx::array>& residual) {
  require(!projections.empty(), "'projections' must not be empty.");
  require(norm.has_value() == norm_eps.has_value(), "'norm' and 'norm_eps' come together.");
  const BitLinearOptions options{eps,
                                 half_away,
                                 has_codes,
                                 activation(gate),
                                 norm_eps,
                                 residual.has_value(),
                                 projections.size()};
  Arrays inputs = {x};
  for (const auto& [weight, scale, own_norm] : projections) {
    inputs.push_back(weight);
    inputs.push_back(scale);
    require(own_norm.has_value() == eps.has_value(), "norms and 'eps' come together.");
    if (own_norm) {
      inputs.push_back(*own_norm);
    }
  }
  for (const auto& optional : {norm, residual}) {
    if (optional) {
      inputs.push_back(*optional);
    }
  }
  check(inputs, options);
  auto shape = result_shape(inputs, options);
  return mx::array(std::move(shape), x.dtype(),
                   std::make_shared<BitLinear>(mx::to_stream({}), options), std::move(inputs));
}

void BitLinear::eval_cpu(const Arrays& inputs, mx::array& output) {
  const Positions at(options_);
  const auto data = [&](size_t input) { return contiguous(inputs[input], stream()); };
  const auto floats = [&](size_t input) {
    const auto values = data(input);
    return Floats{values.data<void>(), float_type(values.dtype())};
  };
  const Floats none{nullptr, FloatType::float32};
  const size_t dims = inputs[0].shape(-1) / (options_.gate == Activation::none ? 1 : 2);
  BitLinearCall call{
      {floats(0), dims, options_.gate, at.has_norm ? floats(at.norm()) : none,
       options_.norm_eps.value_or(0.0f)},
      inputs[0].size() / inputs[0].shape(-1),
      {},
      options_.eps.value_or(0.0f),
      options_.half_away,
      options_.has_codes,
      at.has_residual ? floats(at.residual()) : none,
      nullptr,
      float_type(output.dtype()),
  };
  call.projections.reserve(options_.projections);
  for (size_t p = 0; p < options_.projections; ++p) {
    const auto weight = data(at.weight(p)), scale = data(at.scale(p));
    call.projections.push_back({{weight.data<uint8_t>(), static_cast<size_t>(weight.shape(0)),
                                 4 * static_cast<size_t>(weight.shape(1))},
                                scale.data<float>(),
                                scale.size() > 1,
                                at.has_norms ? floats(at.own_norm(p)) : none});
  }
  output.set_data(mx::allocator::malloc(output.nbytes()));
  call.y = output.data<void>();
  mx::cpu::get_command_encoder(stream()).dispatch([call = std::move(call)]() { project(call); });
}

void BitLinear::eval_gpu(const Arrays&, mx::array&) {
  throw std::runtime_error("[bit_linear] the native backend runs on the CPU only.");
}

Arrays BitLinear::vjp(const Arrays& primals, const Arrays& cotangents,
                      const std::vector<int>& argnums, const Arrays&) {
  const Positions at(options_);
  Arrays wanted;
  for (int argnum : argnums) {
    if (at.is_weight(argnum)) {
      throw std::invalid_argument("[bit_linear] packed trits have no gradient.");
    }
    wanted.push_back(primals[argnum]);
  }
  const auto call = [&](const Arrays& floats) -> Arrays {
    Arrays inputs = primals;
    for (size_t n = 0; n < floats.size(); ++n) {
      inputs[argnums[n]] = floats[n];
    }
    return {compose(inputs, options_, stream())};
  };
  return mx::vjp(call, wanted, cotangents).second;
}

std::pair<Arrays, std::vector<int>> BitLinear::vmap(const Arrays& inputs,
                                                    const std::vector<int>& axes) {
  const auto call = [this](const Arrays& mapped) -> Arrays {
    return {compose(mapped, options_, stream())};
  };
  return {mx::vmap(call, axes, {0})(inputs), {0}};
}

Shapes BitLinear::output_shapes(const Arrays& inputs) {
  return {result_shape(inputs, options_)};
}

bool BitLinear::is_equivalent(const mx::Primitive& other) const {
  return options_ == static_cast<const BitLinear&>(other).options_;
}

}  // namespace mmfree
