#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/variant.h>
#include <nanobind/stl/vector.h>

#include "graph/graph.h"
#include "graph/join.h"

namespace mmfree {

namespace nb = nanobind;
using namespace nb::literals;

void bind_graph(nb::module_& m) {
  m.def(
      "graph_of",
      [](const std::vector<mx::array>& results, const std::vector<mx::array>& leaves) {
        const auto graph = graph_of(results, leaves);
        using Places = std::vector<size_t>;
        std::vector<std::tuple<std::string, Places, Places, std::optional<std::vector<bool>>,
                               std::vector<Value>>>
            nodes;
        for (const auto& node : graph.nodes) {
          nodes.emplace_back(node.name, node.inputs, node.outputs, node.given, node.options);
        }
        return std::make_tuple(graph.arrays, nodes, graph.results);
      },
      "results"_a, "leaves"_a,
      R"(Describes the graph of arrays that are yet to be computed. Nothing is computed.

        Args:
            results: The arrays.
            leaves: Arrays at which the graph ends. Those that are known end it too.

        Returns:
            The arrays, the leaves first; for each operation, behind those that make its inputs, its
            name, the places of its inputs and outputs among the arrays, which of its arguments are
            inputs, or `None` for an operation of MLX, and its options; and the places of the
            results.)");

  m.def("joined", &joined, "results"_a, "leaves"_a,
        R"(Makes one operation of the graph of arrays that are yet to be computed.

        Args:
            results: The arrays.
            leaves: Arrays at which the graph ends.

        Returns:
            The same arrays, made by the operation, which keeps what the graph reads beside the
            leaves. It has no gradient.)");
}

}  // namespace mmfree
