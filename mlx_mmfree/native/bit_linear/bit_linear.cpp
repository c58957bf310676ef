#include "bit_linear/bit_linear.h"

#include <limits>
#include <memory>
#include <stdexcept>

#include "bit_linear/project.h"
#include "mlx/allocator.h"
#include "mlx/backend/cpu/encoder.h"
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

constexpr std::pair<const char*, Activation> kActivations[] = {{"", Activation::none},
                                                               {"silu", Activation::silu},
                                                               {"relu2", Activation::relu2},
                                                               {"gelu", Activation::gelu},
                                                               {"relu", Activation::relu}};

Activation activation(const std::string& name) {
  for (const auto& [known, value] : kActivations) {
    if (name == known) {
      return value;
    }
  }
  throw std::invalid_argument("[bit_linear] 'gate' is unknown.");
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

std::string name_of(Activation activation) {
  for (const auto& [name, value] : kActivations) {
    if (activation == value) {
      return name;
    }
  }
  return "";
}

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

void BitLinear::eval_cpu(const Arrays& inputs, Arrays& outputs) {
  mx::array& output = outputs[0];
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

Shapes BitLinear::output_shapes(const Arrays& inputs) {
  return {result_shape(inputs, options_)};
}

}  // namespace mmfree
