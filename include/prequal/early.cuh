// Kernels that begin while the one before them on the stream still runs (launch.h, launch_early): sm_90 has this. Code of
// older architectures is launched the usual way, after the one before, and the two calls say nothing there.
#pragma once

namespace prequal {

// By the kernel before: the next one may begin. Nothing that is written, before or after, counts as seen by it yet.
__device__ __forceinline__ void let_next_begin() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// By the next kernel: the one before has ended, and all that it wrote is seen.
__device__ __forceinline__ void wait_for_kernel_before() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

}  // namespace prequal
