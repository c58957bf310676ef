#pragma once

#include <string>
#include <vector>

#include "mlx/array.h"

namespace mmfree {

namespace mx = mlx::core;

// An array of a graph.
struct GraphArray {
  size_t bytes;
  mx::Shape shape;
};

// An operation that is yet to run, with numbers of arrays.
struct GraphNode {
  std::string name;
  std::vector<size_t> inputs;
  std::vector<size_t> outputs;
};

struct Graph {
  std::vector<GraphArray> arrays;
  std::vector<GraphNode> nodes;
  std::vector<size_t> results;
};

// The graph of arrays that are yet to be computed, without computing anything. The first arrays are
// the leaves, at which it ends. Every node stands behind those that make its inputs.
Graph graph_of(const std::vector<mx::array>& results, const std::vector<mx::array>& leaves);

}  // namespace mmfree
