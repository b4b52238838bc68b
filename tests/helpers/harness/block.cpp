// The threads of a block as fibres: each has its own stack and runs until it waits or ends. Blocks, or clusters of them,
// run one after another. The order of threads alternates between blocks, so that a missing barrier shows in one order or the other.
#include <dlfcn.h>
#include <setjmp.h>
#include <signal.h>
#include <sys/mman.h>
#include <ucontext.h>

#include "shim.h"

dim3 gridDim, blockDim, blockIdx, threadIdx;
unsigned long long* skuda_slots;
bool skuda_early;
unsigned char* skuda_dynamic_shared;
extern "C" __attribute__((weak, visibility("hidden"))) unsigned char __start_skuda_shared[], __stop_skuda_shared[];

#ifdef __SANITIZE_ADDRESS__
extern "C" void __sanitizer_start_switch_fiber(void** save, const void* bottom, size_t size);
extern "C" void __sanitizer_finish_switch_fiber(void* save, const void** bottom, size_t* size);
extern "C" void __asan_poison_memory_region(const volatile void*, size_t);
extern "C" void __asan_unpoison_memory_region(const volatile void*, size_t);
#else
static void __sanitizer_start_switch_fiber(void**, const void*, size_t) {}
static void __sanitizer_finish_switch_fiber(void*, const void**, size_t*) {}
static void __asan_poison_memory_region(const volatile void*, size_t) {}
static void __asan_unpoison_memory_region(const volatile void*, size_t) {}
#endif

