#include "attention/attend.h"

#include <algorithm>
#include <cmath>

#include "attention/kernels.h"
#include "attention_step/kernels.h"
#include "dense_matmul/kernels.h"
#include "runtime/floats.h"
#include "runtime/kernels.h"
#include "runtime/thread_pool.h"
#include "runtime/workspace.h"

namespace mmfree {

namespace {

// Keys of one run. Runs begin at the same keys in every call, so that a query keeps its bits.
constexpr size_t kRunKeys = 128;
// Queries of one tile, for all heads that share keys. Their sums stay in the second-level cache.
constexpr size_t kTileRows = 96;
// Fewer multiplications than these are done by the caller alone, because another thread wakes up
// too late.
constexpr size_t kSharedProducts = 256 << 10;

// The memory of a thread for one tile. Row `head * tokens + token` is a query.
struct Tile {
  float *queries, *columns, *scores, *runs, *scratch;
  bool* seen;
};

class Queries {
 public:
  Queries(const QueriesCall& call, const Kernels& set)
      : call_(call),
        loops_(table<AttentionStepKernels>(set)),
        products_(table<AttentionKernels>(set)),
        padding_(table<DenseMatmulKernels>(set).padding),
        shared_(call.heads / call.groups),
        tokens_(std::clamp<size_t>(kTileRows / shared_, 1, call.length)),
        tiles_((call.length + tokens_ - 1) / tokens_),
        value_stride_(std::max(round_up(call.value_dims, padding_), padding_)),
        run_(shared_ * tokens_ * (value_stride_ + 2)) {
  }

  void run() const {
    const QueriesCall& c = call_;
    const size_t items = c.batch * c.groups * tiles_;
    const size_t work = c.batch * c.heads * c.length * c.count * (c.dims + c.value_dims);
    const size_t size = cut(nullptr).second;
    char* memory = static_cast<char*>(workspace(threads() * size));
    const size_t step = work <= kSharedProducts ? items : 1;
    parallel_region(items, step, threads(), [&](Claims& claims) {
      const Tile tile = cut(memory + claims.thread() * size).first;
      for (size_t item, last; claims.next(item, last);) {
        for (; item < last; ++item) {
          attend(item / tiles_, item % tiles_ * tokens_, tile);
        }
      }
    });
  }

 private:
  std::pair<Tile, size_t> cut(char* memory) const {
    const size_t rows = shared_ * tokens_, runs = (call_.count + kRunKeys - 1) / kRunKeys;
    Cutter cutter(memory);
    Tile tile;
    tile.queries = cutter.take<float>(rows * call_.dims);
    tile.columns = cutter.take<float>(call_.dims * kRunKeys);
    tile.scores = cutter.take<float>(rows * kRunKeys);
    tile.runs = cutter.take<float>(runs * run_);
    tile.scratch = cutter.take<float>(std::max(2 * call_.dims, call_.value_dims));
    tile.seen = cutter.take<bool>(tokens_ * kRunKeys);
    return {tile, cutter.size()};
  }

  // Computes the tokens from `start` on for the heads of one group of one batch row.
  void attend(size_t group, size_t start, const Tile& tile) const {
    const QueriesCall& c = call_;
    const size_t batch = group / c.groups, tokens = std::min(tokens_, c.length - start);
    const size_t rows = shared_ * tokens;
    group %= c.groups;
    gather(batch, group * shared_, start, tokens, tile);
    const size_t end = c.is_causal ? seen_by(start + tokens - 1) : c.count;
    size_t runs = 0;
    for (size_t first = 0; first < end; first += kRunKeys, ++runs) {
      const size_t keys = std::min(kRunKeys, end - first);
      const size_t at = batch * c.key_batch + group * c.key_group + first * c.dims;
      products_.turn({offset(c.keys, at), c.dims, keys, c.dims, tile.columns, kRunKeys});
      products_.multiply({tile.queries, c.dims, 1, tile.columns, kRunKeys, tile.scores, keys, rows,
                          c.dims, keys, false});
      const bool has_mask = mark(batch, start, tokens, first, keys, tile.seen);
      const size_t value = batch * c.value_batch + group * c.value_group + first * c.value_dims;
      float* record = tile.runs + runs * run_;
      float* peaks = record + rows * value_stride_;
      loops_.weigh({tile.scores, rows, keys, c.value_dims, offset(c.values, value), record,
                    value_stride_, peaks, peaks + rows, has_mask ? tile.seen : nullptr, tokens});
    }
    for (size_t row = 0; row < rows; ++row) {
      const size_t head = group * shared_ + row / tokens, token = start + row % tokens;
      const size_t at = ((batch * c.length + token) * c.heads + head) * c.value_dims;
      const float* peaks = tile.runs + rows * value_stride_ + row;
      loops_.merge({tile.runs + row * value_stride_, peaks, peaks + rows, runs, run_, c.value_dims,
                    static_cast<char*>(c.y) + at * size_of(c.queries.type), c.queries.type,
                    c.log_totals + (batch * c.heads + head) * c.length + token},
                   tile.scratch);
    }
  }

  // Writes the scaled queries in float32.
  void gather(size_t batch, size_t head, size_t start, size_t tokens, const Tile& tile) const {
    const QueriesCall& c = call_;
    const float scale = static_cast<float>(1.0 / std::sqrt(static_cast<double>(c.dims)));
    for (size_t row = 0; row < shared_ * tokens; ++row) {
      const size_t at = batch * c.query_batch + (head + row / tokens) * c.query_head +
                        (start + row % tokens) * c.query_token;
      loops_.prepare_heads({offset(c.queries, at),
                            1,
                            c.dims,
                            {nullptr, FloatType::float32},
                            0.0f,
                            nullptr,
                            0,
                            false,
                            scale,
                            tile.queries + row * c.dims,
                            FloatType::float32,
                            c.dims},
                           tile.scratch);
    }
  }

  // The number of keys that a token sees, with a causal mask.
  size_t seen_by(size_t token) const {
    const size_t keys = token + 1 + call_.count;
    return keys > call_.length ? keys - call_.length : 0;
  }

  // Marks what each token sees of a run of keys. Returns false where that is everything.
  bool mark(size_t batch, size_t start, size_t tokens, size_t first, size_t keys,
            bool* seen) const {
    const QueriesCall& c = call_;
    if (!c.mask && (!c.is_causal || seen_by(start) >= first + keys)) {
      return false;
    }
    for (size_t t = 0; t < tokens; ++t) {
      for (size_t key = 0; key < keys; ++key) {
        seen[t * keys + key] = c.mask ? c.mask[batch * c.mask_batch + (start + t) * c.mask_token +
                                               (first + key) * c.mask_key]
                                      : first + key < seen_by(start + t);
      }
    }
    return true;
  }

  const QueriesCall& call_;
  const AttentionStepKernels& loops_;
  const AttentionKernels& products_;
  size_t padding_;
  size_t shared_, tokens_, tiles_, value_stride_, run_;
};

}  // namespace

void attend(const QueriesCall& call) {
  Queries(call, kernels()).run();
}

}  // namespace mmfree
