#pragma once

#include <algorithm>
#include <cstdint>

namespace mmfree {

// The rule of `ops/slots.py`, which a test compares with this one. The slots of a window follow the
// sinks, and the oldest token of the window makes room for the next.
struct Slots {
  int64_t window, sinks;  // 0: no window

  // The number of slots in use once a token follows those of `used` slots.
  int64_t after(int64_t used, int64_t room) const {
    const int64_t slots = std::min(used + 1, room);
    return window ? std::min(slots, sinks + window) : slots;
  }

  // The slot of a position.
  int64_t of(int64_t position) const {
    return window == 0 || position < sinks ? position : sinks + (position - sinks) % window;
  }

  // The position that a slot holds once the last position is `last`, or -1 for none.
  int64_t held(int64_t slot, int64_t last) const {
    if (slot > last) {
      return -1;
    }
    return window == 0 || slot < sinks ? slot : last - (last - slot) % window;
  }
};

}  // namespace mmfree