namespace {

enum { MOST = 4, SHARED = 256 << 10 };  // blocks of a cluster, and bytes of each
enum State { READY, AT_BLOCK, AT_WARP, AT_CHANGE, ENDED };
struct Fibre {
  State state;
  unsigned mask;
  bool made, waited;  // for the previous kernel
  bool arrived;       // at the cluster's barrier
  unsigned phase;     // of that barrier, when it did
  jmp_buf at;
  void* shadow;  // AddressSanitizer's
};
const size_t STACK = 256 << 10;
Fibre fibres[SKUDA_FIBRES];
unsigned long long slots[MOST][1024];
alignas(1024) unsigned char dynamic_shared[MOST][SHARED];
char* stacks;
jmp_buf scheduler;
const void* scheduler_bottom;
size_t scheduler_size;
unsigned current, count, blocks, phase;  // count: threads of each of the blocks that run
dim3 first;                              // of these blocks
bool overlaps;
struct { unsigned arrived, passed; } named[MOST][16];  // barriers with a number
const char* fault;
void (*thread_code)(const void*);
const void* thread_argument;

// The C library's own: before any other jump AddressSanitizer forgets what it knows of the whole stack, which takes most of
// the time of a switch and hides what a thread writes beside a variable.
typedef void (*Jump)(jmp_buf, int);
Jump found_jump() {
  void* library = dlopen("libc.so.6", RTLD_LAZY | RTLD_NOLOAD);
  void* jump = library ? dlsym(library, "_longjmp") : nullptr;
  return jump ? (Jump)jump : (Jump)_longjmp;
}
const Jump jump = found_jump();
#define SWITCHES __attribute__((no_sanitize_address, noinline))

SWITCHES void suspend() {
  Fibre& self = fibres[current];
  __sanitizer_start_switch_fiber(&self.shadow, scheduler_bottom, scheduler_size);
  if (!_setjmp(self.at)) jump(scheduler, 1);
  __sanitizer_finish_switch_fiber(self.shadow, &scheduler_bottom, &scheduler_size);
}

// A thread that has ended is not waited for.
void check_cluster() {
  for (unsigned i = 0; i < count * blocks; ++i) {
    if (fibres[i].state != ENDED && !fibres[i].arrived) return;
  }
  for (Fibre& fibre : fibres) fibre.arrived = false;
  ++phase;
  skuda_changed();
}

void body() {  // a fibre outlives its thread and runs the next one
  __sanitizer_finish_switch_fiber(nullptr, &scheduler_bottom, &scheduler_size);
  for (;;) {
    thread_code(thread_argument);
    fibres[current].state = ENDED;
    if (blocks > 1) check_cluster();
    suspend();
  }
}

SWITCHES void resume(unsigned thread) {
  Fibre& fibre = fibres[thread];
  char* stack = stacks + thread * STACK;
  void* shadow;
  const unsigned rank = thread / count, own = thread % count;
  current = thread, skuda_early = overlaps && !fibre.waited;
  skuda_dynamic_shared = dynamic_shared[rank], skuda_slots = slots[rank];
  blockIdx = {first.x + rank, first.y, first.z};
  threadIdx = {own % blockDim.x, own / blockDim.x % blockDim.y, own / blockDim.x / blockDim.y};
  __sanitizer_start_switch_fiber(&shadow, stack, STACK);
  if (!_setjmp(scheduler)) {
    if (fibre.made) jump(fibre.at, 1);
    fibre.made = true;
    ucontext_t context;
    getcontext(&context);
    context.uc_stack.ss_sp = stack, context.uc_stack.ss_size = STACK, context.uc_link = nullptr;
    makecontext(&context, body, 0);
    setcontext(&context);
  }
  __sanitizer_finish_switch_fiber(shadow, nullptr, nullptr);
}

// Reading shared memory that the block has not written gives NaN and -1.
__attribute__((no_sanitize_address)) void fill(unsigned char* p, unsigned char* end) {
  for (; p < end; ++p) *(volatile unsigned char*)p = 0xff;
}

void run_blocks(bool backwards) {
  const unsigned all = count * blocks;
  for (unsigned i = 0; i < all; ++i) fibres[i].state = READY, fibres[i].waited = fibres[i].arrived = false;
  fill(__start_skuda_shared, __stop_skuda_shared);
  memset(named, 0, sizeof named);
  for (;;) {
    bool moved = false;
    unsigned ended[MOST + 1] = {}, waiting[MOST] = {};
    for (unsigned i = 0; i < all; ++i) {
      const unsigned thread = backwards ? all - 1 - i : i;
      if (fibres[thread].state == READY) resume(thread), moved = true;
      if (fault) return;
    }
    for (unsigned i = 0; i < all; ++i) {
      const bool end = fibres[i].state == ENDED;
      ended[i / count] += end, ended[MOST] += end, waiting[i / count] += fibres[i].state == AT_BLOCK;
    }
    if (ended[MOST] == all) {
      for (unsigned rank = 0; rank < blocks; ++rank) {
        bool waited = !overlaps;
        for (unsigned i = 0; i < count; ++i) waited |= fibres[rank * count + i].waited;
        if (!waited) fault = "a block ends that has not waited for the previous kernel";
      }
      return;
    }
    if (moved) continue;
    for (unsigned i = 0; i < all; ++i) {
      if (fibres[i].state != AT_BLOCK || ended[i / count] + waiting[i / count] < count) continue;
      fibres[i].state = READY, moved = true;
    }
    if (!moved) {
      fault = "a deadlock: threads of one block or warp wait at different barriers";
      return;
    }
  }
}

// What the processor refuses ends the launch, not Python.
void on_signal(int signal) { skuda_fault(signal == SIGFPE ? "an integer division by zero" : "a bad address"); }

#ifdef __SANITIZE_ADDRESS__
const int SIGNALS[] = {SIGFPE};  // bad addresses are AddressSanitizer's to report
#else
const int SIGNALS[] = {SIGFPE, SIGSEGV, SIGBUS};
#endif

}  // namespace

unsigned skuda_thread() { return current % count; }
unsigned skuda_fibre() { return current; }

void skuda_fault(const char* what) {
  fault = what;
  suspend();
  __builtin_unreachable();
}

void griddepcontrol_wait() { fibres[current].waited = true, skuda_early = false; }

void skuda_wait_block() {
  fibres[current].state = AT_BLOCK;
  suspend();
}

void skuda_wait_change() {
  fibres[current].state = AT_CHANGE;
  suspend();
}

void skuda_changed() {
  for (unsigned i = 0; i < count * blocks; ++i) {
    if (fibres[i].state == AT_CHANGE) fibres[i].state = READY;
  }
}

