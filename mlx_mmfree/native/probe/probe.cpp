#include "probe/probe.h"

#include <algorithm>
#include <atomic>
#include <chrono>

#include "mlx/transforms.h"
#include "probe/kernels.h"
#include "runtime/kernels.h"
#include "runtime/thread_pool.h"

namespace mmfree {

namespace {

// Bytes that a thread takes at once. They are many, so that it seldom starts at a new place.
constexpr size_t kPieceBytes = 256 << 10;

// Pieces of the work of one thread while arithmetic is measured.
constexpr size_t kShares = 16;

using Clock = std::chrono::steady_clock;

double since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

std::atomic<uint32_t> seen;

struct Span {
  const uint8_t* bytes;
  size_t start, size;
};

}  // namespace

double read_seconds(const std::vector<mlx::core::array>& arrays) {
  mlx::core::eval(arrays);
  std::vector<Span> spans;
  size_t total = 0;
  for (const auto& array : arrays) {
    spans.push_back({array.data<uint8_t>(), total, array.nbytes()});
    total += array.nbytes();
  }
  const auto& set = table<ProbeKernels>(kernels());
  const auto start = Clock::now();
  parallel_for(total, kPieceBytes, [&](size_t first, size_t last) {
    auto span = std::upper_bound(spans.begin(), spans.end(), first,
                                 [](size_t at, const Span& s) { return at < s.start; }) -
                1;
    uint32_t joined = 0;
    for (; span != spans.end() && span->start < last; ++span) {
      const size_t from = std::max(first, span->start) - span->start;
      const size_t to = std::min(last, span->start + span->size) - span->start;
      joined ^= from < to ? set.read(span->bytes + from, to - from) : 0;
    }
    seen.fetch_xor(joined, std::memory_order_relaxed);
  });
  return since(start);
}

double multiply_rate(double seconds) {
  const auto& set = table<ProbeKernels>(kernels());
  if (set.turn_macs == 0) {
    return 0;
  }
  // The turns are doubled until a run takes long enough. The runs before it wake the threads up,
  // and a thread that comes late finds work left.
  const size_t shares = kShares * threads();
  for (size_t turns = 1 << 10;; turns *= 2) {
    const auto start = Clock::now();
    parallel_for(shares, 1, [&](size_t first, size_t last) {
      for (size_t share = first; share < last; ++share) {
        set.multiply(turns);
      }
    });
    if (const double taken = since(start); taken >= seconds) {
      return static_cast<double>(turns * set.turn_macs * shares) / taken;
    }
  }
}

}  // namespace mmfree
