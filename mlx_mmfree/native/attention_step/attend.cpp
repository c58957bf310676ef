#include "attention_step/attend.h"

#include <algorithm>
#include <cmath>

#include "attention_step/kernels.h"
#include "dense_matmul/kernels.h"
#include "runtime/floats.h"
#include "runtime/kernels.h"
#include "runtime/thread_pool.h"
#include "runtime/workspace.h"

namespace mmfree {

namespace {

// Slots of one run. Runs begin at the same slots in every call, so that a row keeps its bits.
constexpr size_t kRunSlots = 128;
// Fewer floats than these are read by the caller alone, because another thread wakes up too late.
constexpr size_t kSharedFloats = 32 << 10;

constexpr Floats kNone{nullptr, FloatType::float32};

// The number of items, of so many floats each, that make a piece.
size_t piece(size_t floats) {
  return std::max<size_t>(kSharedFloats / std::max<size_t>(floats, 1), 1);
}

class Attention {
 public:
  Attention(const AttentionCall& call, const Kernels& set)
      : call_(call),
        loops_(table<AttentionStepKernels>(set)),
        dense_(table<DenseMatmulKernels>(set)),
        shared_(call.heads / call.groups),
        stride_(std::max(round_up(call.dims, dense_.padding), dense_.padding)),
        runs_((call.slots + kRunSlots - 1) / kRunSlots),
        record_(shared_ * (stride_ + 2)) {
  }

  void run() {
    const AttentionCall& c = call_;
    const size_t count = threads();
    const size_t own = round_up(std::max(3 * c.dims, shared_ * kRunSlots), 16);
    float* scratch = nullptr;
    const auto cut = [&](Cutter& cutter) {
      queries_ = cutter.take<float>(c.batch * c.heads * stride_);
      used_ = cutter.take<size_t>(c.batch);
      records_ = cutter.take<float>(c.batch * c.groups * runs_ * record_);
      scratch = cutter.take<float>(count * own);
    };
    Cutter measure(nullptr);
    cut(measure);
    Cutter cutter(workspace(measure.size()));
    cut(cutter);
    const auto share = [&](size_t items, size_t step, auto&& body) {
      parallel_region(items, step, count, [&](Claims& claims) {
        for (size_t item, last; claims.next(item, last);) {
          for (; item < last; ++item) {
            body(item, scratch + claims.thread() * own);
          }
        }
      });
    };
    share(c.batch, piece((c.heads + 2 * c.groups) * c.dims),
          [this](size_t row, float* scratch) { prepare(row, scratch); });
    const size_t longest = *std::max_element(used_, used_ + c.batch);
    runs_ = (longest + kRunSlots - 1) / kRunSlots;
    const size_t items = c.batch * c.groups * runs_;
    const bool is_small = 2 * c.batch * c.groups * longest * c.dims <= kSharedFloats;
    share(items, is_small ? std::max<size_t>(items, 1) : 1,
          [this](size_t item, float* scratch) { read(item, scratch); });
    share(c.batch * c.heads, piece(runs_ * c.dims),
          [this](size_t head, float* scratch) { merge(head, scratch); });
  }