void skuda_named_barrier(unsigned id, unsigned threads, bool wait) {
  if (id >= 16) skuda_fault("a barrier that there is not");
  auto& barrier = named[current / count][id];
  const unsigned mine = barrier.passed;
  if (++barrier.arrived == threads) {
    barrier.arrived = 0, ++barrier.passed;
    skuda_changed();
  }
  while (wait && barrier.passed == mine) skuda_wait_change();
}

unsigned cluster_ctarank() { return current / count; }
unsigned char* skuda_shared_of(unsigned rank) {
  if (rank >= blocks) skuda_fault("a block that its cluster does not have");
  return dynamic_shared[rank];
}
void cluster_arrive() {
  if (fibres[current].arrived) skuda_fault("a thread arrives twice at the cluster's barrier");
  fibres[current].arrived = true, fibres[current].phase = phase;
  check_cluster();
}
void cluster_wait() {
  while (phase == fibres[current].phase) skuda_wait_change();
}

void skuda_wait_warp(unsigned mask) {
  const unsigned base = current - current % count % 32, end = current - current % count + count;
  if (!(mask >> current % count % 32 & 1)) skuda_fault("a lane that is not in its own mask");
  fibres[current].state = AT_WARP, fibres[current].mask = mask;
  bool complete = true;
  for (unsigned lane = 0; lane < 32; ++lane) {
    if (!(mask >> lane & 1)) continue;
    if (base + lane >= end || fibres[base + lane].state == ENDED) skuda_fault("a mask with a lane that has ended");
    complete &= fibres[base + lane].state == AT_WARP && fibres[base + lane].mask == mask;
  }
  if (!complete) return suspend();
  for (unsigned lane = 0; lane < 32; ++lane) {
    if (mask >> lane & 1) fibres[base + lane].state = READY;
  }
}

__attribute__((destructor)) static void unmap() {
  if (stacks) munmap(stacks, SKUDA_FIBRES * STACK);
}

const char* skuda_run(const Geometry& geometry, unsigned cluster, void (*thread)(const void*), const void* argument) {
  gridDim = geometry.grid, blockDim = geometry.block;
  const unsigned long long threads = 1ull * blockDim.x * blockDim.y * blockDim.z;
  if (threads == 0 || threads > 1024) return "a block without threads or with more than 1024";
  if (geometry.shared > SHARED) return "more shared memory than any card has";
  if (cluster > MOST || cluster * threads > SKUDA_FIBRES) return "a cluster larger than any here";
  if (gridDim.x % cluster) return "a grid that is not whole clusters";
  if (!stacks) {
    void* got = mmap(nullptr, SKUDA_FIBRES * STACK, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (got == MAP_FAILED) return "no memory for stacks";
    stacks = (char*)got;
  }
  count = (unsigned)threads, blocks = cluster, overlaps = geometry.overlaps, thread_code = thread, thread_argument = argument, fault = nullptr;
  __asan_poison_memory_region(dynamic_shared, sizeof dynamic_shared);
  for (unsigned rank = 0; rank < blocks; ++rank) __asan_unpoison_memory_region(dynamic_shared[rank], geometry.shared);
  struct sigaction before[4], ours = {};
  ours.sa_handler = on_signal, ours.sa_flags = SA_NODEFER;
  const int signals = sizeof SIGNALS / sizeof *SIGNALS;
  for (int i = 0; i < signals; ++i) sigaction(SIGNALS[i], &ours, &before[i]);
  for (first.z = 0; first.z < gridDim.z && !fault; ++first.z) {
    for (first.y = 0; first.y < gridDim.y && !fault; ++first.y) {
      for (first.x = 0; first.x < gridDim.x && !fault; first.x += blocks) {
        for (unsigned rank = 0; rank < blocks; ++rank) fill(dynamic_shared[rank], dynamic_shared[rank] + geometry.shared);
        run_blocks((first.x / blocks + first.y + first.z) % 2);
      }
    }
  }
  for (int i = 0; i < signals; ++i) sigaction(SIGNALS[i], &before[i], nullptr);
  if (fault) {
    for (Fibre& fibre : fibres) fibre.made = false;  // abandon whatever they were doing
  }
  return fault;
}
