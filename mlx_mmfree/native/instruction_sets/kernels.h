#pragma once

#include <string>
#include <vector>

namespace mmfree {

// Chooses the instruction set of this name. Throws std::invalid_argument with the list of names if
// this processor lacks it.
void use_kernels(const std::string& name);

// The instruction set in use.
std::string kernel_name();

// Names of the sets that this processor has, fastest first.
std::vector<std::string> kernel_names();

}  // namespace mmfree
