#include "depthwise_convolution/convolve.h"

#include <algorithm>

#include "runtime/kernels.h"
#include "runtime/thread_pool.h"
#include "runtime/workspace.h"

namespace mmfree {

namespace {

// Products of one piece of work. Fewer are done by the caller alone, because another thread wakes
// up too late.
constexpr size_t kPieceProducts = 256 << 10;
// Weights that are put into order in one piece of work.
constexpr size_t kPieceWeights = 16 << 10;
// Parts of all places, and the fewest places of one.
constexpr size_t kParts = 16, kPartPlaces = 4096;

size_t at_least_one(size_t value) {
  return std::max<size_t>(value, 1);
}

}  // namespace

void convolve(DepthwiseCall call, const Floats& weight, const Floats& bias) {
  const auto& set = table<DepthwiseConvolutionKernels>(kernels());
  const size_t blocks = blocks_of(call.channels), taps = call.side * call.side;
  const size_t step = call.is_gradient ? 1 : call.stride;
  Cutter sizes(nullptr);
  sizes.take<float>(blocks * (taps + 1) * kBlockChannels);
  const size_t shared = sizes.size();
  cut_depthwise(sizes, call.side, step);
  const size_t own = sizes.size() - shared;
  char* memory = static_cast<char*>(workspace(shared + threads() * own));
  float* arranged = reinterpret_cast<float*>(memory);
  const auto scratch_of = [&](size_t thread) {
    Cutter cutter(memory + shared + thread * own);
    return cut_depthwise(cutter, call.side, step);
  };
  const size_t arranged_blocks = at_least_one(kPieceWeights / (taps * kBlockChannels));
  parallel_region(blocks, arranged_blocks, threads(), [&](Claims& claims) {
    const auto scratch = scratch_of(claims.thread());
    for (size_t first, last; claims.next(first, last);) {
      set.arrange(weight, call.channels, taps, first, last, arranged, scratch.weights);
    }
  });
  call.weight = arranged;
  if (bias.data) {
    float* biases = arranged + blocks * taps * kBlockChannels;
    set.arrange(bias, call.channels, 1, 0, blocks, biases, scratch_of(0).weights);
    call.bias = biases;
  }
  const size_t places = std::min(call.target_rows, kStripRows) *
                        std::min(call.target_columns, kPieceColumns) * kBlockChannels;
  const size_t pieces = at_least_one(kPieceProducts / at_least_one(places * taps));
  parallel_region(items_of(call), pieces, threads(), [&](Claims& claims) {
    const auto scratch = scratch_of(claims.thread());
    for (size_t first, last; claims.next(first, last);) {
      set.convolve(call, first, last, scratch);
    }
  });
}

void sum_weight_gradients(DepthwiseWeightCall call, float* d_weight, float* d_bias) {
  const auto& set = table<DepthwiseConvolutionKernels>(kernels());
  const size_t blocks = blocks_of(call.channels), taps = call.side * call.side;
  const size_t rows = call.batch * call.target_rows;
  call.part_rows = std::max(
      {(rows + kParts - 1) / kParts, kPartPlaces / at_least_one(call.target_columns), size_t(1)});
  const size_t parts = (rows + call.part_rows - 1) / call.part_rows;
  const size_t sums = (taps + 1) * kBlockChannels;
  Cutter sizes(nullptr);
  sizes.take<double>(parts * blocks * sums);
  const size_t shared = sizes.size();
  cut_depthwise(sizes, call.side, call.stride);
  const size_t own = sizes.size() - shared;
  char* memory = static_cast<char*>(workspace(shared + threads() * own));
  call.sums = reinterpret_cast<double*>(memory);
  parallel_region(items_of(call), 1, threads(), [&](Claims& claims) {
    Cutter cutter(memory + shared + claims.thread() * own);
    const auto scratch = cut_depthwise(cutter, call.side, call.stride);
    for (size_t first, last; claims.next(first, last);) {
      set.sum_weights(call, first, last, scratch);
    }
  });
  for (size_t channel = 0; channel < call.channels; ++channel) {
    const double* own_sums = call.sums + channel / kBlockChannels * sums + channel % kBlockChannels;
    for (size_t tap = 0; tap <= taps; ++tap) {
      double total = 0;
      for (size_t part = 0; part < parts; ++part) {
        total += own_sums[part * blocks * sums + tap * kBlockChannels];
      }
      (tap < taps ? d_weight[channel * taps + tap] : d_bias[channel]) = static_cast<float>(total);
    }
  }
}

}  // namespace mmfree
