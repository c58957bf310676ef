// Checks the threads alone: built with the thread sanitizer, which sees every
// race.

#include "thread_check.h"

int main() {
  check_threads();
  std::printf("threads\n");
}
