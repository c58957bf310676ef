#pragma once

#include <functional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "mlx/array.h"
#include "mlx/primitives.h"
#include "mlx/transforms.h"

namespace mmfree {

namespace mx = mlx::core;

// A primitive whose gradient and batched form are those of its operation's definition in plain
// operations, which Python gives once.
template <class Options>
class Defined : public mx::Primitive {
 public:
  using Arrays = std::vector<mx::array>;
  using Definition = std::function<Arrays(const Arrays& inputs, const Options&)>;

  Defined(mx::Stream stream, const Options& options) : Primitive(stream), options_(options) {
  }

  static void define(Definition definition) {
    known_definition() = std::move(definition);
  }

  void eval_gpu(const Arrays&, Arrays&) override {
    throw std::runtime_error(place() + " the native backend runs on the CPU only.");
  }

  Arrays vjp(const Arrays& primals, const Arrays& cotangents, const std::vector<int>& argnums,
             const Arrays&) override {
    Arrays wanted;
    for (int argnum : argnums) {
      wanted.push_back(primals[argnum]);
    }
    const auto call = [&](const Arrays& values) {
      Arrays inputs = primals;
      for (size_t n = 0; n < values.size(); ++n) {
        inputs[argnums[n]] = values[n];
      }
      return in_plain_operations(inputs);
    };
    return mx::vjp(call, wanted, cotangents).second;
  }

  std::pair<Arrays, std::vector<int>> vmap(const Arrays& inputs,
                                           const std::vector<int>& axes) override {
    const auto call = [this](const Arrays& mapped) { return in_plain_operations(mapped); };
    const std::vector<int> results(output_shapes(inputs).size(), 0);
    return {mx::vmap(call, axes, results)(inputs), results};
  }

  bool is_equivalent(const mx::Primitive& other) const override {
    return options_ == static_cast<const Defined&>(other).options_;
  }

 protected:
  Options options_;

 private:
  // never destroyed: it belongs to Python, which ends before static objects do
  static Definition& known_definition() {
    static auto* definition = new Definition;
    return *definition;
  }

  std::string place() const {
    return std::string("[") + name() + "]";
  }

  Arrays in_plain_operations(const Arrays& inputs) const {
    if (!known_definition()) {
      throw std::runtime_error(place() + " no definition was given.");
    }
    return known_definition()(inputs, options_);
  }
};

}  // namespace mmfree
