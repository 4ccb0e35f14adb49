// experts[t] = the k best of logits [T, E] (softmax or sigmoid; with a bias and by groups, of what they make of it), their
// weights [T, k], and how many tokens each expert got, counts [E].
// 8, 16 or 32 lanes own a token and sort: a lane what it reads, lanes their lists. Up to 8 experts by logits: a thread does.
// Bytes: T E sizeof(logit) read, T k 8 and 4 E written. Counts: shared memory, then one integer atomic a block and expert.
// Numerics: fp32, with torch's own sigmoid (1 / (1 + exp(-x)), each step rounded); quotients of weights to 2 ulp.
#include <algorithm>
#include <bit>
#include <optional>
#include <string>
#include <tuple>

#include "ops.h"
#include "prequal/dispatch.h"
#include "prequal/early.cuh"
#include "prequal/float_order.h"
#include "prequal/launch.h"
#include "prequal/vec.cuh"

namespace prequal::ops {
namespace {

struct Unit : FileOf<"moe_route"> {};

constexpr int most_experts = 1024, most_chosen = 32, most_groups = 32;
constexpr int few_experts = 8;  // a thread holds them
constexpr unsigned whole_warp = 0xffffffffu;

struct Route {
  const void* logits;  // [T, E]
  const void* bias;    // [E] or null
  DType dtype, bias_dtype;
  int64_t stride, bias_stride;          // elements from token to token, from expert to expert
  uint32_t tokens;                      // below 2^31: so is what a launch steps by
  int experts, chosen;                  // E, k
  int groups, kept_groups, group_size;  // 0: none
  int chunks;                           // how often the lanes of a token read until they have its row
  uint32_t places;                      // the bits of a key that say which expert it is
  bool sigmoid, renormalize;
  bool words;  // what a lane reads comes in whole words, and all of it or nothing is of the row
  float scale;
  float* weights;  // [T, k]
  int* expert;     // [T, k]
  int* counts;     // [E]
};

// The widest access that the bytes of a lane are made of; 0: none.
constexpr int word_of(int bytes) { return bytes % 16 == 0 ? 16 : bytes % 8 == 0 ? 8 : bytes % 4 == 0 ? 4 : 0; }

__device__ __forceinline__ float value_at(const void* from, DType dtype, int64_t place) {
  if (dtype == DType::f32) return static_cast<const float*>(from)[place];
  if (dtype == DType::bf16) return to_float(static_cast<const __nv_bfloat16*>(from)[place]);
  return to_float(static_cast<const __half*>(from)[place]);
}

template <int Bytes>
__device__ __forceinline__ void load_words(uint32_t* raw, const void* from) {
  static_assert(word_of(Bytes) == 16);
#pragma unroll
  for (int i = 0; i < Bytes / 16; ++i) {
    const uint4 four = static_cast<const uint4*>(from)[i];
    raw[4 * i] = four.x, raw[4 * i + 1] = four.y, raw[4 * i + 2] = four.z, raw[4 * i + 3] = four.w;
  }
}

// Logits as they are stored, two halves a register; of words nothing is looked at, so nothing waits for them. `from` is
// where the lane's first one lies.
template <int K>
__device__ __forceinline__ void load_raw(uint32_t (&raw)[K], const Route& a, const void* from, int inside) {
  if (a.words) {
    if (inside <= 0) return;
    if (a.dtype == DType::f32) {
      load_words<4 * K>(raw, from);
    } else {
      load_words<2 * K>(raw, from);
    }
    return;
  }
#pragma unroll
  for (int j = 0; j < K; ++j) {
    if (j >= inside) continue;
    if (a.dtype == DType::f32) {
      raw[j] = static_cast<const uint32_t*>(from)[j];
    } else {
      const uint32_t half = static_cast<const uint16_t*>(from)[j];
      raw[j / 2] = j % 2 ? (raw[j / 2] & 0xffffu) | half << 16 : half;
    }
  }
}

template <int K, class See>
__device__ __forceinline__ void each_value(const uint32_t (&raw)[K], DType dtype, See&& see) {
  switch (dtype) {  // the same for every thread
    case DType::f32:
#pragma unroll
      for (int j = 0; j < K; ++j) see(j, __uint_as_float(raw[j]));
      break;
    case DType::bf16:
#pragma unroll
      for (int j = 0; j < K; ++j) see(j, __uint_as_float(j % 2 ? raw[j / 2] & 0xffff0000u : raw[j / 2] << 16));
      break;
    default:
#pragma unroll
      for (int j = 0; j < K; ++j) {
        see(j, to_float(bits_as<__half>(static_cast<uint16_t>(raw[j / 2] >> (j % 2 * 16)))));
      }
  }
}

__device__ __forceinline__ float sigmoid_of(float x) { return 1.0f / (1.0f + expf(-x)); }

__device__ __forceinline__ float nearly_inverse(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// The same bits. A quotient asks of each divisor whether its inverse is a normal number, and a branch for each lets none
// of them overlap: here one asks for all, and what corrects an inverse of a normal divisor is what the compiler puts there.
template <int K>
__device__ __forceinline__ void sigmoids_of(float (&score)[K], const float (&x)[K]) {
  float below[K], largest = 1.0f;
#pragma unroll
  for (int j = 0; j < K; ++j) {
    below[j] = 1.0f + expf(-x[j]);
    const float close = nearly_inverse(below[j]);
    score[j] = fmaf(close, -fmaf(below[j], close, -1.0f), close);
    largest = fmaxf(largest, below[j]);
  }
  if (largest < 0x1p125f) return;  // NaN is no maximum, and stays NaN above
#pragma unroll
  for (int j = 0; j < K; ++j) score[j] = 1.0f / below[j];
}

// No sum of sigmoids is as small, but one of zeros.
constexpr float least_sum = 1e-20f;

template <int Lanes>
__device__ __forceinline__ float sum_of_team(float value) {
#pragma unroll
  for (int step = Lanes / 2; step > 0; step /= 2) value += __shfl_xor_sync(whole_warp, value, step);
  return value;
}

template <int Lanes>
__device__ __forceinline__ uint32_t most_of_team(uint32_t value) {
#pragma unroll
  for (int step = Lanes / 2; step > 0; step /= 2) value = max(value, __shfl_xor_sync(whole_warp, value, step));
  return value;
}

// ---- Sorted lists of keys, best first -----------------------------------------------------------------------------

__device__ __forceinline__ void exchange(uint32_t& first, uint32_t& second) {
  const uint32_t least = min(first, second);
  first = max(first, second);
  second = least;
}

// Batcher's odd-even merge sort: 19 exchanges of 8 keys, 63 of 16.
template <int Low, int Count, int Step, int N>
__device__ __forceinline__ void merge_halves(uint32_t (&key)[N]) {
  if constexpr (2 * Step < Count) {
    merge_halves<Low, Count, 2 * Step>(key);
    merge_halves<Low + Step, Count, 2 * Step>(key);
#pragma unroll
    for (int i = Low + Step; i + Step < Low + Count; i += 2 * Step) exchange(key[i], key[i + Step]);
  } else {
    exchange(key[Low], key[Low + Step]);
  }
}

template <int Low, int Count, int N>
__device__ __forceinline__ void sort(uint32_t (&key)[N]) {
  if constexpr (Count > 1) {
    sort<Low, Count / 2>(key);
    sort<Low + Count / 2, Count / 2>(key);
    merge_halves<Low, Count, 1>(key);
  }
}

// The first N keys, which rise and then fall or the other way round.
template <int N, int All>
__device__ __forceinline__ void sort_bitonic(uint32_t (&key)[All]) {
#pragma unroll
  for (int distance = N / 2; distance > 0; distance /= 2) {
#pragma unroll
    for (int i = 0; i < N; ++i) {
      if ((i & distance) == 0) exchange(key[i], key[i + distance]);
    }
  }
}

// The best of two lists, in one of them.
template <int K>
__device__ __forceinline__ void keep_best(uint32_t (&best)[K], const uint32_t (&key)[K]) {
#pragma unroll
  for (int i = 0; i < K; ++i) best[i] = max(best[i], key[K - 1 - i]);
  sort_bitonic<K>(best);
}

// A list that 2^n lanes share lies there in blocks: what two lanes have is one list in both halves of it, so that either
// lane sends its second half and keeps its first, whichever of the two it is. Bit s of a lane's number, from the lowest,
// changes bits s and lower of the number of its block, counted from the highest. So the lane whose block differs in one bit
// is this far away (exclusive or),
constexpr int neighbour_of(int s) { return s == 0 ? 1 : 3 << (s - 1); }
// and that bit is the parity of these bits of a lane.
constexpr int parity_of(int s, int sharing) { return (sharing - 1) & ~((1 << s) - 1); }

// Of a list a lane, the K best of all lanes of a team: the one in block b of K is left in key[0]. More lanes than K hold
// the same list several times. What falls out is not above `dropped`.
template <int Lanes, int Sharing, int K>
__device__ __forceinline__ void merge_lists(uint32_t (&key)[K], uint32_t& dropped, int lane) {
  if constexpr (Sharing < Lanes) {
    constexpr int held = Sharing < K ? K / Sharing : 1, left = held > 1 ? held / 2 : 1;
    constexpr int sharing = held > 1 ? 2 * Sharing : K, steps = std::countr_zero(static_cast<unsigned>(sharing));
    constexpr int mirrored = Sharing | (Sharing < K ? Sharing : K) / 2;  // the lane that counts blocks from the end
    uint32_t theirs[left];
#pragma unroll
    for (int i = 0; i < left; ++i) theirs[i] = __shfl_xor_sync(whole_warp, key[held - 1 - i], mirrored);
#pragma unroll
    for (int i = 0; i < left; ++i) {
      dropped = max(dropped, min(key[i], theirs[i]));
      key[i] = max(key[i], theirs[i]);
    }
#pragma unroll
    for (int s = 0; s < steps; ++s) {
      const bool first = (__popc(lane & parity_of(s, sharing)) & 1) == 0;
#pragma unroll
      for (int i = 0; i < left; ++i) {  // the two that have halved a block hold its halves in opposite order
        theirs[i] = __shfl_xor_sync(whole_warp, key[s == steps - 1 ? left - 1 - i : i], neighbour_of(s));
      }
#pragma unroll
      for (int i = 0; i < left; ++i) key[i] = (key[i] > theirs[i]) == first ? key[i] : theirs[i];
    }
    sort_bitonic<left>(key);
    merge_lists<Lanes, 2 * Sharing>(key, dropped, lane);
  }
}

// The lane of K that has block `block`.
template <int K>
__device__ __forceinline__ int lane_of(int block) {
  constexpr int bits = std::countr_zero(static_cast<unsigned>(K));
  int lane = 0;
#pragma unroll
  for (int s = 0; s < bits; ++s) lane ^= block >> (bits - 1 - s) & 1 ? neighbour_of(s) : 0;
  return lane;
}

// Lane r of a team gets the r-th best of the experts whose order is not below `bound`: they are put into the list one
// after the other, each behind its equals. Any number of them may be equal.
template <int Lanes, class OrderOf>
__device__ __forceinline__ int insert_one_by_one(const Route& a, uint32_t bound, int lane, OrderOf&& order_of) {
  uint32_t order = below_all;
  int expert = 0;
#pragma unroll 1
  for (int from = 0; from < a.experts; from += Lanes) {
    const uint32_t own = from + lane < a.experts ? order_of(from + lane) : below_all;
    unsigned hits = __ballot_sync(whole_warp, own >= bound) >> (threadIdx.x % 32 - lane);
    if constexpr (Lanes < 32) hits &= (1u << Lanes) - 1;
#pragma unroll 1
    while (__any_sync(whole_warp, hits != 0)) {  // a team that has none left inserts what is below all
      const int at = hits != 0 ? __ffs(hits) - 1 : 0;
      const uint32_t found = __shfl_sync(whole_warp, own, at, Lanes), more = hits != 0 ? found : below_all;
      const uint32_t higher = __shfl_up_sync(whole_warp, order, 1, Lanes);
      const int its_expert = __shfl_up_sync(whole_warp, expert, 1, Lanes);
      if (order < more) {
        const bool here = lane == 0 || higher >= more;
        order = here ? more : higher;
        expert = here ? from + at : its_expert;
      }
      hits &= hits - 1;
    }
  }
  return expert;
}

// ---- Groups -------------------------------------------------------------------------------------------------------

struct Two {
  uint32_t first = below_all, second = below_all;

  __device__ __forceinline__ void see(uint32_t order) {
    second = max(second, min(first, order));
    first = max(first, order);
  }
};

// By a lane: all of a group's orders, in words of four where it is made of them. Each lane begins elsewhere: groups of 32
// begin in one bank.
template <class See>
__device__ __forceinline__ void over_group(uint32_t* group, int size, int number, See&& see) {
  if (size % 4 == 0) {
    auto* words = reinterpret_cast<uint4*>(group);
    for (int i = 0, at = number % (size / 4); i < size / 4; ++i, at = at + 1 < size / 4 ? at + 1 : 0) see(words[at]);
  } else {
    for (int i = 0; i < size; ++i) {
      uint4 one{group[i], below_all, below_all, below_all};
      see(one);
      group[i] = one.x;
    }
  }
}

// Nothing stays of the experts of groups that are not kept: those whose two best add up to the most are.
template <int Lanes>
__device__ __forceinline__ void keep_groups(uint32_t* row /*[E]*/, uint32_t* sums /*[groups]*/, const Route& a,
                                            int lane) {
  for (int g = lane; g < a.groups; g += Lanes) {
    Two best;
    over_group(row + g * a.group_size, a.group_size, g,
               [&](const uint4& four) { best.see(four.x), best.see(four.y), best.see(four.z), best.see(four.w); });
    float sum = from_order(best.first);
    if (a.group_size > 1) sum += from_order(best.second);
    sums[g] = in_order(sum);
  }
  __syncwarp();
  for (int g = lane; g < a.groups; g += Lanes) {
    const uint32_t mine = sums[g];
    int better = 0;
    for (int other = 0; other < a.groups; ++other) {
      const uint32_t theirs = sums[other];
      better += theirs > mine || (theirs == mine && other < g);
    }
    if (better < a.kept_groups) continue;
    over_group(row + g * a.group_size, a.group_size, g, [](uint4& four) { four = {}; });
  }
  __syncwarp();
}
static_assert(below_all == 0);

// counts += histogram, once the kernel before has set them to zero.
__device__ __forceinline__ void add_counts(const int* histogram, const Route& a) {
  __syncthreads();
  wait_for_kernel_before();
  for (int e = threadIdx.x; e < a.experts; e += blockDim.x) {
    if (const int count = histogram[e]) atomicAdd(a.counts + e, count);
  }
}

template <int K, bool Biased>
constexpr int threads_of = K == 8 && !Biased ? 512 : 256;

// On a multiprocessor: as many as no kernel spills for, on any architecture.
template <int K, int Chunks, bool Biased>
constexpr int blocks_of = K == 8 && Biased         ? 4
                          : K == 16 && Chunks != 0 ? 3
                                                   : 2;

constexpr int most_of_a_lane = 32;  // experts, where they are chosen by their scores: these lie in shared memory

// Biased: experts are chosen by their scores, with a bias, by groups; else by their logits, which are in the same order.
// A key has the upper bits of an order and, in place of the lower ones, which expert it is: equal ones stand in the order
// of the experts. Orders of halves have nothing there. Others may: where that could have changed the choice, it is made
// again from the whole orders.
// Chunks: how many there are; 0: a.chunks.
template <int K, int Lanes, int Chunks, bool Biased>
__global__ void __launch_bounds__(threads_of<K, Biased>, blocks_of<K, Chunks, Biased>) route_kernel(Route a) {
  static_assert(Lanes % K == 0 && (Biased || Lanes == K));
  constexpr int teams = threads_of<K, Biased> / Lanes, together = 32 / Lanes;  // of a block; of a warp
  constexpr int most = most_of_a_lane * Lanes;
  __shared__ int histogram[most_experts];
  __shared__ alignas(16) uint32_t rows[Biased ? teams : 1][Biased ? most : 4];
  __shared__ alignas(16) float biases[Biased ? most : 4];
  __shared__ uint32_t sums[Biased ? teams : 1][most_groups];

  const int lane = threadIdx.x % Lanes, team = threadIdx.x / Lanes;
  const uint32_t step = gridDim.x * teams;
  const int size = a.dtype == DType::f32 ? 4 : 2;
  // past the last token, the other teams of a warp go through the last one again and write nothing
  const auto row_of = [&](uint32_t token) {
    return static_cast<const char*>(a.logits) + min(token, a.tokens - 1) * (a.stride * size);
  };
  const int chunks = Chunks ? Chunks : a.chunks;
  const auto first_of = [&](int chunk) { return (chunk * Lanes + lane) * K; };
  // how many of a lane's experts are the row's: all where another chunk follows
  const auto inside_of = [&](int chunk) { return chunk + 1 < chunks ? K : a.experts - first_of(chunk); };
  const auto load_chunk = [&](uint32_t(&raw)[K], const char* row, int chunk) {
    load_raw(raw, a, row + first_of(chunk) * size, inside_of(chunk));
  };

  uint32_t token = blockIdx.x * teams + team;
  const char* row = row_of(token);
  uint32_t raw[K] = {};
  load_chunk(raw, row, 0);
  for (int e = threadIdx.x; e < a.experts; e += blockDim.x) histogram[e] = 0;
  if constexpr (Biased) {
    for (int e = threadIdx.x; e < most; e += blockDim.x) {
      biases[e] = a.bias && e < a.experts ? value_at(a.bias, a.bias_dtype, e * a.bias_stride) : 0.0f;
    }
  }
  __syncthreads();

  const int rank = lane % K, from = lane - rank + lane_of<K>(rank);
  const bool chosen = lane < a.chosen;
  for (; token - team % together < a.tokens; token += step) {
    const char* next = row_of(token + step);
    const auto load_next = [&](int chunk) {  // arrives meanwhile
      const bool more = chunk + 1 < chunks;
      load_chunk(raw, more ? row : next, more ? chunk + 1 : 0);
    };
    // f(values, how many of them are the row's): once more, from L1
    const auto over_row = [&](auto&& f) {
#pragma unroll 1
      for (int chunk = 0; chunk < chunks; ++chunk) {
        uint32_t again[K] = {};
        float value[K];
        load_chunk(again, row, chunk);
        each_value(again, a.dtype, [&](int j, float x) { value[j] = x; });
        f(value, inside_of(chunk));
      }
    };
    const auto sum_of_exp = [&](float top) {
      float sum = 0.0f;
      over_row([&](const float(&value)[K], int inside) {
        float part = 0.0f;
#pragma unroll
        for (int j = 0; j < K; ++j) part += j < inside ? expf(value[j] - top) : 0.0f;
        sum += part;
      });
      return sum_of_team<Lanes>(sum);
    };

    float top = 0.0f, inverse = 1.0f;  // of all experts
    if constexpr (Biased) {
      if (!a.sigmoid) {
        uint32_t highest = below_all;
        over_row([&](const float(&value)[K], int inside) {
#pragma unroll
          for (int j = 0; j < K; ++j) highest = max(highest, j < inside ? in_order(value[j]) : below_all);
        });
        top = from_order(most_of_team<Lanes>(highest));
        inverse = 1.0f / sum_of_exp(top);
      }
#pragma unroll 1
      for (int chunk = 0; chunk < chunks; ++chunk) {
        float value[K];
        each_value(raw, a.dtype, [&](int j, float x) { value[j] = x; });
        load_next(chunk);
        const int first = first_of(chunk), inside = inside_of(chunk);
        float score[K];
        if (a.sigmoid) {
          sigmoids_of(score, value);
        } else {
#pragma unroll
          for (int j = 0; j < K; ++j) score[j] = expf(value[j] - top) * inverse;
        }
        uint32_t order[K];
#pragma unroll
        for (int j = 0; j < K; j += 4) {
          const float4 bias = reinterpret_cast<const float4*>(biases + first)[j / 4];
          order[j] = in_order(score[j] + bias.x), order[j + 1] = in_order(score[j + 1] + bias.y);
          order[j + 2] = in_order(score[j + 2] + bias.z), order[j + 3] = in_order(score[j + 3] + bias.w);
        }
        if (inside < K) {
#pragma unroll
          for (int j = 0; j < K; ++j) order[j] = j < inside ? order[j] : below_all;
        }
#pragma unroll
        for (int j = 0; j < K; j += 4) {
          reinterpret_cast<uint4*>(rows[team] + first)[j / 4] = {order[j], order[j + 1], order[j + 2], order[j + 3]};
        }
      }
      __syncwarp();
      if (a.groups) keep_groups<Lanes>(rows[team], sums[team], a, lane);
    }

    uint32_t best[K];
#pragma unroll(Chunks ? Chunks : 1)
    for (int chunk = 0; chunk < chunks; ++chunk) {
      const int first = first_of(chunk), inside = inside_of(chunk);
      uint32_t key[K];
      if constexpr (Biased) {
        load_words<4 * K>(key, rows[team] + first);
      } else {
        each_value(raw, a.dtype, [&](int j, float x) { key[j] = in_order(x); });
        load_next(chunk);
        if (inside < K) {
#pragma unroll
          for (int j = 0; j < K; ++j) key[j] = j < inside ? key[j] : below_all;
        }
      }
#pragma unroll
      for (int j = 0; j < K; ++j) key[j] = (key[j] & ~a.places) | (K - 1 - j);
      sort<0, K>(key);
      const uint32_t place = (a.places ^ first) & ~(K - 1u);
#pragma unroll
      for (int j = 0; j < K; ++j) key[j] += place;
      if (chunk == 0) {
#pragma unroll
        for (int j = 0; j < K; ++j) best[j] = key[j];
      } else {
        keep_best(best, key);
      }
    }

    // what a lane itself dropped is not above the last that it kept
    uint32_t dropped = chunks > 1 ? best[K - 1] : below_all;
    merge_lists<Lanes, 1>(best, dropped, lane);
    const uint32_t key = __shfl_sync(whole_warp, best[0], from, Lanes);
    int expert = chosen ? static_cast<int>(a.places & ~key) : 0;
    float logit = value_at(row, a.dtype, expert);  // from L1: a key has a part of it
    if (Biased || a.dtype == DType::f32) {
      uint32_t order;
      if constexpr (Biased) {
        order = rows[team][expert];
      } else {
        order = in_order(logit);
      }
      const uint32_t bound = __shfl_sync(whole_warp, key, a.chosen - 1, Lanes) & ~a.places;
      const uint32_t lower = __shfl_down_sync(whole_warp, order, 1, Lanes);
      const bool swapped = lane + 1 < a.chosen && order < lower;
      const bool tied = dropped >= bound || (rank >= a.chosen && key >= bound);
      bool again = __any_sync(whole_warp, swapped || tied);
      if constexpr (!Biased) {
        if (again) {  // not where the row has nothing in the lower bits, as halves that became floats
          uint32_t lost = 0;
          over_row([&](const float(&value)[K], int inside) {
#pragma unroll
            for (int j = 0; j < K; ++j) lost |= j < inside ? __float_as_uint(value[j]) : 0;
          });
          again = __any_sync(whole_warp, (lost & a.places) != 0);
        }
      }
      if (again) {
        expert = insert_one_by_one<Lanes>(a, bound, lane, [&](int e) {
          if constexpr (Biased) {
            return rows[team][e];
          } else {
            return in_order(value_at(row, a.dtype, e));
          }
        });
        logit = value_at(row, a.dtype, expert);
      }
    }

    float weight;
    if (a.sigmoid) {
      weight = chosen ? sigmoid_of(logit) : 0.0f;
      if (a.renormalize) weight = __fdividef(weight, sum_of_team<Lanes>(weight) + least_sum);
    } else if (a.renormalize) {
      float highest;
      if constexpr (Biased) {
        highest = from_order(most_of_team<Lanes>(chosen ? in_order(logit) : below_all));
      } else {
        highest = __shfl_sync(whole_warp, logit, 0, Lanes);
      }
      weight = chosen ? expf(logit - highest) : 0.0f;
      weight = __fdividef(weight, sum_of_team<Lanes>(weight));
    } else {
      if constexpr (!Biased) {
        top = __shfl_sync(whole_warp, logit, 0, Lanes);
        inverse = 1.0f / sum_of_exp(top);
      }
      weight = expf(logit - top) * inverse;
    }
    if (chosen && token < a.tokens) {
      const int64_t place = static_cast<int64_t>(token) * a.chosen + lane;
      a.weights[place] = weight * a.scale;
      a.expert[place] = expert;
      atomicAdd(histogram + expert, 1);
    }
    row = next;
    if constexpr (Biased) __syncwarp();  // the next token's orders are written into the same places
  }
  add_counts(histogram, a);
}

// Few experts, chosen by their logits: a token a thread.
constexpr int few_threads = 256;

__global__ void __launch_bounds__(few_threads) route_few_kernel(Route a) {
  constexpr int V = few_experts;
  __shared__ int histogram[V];
  if (threadIdx.x < V) histogram[threadIdx.x] = 0;
  __syncthreads();

  const uint32_t step = gridDim.x * few_threads;
  const int size = a.dtype == DType::f32 ? 4 : 2;
  for (uint32_t token = blockIdx.x * few_threads + threadIdx.x; token < a.tokens; token += step) {
    const int64_t first = static_cast<int64_t>(token) * a.chosen;
    uint32_t raw[V] = {}, order[V];
    load_raw(raw, a, static_cast<const char*>(a.logits) + token * (a.stride * size), a.experts);
    each_value(raw, a.dtype, [&](int j, float x) { order[j] = j < a.experts ? in_order(x) : below_all; });

    float value[V], sum = 0.0f;  // of the chosen ones; value: logits, then weights before they are scaled
    int expert[V];
    float all = 1.0f;
    uint32_t highest = order[0];
#pragma unroll
    for (int j = 1; j < V; ++j) highest = max(highest, order[j]);
    const float top = from_order(highest);
    if (!a.sigmoid && !a.renormalize) {
      all = 0.0f;
#pragma unroll
      for (int j = 0; j < V; ++j) all += order[j] != below_all ? expf(from_order(order[j]) - top) : 0.0f;
    }
#pragma unroll
    for (int r = 0; r < V; ++r) {
      if (r >= a.chosen) break;
      uint32_t best = order[0];
      expert[r] = 0;
#pragma unroll
      for (int j = 1; j < V; ++j) {
        if (order[j] > best) best = order[j], expert[r] = j;
      }
#pragma unroll
      for (int j = 0; j < V; ++j) order[j] = j == expert[r] ? below_all : order[j];
      const float logit = from_order(best);
      value[r] = a.sigmoid ? sigmoid_of(logit) : expf(logit - top);
      sum += value[r];
    }
    const float by = !a.renormalize ? all : a.sigmoid ? sum + least_sum : sum;
#pragma unroll
    for (int r = 0; r < V; ++r) {
      if (r >= a.chosen) break;
      a.weights[first + r] = __fdividef(value[r], by) * a.scale;
      a.expert[first + r] = expert[r];
      atomicAdd(histogram + expert[r], 1);
    }
  }
  add_counts(histogram, a);
}

__global__ void zero_counts_kernel(int* counts /*[E]*/, int experts) {
  let_next_begin();
  if (static_cast<int>(threadIdx.x) < experts) counts[threadIdx.x] = 0;
}

template <int K, int Lanes, int Chunks, bool Biased>
void run(const Context& context, Route& a) {
  a.words = a.experts % K == 0 && aligned(a.logits, a.stride * static_cast<int64_t>(item_size(a.dtype)), 16);
  a.chunks = (a.experts + Lanes * K - 1) / (Lanes * K);
  a.places = std::bit_ceil(static_cast<uint32_t>(a.chunks * Lanes * K)) - 1;
  constexpr int threads = threads_of<K, Biased>, teams = threads / Lanes;
  constexpr auto kernel = route_kernel<K, Lanes, Chunks, Biased>;
  // every block has as many tokens as any other: blocks that are resident go through them as often as they must
  const int64_t wanted = (int64_t{a.tokens} + teams - 1) / teams, resident = resident_blocks<kernel>(context, threads);
  const int64_t passes = (wanted + resident - 1) / resident, blocks = (wanted + passes - 1) / passes;
  launch_early<kernel>(context, dim3(static_cast<unsigned>(blocks)), dim3(threads), a);
}

void run_plain(const Context& context, Route& a) {
  if (a.chosen <= 8) {
    if (a.experts <= 64) return run<8, 8, 1, false>(context, a);
    if (a.experts <= 128) return run<8, 8, 2, false>(context, a);
    if (a.experts <= 192) return run<8, 8, 3, false>(context, a);
    if (a.experts <= 256) return run<8, 8, 4, false>(context, a);
    return run<8, 8, 0, false>(context, a);
  }
  if (a.chosen <= 16) {
    if (a.experts <= 256) return run<16, 16, 1, false>(context, a);
    if (a.experts <= 512) return run<16, 16, 2, false>(context, a);
    return run<16, 16, 0, false>(context, a);
  }
  run<32, 32, 1, false>(context, a);
}

void run_biased(const Context& context, Route& a) {
  if (a.chosen <= 8 && a.experts <= 256) {
    if (a.experts > 192) return run<8, 8, 4, true>(context, a);
    return run<8, 8, 0, true>(context, a);
  }
  if (a.chosen <= 8) return run<8, 32, 0, true>(context, a);
  if (a.chosen <= 16) return run<16, 32, 0, true>(context, a);
  run<32, 32, 1, true>(context, a);
}

void run_few(const Context& context, Route& a) {
  const int size = static_cast<int>(item_size(a.dtype));
  a.words = a.experts == few_experts && aligned(a.logits, a.stride * size, 16);
  const int64_t wanted = (int64_t{a.tokens} + few_threads - 1) / few_threads;
  const int64_t blocks = std::min(wanted, resident_blocks<route_few_kernel>(context, few_threads));
  launch_early<route_few_kernel>(context, dim3(static_cast<unsigned>(blocks)), dim3(few_threads), a);
}

int64_t in_range(const char* argument, int64_t value, int64_t low, int64_t high) {
  if (value < low || value > high) {
    wrong_value(argument, std::to_string(low) + " to " + std::to_string(high), std::to_string(value));
  }
  return value;
}

}  // namespace

std::tuple<Buffer, Buffer, Buffer> moe_route(const Context& context, const Tensor& logits /*[T, E]*/, int64_t k,
                                             const std::string& score, bool renormalize,
                                             const std::optional<Tensor>& bias /*[E]*/,
                                             const std::optional<int64_t>& groups,
                                             const std::optional<int64_t>& topk_groups, double scale) {
  if (logits.rank != 2 || logits.shape[1] == 0) wrong_value("logits", "shape [T, E], E from 1", shape_of(logits));
  const int64_t tokens = logits.shape[0], experts = logits.shape[1];
  if (score != "softmax" && score != "sigmoid") wrong_value("score", "'softmax' or 'sigmoid'", "'" + score + "'");
  if (bias) {
    if (bias->rank != 1 || bias->shape[0] != experts) {
      wrong_value("bias", "shape [" + std::to_string(experts) + "]", shape_of(*bias));
    }
    const bool floating = bias->dtype <= DType::f64;
    if (!floating && bias->dtype != DType::other) wrong_type("bias", "a floating dtype", name_of(bias->dtype));
  }
  in_range("k", k, 1, std::min<int64_t>(experts, most_chosen));
  if (groups.has_value() != topk_groups.has_value()) {
    const char *missing = groups ? "topk_groups" : "groups", *given = groups ? "groups" : "topk_groups";
    wrong_type(missing, std::string("an int beside ") + given, "NoneType");
  }
  if (groups) {
    in_range("groups", *groups, 1, experts);
    if (experts % *groups != 0) {
      wrong_value("groups", "a divisor of the " + std::to_string(experts) + " experts", std::to_string(*groups));
    }
    in_range("topk_groups", *topk_groups, 1, *groups);
    const int64_t left = *topk_groups * (experts / *groups);
    if (k > left) {
      wrong_value("k", "at most the " + std::to_string(left) + " experts of topk_groups groups", std::to_string(k));
    }
  }
  if (experts > most_experts || tokens > INT32_MAX || (groups && *groups > most_groups)) throw Refused{"size"};
  if (experts > 1 && logits.stride[1] != 1) throw Refused{"unit_stride"};
  if (bias && bias->dtype != DType::f32 && bias->dtype != logits.dtype) throw Refused{"dtype"};
  dispatch(logits.dtype, Floats{}, [&]<class T>() {});

  Buffer weights = context.empty({tokens, k}, DType::f32), chosen = context.empty({tokens, k}, DType::i32);
  Buffer counts = context.empty({experts}, DType::i32);
  launch<zero_counts_kernel>(context, dim3(1), dim3(most_experts), counts.as<int>(), static_cast<int>(experts));
  if (tokens > 0) {
    Route a{};
    a.logits = logits.data, a.dtype = logits.dtype, a.stride = logits.stride[0];
    if (bias) a.bias = bias->data, a.bias_dtype = bias->dtype, a.bias_stride = bias->stride[0];
    a.tokens = static_cast<uint32_t>(tokens), a.experts = static_cast<int>(experts), a.chosen = static_cast<int>(k);
    if (groups && *topk_groups < *groups) {  // else all are kept
      a.groups = static_cast<int>(*groups), a.kept_groups = static_cast<int>(*topk_groups);
      a.group_size = a.experts / a.groups;
    }
    a.sigmoid = score == "sigmoid", a.renormalize = renormalize;
    a.scale = static_cast<float>(scale);
    a.weights = weights.as<float>(), a.expert = chosen.as<int>(), a.counts = counts.as<int>();
    if (bias || groups) {
      run_biased(context, a);
    } else if (experts <= few_experts) {
      run_few(context, a);
    } else {
      run_plain(context, a);
    }
  }
  return {std::move(weights), std::move(chosen), std::move(counts)};
}

}  // namespace prequal::ops
