#pragma once

#include <string>
#include <vector>

namespace mmfree {

// Throws std::invalid_argument, listing the names, where this processor lacks it.
void use_kernels(const std::string& name);

// The instruction set in use.
std::string kernel_name();

// Names of the sets that this processor has, fastest first.
std::vector<std::string> kernel_names();

}  // namespace mmfree
