#include "graph/graph.h"

#include <unordered_map>
#include <utility>

#include "mlx/primitives.h"

namespace mmfree {

namespace {

class Walk {
 public:
  explicit Walk(const std::vector<mx::array>& leaves) {
    for (const auto& leaf : leaves) {
      number(leaf);
    }
    leaves_ = graph_.arrays.size();
  }

  // Adds the node that makes an array, behind those that make its inputs.
  void visit(const mx::array& result) {
    std::vector<std::pair<mx::array, size_t>> path;
    enter(path, result);
    while (!path.empty()) {
      const mx::array array = path.back().first;
      const size_t next = path.back().second++;
      if (next < array.inputs().size()) {
        enter(path, array.inputs()[next]);
      } else {
        path.pop_back();
        add(array);
      }
    }
  }

  size_t number(const mx::array& array) {
    const auto [place, is_new] = numbers_.try_emplace(array.id(), graph_.arrays.size());
    if (is_new) {
      graph_.arrays.push_back(array);
      made_.push_back(false);
    }
    return place->second;
  }

  Graph take() {
    return std::move(graph_);
  }

 private:
  void enter(std::vector<std::pair<mx::array, size_t>>& path, const mx::array& array) {
    const size_t own = number(array);
    const bool is_known = own < leaves_ || made_[own] ||
                          array.status() != mx::array::Status::unscheduled ||
                          !array.has_primitive();
    if (!is_known) {
      for (const auto& output : array.outputs()) {
        made_[number(output)] = true;
      }
      path.emplace_back(array, 0);
    }
  }

  void add(const mx::array& array) {
    GraphNode node{array.primitive().name(), {}, {}, std::nullopt, {}};
    if (const auto* own = dynamic_cast<const Described*>(&array.primitive())) {
      node.given = own->given();
      node.options = own->option_values();
    }
    for (const auto& input : array.inputs()) {
      node.inputs.push_back(number(input));
    }
    for (const auto& output : array.outputs()) {
      node.outputs.push_back(number(output));
    }
    graph_.nodes.push_back(std::move(node));
  }

  Graph graph_;
  size_t leaves_ = 0;
  std::unordered_map<std::uintptr_t, size_t> numbers_;
  std::vector<bool> made_;
};

}  // namespace

Graph graph_of(const std::vector<mx::array>& results, const std::vector<mx::array>& leaves) {
  Walk walk(leaves);
  std::vector<size_t> numbers;
  for (const auto& result : results) {
    walk.visit(result);
    numbers.push_back(walk.number(result));
  }
  auto graph = walk.take();
  graph.results = std::move(numbers);
  return graph;
}

}  // namespace mmfree
