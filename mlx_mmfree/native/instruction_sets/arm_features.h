#pragma once

namespace mmfree {

// Instructions of the running Arm processor: FEAT_DotProd and FEAT_I8MM.
bool has_dot_products();
bool has_int8_matrices();

}  // namespace mmfree
