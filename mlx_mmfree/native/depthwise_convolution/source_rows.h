#pragma once

#include <string.h>

#include "depthwise_convolution/kernels.h"
#include "runtime/floats.h"

namespace mmfree {

// Which rows, or columns, of the source a row or column of the target reads: row r of the result
// reads r * stride - side / 2 and those below it, so that row r of the map is read by the rows
// whose window holds it.
struct SourceWindow {
  size_t side, stride;
  bool is_gradient;

  int64_t first(size_t target) const {
    const int64_t from = target, half = side / 2, step = stride;
    if (!is_gradient) {
      return from * step - half;
    }
    // rounded up
    return from >= half ? (from - half + step - 1) / step : -((half - from) / step);
  }
  int64_t last(size_t target) const {
    return is_gradient ? static_cast<int64_t>((target + side / 2) / stride)
                       : first(target) + static_cast<int64_t>(side) - 1;
  }
  // The weight with which a source in the window is multiplied.
  size_t tap(size_t target, int64_t source) const {
    return is_gradient ? target + side / 2 - source * stride : source - first(target);
  }
};

// A block of channels of a map.
struct MapBlock {
  Floats floats;  // (batch, rows, columns, channels)
  size_t rows, columns, channels;
  size_t first, count;  // its channels
};

// Writes one place of a block after the other in float32, `channels` values each, filled up to
// kBlockChannels with zeros.
template <class Isa, FloatType type>
void widen_whole_places(const Floats& floats, size_t start, size_t channels, size_t count,
                        float* places) {
  const char* from = static_cast<const char*>(floats.data) + start * size_of(type);
  for (size_t place = 0; place < count; ++place) {
    unroll<kBlockChannels / Isa::kLanes>([&](auto v) MMFREE_INLINE {
      const auto values =
          Isa::template load<type>(from + (place * channels + v * Isa::kLanes) * size_of(type));
      memcpy(places + place * kBlockChannels + v * Isa::kLanes, &values, sizeof(values));
    });
  }
}

template <class Isa>
void widen_places(const MapBlock& map, size_t start, size_t count, float* places) {
  start += map.first;
  if (map.count < kBlockChannels) {
    memset(places, 0, count * kBlockChannels * sizeof(float));
    for (size_t place = 0; place < count; ++place) {
      widen<Isa>(map.floats, start + place * map.channels, map.count,
                 places + place * kBlockChannels);
    }
    return;
  }
  switch (map.floats.type) {
    case FloatType::float32:
      return widen_whole_places<Isa, FloatType::float32>(map.floats, start, map.channels, count,
                                                         places);
    case FloatType::float16:
      return widen_whole_places<Isa, FloatType::float16>(map.floats, start, map.channels, count,
                                                         places);
    case FloatType::bfloat16:
      return widen_whole_places<Isa, FloatType::bfloat16>(map.floats, start, map.channels, count,
                                                          places);
  }
}

// The last rows of a block that were read, with zeros beside the map. Rows are read from top to
// bottom, `side` of them are held at most.
template <class Isa>
class SourceRows {
 public:
  // `column`: the first column that is held, perhaps before the map. `width`: how many are held.
  SourceRows(const MapBlock& map, size_t image, int64_t column, size_t width, size_t side,
             float* memory)
      : map_(map), image_(image), column_(column), width_(width), side_(side), memory_(memory) {
  }

  // Reads the rows from `above` to `below`, as far as the map has them and they are not held yet.
  void read_until(int64_t above, int64_t below) {
    next_ = above > next_ ? above : next_;
    for (; next_ <= below && next_ < static_cast<int64_t>(map_.rows); ++next_) {
      read(next_);
    }
  }

  bool has(int64_t row) const {
    return row >= 0 && row < static_cast<int64_t>(map_.rows);
  }

  const float* row(int64_t row) const {
    return memory_ + row % side_ * width_ * kBlockChannels;
  }

 private:
  void read(int64_t row) {
    float* places = memory_ + row % side_ * width_ * kBlockChannels;
    const size_t before = column_ < 0 ? std::min<size_t>(-column_, width_) : 0;
    const size_t from = column_ < 0 ? 0 : column_;
    const size_t left = map_.columns > from ? map_.columns - from : 0;
    const size_t count = std::min(left, width_ - before);
    memset(places, 0, before * kBlockChannels * sizeof(float));
    const size_t start = ((image_ * map_.rows + row) * map_.columns + from) * map_.channels;
    widen_places<Isa>(map_, start, count, places + before * kBlockChannels);
    memset(places + (before + count) * kBlockChannels, 0,
           (width_ - before - count) * kBlockChannels * sizeof(float));
  }

  MapBlock map_;
  size_t image_;
  int64_t column_;
  size_t width_, side_;
  float* memory_;
  int64_t next_ = 0;
};

}  // namespace mmfree
