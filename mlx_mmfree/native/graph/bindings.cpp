#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include "graph/graph.h"

namespace mmfree {

namespace nb = nanobind;
using namespace nb::literals;

void bind_graph(nb::module_& m) {
  m.def(
      "graph_of",
      [](const std::vector<mx::array>& results, const std::vector<mx::array>& leaves) {
        const auto graph = graph_of(results, leaves);
        std::vector<std::tuple<size_t, std::vector<int>>> arrays;
        for (const auto& array : graph.arrays) {
          arrays.emplace_back(array.bytes,
                              std::vector<int>(array.shape.begin(), array.shape.end()));
        }
        std::vector<std::tuple<std::string, std::vector<size_t>, std::vector<size_t>>> nodes;
        for (const auto& node : graph.nodes) {
          nodes.emplace_back(node.name, node.inputs, node.outputs);
        }
        return std::make_tuple(arrays, nodes, graph.results);
      },
      "results"_a, "leaves"_a,
      R"(Describes the graph of arrays that are yet to be computed. Nothing is computed.

        Args:
            results: The arrays.
            leaves: Arrays at which the graph ends. Those that are known end it too.

        Returns:
            The number of bytes and the shape of each array, the leaves first; the name of each
            operation, with the places of its inputs and outputs among the arrays, behind those that
            make its inputs; and the places of the results.)");
}

}  // namespace mmfree