 private:
  // Rotates a row's queries and key, and puts the key and the value into their slot.
  void prepare(size_t row, float* scratch) {
    const AttentionCall& c = call_;
    const int64_t position = length(row);
    used_[row] = std::min<size_t>(position + 1, c.slots);
    for (size_t slot = 0; slot < c.slots; ++slot) {
      c.new_positions[row * c.slots + slot] = static_cast<int32_t>(c.rule.held(slot, position));
    }
    float* angles = c.wavelengths ? scratch + 2 * c.dims : nullptr;
    if (angles) {
      set_angles(position, angles);
    }
    const Floats heads = offset(c.projected, row * (c.heads + 2 * c.groups) * c.dims);
    float* queries = queries_ + row * c.heads * stride_;
    std::fill_n(queries, c.heads * stride_, 0.0f);
    const float scale = static_cast<float>(1.0 / std::sqrt(static_cast<double>(c.dims)));
    loops_.prepare_heads({heads, c.heads, c.dims, c.query_norm, c.eps, angles, c.rotated,
                          c.is_interleaved, scale, queries, FloatType::float32, stride_},
                         scratch);
    const size_t at = (row * c.groups * c.room + slot_of(position)) * c.dims;
    const auto store = [&](size_t head, const Floats& norm, const float* angles, void* buffer,
                           FloatType type) {
      loops_.prepare_heads({offset(heads, head * c.dims), c.groups, c.dims, norm, c.eps, angles,
                            c.rotated, c.is_interleaved, 1.0f,
                            static_cast<char*>(buffer) + at * size_of(type), type, c.room * c.dims},
                           scratch);
    };
    store(c.heads, c.key_norm, angles, c.keys, c.key_type);
    store(c.heads + c.groups, kNone, nullptr, c.values, c.value_type);
  }

  // The number of tokens that a row has read, which is the position of the new one.
  int64_t length(size_t row) const {
    const int32_t* positions = call_.positions + row * call_.used;
    int64_t last = -1;
    for (size_t slot = 0; slot < call_.used; ++slot) {
      last = std::max<int64_t>(last, positions[slot]);
    }
    return last + 1;
  }

  // The slot is one of the call's, whatever the position is.
  size_t slot_of(int64_t position) const {
    return std::min<size_t>(call_.rule.of(position), call_.slots - 1);
  }

  // Writes the cosines, then the sines. The angles are those of the plain operations in float32.
  void set_angles(int64_t position, float* angles) const {
    const size_t half = call_.rotated / 2;
    for (size_t i = 0; i < half; ++i) {
      const float angle = static_cast<float>(position) * (1.0f / call_.wavelengths[i]);
      angles[i] = static_cast<float>(std::cos(static_cast<double>(angle)));
      angles[half + i] = static_cast<float>(std::sin(static_cast<double>(angle)));
    }
  }

  // Reads one run of slots of one key head for all of its query heads.
  void read(size_t item, float* scores) const {
    const AttentionCall& c = call_;
    const size_t first = item % runs_ * kRunSlots, group = item / runs_, row = group / c.groups;
    if (first >= used_[row]) {
      return;
    }
    const size_t slots = std::min(kRunSlots, used_[row] - first);
    const size_t at = (group * c.room + first) * c.dims;
    const Floats keys = offset({c.keys, c.key_type}, at);
    dense_.multiply({queries_ + group * shared_ * stride_, shared_, stride_, c.dims, keys.data,
                     keys.type, slots, scores},
                    0, slots);
    float* record = records_ + item * record_;
    float* peaks = record + shared_ * stride_;
    loops_.weigh({scores, shared_, slots, c.dims, offset({c.values, c.value_type}, at), record,
                  stride_, peaks, peaks + shared_});
  }

  // Joins the runs of one query head.
  void merge(size_t head, float* scratch) const {
    const AttentionCall& c = call_;
    const size_t row = head / c.heads, own = head % shared_;
    const float* record = records_ + head / shared_ * runs_ * record_;
    const float* peaks = record + shared_ * stride_ + own;
    const size_t runs = (used_[row] + kRunSlots - 1) / kRunSlots;
    char* y = static_cast<char*>(c.y) + head * c.dims * size_of(c.projected.type);
    loops_.merge({record + own * stride_, peaks, peaks + shared_, runs, record_, c.dims, y,
                  c.projected.type},
                 scratch);
  }

  const AttentionCall& call_;
  const AttentionStepKernels& loops_;
  const DenseMatmulKernels& dense_;
  size_t shared_, stride_, runs_, record_;
  float* queries_ = nullptr;  // (batch, heads, stride)
  size_t* used_ = nullptr;    // (batch,) slots with a token
  float* records_ = nullptr;  // (batch, groups, runs): sums, peaks and totals of the shared heads
};

}  // namespace

void attend(const AttentionCall& call) {
  Attention(call, kernels()).run();
}

}  // namespace mmfree
