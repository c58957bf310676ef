#pragma once

#include <stdexcept>
#include <string>
#include <utility>

#include "gated_activation/kernels.h"

namespace mmfree {

inline constexpr std::pair<const char*, Activation> kActivations[] = {{"", Activation::none},
                                                                      {"silu", Activation::silu},
                                                                      {"relu2", Activation::relu2},
                                                                      {"gelu", Activation::gelu},
                                                                      {"relu", Activation::relu}};

// The activation of this name. `refusal` is what an unknown one is answered with.
inline Activation activation_of(const std::string& name, const char* refusal) {
  for (const auto& [known, value] : kActivations) {
    if (name == known) {
      return value;
    }
  }
  throw std::invalid_argument(refusal);
}

inline std::string name_of(Activation activation) {
  for (const auto& [name, value] : kActivations) {
    if (activation == value) {
      return name;
    }
  }
  return "";
}

}  // namespace mmfree
