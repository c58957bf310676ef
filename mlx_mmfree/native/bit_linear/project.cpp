#include "bit_linear/project.h"

#include <algorithm>
#include <cstring>

#include "runtime/floats.h"
#include "runtime/kernels.h"
#include "runtime/thread_pool.h"
#include "runtime/workspace.h"
#include "ternary_matmul/tiles.h"

namespace mmfree {

namespace {

// The outputs of a group are whole cache lines, and a piece of work is whole groups.
constexpr size_t kGroup = 16;
// Weights of one piece. They stay in the second-level cache together with the activations of one
// tile.
constexpr size_t kPieceBytes = 128 << 10;
// Less work than this is done by the caller alone, because another thread wakes up too late.
constexpr size_t kSharedBytes = 64 << 10;
// Encoded activations that are prepared at once.
constexpr size_t kPanelBytes = 2 << 20;
// Rows whose sums are finished while they are in the first-level cache.
constexpr size_t kChunkRows = 24;
// Activations that one thread prepares at once.
constexpr size_t kPreparedBytes = 16 << 10;
// Bytes at the start of a share that are fetched while the activations are prepared.
constexpr size_t kEarlyBytes = 8 << 10;

constexpr size_t groups(size_t outputs) {
  return (outputs + kGroup - 1) / kGroup;
}

// The encoded rows of each projection, or of all of them together if they have no norms.
struct Panel {
  size_t rows, stride;
  bool has_codes;
  int8_t* codes;  // (projections, rows, stride)
  float* floats;  // the same, without codes
  int32_t* sums;  // (projections, rows)
  float* scales;  // (projections, rows)

  void cut(Cutter& cutter, size_t count) {
    codes = has_codes ? cutter.take<int8_t>(count * rows * stride) : nullptr;
    floats = has_codes ? nullptr : cutter.take<float>(count * rows * stride);
    sums = cutter.take<int32_t>(count * rows);
    scales = cutter.take<float>(count * rows);
  }
};

struct Scratch {
  float *z, *values, *sums;
  uint8_t* tile;

  void cut(Cutter& cutter, size_t z_rows, size_t stride, size_t sum_count, size_t tile_size) {
    z = cutter.take<float>(z_rows * stride);
    values = cutter.take<float>(stride);
    sums = cutter.take<float>(sum_count);
    tile = cutter.take<uint8_t>(tile_size);
  }
};

class Projector {
 public:
  Projector(const BitLinearCall& call, const Kernels& set)
      : call_(call),
        input_(call.input),
        loops_(table<BitLinearKernels>(set)),
        product_(table<TernaryMatmulKernels>(set)),
        row_bytes_(call.projections[0].weight.row_bytes),
        stride_(blocks(call.input.dims) * kBlockWeights) {
    input_.stride = stride_;
    for (const auto& projection : call.projections) {
      has_norms_ |= projection.norm.data != nullptr;
      groups_ += groups(projection.weight.outputs);
      outputs_ += projection.weight.outputs;
    }
    panels_ = has_norms_ ? call.projections.size() : 1;
  }

  void run() const {
    if (call_.rows <= product_.stream_rows && call_.rows > 0) {
      run_few();
      return;
    }
    const size_t row_size = panels_ * stride_ * (call_.has_codes ? 1 : sizeof(float));
    const size_t most = std::max<size_t>(kPanelBytes / row_size / 12 * 12, 12);
    for (size_t start = 0; start < call_.rows; start += most) {
      run_panel(start, std::min(most, call_.rows - start));
    }
  }

 private:
  bool has_tiles(size_t rows) const {
    return call_.has_codes && rows > product_.stream_rows;
  }

  // The number of groups in one piece of the products. Tiles are pieces of their own, so that the
  // threads come to the end together.
  size_t piece(size_t rows, size_t threads) const {
    if (groups_ * kGroup * row_bytes_ * rows <= kSharedBytes) {
      return groups_;
    }
    const size_t most = has_tiles(rows) ? kCodeTileOutputs / kGroup
                                        : kPieceBytes / std::max<size_t>(row_bytes_ * kGroup, 1);
    return std::max<size_t>(std::min(most, groups_ / (4 * threads)), 1);
  }

