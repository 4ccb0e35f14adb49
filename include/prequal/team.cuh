// Who works on a row together, and their sums: a warp, a block, or a cluster of blocks. Sums are taken in an order that
// depends on nothing but the team's size: two runs agree bit for bit.
#pragma once

#include <cstdint>

#include "prequal/reduce.cuh"
#include "prequal/row_plan.h"

namespace prequal {

template <int Sums>
class WarpTeam {
 public:
  static constexpr RowKind kind = RowKind::warp;
  struct Shared {};
  __device__ explicit WarpTeam(Shared&) {}

  __device__ int thread() const { return threadIdx.x % 32; }
  __device__ int threads() const { return 32; }
  __device__ int64_t index() const { return static_cast<int64_t>(blockIdx.x) * (blockDim.x / 32) + threadIdx.x / 32; }
  __device__ int64_t count() const { return static_cast<int64_t>(gridDim.x) * (blockDim.x / 32); }

  __device__ void leave() const {}

  __device__ __forceinline__ void sum(float (&value)[Sums]) {
#pragma unroll
    for (int k = 0; k < Sums; ++k) value[k] = warp_sum(value[k]);
  }
};

template <int Sums>
class BlockTeam {
 public:
  static constexpr RowKind kind = RowKind::block;
  struct Shared {
    float at[2][Sums][32];  // two turns: the next sum may begin before every thread has read this one
  };
  __device__ explicit BlockTeam(Shared& shared) : shared_(shared) {}

  __device__ int thread() const { return threadIdx.x; }
  __device__ int threads() const { return blockDim.x; }
  __device__ int64_t index() const { return blockIdx.x; }
  __device__ int64_t count() const { return gridDim.x; }

  __device__ void leave() const {}

  __device__ __forceinline__ void sum(float (&value)[Sums]) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
#pragma unroll
    for (int k = 0; k < Sums; ++k) value[k] = warp_sum(value[k]);
    if (warps == 1) return;
    if (lane == 0) {
#pragma unroll
      for (int k = 0; k < Sums; ++k) shared_.at[turn_][k][warp] = value[k];
    }
    __syncthreads();
#pragma unroll
    for (int k = 0; k < Sums; ++k) value[k] = warp_sum(lane < warps ? shared_.at[turn_][k][lane] : 0.0f);
    turn_ ^= 1;
  }

 private:
  Shared& shared_;
  int turn_ = 0;
};

// Distributed shared memory of sm_90. Elsewhere these kernels are compiled and never launched (launch.h, has_clusters).
namespace cluster {

__device__ __forceinline__ int size() {
#if __CUDA_ARCH__ >= 900
  int value;
  asm("mov.u32 %0, %%cluster_nctaid.x;" : "=r"(value));
  return value;
#else
  __trap();
  return 1;
#endif
}

__device__ __forceinline__ int rank() {
#if __CUDA_ARCH__ >= 900
  int value;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(value));
  return value;
#else
  __trap();
  return 0;
#endif
}

// All threads of all blocks. What was written before arriving is seen after waiting, in every block of the cluster.
__device__ __forceinline__ void arrive() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
#else
  __trap();
#endif
}

__device__ __forceinline__ void wait() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
#else
  __trap();
#endif
}

// The same variable in the shared memory of block `rank` of the cluster.
__device__ __forceinline__ void store_to(int rank, float* mine, float value) {
#if __CUDA_ARCH__ >= 900
  const auto address = static_cast<uint32_t>(__cvta_generic_to_shared(mine));
  uint32_t theirs;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(theirs) : "r"(address), "r"(rank));
  asm volatile("st.shared::cluster.f32 [%0], %1;" ::"r"(theirs), "f"(value) : "memory");
#else
  (void)rank, (void)mine, (void)value;
  __trap();
#endif
}

}  // namespace cluster

template <int Sums>
class ClusterTeam {
 public:
  static constexpr RowKind kind = RowKind::cluster;
  struct Shared {
    float at[2][Sums][largest_cluster * 32];  // of every warp of every block
  };
  // No block may write to another before that one has begun; nobody waits for it until the first sum.
  __device__ explicit ClusterTeam(Shared& shared) : shared_(shared) { cluster::arrive(); }

  __device__ int thread() const { return cluster::rank() * blockDim.x + threadIdx.x; }
  __device__ int threads() const { return cluster::size() * blockDim.x; }
  __device__ int64_t index() const { return blockIdx.x / cluster::size(); }
  __device__ int64_t count() const { return gridDim.x / cluster::size(); }

  // A block may leave after its last sum: by then every other block has written to it, and none reads it.
  __device__ __forceinline__ void sum(float (&value)[Sums]) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32, blocks = cluster::size();
#pragma unroll
    for (int k = 0; k < Sums; ++k) value[k] = warp_sum(value[k]);
    if (!begun_) cluster::wait();
    begun_ = true;
    if (lane < blocks) {
#pragma unroll
      for (int k = 0; k < Sums; ++k) {
        cluster::store_to(lane, &shared_.at[turn_][k][cluster::rank() * warps + warp], value[k]);
      }
    }
    __syncwarp();
    cluster::arrive();
    cluster::wait();
#pragma unroll
    for (int k = 0; k < Sums; ++k) {
      float total = 0.0f;
      for (int i = lane; i < blocks * warps; i += 32) total += shared_.at[turn_][k][i];
      value[k] = warp_sum(total);
    }
    turn_ ^= 1;
  }

  // Where there was no row: the barrier that was arrived at must be left.
  __device__ __forceinline__ void leave() {
    if (!begun_) cluster::wait();
  }

 private:
  Shared& shared_;
  int turn_ = 0;
  bool begun_ = false;
};

}  // namespace prequal
