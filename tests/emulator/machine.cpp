// The machine that runs one threadgroup at a time, a fiber for each thread; linked to each kernel.
#include "metal.h"

extern "C" int snprintf(char*, size_t, const char*, ...);
extern "C" void* memset(void*, int, size_t);
extern "C" void* memcpy(void*, const void*, size_t);

namespace machine {
struct Access {  // since which barriers, by which thread (counted from 1)
  uint epoch, simd_epoch, by;
};
struct Shared {
  char* data;
  uint bytes;
  const char* name;
  uint poisoned;
};

alignas(64) static char stacks[MAX_THREADS][STACK];
static Lane lanes[MAX_THREADS];
Lane* current;
static void* scheduler;
Launch* run;
static void (*entry)(const Attributes&);
static Shared shared[16];
static uint number_shared, shared_bytes, group_number, epoch, simd_epochs[32], random;
static Access written[LIMIT], read[LIMIT];
char table[2][MAX_THREADS][64];

extern "C" void machine_switch(void** from, void* to);
asm(R"(
.hidden machine_switch
.globl machine_switch
machine_switch:
  push %rbx
  push %rbp
  push %r12
  push %r13
  push %r14
  push %r15
  mov %rsp, (%rdi)
  mov %rsi, %rsp
  pop %r15
  pop %r14
  pop %r13
  pop %r12
  pop %rbp
  pop %rbx
  ret
)");

void leave(State state, const char* place, uint line) {
  current->state = state;
  current->place = place;
  current->line = line;
  machine_switch(&current->stack_pointer, scheduler);
}
// Ends the run: the first fault is reported, and the fibers are dropped.
template <class... T> static void fail(const char* text, T... values) {
  if (!run->error[0]) snprintf(run->error, sizeof run->error, text, values...);
  if (current) leave(DONE, "fault", 0);
}
static uint rest() {
  random = random * 1664525u + 1013904223u;
  return random >> 8;
}
static uint simdgroup() { return current->attributes.simdgroup_index_in_threadgroup; }

static bool is_ordered(const Access& past) {
  if (past.epoch != epoch || past.by == thread_number()) return true;
  if (past.by == MANY) return false;
  return (past.by - 1) / 32 == simdgroup() && past.simd_epoch != simd_epochs[simdgroup()];
}
static void check_race(const Shared& array, ulong at, ulong bytes, bool is_store) {
  uint offset = 0;
  for (const Shared* other = shared; other != &array; other++) offset += other->bytes;
  for (ulong byte = at; byte < at + bytes; byte++) {
    Access &w = written[offset + byte], &r = read[offset + byte];
    if (!is_ordered(w) || (is_store && !is_ordered(r)))
      fail("threadgroup memory '%s': thread %u %s byte %lu, which another thread %s, and no barrier "
           "lies in between", array.name, thread_number() - 1, is_store ? "stores" : "loads", byte,
           !is_ordered(w) ? "stored" : "loaded");
    Access now = {epoch, simd_epochs[simdgroup()], thread_number()};
    if (is_store) w = now;
    else if (!is_ordered(r)) r = {epoch, 0, MANY};
    else r = now;
  }
}
static void access(const void* pointer, ulong bytes, bool is_store) {
  const char* p = (const char*)pointer;
  if (!current || (p >= stacks[0] && p < stacks[MAX_THREADS - 1] + STACK)) return;
  for (uint n = 0; n < run->number_of_buffers; n++) {
    Buffer& b = run->buffers[n];
    if (p < b.data || p + bytes > b.data + b.bytes) continue;
    if (is_store && !b.is_output) fail("store to the input '%s'", b.name);
    (is_store ? b.stored : b.loaded) += bytes;
    return;
  }
  for (uint n = 0; n < number_shared; n++) {
    Shared& s = shared[n];
    if (p >= s.data && p + bytes <= s.data + s.bytes)
      return check_race(s, p - s.data, bytes, is_store);
  }
  const char* name = "unknown memory";
  long offset = 0;
  for (uint n = 0; n < run->number_of_buffers; n++) {
    Buffer& b = run->buffers[n];
    long distance = p - b.data;
    if (distance > -(1l << 25) && distance < (long)b.bytes + (1l << 25)) {
      name = b.name;
      offset = distance;
    }
  }
  fail("out of bounds: %s of %lu bytes at byte %ld of '%s'", is_store ? "store" : "load", bytes,
       offset, name);
}
// Threadgroup arrays are static, as one threadgroup runs at a time; each finds NaN in them.
void declare_shared(void* data, uint bytes, const char* name) {
  uint n = 0;
  while (n < number_shared && shared[n].data != data) n++;
  if (n == number_shared) {
    shared[number_shared++] = {(char*)data, bytes, name, 0};
    shared_bytes += bytes;
    if (shared_bytes > LIMIT || number_shared == 16) fail("too much threadgroup memory");
  }
  if (shared[n].poisoned != group_number) {
    shared[n].poisoned = group_number;
    memset(data, 0xff, bytes);
  }
}

static void begin() {
  entry(current->attributes);
  leave(DONE, "end", 0);
}
static bool same(const Lane& a, const Lane& b) {
  return a.state == b.state && a.line == b.line && a.place == b.place;
}
// Runs the lanes of a SIMD group until all are at a barrier of the threadgroup, or done.
static void run_simdgroup(Lane* lane) {
  for (;;) {
    uint offset = run->seed ? rest() % 32 : 0;
    for (uint n = 0; n < 32; n++) {
      current = lane + (n + offset) % 32;
      if (current->state == READY) machine_switch(&scheduler, current->stack_pointer);
      current = nullptr;
      if (run->error[0]) return;
    }
    for (uint n = 1; n < 32; n++)
      if (!same(lane[n], *lane))
        return fail("lanes of a SIMD group part: at %s (line %u) and at %s (line %u)", lane->place,
                    lane->line, lane[n].place, lane[n].line);
    if (lane->state == AT_SIMD_BARRIER) simd_epochs[(lane - lanes) / 32]++;
    else if (lane->state != AT_SIMD) return;
    for (uint n = 0; n < 32; n++) lane[n].state = READY;
  }
}
static void run_threadgroup(uint3 position) {
  uint threads = run->threads, simdgroups = threads / 32;
  group_number++;
  for (uint n = 0; n < threads; n++) {
    void** top = (void**)(stacks[n] + STACK - 64);
    top[6] = (void*)begin;
    lanes[n] = {top, READY, "", 0, 0, {}};
    Attributes& a = lanes[n].attributes;
    a.threadgroup_position_in_grid = a.thread_position_in_grid = position;
    a.thread_position_in_grid.x = position.x * threads + n;
    a.threads_per_threadgroup = uint3{threads, 1, 1};
    a.threadgroups_per_grid = uint3{run->groups[0], run->groups[1], run->groups[2]};
    a.thread_index_in_threadgroup = n;
    a.thread_index_in_simdgroup = n % 32;
    a.simdgroup_index_in_threadgroup = n / 32;
    a.simdgroups_per_threadgroup = simdgroups;
  }
  for (;;) {
    epoch++;
    uint offset = run->seed ? rest() % simdgroups : 0;
    bool backwards = run->seed && rest() % 2;
    for (uint n = 0; n < simdgroups && !run->error[0]; n++) {
      uint group = (n + offset) % simdgroups;
      run_simdgroup(lanes + 32 * (backwards ? simdgroups - 1 - group : group));
    }
    for (uint n = 32; n < threads && !run->error[0]; n += 32)
      if (!same(lanes[n], *lanes))
        fail("SIMD groups part: at %s (line %u) and at %s (line %u)", lanes->place, lanes->line,
             lanes[n].place, lanes[n].line);
    if (run->error[0] || lanes->state == DONE) return;
    for (uint n = 0; n < threads; n++) lanes[n].state = READY;
  }
}
void run_grid(Launch* launch, void (*start)(const Attributes&)) {
  run = launch;
  entry = start;
  random = launch->seed;
  number_shared = shared_bytes = 0;
  current = nullptr;
  uint *g = launch->groups, total = g[0] * g[1] * g[2];
  uint offset = launch->seed ? rest() % total : 0;
  for (uint n = 0; n < total && !launch->error[0]; n++) {
    uint group = (n + offset) % total;
    if (launch->seed % 2) group = total - 1 - group;
    run_threadgroup(uint3{group % g[0], group / g[0] % g[1], group / g[0] / g[1]});
  }
  launch->shared_bytes = shared_bytes;
}
}  // namespace machine

#define ACCESS(bytes) \
  void __tsan_read##bytes(void* p) { machine::access(p, bytes, false); } \
  void __tsan_write##bytes(void* p) { machine::access(p, bytes, true); } \
  void __tsan_unaligned_read##bytes(void* p) { machine::access(p, bytes, false); } \
  void __tsan_unaligned_write##bytes(void* p) { machine::access(p, bytes, true); }
extern "C" {
ACCESS(1) ACCESS(2) ACCESS(4) ACCESS(8) ACCESS(16)
void __tsan_init() {}
void* __tsan_memset(void* target, int value, size_t bytes) {
  machine::access(target, bytes, true);
  return memset(target, value, bytes);
}
void* __tsan_memcpy(void* target, const void* source, size_t bytes) {
  machine::access(source, bytes, false);
  machine::access(target, bytes, true);
  return memcpy(target, source, bytes);
}
__bf16 __truncsfbf2(float value) {
  uint bits = __builtin_bit_cast(uint, value);
  bits = value != value ? bits >> 16 | 0x40 : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
  return __builtin_bit_cast(__bf16, (ushort)bits);
}
}
