#include "runtime/operation_times.h"

#include <atomic>
#include <chrono>
#include <mutex>
#include <utility>

namespace mmfree {

namespace {

std::atomic<bool> is_measuring{false};
thread_local double waited = 0;
std::mutex mutex;

std::map<std::string, OperationTime>& times() {
  static auto* found = new std::map<std::string, OperationTime>;
  return *found;
}

}  // namespace

bool measures_times() {
  return is_measuring.load(std::memory_order_relaxed);
}

double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

void add_waited(double seconds) {
  waited += seconds;
}

std::map<std::string, OperationTime> operation_times(bool is_on) {
  const std::lock_guard lock(mutex);
  is_measuring.store(is_on);
  return std::exchange(times(), {});
}

Timed::Timed(const char* operation) : operation_(measures_times() ? operation : nullptr) {
  if (operation_) {
    waited = 0;
    start_ = now();
  }
}

Timed::~Timed() {
  if (operation_) {
    const double seconds = now() - start_;
    const std::lock_guard lock(mutex);
    auto& time = times()[operation_];
    ++time.runs;
    time.seconds += seconds;
    time.waited += waited;
  }
}

}  // namespace mmfree
