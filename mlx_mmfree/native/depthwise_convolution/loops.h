#pragma once

#include <string.h>

#include "depthwise_convolution/kernels.h"
#include "depthwise_convolution/source_rows.h"
#include "depthwise_convolution/weight_sums.h"
#include "runtime/floats.h"
#include "runtime/unroll.h"

namespace mmfree {

template <class Isa>
void arrange_taps(const Floats& weight, size_t channels, size_t taps, size_t first, size_t last,
                  float* arranged, float* scratch) {
  for (size_t block = first; block < last; ++block) {
    float* own = arranged + block * taps * kBlockChannels;
    for (size_t lane = 0; lane < kBlockChannels; ++lane) {
      const size_t channel = block * kBlockChannels + lane;
      if (channel >= channels) {
        for (size_t tap = 0; tap < taps; ++tap) {
          own[tap * kBlockChannels + lane] = 0.0f;
        }
        continue;
      }
      const float* values = as_float32<Isa>(weight, channel * taps, taps, scratch);
      for (size_t tap = 0; tap < taps; ++tap) {
        own[tap * kBlockChannels + lane] = values[tap];
      }
    }
  }
}

// The sums of kTilePlaces places, whose sources are `step` columns apart, or `any_step` if that is
// 0. Each of the rows meets `taps` weights, one of which is `distance` floats from the next.
template <class Isa, size_t step>
void sum_tile(const DepthwiseTap* rows, size_t count, size_t taps, ptrdiff_t distance,
              size_t any_step, const float* bias, float* sums) {
  const size_t between = (step ? step : any_step) * kBlockChannels;
  for (size_t lane = 0; lane < kBlockChannels; lane += Isa::kLanes) {
    typename Isa::Floats at[kTilePlaces];
    unroll<kTilePlaces>([&](auto t) MMFREE_INLINE {
      at[t] = bias ? Isa::template load<FloatType::float32>(bias + lane) : Isa::zero();
    });
    for (size_t row = 0; row < count; ++row) {
      const float *x = rows[row].source + lane, *w = rows[row].weight + lane;
      for (size_t tap = 0; tap < taps; ++tap, x += kBlockChannels, w += distance) {
        const auto weight = Isa::template load<FloatType::float32>(w);
        unroll<kTilePlaces>([&](auto t) MMFREE_INLINE {
          const auto value = Isa::template load<FloatType::float32>(x + t * between);
          at[t] = Isa::multiply_add(value, weight, at[t]);
        });
      }
    }
    unroll<kTilePlaces>([&](auto t) MMFREE_INLINE {
      memcpy(sums + t * kBlockChannels + lane, &at[t], sizeof(at[t]));
    });
  }
}

// Places of a row of the target that meet the same weights: the columns `first` + n * `distance` of
// a piece. The source of the first one begins at column `source`.
struct DepthwisePhase {
  size_t first, distance, places;
  size_t source, step;
  size_t taps;
  ptrdiff_t weight, weight_distance;
};

inline DepthwisePhase phase_of(const DepthwiseCall& c, size_t start, size_t end, size_t phase,
                               int64_t first_column) {
  if (!c.is_gradient) {
    return {start, 1, end - start, 0, c.stride, c.side, 0, kBlockChannels};
  }
  const int64_t stride = c.stride, from = start + phase + c.side / 2, last = c.side - 1;
  // the last of the weights that meet these places
  const int64_t weight = last - ((last - from) % stride + stride) % stride;
  const size_t first = start + phase;
  const size_t places = first < end ? (end - first + c.stride - 1) / c.stride : 0;
  if (weight < 0) {
    return {first, c.stride, places, 0, 1, 0, 0, 0};
  }
  return {first,
          c.stride,
          places,
          static_cast<size_t>((from - weight) / stride - first_column),
          1,
          static_cast<size_t>(weight / stride + 1),
          static_cast<ptrdiff_t>(weight * kBlockChannels),
          -static_cast<ptrdiff_t>(stride * kBlockChannels)};
}

template <class Isa, class Dense>
void store_place(const DepthwiseCall& c, const float* sums, size_t start, size_t count) {
  if (c.type == FloatType::float32 && count == kBlockChannels) {
    memcpy(static_cast<float*>(c.target) + start, sums, kBlockChannels * sizeof(float));
    return;
  }
  narrow<Isa>(sums, count, c.type, static_cast<char*>(c.target) + start * size_of(c.type));
}

template <class Isa, class Dense>
void convolve_row(const DepthwiseCall& c, const DepthwiseTap* rows, size_t count,
                  const DepthwisePhase& p, const float* bias, size_t origin, size_t channels,
                  DepthwiseTap* moved) {
  alignas(64) float sums[kTilePlaces * kBlockChannels];
  for (size_t place = 0; place < p.places; place += kTilePlaces) {
    for (size_t row = 0; row < count; ++row) {
      moved[row] = {rows[row].source + (p.source + place * p.step) * kBlockChannels,
                    rows[row].weight + p.weight};
    }
    const auto sum = p.step == 1   ? sum_tile<Dense, 1>
                     : p.step == 2 ? sum_tile<Dense, 2>
                                   : sum_tile<Dense, 0>;
    sum(moved, count, p.taps, p.weight_distance, p.step, bias, sums);
    const size_t own = p.places - place < kTilePlaces ? p.places - place : kTilePlaces;
    for (size_t t = 0; t < own; ++t) {
      const size_t column = p.first + (place + t) * p.distance;
      store_place<Isa, Dense>(c, sums + t * kBlockChannels, origin + column * c.channels, channels);
    }
  }
}

template <class Isa, class Dense>
void convolve_items(const DepthwiseCall& c, size_t first, size_t last,
                    const DepthwiseScratch& scratch) {
  const size_t blocks = blocks_of(c.channels), taps = c.side * c.side;
  const size_t pieces = (c.target_columns + kPieceColumns - 1) / kPieceColumns;
  const size_t strips = (c.target_rows + kStripRows - 1) / kStripRows;
  for (size_t item = first; item < last; ++item) {
    const size_t block = item % blocks, piece = item / blocks % pieces;
    const size_t strip = item / blocks / pieces % strips, image = item / blocks / pieces / strips;
    const size_t start = piece * kPieceColumns, top = strip * kStripRows;
    const size_t end = std::min(start + kPieceColumns, c.target_columns);
    const size_t bottom = std::min(top + kStripRows, c.target_rows);
    const SourceWindow window{c.side, c.stride, c.is_gradient};
    const int64_t column = window.first(start);
    const size_t channels = std::min(kBlockChannels, c.channels - block * kBlockChannels);
    SourceRows<Dense> source(
        {c.source, c.source_rows, c.source_columns, c.channels, block * kBlockChannels, channels},
        image, column, source_columns_of(end - start, c.side, c.is_gradient ? 1 : c.stride), c.side,
        scratch.rows);
    const float* weight = c.weight + block * taps * kBlockChannels;
    for (size_t row = top; row < bottom; ++row) {
      const int64_t above = window.first(row), below = window.last(row);
      source.read_until(above, below);
      size_t count = 0;
      for (int64_t from = above; from <= below; ++from) {
        if (source.has(from)) {
          const size_t tap = window.tap(row, from);
          scratch.taps[count++] = {source.row(from), weight + tap * c.side * kBlockChannels};
        }
      }
      const size_t phases = c.is_gradient ? c.stride : 1;
      for (size_t phase = 0; phase < phases; ++phase) {
        convolve_row<Isa, Dense>(c, scratch.taps, count, phase_of(c, start, end, phase, column),
                                 c.bias ? c.bias + block * kBlockChannels : nullptr,
                                 ((image * c.target_rows + row) * c.target_columns) * c.channels +
                                     block * kBlockChannels,
                                 channels, scratch.taps + c.side);
      }
    }
  }
}

template <class Isa, class Dense>
constexpr DepthwiseConvolutionKernels DepthwiseConvolutionKernels::of() {
  return {mmfree::arrange_taps<Isa>, mmfree::convolve_items<Isa, Dense>,
          mmfree::sum_weight_items<Dense>};
}

}  // namespace mmfree
