#include "attention/attend_gradient.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "attention/kernels.h"
#include "runtime/kernels.h"
#include "runtime/thread_pool.h"
#include "runtime/workspace.h"

namespace mmfree {

namespace {

// Keys and queries of one tile. Its scores and its operands stay in the first- and second-level
// cache.
constexpr size_t kKeys = 64, kTokens = 64;
// Enough items to keep many threads busy. More parts of the keys take more memory.
constexpr size_t kItems = 16;
// Numbers of one piece in passes over whole arrays.
constexpr size_t kPieceFloats = 16 << 10;
// Independent sums of one product, so that none waits for the other.
constexpr size_t kSums = 8;

size_t key_blocks(size_t count) {
  return (count + kKeys - 1) / kKeys;
}

// The memory of a thread.
struct Scratch {
  float *keys, *values;        // (dims, kKeys), (value_dims, kKeys): transposed
  float *weights, *gradients;  // (kTokens, kKeys)
  bool* seen;                  // (kTokens, kKeys)
};

class Gradient {
 public:
  Gradient(const AttentionGradientCall& call, const Kernels& set)
      : call_(call),
        loops_(table<AttentionKernels>(set)),
        shared_(call.heads / call.groups),
        parts_(key_parts(call.batch, call.groups, call.count)),
        scale_(static_cast<float>(1.0 / std::sqrt(static_cast<double>(call.dims)))) {
  }

  void run() {
    const AttentionGradientCall& c = call_;
    const size_t rows = c.batch * c.heads * c.length;
    float* deltas = nullptr;
    char* memory = nullptr;
    const size_t size = cut(nullptr).second;
    const auto take = [&](Cutter& cutter) {
      deltas = cutter.take<float>(rows);
      memory = cutter.take<char>(threads() * size);
    };
    Cutter measure(nullptr);
    take(measure);
    Cutter cutter(workspace(measure.size()));
    take(cutter);
    deltas_ = deltas;
    parallel_for(rows, std::max<size_t>(kPieceFloats / c.value_dims, 1),
                 [&](size_t first, size_t last) { set_deltas(first, last, deltas); });
    parallel_region(parts_ * c.batch * c.groups, 1, threads(), [&](Claims& claims) {
      const Scratch scratch = cut(memory + claims.thread() * size).first;
      for (size_t item, last; claims.next(item, last);) {
        for (; item < last; ++item) {
          compute(item, scratch);
        }
      }
    });
    if (parts_ > 1) {
      join();
    }
  }

 private:
  std::pair<Scratch, size_t> cut(char* memory) const {
    Cutter cutter(memory);
    Scratch scratch;
    scratch.keys = cutter.take<float>(call_.dims * kKeys);
    scratch.values = cutter.take<float>(call_.value_dims * kKeys);
    scratch.weights = cutter.take<float>(kTokens * kKeys);
    scratch.gradients = cutter.take<float>(kTokens * kKeys);
    scratch.seen = cutter.take<bool>(kTokens * kKeys);
    return {scratch, cutter.size()};
  }

  // Sets the product of each row of the result and its gradient. No sum of weights needs it then.
  // The rows [first, last) are in the order of (batch, length, heads), in which results lie.
  void set_deltas(size_t first, size_t last, float* deltas) const {
    const AttentionGradientCall& c = call_;
    for (size_t row = first; row < last; ++row) {
      const size_t head = row % c.heads, token = row / c.heads % c.length;
      const size_t batch = row / c.heads / c.length;
      const float *y = c.y.at(batch, head, token), *d_y = c.d_y.at(batch, head, token);
      double sums[kSums] = {};
      size_t d = 0;
      for (; d + kSums <= c.value_dims; d += kSums) {
        for (size_t s = 0; s < kSums; ++s) {
          sums[s] += static_cast<double>(y[d + s]) * d_y[d + s];
        }
      }
      for (; d < c.value_dims; ++d) {
        sums[0] += static_cast<double>(y[d]) * d_y[d];
      }
      deltas[(batch * c.heads + head) * c.length + token] =
          static_cast<float>(std::accumulate(sums, sums + kSums, 0.0));
    }
  }

  // Computes the gradients of one part of the keys of one group, and its part of those of queries.
  void compute(size_t item, const Scratch& scratch) const {
    const AttentionGradientCall& c = call_;
    const size_t part = item % parts_, pair = item / parts_;
    const size_t batch = pair / c.groups, group = pair % c.groups;
    const size_t size = c.batch * c.heads * c.length * c.dims;
    float* d_queries = parts_ == 1 ? c.d_queries : c.parts + part * size;
    d_queries += pair * shared_ * c.length * c.dims;
    std::fill_n(d_queries, shared_ * c.length * c.dims, 0.0f);
    const size_t blocks = key_blocks(c.count);
    for (size_t block = part * blocks / parts_; block < (part + 1) * blocks / parts_; ++block) {
      add_keys(batch, group, block * kKeys, d_queries, scratch);
    }
  }

