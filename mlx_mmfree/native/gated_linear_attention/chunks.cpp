#include "gated_linear_attention/chunks.h"

#include "runtime/kernels.h"
#include "runtime/thread_pool.h"

namespace mmfree {

namespace {

// Calls compute(head, index, scratch) for each head, on all threads.
template <class F>
void each_head(const GatedCall& call, bool has_gradients, F&& compute) {
  const GatedHead first = call.of(0, 0);
  Cutter measure(nullptr);
  cut_scratch(measure, first, has_gradients);
  const size_t size = measure.size();
  char* memory = static_cast<char*>(workspace(threads() * size));
  parallel_region(call.batch * call.heads, 1, threads(), [&](Claims& claims) {
    Cutter cutter(memory + claims.thread() * size);
    const ChunkScratch scratch = cut_scratch(cutter, first, has_gradients);
    for (size_t index, last; claims.next(index, last);) {
      for (; index < last; ++index) {
        compute(call.of(index / call.heads, index % call.heads), index, scratch);
      }
    }
  });
}

}  // namespace

void run_chunks(const GatedCall& call, float* o, float* last) {
  const auto& loops = table<GatedLinearAttentionKernels>(kernels());
  each_head(call, false, [&](const GatedHead& head, size_t index, const ChunkScratch& scratch) {
    const size_t b = index / call.heads, h = index % call.heads, row = call.heads * call.values;
    const GatedOutput output = {o + b * call.length * row + h * call.values, row,
                                last + index * call.keys * call.values};
    loops.run(head, output, scratch);
  });
}

void run_chunks_gradient(const GatedGradientCall& g) {
  const auto& loops = table<GatedLinearAttentionKernels>(kernels());
  const GatedCall& call = g.call;
  each_head(call, true, [&](const GatedHead& head, size_t index, const ChunkScratch& scratch) {
    const size_t positions = index * call.length, state = index * call.keys * call.values;
    const GatedGradients gradients = {
        g.d_o.of(index / call.heads, index % call.heads),
        g.d_last + state,
        g.d_q + positions * call.keys,
        g.d_k + positions * call.keys,
        g.d_v + positions * call.values,
        g.d_f + positions * call.gates,
        g.d_state + state,
    };
    loops.run_gradient(head, gradients, scratch);
  });
}

}  // namespace mmfree
