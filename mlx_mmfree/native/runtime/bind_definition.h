#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/stl/function.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <utility>

namespace mmfree {

// Adds the function by which Python gives the definition of an operation.
template <class Own>
void bind_definition(nanobind::module_& m, const char* name) {
  m.def(
      name, [](typename Own::Definition definition) { Own::define(std::move(definition)); },
      nanobind::arg("definition"),
      R"(Takes what the gradient is computed with.

        Args:
            definition: The operation in differentiable operations. It is called with the list of the
                arrays of a call, `None` for each that was left out, the tuple of its options and the
                list of its results, and returns the list of the results.)");
}

}  // namespace mmfree
