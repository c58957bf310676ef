#pragma once

#include "bit_linear/finish.h"
#include "bit_linear/kernels.h"
#include "bit_linear/prepare_row.h"

namespace mmfree {

template <class Isa, class Dense>
constexpr BitLinearKernels BitLinearKernels::of() {
  return {mmfree::prepare_row<Isa>, mmfree::encode_row<Isa>, mmfree::normalize_row<Isa>,
          mmfree::finish<Isa>};
}

}  // namespace mmfree
