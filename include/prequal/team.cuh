// Who works on a row together, and their sums: a warp, a block, or a cluster of blocks. Sums are taken in an order that
// depends on nothing but the team's size: two runs agree bit for bit.
#pragma once

#include <cstdint>

#include "prequal/reduce.cuh"
#include "prequal/row_plan.h"
#include "prequal/vec.cuh"

namespace prequal {

// What moments() takes and gives. In: the mean of x over the warp's columns, and of this thread's columns the sums of
// (x - mean)^2, of g, of g (x - mean). Out: the same of the whole row, about the row's mean. Two passes at each level,
// as over the values themselves: exact where the mean is large, and a single exchange.
template <int Sums>
struct Moments {
  static_assert(Sums == 2 || Sums == 4);
  float mean;
  float sum[Sums - 1];  // squares; g; g (x - mean)
};

// Lane i gets what `value` is of number i of the thread's sums, the last of which is the mean.
template <int Sums>
__device__ __forceinline__ float lane_moments(const Moments<Sums>& of) {
  float own;
  if constexpr (Sums == 2) {
    own = warp_sum(of.sum[0]);
  } else {
    own = warp_sums({of.sum[0], of.sum[1], of.sum[2], 0.0f});
  }
  return threadIdx.x % Sums == Sums - 1 ? of.mean : own;
}

// Of parts (a lane each, their own columns `n`), the whole. A part of nothing has n = 0 and zeros.
template <int Sums>
__device__ __forceinline__ void join(Moments<Sums>& part, float n, float inverse_of_all) {
  const float mean = warp_sum(n * part.mean) * inverse_of_all;
  const float apart = n > 0.0f ? part.mean - mean : 0.0f;
  part.mean = mean;
  if constexpr (Sums == 2) {
    part.sum[0] = warp_sum(part.sum[0] + n * apart * apart);
  } else {
    const float own =
        warp_sums({part.sum[0] + n * apart * apart, part.sum[1], part.sum[2] + apart * part.sum[1], 0.0f});
#pragma unroll
    for (int k = 0; k < 3; ++k) part.sum[k] = __shfl_sync(0xffffffffu, own, k);
  }
}

// Of a row of `width` columns that begins `past` columns into its first word: how many lie in `words` words from `first` on.
__device__ __forceinline__ int columns_in(int first, int words, int width, int past, int vec) {
  const int from = max(first * vec - past, 0), to = min((first + words) * vec - past, width);
  return max(to - from, 0);
}

__device__ __forceinline__ float inverse_of(float n) { return n > 0.0f ? 1.0f / n : 0.0f; }

// `Lanes` neighbours of a warp. The last ones of a grid may be without a row, so the others wait for no more than each other.
template <int Lanes, int Sums>
class PartTeam {
 public:
  static_assert(Lanes == 8 || Lanes == 16);
  static constexpr RowKind kind = RowKind::warp;
  struct Shared {};
  __device__ explicit PartTeam(Shared&) {}

  __device__ int thread() const { return threadIdx.x % Lanes; }
  __device__ int threads() const { return Lanes; }
  __device__ int64_t index() const {
    return static_cast<int64_t>(blockIdx.x) * (blockDim.x / Lanes) + threadIdx.x / Lanes;
  }
  __device__ int64_t count() const { return static_cast<int64_t>(gridDim.x) * (blockDim.x / Lanes); }

  __device__ __forceinline__ void sum(float (&value)[Sums]) const {
#pragma unroll
    for (int k = 0; k < Sums; ++k) value[k] = lanes_sum(value[k]);
  }

  __device__ void share_out(int width, int, int, int, int) { inverse_ = inverse_of(width); }
  // of those that share a mean before the team joins
  __device__ __forceinline__ float first_mean(float value) const { return lanes_sum(value) * inverse_; }
  __device__ __forceinline__ void moments(Moments<Sums>& of) const {
#pragma unroll
    for (int k = 0; k < Sums - 1; ++k) of.sum[k] = lanes_sum(of.sum[k]);
  }

 private:
  __device__ __forceinline__ float lanes_sum(float value) const {
    const unsigned own = ((1u << Lanes) - 1) << (threadIdx.x % 32 / Lanes * Lanes);
#pragma unroll
    for (int step = Lanes / 2; step > 0; step /= 2) value += __shfl_xor_sync(own, value, step);
    return value;
  }
  float inverse_ = 0.0f;
};

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

  __device__ __forceinline__ void sum(float (&value)[Sums]) { spread(value, warp_sums(value)); }

  __device__ void share_out(int width, int, int, int, int) { inverse_ = inverse_of(width); }
  __device__ float inverse_of_warp() const { return inverse_; }
  __device__ __forceinline__ float first_mean(float value) const { return warp_sum(value) * inverse_; }
  __device__ __forceinline__ void moments(Moments<Sums>& of) {
#pragma unroll
    for (int k = 0; k < Sums - 1; ++k) of.sum[k] = warp_sum(of.sum[k]);
  }

 private:
  float inverse_ = 0.0f;
};

