#pragma once

#include <optional>
#include <string>
#include <vector>

#include "mlx/array.h"
#include "runtime/operation.h"

namespace mmfree {

// An operation that is yet to run, with numbers of arrays. Operations of this library say which of
// their arguments were given, and their options.
struct GraphNode {
  std::string name;
  std::vector<size_t> inputs;
  std::vector<size_t> outputs;
  std::optional<std::vector<bool>> given;
  std::vector<Value> options;
};

struct Graph {
  std::vector<mx::array> arrays;
  std::vector<GraphNode> nodes;
  std::vector<size_t> results;
};

// The graph of arrays that are yet to be computed, without computing anything. The first arrays are
// the leaves, at which it ends. Every node stands behind those that make its inputs.
Graph graph_of(const std::vector<mx::array>& results, const std::vector<mx::array>& leaves);

}  // namespace mmfree
