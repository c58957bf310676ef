#include "gated_delta_rule/rule.h"

#include "runtime/kernels.h"
#include "runtime/thread_pool.h"

namespace mmfree {

void run_rule(const DeltaCall& call, float* o, float* last) {
  const auto& loops = table<GatedDeltaRuleKernels>(kernels());
  const size_t wide = call.length == 1 ? loops.columns_of_one : loops.columns_of_many;
  const size_t pieces = (call.values + wide - 1) / wide;
  const size_t own = round_up(call.keys * wide * sizeof(float), 64);
  char* memory = static_cast<char*>(workspace(threads() * own));
  parallel_region(call.batch * call.heads * pieces, 1, threads(), [&](Claims& claims) {
    auto* scratch = reinterpret_cast<float*>(memory + claims.thread() * own);
    for (size_t piece, stop; claims.next(piece, stop);) {
      for (; piece < stop; ++piece) {
        const size_t index = piece / pieces, first = piece % pieces * wide;
        const size_t n = index / call.heads, h = index % call.heads;
        const size_t row = call.heads * call.values;
        const DeltaOutput output = {o + n * call.length * row + h * call.values, row,
                                    last + index * call.keys * call.values};
        loops.run(call.of(n, h), output, first, std::min(wide, call.values - first), scratch);
      }
    }
  });
}

void run_rule_gradient(const DeltaGradientCall& g) {
  const auto& loops = table<GatedDeltaRuleKernels>(kernels());
  const DeltaCall& call = g.call;
  const DeltaHead any = call.of(0, 0);
  Cutter measure(nullptr);
  cut_scratch(measure, any);
  const size_t size = measure.size();
  char* memory = static_cast<char*>(workspace(threads() * size));
  parallel_region(call.batch * call.heads, 1, threads(), [&](Claims& claims) {
    Cutter cutter(memory + claims.thread() * size);
    const DeltaScratch scratch = cut_scratch(cutter, any);
    for (size_t index, stop; claims.next(index, stop);) {
      for (; index < stop; ++index) {
        const size_t n = index / call.heads, h = index % call.heads;
        const size_t positions = index * call.length, state = index * call.keys * call.values;
        const DeltaGradients gradients = {
            g.d_o.of(n, h),
            g.d_last + state,
            g.d_q + positions * call.keys,
            g.d_k + positions * call.keys,
            g.d_v + positions * call.values,
            g.d_a + positions * call.keys,
            g.d_f + positions * call.gates,
            g.d_b ? g.d_b + positions * call.keys : nullptr,
            g.d_state + state,
        };
        loops.run_gradient(call.of(n, h), gradients, scratch);
      }
    }
  });
}

}  // namespace mmfree
