#include "bit_linear/bit_linear.h"

#include <limits>
#include <utility>

#include "bit_linear/project.h"
#include "mlx/allocator.h"
#include "runtime/contiguous.h"
#include "runtime/float_type.h"
#include "ternary_matmul/ternary_matmul.h"

namespace mmfree {

namespace {

// Where the arguments of the first projection begin, and how many each has.
constexpr size_t kFirst = 3, kEach = 3;

bool is_vector(const std::optional<mx::array>& x, int dims) {
  return !x || (x->shape() == mx::Shape{dims} && is_float(*x));
}

mx::Shape result_shape(const Arguments& arguments) {
  int64_t outputs = 0;
  for (size_t n = kFirst; n < arguments.size(); n += kEach) {
    outputs += arguments[n]->shape(0);
  }
  require(outputs <= std::numeric_limits<int>::max(), "[bit_linear] there are too many outputs.");
  auto shape = arguments[0]->shape();
  shape.back() = static_cast<int>(outputs);
  return shape;
}

void check(const Arguments& arguments, const BitLinearOptions& options) {
  const auto& x = *arguments[0];
  const auto& residual = arguments[2];
  require(x.ndim() > 0 && x.shape(-1) > 0, "[bit_linear] 'x' must be (..., D) with D > 0.");
  const int halves = options.gate == Activation::none ? 1 : 2;
  require(x.shape(-1) % halves == 0, "[bit_linear] 'x' must have a gate and an up half.");
  const int dims = x.shape(-1) / halves;
  require(!options.has_codes || dims <= kMostCodes,
          "[bit_linear] 'x' must have 4194304 inputs at most.");
  require(is_float(x) && (!residual || is_float(*residual)),
          "[bit_linear] 'x' and 'residual' must be floats.");
  require(is_vector(arguments[1], dims), "[bit_linear] a norm must be floats (D,).");
  for (size_t n = kFirst; n < arguments.size(); n += kEach) {
    const auto &weight = *arguments[n], &scale = *arguments[n + 1];
    require(weight.dtype() == mx::uint32,
            "[bit_linear] weights must be uint32. A matrix of uint8 with five trits a byte is a "
            "form of files, which load_model unpacks to uint32.");
    require(weight.ndim() == 2 && weight.shape(1) == packed_words(dims),
            "[bit_linear] weights must be (N, D / 16), padded.");
    require(scale.dtype() == mx::float32 && scale.ndim() == 1 &&
                (scale.size() == 1 || scale.shape(0) == weight.shape(0)),
            "[bit_linear] a scale must be float32 (1,) or (N,).");
    require(arguments[n + 2].has_value() == options.eps.has_value(),
            "[bit_linear] norms and 'eps' come together.");
    require(is_vector(arguments[n + 2], dims), "[bit_linear] a norm must be floats (D,).");
  }
  require(!residual || residual->shape() == result_shape(arguments),
          "[bit_linear] 'residual' must have the shape of the result.");
}

}  // namespace

mx::array bit_linear(const mx::array& x, const std::vector<ProjectionArrays>& projections,
                     std::optional<float> eps, bool half_away, bool has_codes,
                     const std::string& gate, const std::optional<mx::array>& norm,
                     std::optional<float> norm_eps, const std::optional<mx::array>& residual) {
  require(!projections.empty(), "[bit_linear] 'projections' must not be empty.");
  require(norm.has_value() == norm_eps.has_value(),
          "[bit_linear] 'norm' and 'norm_eps' come together.");
  Arguments arguments;
  arguments.reserve(kFirst + kEach * projections.size());
  arguments.emplace_back(x);
  arguments.push_back(norm);
  arguments.push_back(residual);
  for (const auto& [weight, scale, own_norm] : projections) {
    arguments.emplace_back(weight);
    arguments.emplace_back(scale);
    arguments.push_back(own_norm);
  }
  const BitLinearOptions options{eps, half_away, has_codes,
                                 activation_of(gate, "[bit_linear] 'gate' is unknown."), norm_eps};
  check(arguments, options);
  return BitLinear::call(std::move(arguments), options)[0];
}

void BitLinear::eval_cpu(const Arrays& inputs, Arrays& outputs) {
  mx::array& output = outputs[0];
  output.set_data(mx::allocator::malloc(output.nbytes()));
  const auto given = arguments(inputs);
  const auto floats = [&](size_t n) { return floats_of(given[n], stream()); };
  const size_t width = inputs[0].shape(-1);
  BitLinearCall call{
      {floats(0), options_.gate == Activation::none ? width : width / 2, options_.gate, floats(1),
       options_.norm_eps.value_or(0.0f), 0},
      inputs[0].size() / width,
      {},
      options_.eps.value_or(0.0f),
      options_.half_away,
      options_.has_codes,
      floats(2),
      output.data<void>(),
      float_type(output.dtype()),
  };
  call.projections.reserve((given.size() - kFirst) / kEach);
  for (size_t n = kFirst; n < given.size(); n += kEach) {
    const auto weight = contiguous(*given[n], stream());
    const auto scale = contiguous(*given[n + 1], stream());
    call.projections.push_back({{weight.data<uint8_t>(), static_cast<size_t>(weight.shape(0)),
                                 4 * static_cast<size_t>(weight.shape(1))},
                                scale.data<float>(),
                                scale.size() > 1,
                                floats(n + 2)});
  }
  dispatch([call = std::move(call)]() { project(call); });
}

OutputForms BitLinear::output_forms(const Arguments& arguments) const {
  return {{result_shape(arguments)}, {arguments[0]->dtype()}};
}

}  // namespace mmfree