  // Each thread prepares the activations of a projection for itself when it comes to it, which is
  // faster than waiting for the other threads.
  void run_few() const {
    const size_t count = threads(), step = piece(call_.rows, count);
    const auto cut = [&](Cutter& cutter, Panel& panel, Scratch& scratch) {
      panel.cut(cutter, panels_);
      scratch.cut(cutter, call_.rows, stride_, call_.rows * step * kGroup, 0);
    };
    Panel panel{call_.rows, stride_, call_.has_codes, nullptr, nullptr, nullptr, nullptr};
    Scratch scratch;
    Cutter measure(nullptr);
    cut(measure, panel, scratch);
    char* memory = static_cast<char*>(workspace(count * measure.size()));
    parallel_region(groups_, step, count, [&](Claims& claims) {
      size_t first, last;
      if (!claims.next(first, last)) {
        return;
      }
      Panel panel{call_.rows, stride_, call_.has_codes, nullptr, nullptr, nullptr, nullptr};
      Scratch scratch;
      Cutter cutter(memory + claims.thread() * measure.size());
      cut(cutter, panel, scratch);
      prefetch(first);
      const float* z[kMostStreamRows];
      for (size_t row = 0; row < call_.rows; ++row) {
        z[row] = loops_.prepare_row(input_, row, scratch.z + row * stride_, scratch.values);
      }
      size_t encoded = call_.projections.size();
      do {
        each_projection(first, last, [&](size_t p, size_t output, size_t offset, size_t outputs) {
          if (encoded != p && (has_norms_ || encoded == call_.projections.size())) {
            for (size_t row = 0; row < call_.rows; ++row) {
              encode(panel, p, row, z[row], scratch.values);
            }
            encoded = p;
          }
          multiply(panel, p, 0, rows_of(p, output, outputs), output, offset, scratch);
        });
      } while (claims.next(first, last));
    });
  }

  void run_panel(size_t start, size_t rows) const {
    const size_t count = threads(), step = piece(rows, count);
    Panel panel{rows, stride_, call_.has_codes, nullptr, nullptr, nullptr, nullptr};
    Scratch scratch;
    const auto cut_scratch = [&](Cutter& cutter, Scratch& scratch) {
      scratch.cut(cutter, 1, stride_,
                  call_.has_codes ? 0 : std::min(rows, kChunkRows) * step * kGroup,
                  call_.has_codes ? interleaved_bytes(product_, rows, row_bytes_) : 0);
    };
    Cutter measure(nullptr), panel_measure(nullptr);
    cut_scratch(measure, scratch);
    panel.cut(panel_measure, panels_);
    char* memory = static_cast<char*>(workspace(panel_measure.size() + count * measure.size()));
    Cutter panel_cutter(memory);
    panel.cut(panel_cutter, panels_);
    const auto own = [&](const Claims& claims) {
      Scratch scratch;
      Cutter cutter(memory + panel_measure.size() + claims.thread() * measure.size());
      cut_scratch(cutter, scratch);
      return scratch;
    };
    const size_t row_step = std::max<size_t>(kPreparedBytes / (panels_ * stride_ * 4), 1);
    parallel_region(rows, row_step, count, [&](Claims& claims) {
      const Scratch scratch = own(claims);
      for (size_t first, last; claims.next(first, last);) {
        for (size_t row = first; row < last; ++row) {
          const float* z = loops_.prepare_row(input_, start + row, scratch.z, scratch.values);
          for (size_t p = 0; p < panels_; ++p) {
            encode(panel, p, row, z, scratch.values);
          }
        }
      }
    });
    parallel_region(groups_, step, count, [&](Claims& claims) {
      const Scratch scratch = own(claims);
      for (size_t first, last; claims.next(first, last);) {
        each_projection(first, last, [&](size_t p, size_t output, size_t offset, size_t outputs) {
          multiply(panel, p, start, rows_of(p, output, outputs), output, offset, scratch);
        });
      }
    });
  }

