#pragma once

#include <cstddef>
#include <map>
#include <string>

namespace mmfree {

// What the runs of an operation took together.
struct OperationTime {
  size_t runs = 0;
  double seconds = 0;
  // of all threads together: until a thread began its share of the work, and after it was done
  double waited = 0;
};

// Returns the times of each operation since the last call, and measures from now on or not.
std::map<std::string, OperationTime> operation_times(bool is_on);

// Measures while it lives, if times are measured.
class Timed {
 public:
  explicit Timed(const char* operation);
  ~Timed();

 private:
  const char* operation_;  // null: nothing is measured
  double start_ = 0;
};

bool measures_times();
double now();
// Adds to the operation that runs on this thread.
void add_waited(double seconds);

}  // namespace mmfree
