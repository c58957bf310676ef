#include "runtime/thread_pool.h"

#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <deque>
#include <mutex>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#if defined(__linux__)
#include <sched.h>
#endif
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "runtime/operation_times.h"

namespace mmfree {

namespace {

std::atomic<size_t> wanted{1};

// About 20 microseconds, which is longer than the pause between two products of one layer.
constexpr int kSpins = 1000;

void pause() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("isb" ::: "memory");
#endif
}

// Waits until value != old, first awake and then asleep.
template <class T>
void wait_for_change(const std::atomic<T>& value, T old) {
  for (int spin = 0; spin < kSpins; ++spin) {
    if (value.load(std::memory_order_acquire) != old) {
      return;
    }
    pause();
  }
  value.wait(old, std::memory_order_acquire);
}

// The processors that this process may use, or none if threads cannot be bound to them.
std::vector<int> processors() {
  std::vector<int> found;
#if defined(__linux__)
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof(set), &set) == 0) {
    for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu) {
      if (CPU_ISSET(cpu, &set)) {
        found.push_back(cpu);
      }
    }
  }
#endif
  return found;
}

void pin(std::thread& thread, const std::vector<int>& cpus) {
#if defined(__linux__)
  cpu_set_t set;
  CPU_ZERO(&set);
  for (int cpu : cpus) {
    CPU_SET(cpu, &set);
  }
  if (thread.joinable()) {
    pthread_setaffinity_np(thread.native_handle(), sizeof(set), &set);
  }
#endif
}

}  // namespace

class Pool {
 public:
  using Function = void (*)(void* context, Claims& claims);

  void run(size_t items, size_t step, size_t count, Function function, void* context) {
    start(std::max(count, threads()));
    follow_caller();
    share(items, step, count);
    function_ = function;
    context_ = context;
    is_timed_ = measures_times();
    const double begin = is_timed_ ? now() : 0;
    gate_.fetch_and(~kClosed);
    for (size_t slot = 1; slot < count; ++slot) {
      slots_[slot].ticket.fetch_add(1);
      slots_[slot].ticket.notify_one();
    }
    work(0);
    // a thread that has not come by now is not waited for
    uint32_t inside = gate_.fetch_or(kClosed) & ~kClosed;
    while (inside != 0) {
      wait_for_change(gate_, inside | kClosed);
      inside = gate_.load() & ~kClosed;
    }
    if (is_timed_) {
      double waited = static_cast<double>(count) * (now() - begin);
      for (size_t slot = 0; slot < count; ++slot) {
        waited -= std::exchange(slots_[slot].seconds, 0.0);
      }
      add_waited(waited);
    }
  }

  bool claim(size_t thread, size_t& turn, size_t& first, size_t& last) {
    for (; turn < count_; ++turn) {
      Slot& owner = slots_[(thread + turn) % count_];
      if (owner.next.load(std::memory_order_relaxed) >= owner.end) {
        continue;
      }
      first = owner.next.fetch_add(step_);
      if (first < owner.end) {
        last = std::min(first + step_, owner.end);
        return true;
      }
    }
    return false;
  }

  std::mutex busy;

 private:
  static constexpr uint32_t kClosed = 1u << 31;

  struct alignas(64) Slot {
    std::atomic<size_t> next{0};
    size_t end = 0;
    double seconds = 0;  // at work, if times are measured
    alignas(64) std::atomic<uint32_t> ticket{0};
    std::thread thread;
  };

  void start(size_t count) {
    if (slots_.size() >= count) {
      return;
    }
    while (slots_.size() < count) {
      const size_t slot = slots_.size();
      Slot& own = slots_.emplace_back();
      try {
        own.thread =
            slot == 0 ? std::thread() : std::thread([this, &own, slot] { serve(own, slot); });
      } catch (const std::system_error&) {
        // the system gives no more threads, and the others take the share of this one
      }
    }
    // threads are bound only if all processors are ours, so that two small processes do not meet on
    // one
    cpus_ = processors();
    const bool is_bound = cpus_.size() == count;
    for (size_t slot = 1; slot < count; ++slot) {
      pin(slots_[slot].thread, is_bound ? std::vector<int>{cpus_[slot]} : cpus_);
    }
    if (!is_bound) {
      cpus_.clear();
    }
  }

  // Moves away the worker that is bound to the processor on which the caller runs now.
  void follow_caller() {
#if defined(__linux__)
    if (cpus_.empty()) {
      return;
    }
    const int cpu = sched_getcpu();
    if (cpu == cpus_[0]) {
      return;
    }
    const auto found = std::find(cpus_.begin(), cpus_.end(), cpu);
    if (found != cpus_.end()) {
      std::swap(*found, cpus_[0]);
      pin(slots_[found - cpus_.begin()].thread, {*found});
    }
#endif
  }

  void share(size_t items, size_t step, size_t count) {
    const size_t pieces = (items + step - 1) / step;
    step_ = step;
    count_ = count;
    for (size_t slot = 0; slot < count; ++slot) {
      slots_[slot].next.store(std::min(items, pieces * slot / count * step));
      slots_[slot].end = std::min(items, pieces * (slot + 1) / count * step);
    }
  }

  void work(size_t slot) {
    const double begin = is_timed_ ? now() : 0;
    Claims claims(this, slot);
    function_(context_, claims);
    if (is_timed_) {
      slots_[slot].seconds += now() - begin;
    }
  }

  void serve(Slot& own, size_t slot) {
    for (uint32_t seen = 0;;) {
      wait_for_change(own.ticket, seen);
      seen = own.ticket.load();
      const bool is_open = !(gate_.fetch_add(1) & kClosed);
      if (is_open && slot < count_) {
        work(slot);
      }
      if (gate_.fetch_sub(1) == (kClosed | 1)) {
        gate_.notify_one();
      }
    }
  }

  // grows only, and never moves a slot
  std::deque<Slot> slots_;
  std::vector<int> cpus_;
  std::atomic<uint32_t> gate_{kClosed};
  Function function_ = nullptr;
  void* context_ = nullptr;
  size_t step_ = 1, count_ = 1;
  bool is_timed_ = false;
};

namespace {

// The pool is never destroyed, because its threads sleep when the process ends. A child of fork has
// none of them and starts its own.
std::atomic<Pool*> current{nullptr};

void renew() {
  current.store(new Pool);
}

Pool& pool() {
  static const int registered = [] {
    renew();
    return pthread_atfork(nullptr, nullptr, renew);
  }();
  static_cast<void>(registered);
  return *current.load();
}

}  // namespace

void set_threads(size_t count) {
  wanted.store(std::max<size_t>(count, 1));
}

size_t threads() {
  return wanted.load();
}

bool Claims::next(size_t& first, size_t& last) {
  if (pool_) {
    return pool_->claim(thread_, turn_, first, last);
  }
  first = next_;
  last = next_ = std::min(first + step_, items_);
  return first < last;
}

void parallel(size_t items, size_t step, size_t count,
              void (*function)(void* context, Claims& claims), void* context) {
  if (items == 0) {
    return;
  }
  count = std::min(count, (items + step - 1) / step);
  if (count > 1) {
    Pool& shared = pool();
    if (std::unique_lock lock(shared.busy, std::try_to_lock); lock.owns_lock()) {
      shared.run(items, step, count, function, context);
      return;
    }
  }
  Claims claims(nullptr, 0);
  claims.items_ = items;
  claims.step_ = step;
  function(context, claims);
}

}  // namespace mmfree