  // Calls body(projection, its first output, that in y, outputs) for the groups [first, last).
  template <class Body>
  void each_projection(size_t first, size_t last, Body&& body) const {
    size_t start = 0, offset = 0;
    for (size_t p = 0; p < call_.projections.size(); ++p) {
      const size_t outputs = call_.projections[p].weight.outputs;
      const size_t from = std::max(first, start), end = std::min(last, start + groups(outputs));
      if (from < end) {
        const size_t output = (from - start) * kGroup;
        body(p, output, offset + output, std::min((end - start) * kGroup, outputs) - output);
      }
      start += groups(outputs);
      offset += outputs;
    }
  }

  void prefetch(size_t group) const {
    each_projection(group, group + 1, [&](size_t p, size_t output, size_t, size_t) {
      const uint8_t* weight = call_.projections[p].weight.bytes + output * row_bytes_;
      for (size_t byte = 0; byte < kEarlyBytes; byte += 64) {
        __builtin_prefetch(weight + byte);
      }
    });
  }

  void encode(const Panel& panel, size_t p, size_t row, const float* z, float* scratch) const {
    const RowEncoder encoder{call_.input.dims, call_.projections[p].norm, call_.eps,
                             call_.half_away, stride_};
    const size_t at = place(panel, p) + row;
    if (panel.has_codes) {
      loops_.encode_row(encoder, z, scratch, panel.codes + at * stride_, panel.sums + at,
                        panel.scales + at);
    } else {
      loops_.normalize_row(encoder, z, scratch, panel.floats + at * stride_);
    }
  }

  PackedMatrix rows_of(size_t p, size_t output, size_t outputs) const {
    PackedMatrix weight = call_.projections[p].weight;
    weight.bytes += output * row_bytes_;
    weight.outputs = outputs;
    return weight;
  }

  // Where the rows of a projection begin in the panel.
  size_t place(const Panel& panel, size_t p) const {
    return (has_norms_ ? p : 0) * panel.rows;
  }

  // Multiplies all rows of the panel, which are those of y from `start` on, by a part of a matrix,
  // which begins at `output`.
  void multiply(const Panel& panel, size_t p, size_t start, const PackedMatrix& weight,
                size_t output, size_t offset, const Scratch& scratch) const {
    const size_t at = place(panel, p), outputs = weight.outputs;
    if (!panel.has_codes) {
      for (size_t row = 0; row < panel.rows; row += kChunkRows) {
        const size_t count = std::min(kChunkRows, panel.rows - row);
        product_.multiply_floats(
            {panel.floats + (at + row) * stride_, count, stride_, weight, scratch.sums}, 0,
            outputs);
        finish(panel, p, row, count, start, output, offset, outputs, scratch.sums, outputs);
      }
      return;
    }
    const CodeProduct product{
        panel.codes + at * stride_, panel.sums + at, panel.rows, stride_, weight, scratch.sums};
    if (!has_tiles(panel.rows)) {
      product_.stream_codes(product, 0, outputs);
      finish(panel, p, 0, panel.rows, start, output, offset, outputs, scratch.sums, outputs);
      return;
    }
    multiply_tiles(product_, product, 0, outputs, scratch.tile,
                   [&](size_t row, size_t rows, size_t first, size_t width, const float* values) {
                     finish(panel, p, row, rows, start, output + first, offset + first, width,
                            values, kCodeTileOutputs);
                   });
  }

  // Makes the rows [row, row + rows) of the panel of their sums with some outputs.
  void finish(const Panel& panel, size_t p, size_t row, size_t rows, size_t start, size_t output,
              size_t offset, size_t outputs, const float* sums, size_t sum_stride) const {
    const Projection& projection = call_.projections[p];
    const size_t at = (start + row) * outputs_ + offset;
    loops_.finish({sums, sum_stride, rows, outputs,
                   projection.scale + (projection.has_scales ? output : 0), projection.has_scales,
                   panel.has_codes ? panel.scales + place(panel, p) + row : nullptr,
                   mmfree::offset(call_.residual, at),
                   static_cast<char*>(call_.y) + at * size_of(call_.type), call_.type, outputs_});
  }

  const BitLinearCall& call_;
  RowInput input_;
  const BitLinearKernels& loops_;
  const TernaryMatmulKernels& product_;
  bool has_norms_ = false;
  size_t row_bytes_, stride_, groups_ = 0, outputs_ = 0, panels_ = 1;
};

}  // namespace

void project(const BitLinearCall& call) {
  Projector(call, kernels()).run();
}

}  // namespace mmfree
