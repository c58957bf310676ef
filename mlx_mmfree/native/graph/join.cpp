#include "graph/join.h"

#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "graph/graph.h"
#include "mlx/backend/cpu/encoder.h"

namespace mmfree {

namespace {

struct Form {
  mx::Shape shape;
  mx::Dtype dtype;
};

// An operation of the graph, with numbers of arrays.
struct Step {
  std::shared_ptr<mx::Primitive> primitive;
  std::vector<size_t> inputs, outputs;
  std::vector<bool> is_last;  // whether no later step and no result needs the input
  std::vector<Form> forms;    // of the outputs
};

struct Steps {
  std::vector<Step> steps;
  std::vector<std::optional<mx::array>> kept;  // arrays that are no leaves, made by no step
  size_t leaves;
  std::vector<size_t> results;
};

class Joined : public mx::Primitive {
 public:
  Joined(mx::Stream stream, Steps graph) : Primitive(stream), graph_(std::move(graph)) {
  }

  void eval_cpu(const Arrays& inputs, Arrays& outputs) override {
    auto& encoder = mx::cpu::get_command_encoder(stream());
    std::vector<std::optional<mx::array>> values(graph_.kept.size());
    Arrays given = taken(inputs, outputs);
    for (size_t n = 0; n < graph_.leaves; ++n) {
      values[n] = std::move(given[n]);
    }
    given.clear();
    for (const auto& step : graph_.steps) {
      Arrays read, made;
      read.reserve(step.inputs.size());
      for (size_t n = 0; n < step.inputs.size(); ++n) {
        const auto& kept = graph_.kept[step.inputs[n]];
        auto& value = values[step.inputs[n]];
        read.push_back(kept              ? *kept
                       : step.is_last[n] ? *std::exchange(value, std::nullopt)
                                         : *value);
      }
      made.reserve(step.outputs.size());
      for (const auto& form : step.forms) {
        // MLX asks results for the stream of their operation
        made.emplace_back(form.shape, form.dtype, step.primitive, Arrays{});
      }
      step.primitive->eval_cpu(read, made);
      // what is written in place belongs to the results
      for (size_t n = 0; n < read.size(); ++n) {
        if (!graph_.kept[step.inputs[n]] && !shares(read[n], made)) {
          encoder.add_temporary(std::move(read[n]));
        }
      }
      for (size_t n = 0; n < made.size(); ++n) {
        values[step.outputs[n]] = std::move(made[n]);
      }
    }
    for (size_t n = 0; n < outputs.size(); ++n) {
      outputs[n].copy_shared_buffer(*values[graph_.results[n]]);
    }
    // all memory, and that of the arrays that are kept, lasts until the steps are done
    for (auto& value : values) {
      if (value) {
        encoder.add_temporary(*std::move(value));
      }
    }
    encoder.dispatch([self = outputs[0].primitive_ptr()]() {});
  }

  void eval_gpu(const Arrays&, Arrays&) override {
    throw std::runtime_error("[Joined] the native backend runs on the CPU only.");
  }

  const char* name() const override {
    return "Joined";
  }

 private:
  // The inputs without any other holder in the graph, so that a step can write in their memory.
  static Arrays taken(const Arrays& inputs, Arrays& outputs) {
    Arrays own;
    for (auto& output : outputs) {
      if (output.is_tracer()) {
        return inputs;
      }
      auto& held = output.inputs();
      if (&held == &inputs) {
        own.swap(held);
      } else {
        held.clear();
      }
    }
    return own;
  }

  static bool shares(const mx::array& array, const Arrays& others) {
    for (const auto& other : others) {
      if (other.data_shared_ptr() == array.data_shared_ptr()) {
        return true;
      }
    }
    return false;
  }

  Steps graph_;
};

}  // namespace

Arrays joined(const Arrays& results, const Arrays& leaves) {
  const Graph graph = graph_of(results, leaves);
  const size_t count = graph.arrays.size();
  Steps found{{}, std::vector<std::optional<mx::array>>(count), leaves.size(), {}};
  std::vector<bool> is_made(count), is_needed(count);
  std::optional<mx::Stream> stream;
  for (const auto& node : graph.nodes) {
    const auto& primitive = graph.arrays[node.outputs[0]].primitive_ptr();
    if (primitive->device() != mx::Device::cpu || (stream && *stream != primitive->stream())) {
      return results;
    }
    stream = primitive->stream();
    Step step{primitive, node.inputs, node.outputs, std::vector<bool>(node.inputs.size()), {}};
    for (size_t output : node.outputs) {
      is_made[output] = true;
      step.forms.push_back({graph.arrays[output].shape(), graph.arrays[output].dtype()});
    }
    found.steps.push_back(std::move(step));
  }
  for (size_t n = leaves.size(); n < count; ++n) {
    if (!is_made[n]) {
      found.kept[n] = graph.arrays[n];
    }
  }
  std::vector<mx::Shape> shapes;
  std::vector<mx::Dtype> dtypes;
  std::vector<size_t> places;
  for (size_t n = 0; n < results.size(); ++n) {
    const size_t place = graph.results[n];
    if (is_made[place]) {
      places.push_back(n);
      found.results.push_back(place);
      is_needed[place] = true;
      shapes.push_back(results[n].shape());
      dtypes.push_back(results[n].dtype());
    }
  }
  if (places.empty()) {
    return results;
  }
  for (auto step = found.steps.rbegin(); step != found.steps.rend(); ++step) {
    for (size_t n = step->inputs.size(); n-- > 0;) {
      step->is_last[n] = !is_needed[step->inputs[n]];
      is_needed[step->inputs[n]] = true;
    }
  }
  const auto made = mx::array::make_arrays(
      std::move(shapes), dtypes, std::make_shared<Joined>(*stream, std::move(found)), leaves);
  Arrays all = results;
  for (size_t n = 0; n < places.size(); ++n) {
    all[places[n]] = made[n];
  }
  return all;
}

}  // namespace mmfree