template <int Sums>
class BlockTeam {
 public:
  static constexpr RowKind kind = RowKind::block;
  static constexpr bool exists = true;
  struct alignas(16) Shared {
    float at[2][32][Sums];  // of each warp; two turns: the next sum may begin before every thread has read this one
  };
  __device__ explicit BlockTeam(Shared& shared) : shared_(shared) {}

  __device__ int thread() const { return threadIdx.x; }
  __device__ int threads() const { return blockDim.x; }
  __device__ int block() const { return 0; }
  __device__ int64_t index() const { return blockIdx.x; }
  __device__ int64_t count() const { return gridDim.x; }

  __device__ void leave() const {}

  // A sum in two halves, between which there is time: what is offered is there to take for every thread.
  __device__ __forceinline__ void offer(const float (&value)[Sums]) {
    const float own = warp_sums(value);
    if (threadIdx.x % 32 < Sums) shared_.at[turn_][threadIdx.x / 32][threadIdx.x % 32] = own;
    turn_ ^= 1;
    __syncthreads();
  }
  __device__ __forceinline__ void take(float (&value)[Sums]) const {
    const int lane = threadIdx.x % 32, count = blockDim.x / 32 * Sums;
    // lane i has the sum of number i % Sums over every (32 / Sums)th warp
    const float* all = &shared_.at[turn_ ^ 1][0][0];
    float total = lane < count ? all[lane] : 0.0f;
#pragma unroll
    for (int more = 32; more < 32 * Sums; more += 32) {
      if (lane + more < count) total += all[lane + more];
    }
#pragma unroll
    for (int step = Sums; step < 32; step *= 2) total += __shfl_xor_sync(0xffffffffu, total, step);
    spread(value, total);
  }
  __device__ __forceinline__ void sum(float (&value)[Sums]) { offer(value), take(value); }

  // Before moments(): how many columns each warp has, of a row that begins `past` columns into its first word, of which
  // the block's first is number `first`.
  __device__ void share_out(int width, int first, int past, int items, int vec) {
    const auto of = [&](int warp) {
      int columns = 0;
      for (int item = 0; item < items; ++item) {
        columns += columns_in(first + item * static_cast<int>(blockDim.x) + warp * 32, 32, width, past, vec);
      }
      return static_cast<float>(columns);
    };
    const int lane = threadIdx.x % 32;
    of_lane_ = lane < static_cast<int>(blockDim.x) / 32 ? of(lane) : 0.0f;
    inverse_of_warp_ = inverse_of(of(threadIdx.x / 32));
    inverse_of_block_ = inverse_of(columns_in(first, static_cast<int>(blockDim.x) * items, width, past, vec));
  }
  __device__ float inverse_of_warp() const { return inverse_of_warp_; }

  __device__ __forceinline__ void offer_moments(const Moments<Sums>& of) {
    const float own = lane_moments(of);
    if (threadIdx.x % 32 < Sums) shared_.at[turn_][threadIdx.x / 32][threadIdx.x % 32] = own;
    turn_ ^= 1;
    __syncthreads();
  }
  __device__ __forceinline__ void take_moments(Moments<Sums>& of) const {
    const int lane = threadIdx.x % 32;
    Vec<float, Sums> part{};
    if (lane < static_cast<int>(blockDim.x) / 32) part = load<Sums>(shared_.at[turn_ ^ 1][lane]);
    of.mean = part.at[Sums - 1];
#pragma unroll
    for (int k = 0; k < Sums - 1; ++k) of.sum[k] = part.at[k];
    join(of, of_lane_, inverse_of_block_);
  }

 private:
  Shared& shared_;
  int turn_ = 0;
  float of_lane_ = 0.0f, inverse_of_warp_ = 0.0f, inverse_of_block_ = 0.0f;
};

// Distributed shared memory of sm_90. Elsewhere these kernels are compiled, empty, and never launched (launch.h,
// has_clusters).
namespace cluster {

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
inline constexpr bool exist = false;
#else
inline constexpr bool exist = true;
#endif

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

__device__ __forceinline__ uint32_t shared_address(const void* of) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(of));
}

// A barrier that counts bytes which arrive in this block's shared memory. For the whole cluster to see: begin() after it.
__device__ __forceinline__ void make_barrier(uint64_t* barrier) {
#if __CUDA_ARCH__ >= 900
  asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared_address(barrier)) : "memory");
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#else
  (void)barrier;
  __trap();
#endif
}

__device__ __forceinline__ void expect_bytes(uint64_t* barrier, int bytes) {
#if __CUDA_ARCH__ >= 900
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes)
               : "memory");
#else
  (void)barrier, (void)bytes;
  __trap();
#endif
}

// Acquires at the block's scope, as try_wait does unless told otherwise: what is waited for are bytes in this block's own
// shared memory, which the barrier counted. At the cluster's scope nvcc 13.0 adds an emptying of L1 (CCTL.IVALL) after every
// wait, which only what others wrote to global memory would need.
__device__ __forceinline__ void wait_for_bytes(uint64_t* barrier, int phase) {
#if __CUDA_ARCH__ >= 900
  int done = 0;
  while (!done) {
    asm volatile(
        "{\n.reg .pred p;\n"
        "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
        "selp.b32 %0, 1, 0, p;\n}"
        : "=r"(done)
        : "r"(shared_address(barrier)), "r"(phase)
        : "memory");
  }
#else
  (void)barrier, (void)phase;
  __trap();
#endif
}

