#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <variant>
#include <vector>

#include "mlx/array.h"
#include "mlx/backend/cpu/encoder.h"
#include "mlx/ops.h"
#include "mlx/primitives.h"
#include "mlx/transforms.h"
#include "mlx/utils.h"
#include "runtime/operation_times.h"

namespace mmfree {

namespace mx = mlx::core;

using Arrays = std::vector<mx::array>;
using Shapes = std::vector<mx::Shape>;
// The arrays of a call in the order of its parameters. Those that may be left out can be missing.
using Arguments = std::vector<std::optional<mx::array>>;

struct OutputForms {
  Shapes shapes;
  std::vector<mx::Dtype> dtypes;
};

inline void require(bool condition, const char* message) {
  if (!condition) {
    throw std::invalid_argument(message);
  }
}

using Value = std::variant<std::monostate, bool, int64_t, double, std::string>;

// What a primitive of this library says of its call, for those who read a graph: which of its
// arguments are inputs, in their order, and the options.
class Described {
 public:
  virtual ~Described() = default;
  virtual const std::vector<bool>& given() const = 0;
  virtual std::vector<Value> option_values() const = 0;
};

template <class Option>
Value value_of(const Option& option) {
  if constexpr (requires { option.has_value(); }) {
    return option ? value_of(*option) : Value();
  } else if constexpr (std::is_same_v<Option, bool>) {
    return option;
  } else if constexpr (std::is_integral_v<Option>) {
    return static_cast<int64_t>(option);
  } else if constexpr (std::is_floating_point_v<Option>) {
    return static_cast<double>(option);
  } else {
    return std::string(option);
  }
}

// What all primitives share. `Own` is the primitive itself, which has `eval_cpu` and `OutputForms
// output_forms(const Arguments&) const`. A test compares these forms with those of the definition
// in Python. Options compare with ==, and `values()` is their tuple, if they have one.
template <class Own, class Options>
class Operation : public mx::Primitive, public Described {
 public:
  Operation(mx::Stream stream, const Options& options, const Arguments& arguments)
      : Primitive(stream), options_(options) {
    given_.reserve(arguments.size());
    for (const auto& argument : arguments) {
      given_.push_back(argument.has_value());
    }
  }

  static Arrays call(Arguments arguments, const Options& options, mx::StreamOrDevice stream = {}) {
    auto own = std::make_shared<Own>(mx::to_stream(stream), options, arguments);
    auto [shapes, dtypes] = own->output_forms(arguments);
    Arrays inputs;
    inputs.reserve(arguments.size());
    for (auto& argument : arguments) {
      if (argument) {
        inputs.push_back(std::move(*argument));
      }
    }
    if (shapes.size() == 1) {
      return {mx::array(std::move(shapes[0]), dtypes[0], std::move(own), std::move(inputs))};
    }
    return mx::array::make_arrays(std::move(shapes), dtypes, own, inputs);
  }

  void eval_gpu(const Arrays&, Arrays&) override {
    throw std::runtime_error(place() + " the native backend runs on the CPU only.");
  }

  const std::vector<bool>& given() const override {
    return given_;
  }

  std::vector<Value> option_values() const override {
    std::vector<Value> result;
    if constexpr (requires { options_.values(); }) {
      std::apply([&](const auto&... options) { (result.push_back(value_of(options)), ...); },
                 options_.values());
    }
    return result;
  }

  Shapes output_shapes(const Arrays& inputs) override {
    return own().output_forms(arguments(inputs)).shapes;
  }

  // Calls the operation once for each slice, whose bits are those of that call.
  std::pair<Arrays, std::vector<int>> vmap(const Arrays& inputs,
                                           const std::vector<int>& axes) override {
    int count = 0;
    for (size_t n = 0; n < inputs.size(); ++n) {
      count = axes[n] < 0 ? count : inputs[n].shape(axes[n]);
    }
    if (count == 0) {
      throw std::invalid_argument(place() + " an axis that is mapped must not be empty.");
    }
    std::vector<Arrays> results;
    for (int slice = 0; slice < count; ++slice) {
      Arrays own_inputs = inputs;
      for (size_t n = 0; n < inputs.size(); ++n) {
        if (axes[n] >= 0) {
          own_inputs[n] = mx::take(inputs[n], slice, axes[n], stream());
        }
      }
      auto outputs = call(arguments(own_inputs), options_, stream());
      results.resize(outputs.size());
      for (size_t n = 0; n < outputs.size(); ++n) {
        results[n].push_back(std::move(outputs[n]));
      }
    }
    Arrays stacked;
    for (const auto& slices : results) {
      stacked.push_back(mx::stack(slices, 0, stream()));
    }
    return {stacked, std::vector<int>(stacked.size(), 0)};
  }

  bool is_equivalent(const mx::Primitive& other) const override {
    const auto& same = static_cast<const Operation&>(other);
    return options_ == same.options_ && given_ == same.given_;
  }

 protected:
  // Runs a function after all that was dispatched before. Its time is that of this operation.
  template <class F>
  void dispatch(F&& function) {
    mx::cpu::get_command_encoder(stream()).dispatch(
        [name = own().name(), function = std::forward<F>(function)]() mutable {
          const Timed timed(name);
          function();
        });
  }

  // The inputs of the primitive in the places that they had among the arguments of its call.
  Arguments arguments(const Arrays& inputs) const {
    Arguments result;
    result.reserve(given_.size());
    size_t next = 0;
    for (bool is_given : given_) {
      result.push_back(is_given ? std::optional(inputs[next++]) : std::nullopt);
    }
    return result;
  }

  std::string place() const {
    return std::string("[") + name() + "]";
  }

  Options options_;

 private:
  const Own& own() const {
    return static_cast<const Own&>(*this);
  }

  std::vector<bool> given_;
};

// An operation whose gradient is that of its definition, which Python gives once. Options have
// `values()`, the tuple that the definition takes beside the arguments.
template <class Own, class Options>
class Defined : public Operation<Own, Options> {
 public:
  using Values = decltype(std::declval<const Options&>().values());
  using Definition = std::function<Arrays(const Arguments&, const Values&, const Arrays& results)>;

  using Operation<Own, Options>::Operation;

  static void define(Definition definition) {
    known_definition() = std::move(definition);
  }

  Arrays vjp(const Arrays& primals, const Arrays& cotangents, const std::vector<int>& argnums,
             const Arrays& outputs) override {
    if (!known_definition()) {
      throw std::runtime_error(this->place() + " no definition was given.");
    }
    Arrays wanted;
    for (int argnum : argnums) {
      wanted.push_back(primals[argnum]);
    }
    const auto definition = [&](const Arrays& values) {
      Arrays inputs = primals;
      for (size_t n = 0; n < values.size(); ++n) {
        inputs[argnums[n]] = values[n];
      }
      return known_definition()(this->arguments(inputs), this->options_.values(), outputs);
    };
    return mx::vjp(definition, wanted, cotangents).second;
  }

 private:
  // Never destroyed, because it belongs to Python, which ends before static objects do.
  static Definition& known_definition() {
    static auto* definition = new Definition;
    return *definition;
  }
};

}  // namespace mmfree
