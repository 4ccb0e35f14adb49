// The k best of scores that come in any number and order: keys that are never equal, and the list that a block keeps of them.
// What scores are made of, and their metrics, stand here too: several kernels rank by them.
#pragma once

#include <cstdint>
#include <string>

#include "prequal/error.h"
#include "prequal/float_order.h"
#include "prequal/host_device.h"

namespace prequal::topk {

enum class Metric { dot, cosine, l2 };

inline Metric metric_of(const std::string& metric) {
  if (metric == "dot") return Metric::dot;
  if (metric == "cosine") return Metric::cosine;
  if (metric == "l2") return Metric::l2;
  wrong_value("metric", "'dot', 'cosine' or 'l2'", "'" + metric + "'");
}

template <Metric M>
__device__ __forceinline__ float score_of(float z, float column, float row) {
  if constexpr (M == Metric::dot) {
    return z;
  } else if constexpr (M == Metric::cosine) {
    return mul(mul(z, column), row);
  } else {
    const float negative = sub(sub(2.0f * z, column), row);  // 2 z is exact
    return negative > 0.0f ? 0.0f : negative;                // NaN stays
  }
}

// The upper half of a key is a score in the order of the floats, the lower one tells where it comes from: its place, its
// bits turned over. So the larger key is the better candidate, and of candidates at two places no two are equal.
using Key = uint64_t;

__device__ __forceinline__ Key key_of(uint32_t order, uint32_t place) { return static_cast<Key>(order) << 32 | ~place; }
__device__ __forceinline__ uint32_t place_of(Key key) { return ~static_cast<uint32_t>(key); }
__device__ __forceinline__ uint32_t order_of(Key key) { return static_cast<uint32_t>(key >> 32); }

// ---- a block's list -------------------------------------------------------------------------------------------------

constexpr int threads = 256;
constexpr int most_kept = threads;  // k: a thread writes each
constexpr int slots = 1024;         // keys in shared memory: the list of the best, and behind it what has passed

// Of a power of two of keys from 64 on, best first; all threads. Two keys that are 32 apart or nearer lie in the 64 that one
// warp owns, and steps between those need no barrier of the block.
__device__ __forceinline__ void sort_keys(Key* key, int count) {
  for (int size = 2; size <= count; size *= 2) {
    for (int distance = size / 2; distance > 0; distance /= 2) {
      for (int pair = threadIdx.x; pair < count / 2; pair += threads) {
        const int low = 2 * pair - (pair & (distance - 1)), high = low + distance;
        const Key a = key[low], b = key[high];
        if ((a < b) == ((low & size) == 0)) key[low] = b, key[high] = a;
      }
      if (distance > 32 || (distance == 1 && size >= 64)) {
        __syncthreads();
      } else {
        __syncwarp();
      }
    }
  }
}

struct Shared {
  Key key[slots];
  int passed;
};

// The list of a block's best keys, at most `listed` of them sorted, and what has passed since.
class Selection {
 public:
  __device__ Selection(Shared& shared, int k) : shared_(shared), k_(k), listed_(k <= 32 ? 32 : k <= 128 ? 128 : 256) {}

  // With these k keys; without any, where nothing is taken over.
  template <class At>
  __device__ __forceinline__ void begin(bool takes_over, At&& at) {
    if (static_cast<int>(threadIdx.x) < listed_) {
      shared_.key[threadIdx.x] = takes_over && static_cast<int>(threadIdx.x) < k_ ? at(threadIdx.x) : 0;
    }
    if (threadIdx.x == 0) shared_.passed = 0;
    __syncthreads();
    bound_ = 0;
    if (!takes_over) return;
    const int j = threadIdx.x;
    if (__syncthreads_or(j + 1 < k_ && shared_.key[j] < shared_.key[j + 1])) settle();
    bound_ = shared_.key[k_ - 1];
  }

  __device__ Key bound() const { return bound_; }
  __device__ void raise(Key bound) { bound_ = bound > bound_ ? bound : bound_; }
  __device__ bool changed() const { return changed_; }
  __device__ Key key(int j) const { return shared_.key[j]; }

  // Every thread: its keys of number j, of which bit j of `mask` says that it is above the bound.
  template <int N, class KeyAt>
  __device__ __forceinline__ void take(uint32_t mask, KeyAt&& at) {
    while (__syncthreads_or(mask != 0)) {
#pragma unroll
      for (int j = 0; j < N; ++j) {
        if (!(mask >> j & 1)) continue;
        const int place = atomicAdd(&shared_.passed, 1);
        if (place >= room()) continue;  // after the others are sorted in
        shared_.key[listed_ + place] = at(j);
        mask ^= 1u << j;
      }
      changed_ = true;
      __syncthreads();
      if (shared_.passed < room()) return;
      settle();
#pragma unroll
      for (int j = 0; j < N; ++j) {
        if ((mask >> j & 1) && at(j) <= bound_) mask ^= 1u << j;
      }
    }
  }

  // All threads, after a barrier: what has passed goes into the list.
  __device__ void settle() {
    const int passed = min(shared_.passed, room());
    int count = 64;
    while (count < listed_ + passed) count *= 2;
    for (int i = listed_ + passed + threadIdx.x; i < count; i += threads) shared_.key[i] = 0;
    __syncthreads();
    if (threadIdx.x == 0) shared_.passed = 0;
    sort_keys(shared_.key, count);
    raise(shared_.key[k_ - 1]);
  }

 private:
  __device__ int room() const { return slots - listed_; }

  Shared& shared_;
  int k_, listed_;
  Key bound_ = 0;
  bool changed_ = false;
};

}  // namespace prequal::topk