// Into the same variable in the shared memory of block `rank`, whose barrier counts it. No fence, which a barrier of the
// whole cluster would need: that one empties the L1 cache.
__device__ __forceinline__ void send(int rank, float* mine, float value, uint64_t* barrier) {
#if __CUDA_ARCH__ >= 900
  uint32_t theirs, counted;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(theirs) : "r"(shared_address(mine)), "r"(rank));
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(counted) : "r"(shared_address(barrier)), "r"(rank));
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];" ::"r"(theirs),
               "r"(__float_as_uint(value)), "r"(counted)
               : "memory");
#else
  (void)rank, (void)mine, (void)value, (void)barrier;
  __trap();
#endif
}

}  // namespace cluster

template <int Sums>
class ClusterTeam {
 public:
  static constexpr bool exists = cluster::exist;
  struct Shared {
    typename BlockTeam<Sums>::Shared own;
    float at[2][Sums][largest_cluster];  // of every block, two turns
    uint64_t arrived[2];
  };
  // No block may send to another before that one has its barriers; nobody waits for it until the first sum.
  __device__ explicit ClusterTeam(Shared& shared) : shared_(shared), own_(shared.own) {
    if (threadIdx.x == 0) {
      cluster::make_barrier(&shared.arrived[0]);
      cluster::make_barrier(&shared.arrived[1]);
    }
    cluster::arrive();
  }

  __device__ int block() const { return cluster::rank(); }
  __device__ int64_t index() const { return blockIdx.x / cluster::size(); }
  __device__ int64_t count() const { return gridDim.x / cluster::size(); }

  __device__ __forceinline__ void offer(const float (&value)[Sums]) {
    float own[Sums];
    own_.offer(value), own_.take(own);
    send(own);
  }
  __device__ __forceinline__ void take(float (&value)[Sums]) {
    receive(value);
    spread(value, warp_sums(value));
  }

  __device__ void share_out(int width, int first, int past, int items, int vec) {
    own_.share_out(width, first, past, items, vec);
    const int lane = threadIdx.x % 32, words = static_cast<int>(blockDim.x) * items;
    of_lane_ = lane < cluster::size() ? columns_in(lane * words, words, width, past, vec) : 0;
    inverse_ = inverse_of(width);
  }
  __device__ float inverse_of_warp() const { return own_.inverse_of_warp(); }

  __device__ __forceinline__ void offer_moments(const Moments<Sums>& of) {
    Moments<Sums> own;
    own_.offer_moments(of), own_.take_moments(own);
    float value[Sums];
    value[Sums - 1] = own.mean;
#pragma unroll
    for (int k = 0; k < Sums - 1; ++k) value[k] = own.sum[k];
    send(value);
  }
  __device__ __forceinline__ void take_moments(Moments<Sums>& of) {
    float value[Sums];
    receive(value);
    of.mean = value[Sums - 1];
#pragma unroll
    for (int k = 0; k < Sums - 1; ++k) of.sum[k] = value[k];
    join(of, of_lane_, inverse_);
  }

  // Where there was no row: the barrier that was arrived at must be left. Else a block may leave after its last sum: by
  // then every other block's figures have arrived, and nobody reads it.
  __device__ __forceinline__ void leave() {
    if (!begun_) cluster::wait();
  }

 private:
  // The block's figures, which all its threads have, to every block. A turn is sent into again only after the next one,
  // which a block takes part in after all its threads have read this one: the sum within the block is a barrier.
  __device__ __forceinline__ void send(const float (&value)[Sums]) {
    const int blocks = cluster::size();
    if (!begun_) cluster::wait();
    begun_ = true;
    if (threadIdx.x == 0)
      cluster::expect_bytes(&shared_.arrived[turn_], blocks * Sums * static_cast<int>(sizeof(float)));
    if (static_cast<int>(threadIdx.x) < blocks) {
#pragma unroll
      for (int k = 0; k < Sums; ++k) {
        cluster::send(threadIdx.x, &shared_.at[turn_][k][cluster::rank()], value[k], &shared_.arrived[turn_]);
      }
    }
    turn_ ^= 1;
  }

  // Lane i gets those of block i, or zeros.
  __device__ __forceinline__ void receive(float (&value)[Sums]) {
    const int lane = threadIdx.x % 32, turn = turn_ ^ 1;
    cluster::wait_for_bytes(&shared_.arrived[turn], phase_);
#pragma unroll
    for (int k = 0; k < Sums; ++k) value[k] = lane < cluster::size() ? shared_.at[turn][k][lane] : 0.0f;
    phase_ ^= turn;
  }

  Shared& shared_;
  BlockTeam<Sums> own_;
  int turn_ = 0, phase_ = 0;  // phase: of both turns' barriers, which it passes one after the other
  float of_lane_ = 0.0f, inverse_ = 0.0f;
  bool begun_ = false;
};

}  // namespace prequal