  void add_keys(size_t batch, size_t group, size_t first, float* d_queries,
                const Scratch& scratch) const {
    const AttentionGradientCall& c = call_;
    const size_t keys = std::min(kKeys, c.count - first);
    const size_t row = (batch * c.groups + group) * c.count + first;
    const auto turn = [&](const HeadRows& rows, size_t dims, float* columns) {
      const Floats own{rows.at(batch, group, first), FloatType::float32};
      loops_.turn({own, rows.token, keys, dims, columns, kKeys});
    };
    turn(c.keys, c.dims, scratch.keys);
    turn(c.values, c.value_dims, scratch.values);
    std::fill_n(c.d_keys + row * c.dims, keys * c.dims, 0.0f);
    std::fill_n(c.d_values + row * c.value_dims, keys * c.value_dims, 0.0f);
    // with a causal mask, the queries before see none of these keys
    const size_t begin = c.is_causal && first + c.length > c.count ? first + c.length - c.count : 0;
    for (size_t head = 0; head < shared_; ++head) {
      for (size_t start = begin; start < c.length; start += kTokens) {
        add_tile(batch, group, head, start, first, d_queries, scratch);
      }
    }
  }

  // Adds what one tile of scores gives to the gradients of its queries, keys and values.
  void add_tile(size_t batch, size_t group, size_t shared_head, size_t start, size_t first,
                float* d_queries, const Scratch& scratch) const {
    const AttentionGradientCall& c = call_;
    const size_t tokens = std::min(kTokens, c.length - start);
    const size_t keys = std::min(kKeys, c.count - first);
    const size_t head = group * shared_ + shared_head;
    const float* queries = c.queries.at(batch, head, start);
    const float* d_y = c.d_y.at(batch, head, start);
    float *weights = scratch.weights, *gradients = scratch.gradients;
    loops_.multiply({queries, c.queries.token, 1, scratch.keys, kKeys, weights, kKeys, tokens,
                     c.dims, keys, false});
    loops_.multiply({d_y, c.d_y.token, 1, scratch.values, kKeys, gradients, kKeys, tokens,
                     c.value_dims, keys, false});
    const size_t row = (batch * c.heads + head) * c.length + start;
    const bool has_mask = mark(batch, start, tokens, first, keys, scratch.seen);
    loops_.weigh({weights, gradients, tokens, keys, kKeys, c.log_totals + row, deltas_ + row,
                  has_mask ? scratch.seen : nullptr, scale_});
    const size_t key = (batch * c.groups + group) * c.count + first;
    loops_.multiply({weights, 1, kKeys, d_y, c.d_y.token, c.d_values + key * c.value_dims,
                     c.value_dims, keys, tokens, c.value_dims, true});
    loops_.multiply({gradients, 1, kKeys, queries, c.queries.token, c.d_keys + key * c.dims, c.dims,
                     keys, tokens, c.dims, true});
    loops_.multiply({gradients, kKeys, 1, c.keys.at(batch, group, first), c.keys.token,
                     d_queries + (shared_head * c.length + start) * c.dims, c.dims, tokens, keys,
                     c.dims, true});
  }

  // Marks what each token sees of a tile of keys. Returns false where that is everything.
  bool mark(size_t batch, size_t start, size_t tokens, size_t first, size_t keys,
            bool* seen) const {
    const AttentionGradientCall& c = call_;
    if (!c.mask && (!c.is_causal || first + keys + c.length <= start + 1 + c.count)) {
      return false;
    }
    for (size_t t = 0; t < tokens; ++t) {
      for (size_t key = 0; key < keys; ++key) {
        seen[t * kKeys + key] = c.mask ? c.mask[batch * c.mask_batch + (start + t) * c.mask_token +
                                                (first + key) * c.mask_key]
                                       : first + key + c.length < start + t + 1 + c.count;
      }
    }
    return true;
  }

  // Adds up the parts of the gradient of the queries, in their order.
  void join() const {
    const AttentionGradientCall& c = call_;
    const size_t size = c.batch * c.heads * c.length * c.dims;
    parallel_for(size, kPieceFloats, [&](size_t first, size_t last) {
      std::copy(c.parts + first, c.parts + last, c.d_queries + first);
      for (size_t part = 1; part < parts_; ++part) {
        const float* own = c.parts + part * size;
        for (size_t i = first; i < last; ++i) {
          c.d_queries[i] += own[i];
        }
      }
    });
  }

  const AttentionGradientCall& call_;
  const AttentionKernels& loops_;
  size_t shared_, parts_;
  float scale_;
  const float* deltas_ = nullptr;  // (batch, heads, length)
};

}  // namespace

size_t key_parts(size_t batch, size_t groups, size_t count) {
  const size_t wanted = (kItems + batch * groups - 1) / (batch * groups);
  return std::clamp<size_t>(wanted, 1, key_blocks(count));
}

void attend_gradient(const AttentionGradientCall& call) {
  Gradient(call, kernels()).run();
}

}  // namespace mmfree
