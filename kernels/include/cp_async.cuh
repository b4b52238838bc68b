// Copies from global to shared memory that a thread does not wait for (cp.async), on any card since Ampere. See PTX ISA
// 7.0, "cp.async".
//
//   shared[to .. to + 15] = global[from .. from + 15], 16 bytes, both aligned
//
// Data: global memory -> shared memory, past the registers and the first cache. A thread's copies since its last commit
// are a group; when it waits until at most PENDING groups are left, what the others hold is there for that thread.
//
// Variants: a whole unit or zeros, or as many of its bytes as are real and then zeros.
#pragma once
#include "elements.cuh"

#ifndef SKUDA_HOST  // the CPU harness of the tests defines all that follows
DEVICE u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }

// Copies 16 bytes, or writes zeros.
DEVICE void cp_async_16(u32 to, const void* from, bool real) {
  asm volatile(
      "{\n.reg .pred none;\nsetp.eq.s32 none, %2, 0;\n"
      "cp.async.cg.shared.global.L2::128B [%0], [%1], 16, none;\n}" ::"r"(to),
      "l"(from), "r"((s32)real)
      : "memory");
}
// Copies the first `real` of 16 bytes and then writes zeros. Its code is longer.
DEVICE void cp_async_16_zfill(u32 to, const void* from, s32 real) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(min(max(real, 0), 16))
               : "memory");
}
DEVICE void cp_async_commit_group() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int PENDING> DEVICE void cp_async_wait_group() { asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory"); }

// Named barrier `id` of the block, for THREADS threads: bar_sync waits, bar_arrive does not.
template <int THREADS> DEVICE void bar_sync(u32 id) { asm volatile("bar.sync %0, %1;" ::"r"(id), "n"(THREADS) : "memory"); }
template <int THREADS> DEVICE void bar_arrive(u32 id) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "n"(THREADS) : "memory");
}
#endif
