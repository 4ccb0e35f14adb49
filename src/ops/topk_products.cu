// The k best rows of corpus [C, D] for each query [Q, D], in one pass: no score goes to memory.   -> scores, idx [Q, k]
// score = z (dot); z column[c] row[q] (cosine); -max(0, column[c] + row[q] - 2 z) (l2), z the inner product.
// A warp owns 16 rows of the corpus at a time, which it reads once, 16 bytes a lane; up to 64 queries lie in shared memory,
// with a list of the k best for each that the warps of a block share. A launch before finds the best of each of 1,024 groups
// of rows: the k-th of these is a bound that few scores pass. A launch behind merges what the blocks have found.
// Bytes: C D sizeof(T) and a sample's for every 64 queries, C 4 where column terms are given, k 8 a query and block.
// Numerics: sums in fp32, of halves by tensor cores; each step after z rounded on its own. Candidates are totally ordered,
// so the order of arrival does not matter.
#include <algorithm>
#include <cmath>
#include <optional>
#include <string>
#include <tuple>
#include <utility>

#include "ops.h"
#include "prequal/dispatch.h"
#include "prequal/float_order.h"
#include "prequal/launch.h"
#include "prequal/must_be.h"
#include "prequal/norms.cuh"
#include "prequal/reduce.cuh"
#include "prequal/search_plan.h"
#include "prequal/topk.cuh"
#include "prequal/vec.cuh"

namespace prequal::ops {
namespace {

struct Unit : FileOf<"topk_products"> {};

using topk::Key;
using topk::key_of;
using topk::Metric;
using topk::Selection;

constexpr int most_kept = 128;              // k
constexpr int most_rows = 1 << 30;          // C
constexpr int most_query_bytes = 6 * 1024;  // of a query, so that 8 and their lists fit the 99 KB of sm_86
constexpr int rows_a_warp = search_rows, queries_a_tile = 8;
constexpr int words_a_step = 2;  // of a lane and row, on their way at a time
constexpr int groups = search_groups;
constexpr int held = groups / 32;  // values of a lane or thread in which a k-th largest is looked for

// A lane has one 16-byte word of every four: 8 rows, 4 neighbouring words of each.
template <class T>
inline constexpr int columns_a_group = 4 * widest<T>;

struct Search {
  const void* queries;  // [Q, D], Q of this launch
  int64_t query_stride;
  const void* corpus;  // [C, D]
  int64_t corpus_stride;
  const float* of_column;  // [C] or null
  Metric metric;
  int count, width, rows, k, slots;  // Q, D, C

  int tiles, spread;       // of 16 rows, and how far apart those of this launch are
  uint32_t* sampled;       // [Q, tiles], written instead of anything else: the best of each tile; or null
  const uint32_t* sample;  // [Q, tiles_a_group, groups], of the launch before; or null
  int tiles_a_group;
  int* taken;  // [Q], zeroed beside a sample: how many keys stand in found. null: each block has k places
  Key* found;  // [Q, k blocks]: from the front; without a sample [Q, k, blocks], zero where a block has fewer
};

// ---- shared memory --------------------------------------------------------------------------------------------------

// Of each query a list of the k best, sorted, and behind it what has passed the k-th best since. Warps add to it as they
// come; the one that finds no room sorts, the others wait only where they have something to add.
struct Lists {
  Key* key;                 // [Q, slots]
  volatile Key* bound;      // [Q]: the k-th best, at a time
  int *reserved, *written;  // [Q]: places given away behind the list, and those of them that are filled
  float* term;              // [Q]: of the metric
  int k, slots;

  __device__ __forceinline__ int room() const { return slots - k; }
};

constexpr int list_bytes(int slots) { return slots * 8 + 8 + 4 + 4 + 4; }

// Of a small corpus, which has no sample, all 16 rows of each of 8 warps pass at first: 256 hold them without sorting
// between. With 128, 16 queries, 16,000 rows and k 1 took 105 us.
constexpr int slots_of(int64_t k, int64_t rows) { return k <= 64 && search_tiles(rows) >= groups ? 128 : 256; }

template <class T>
constexpr int steps_of(int width) {
  constexpr int columns = columns_a_group<T> * words_a_step;
  return (width + columns - 1) / columns;
}

template <class T>
constexpr int query_bytes(int width) {
  return steps_of<T>(width) * words_a_step * 64;
}

// Of a power of two of keys, best first; a whole warp.
__device__ __forceinline__ void sort_by_warp(Key* key, int count) {
  const int lane = threadIdx.x % 32;
  for (int size = 2; size <= count; size *= 2) {
    for (int distance = size / 2; distance > 0; distance /= 2) {
      for (int pair = lane; pair < count / 2; pair += 32) {
        const int low = 2 * pair - (pair & (distance - 1)), high = low + distance;
        const Key a = key[low], b = key[high];
        if ((a < b) == ((low & size) == 0)) key[low] = b, key[high] = a;
      }
      __syncwarp();
    }
  }
}

// A whole warp, which the last place was refused to. Whoever has a place fills it without waiting for anything.
__device__ __noinline__ void settle(Key* key, int slots, int k, volatile Key* bound, int* reserved,
                                    volatile int* written) {
  while (*written < slots - k) {
  }
  __threadfence_block();
  __syncwarp();
  sort_by_warp(key, slots);
  if (threadIdx.x % 32 == 0) {
    *bound = key[k - 1];
    *written = 0;
    __threadfence_block();
    atomicExch(reserved, 0);
  }
  __syncwarp();
}

// A whole warp: keys of number j of each lane, for query_at(j), where bit j of `mask` is set.
template <int N, class KeyAt, class QueryAt>
__device__ __forceinline__ void add_keys(const Lists& lists, uint32_t mask, KeyAt&& key_at, QueryAt&& query_at) {
  while (const uint32_t any = __reduce_or_sync(0xffffffffu, mask)) {
    uint32_t refused = 0;
#pragma unroll
    for (int j = 0; j < N; ++j) {
      if (!(any >> j & 1)) continue;  // for the whole warp: most j are nobody's
      if (!(mask >> j & 1)) continue;
      const int q = query_at(j);
      const Key key = key_at(j);
      if (key <= lists.bound[q]) {
        mask ^= 1u << j;
        continue;
      }
      if (*static_cast<volatile int*>(lists.reserved + q) > lists.room()) continue;  // somebody sorts
      const int place = atomicAdd(lists.reserved + q, 1);
      if (place < lists.room()) {
        lists.key[q * lists.slots + lists.k + place] = key;
        __threadfence_block();
        atomicAdd(lists.written + q, 1);
        mask ^= 1u << j;
      } else if (place == lists.room()) {  // one of all threads
        refused |= 1u << j;
      }
    }
    __syncwarp();
    // before this warp waits for anybody: two could else wait for each other
    while (const uint32_t lanes = __ballot_sync(0xffffffffu, refused != 0)) {
      const int lane = __ffs(static_cast<int>(lanes)) - 1;
      int q = 0;
      if (static_cast<int>(threadIdx.x % 32) == lane) {
        q = query_at(__ffs(static_cast<int>(refused)) - 1);
        refused &= refused - 1;
      }
      q = __shfl_sync(0xffffffffu, q, lane);
      settle(lists.key + q * lists.slots, lists.slots, lists.k, lists.bound + q, lists.reserved + q, lists.written + q);
    }
  }
}

// A number that at least k of all lanes' values reach, as large as its upper 20 bits can be; 0 where there are fewer. `sum`
// adds up a count of all who hold values.
template <class Sum>
__device__ __forceinline__ uint32_t reached_by(const uint32_t (&value)[held], int k, Sum&& sum) {
  uint32_t found = 0;
  for (int bit = 31; bit >= 12; --bit) {
    const uint32_t tried = found | 1u << bit;
    int count = 0;
#pragma unroll
    for (int i = 0; i < held; ++i) count += value[i] >= tried;
    if (sum(count) >= k) found = tried;
  }
  return found;
}

// What is above this key has at least that order.
__device__ __forceinline__ Key below(uint32_t order) { return order ? (static_cast<Key>(order) << 32) - 1 : 0; }

// ---- products -------------------------------------------------------------------------------------------------------

// c [16, 8] += a [16, 16] b [16, 8] of halves. Which column of the sum is called which does not matter: a lane gives
// neighbouring ones of its rows, and the same of its query.
template <class T>
__device__ __forceinline__ void multiply_add(float (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3,
                                             uint32_t b0, uint32_t b1) {
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
  } else {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
  }
}

// The inner products of 16 rows and 8 Tiles queries: lane 4 g + t ends with those of rows g and g + 8 and of queries
// 2 t and 2 t + 1 of each tile.
template <int Tiles, class T>
struct Products {
  float z[Tiles][4] = {};  // row g: 0, 1; row g + 8: 2, 3

  __device__ __forceinline__ void add(const Packet<T> (&row)[2], const uint4* words /*[Tiles, 8, 4]*/) {
#pragma unroll
    for (int tile = 0; tile < Tiles; ++tile) {
      const uint4 q = words[tile * 32 + threadIdx.x % 32];
      const Word &low = row[0].word, &high = row[1].word;
      multiply_add<T>(z[tile], low.at[0], high.at[0], low.at[1], high.at[1], q.x, q.y);
      multiply_add<T>(z[tile], low.at[2], high.at[2], low.at[3], high.at[3], q.z, q.w);
    }
  }
  __device__ __forceinline__ void finish() {}
};

template <int Tiles>
struct Products<Tiles, float> {
  float z[Tiles][4];
  float sum[Tiles][8][2] = {};  // of a lane's own columns, each query and row

  __device__ __forceinline__ void add(const Packet<float> (&row)[2], const uint4* words /*[Tiles, 8, 4]*/) {
    const int t = threadIdx.x % 4;
#pragma unroll
    for (int tile = 0; tile < Tiles; ++tile) {
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        const Packet<float> q{bits_as<Word>(words[tile * 32 + j * 4 + t])};
#pragma unroll
        for (int i = 0; i < 4; ++i) {
#pragma unroll
          for (int r = 0; r < 2; ++r) sum[tile][j][r] = fmaf(q[i], row[r][i], sum[tile][j][r]);
        }
      }
    }
  }

  // Of the four lanes of a row each keeps two queries: half of what is left is sent away at each of two steps.
  __device__ __forceinline__ void finish() {
    const bool high = threadIdx.x & 2, odd = threadIdx.x & 1;
#pragma unroll
    for (int tile = 0; tile < Tiles; ++tile) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        float four[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const float a = sum[tile][j][r], b = sum[tile][4 + j][r];
          four[j] = (high ? b : a) + __shfl_xor_sync(0xffffffffu, high ? a : b, 2);
        }
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          const float a = four[j], b = four[2 + j];
          z[tile][2 * r + j] = (odd ? b : a) + __shfl_xor_sync(0xffffffffu, odd ? a : b, 1);
        }
      }
    }
  }
};

__device__ __forceinline__ float term_of(Metric metric, float squares) {
  return metric == Metric::cosine ? norm_of_squares<NormForm::inverse>(squares) : squares;
}

// Queries of a launch, 8 each. Floats are held in full by every lane, and ragged rows take registers to be shifted.
template <bool Ragged, class T>
inline constexpr int most_tiles = (sizeof(T) == 4 ? 2 : 8) / (Ragged ? (sizeof(T) == 4 ? 2 : 4) : 1);

// Threads a block, one block a multiprocessor. Measured on an H200, 16 queries, k 128, a million rows of 256: 526 us with
// 768, 674 with two blocks of 512, 806 with three of 256, whose lists are shorter lived. More queries and ragged
// rows need the registers of 512, floats those of 384.
template <bool Ragged, int Tiles, class T>
inline constexpr int threads_of = sizeof(T) == 4          ? 384
                                  : !Ragged && Tiles <= 2 ? 768
                                                          : 512;

// Squares: the terms of the corpus are made of the rows as they pass.
template <bool Squares, bool Ragged, int Tiles, class T>
__global__ void __launch_bounds__(threads_of<Ragged, Tiles, T>, 1)
    products_kernel(Search a /*queries [Q, D], corpus [C, D]*/) {
  constexpr int N = widest<T>, W = words_a_step;
  extern __shared__ uint4 memory[];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32, g = lane / 4, t = lane % 4;
  const int steps = steps_of<T>(a.width);
  uint4* words = memory;  // [steps, W, Tiles, 8, 4]: lane 4 g + t finds its own word of query g
  Lists lists;
  lists.k = a.k, lists.slots = a.slots;
  lists.key = reinterpret_cast<Key*>(words + steps * W * Tiles * 32);
  lists.bound = lists.key + a.count * a.slots;
  lists.reserved = reinterpret_cast<int*>(lists.key + a.count * (a.slots + 1));
  lists.written = lists.reserved + a.count;
  lists.term = reinterpret_cast<float*>(lists.written + a.count);

  for (int i = threadIdx.x; i < steps * W * Tiles * 32; i += blockDim.x) {
    const int q = i / 32 % Tiles * 8 + i % 32 / 4, column = (i / (32 * Tiles) * 4 + i % 4) * N;
    Packet<T> packet{};
    if (q < a.count) {
      packet = load_packet<Ragged, true>(static_cast<const T*>(a.queries) + q * a.query_stride, column, a.width);
    }
    words[i] = bits_as<uint4>(packet.word);
  }
  for (int i = threadIdx.x; i < a.count * a.k; i += blockDim.x) lists.key[i / a.k * a.slots + i % a.k] = 0;
  for (int q = threadIdx.x; q < a.count; q += blockDim.x) {
    lists.bound[q] = 0;
    if (a.sampled && blockIdx.x == 0) a.taken[q] = 0;
    lists.reserved[q] = lists.written[q] = 0;
  }
  __syncthreads();
  if (a.metric != Metric::dot) {
    for (int q = warp; q < a.count; q += warps) {
      float sum = 0.0f;
      for (int i = lane; i < steps * W * 4; i += 32) {
        add_squares(sum, Packet<T>{bits_as<Word>(words[(i / 4 * Tiles + q / 8) * 32 + q % 8 * 4 + i % 4])});
      }
      sum = warp_sum(sum);
      if (lane == 0) lists.term[q] = term_of(a.metric, sum);
    }
    __syncthreads();
  }
  if (a.sample) {
    for (int q = warp; q < a.count; q += warps) {
      uint32_t best[held];
      const uint32_t* of = a.sample + static_cast<int64_t>(q) * groups * a.tiles_a_group;
#pragma unroll
      for (int i = 0; i < held; ++i) best[i] = of[i * 32 + lane];
      for (int j = 1; j < a.tiles_a_group; ++j) {
#pragma unroll
        for (int i = 0; i < held; ++i) best[i] = max(best[i], of[(j * held + i) * 32 + lane]);
      }
      const uint32_t order = reached_by(best, a.k, [](int count) { return __reduce_add_sync(0xffffffffu, count); });
      if (lane == 0) lists.bound[q] = below(order);
    }
    __syncthreads();
  }

  const int tiles = a.tiles, stride = static_cast<int>(gridDim.x) * warps;
  const auto row_of = [&](int tile, int r) { return tile * a.spread * rows_a_warp + r * 8 + g; };
  Packet<T> next[W][2];
  const auto fetch = [&](int tile, int step) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const T* row = static_cast<const T*>(a.corpus) + min(row_of(tile, r), a.rows - 1) * a.corpus_stride;
#pragma unroll
      for (int w = 0; w < W; ++w) {
        next[w][r] = load_packet<Ragged, true>(row, ((step * W + w) * 4 + t) * N, a.width);
      }
    }
  };

  // neighbouring tiles at the same time, all over the device
  int tile = static_cast<int>(blockIdx.x) + warp * static_cast<int>(gridDim.x);
  if (tile < tiles) fetch(tile, 0);
  for (; tile < tiles; tile += stride) {
    Products<Tiles, T> products;
    float column[2] = {};
    if (!Squares && a.metric != Metric::dot) {
#pragma unroll
      for (int r = 0; r < 2; ++r) column[r] = a.of_column[min(row_of(tile, r), a.rows - 1)];
    }
    for (int step = 0; step < steps; ++step) {
      Packet<T> now[W][2];
#pragma unroll
      for (int w = 0; w < W; ++w) now[w][0] = next[w][0], now[w][1] = next[w][1];
      if (step + 1 < steps) {
        fetch(tile, step + 1);
      } else if (tile + stride < tiles) {
        fetch(tile + stride, 0);
      }
#pragma unroll
      for (int w = 0; w < W; ++w) {
        products.add(now[w], words + (step * W + w) * Tiles * 32);
        if constexpr (Squares) add_squares(column[0], now[w][0]), add_squares(column[1], now[w][1]);
      }
    }
    products.finish();
    if constexpr (Squares) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        column[r] += __shfl_xor_sync(0xffffffffu, column[r], 1);
        column[r] += __shfl_xor_sync(0xffffffffu, column[r], 2);
        column[r] = term_of(a.metric, column[r]);
      }
    }

    uint32_t order[Tiles * 4] = {}, mask = 0;
    const auto rank = [&]<Metric M>() {
#pragma unroll
      for (int j = 0; j < Tiles * 4; ++j) {
        const int q = j / 4 * 8 + 2 * t + j % 2, r = j % 4 / 2;
        if (q >= a.count) continue;
        const float of_query = M == Metric::dot ? 0.0f : lists.term[q];
        order[j] = in_order(topk::score_of<M>(products.z[j / 4][j % 4], column[r], of_query));
        if (row_of(tile, r) >= a.rows) order[j] = below_all;
        if (order[j] > below_all && order[j] >= topk::order_of(lists.bound[q])) mask |= 1u << j;
      }
    };
    switch (a.metric) {
      case Metric::dot: rank.template operator()<Metric::dot>(); break;
      case Metric::cosine: rank.template operator()<Metric::cosine>(); break;
      case Metric::l2: rank.template operator()<Metric::l2>(); break;
    }
    if (a.sampled) {
#pragma unroll
      for (int j = 0; j < Tiles * 2; ++j) {
        uint32_t best = max(order[j / 2 * 4 + j % 2], order[j / 2 * 4 + j % 2 + 2]);
#pragma unroll
        for (int step = 4; step < 32; step *= 2) best = max(best, __shfl_xor_sync(0xffffffffu, best, step));
        const int q = j / 2 * 8 + 2 * t + j % 2;
        if (g == 0 && q < a.count) a.sampled[static_cast<int64_t>(q) * tiles + tile] = best;
      }
      continue;
    }
    add_keys<Tiles * 4>(
        lists, mask, [&](int j) { return key_of(order[j], static_cast<uint32_t>(row_of(tile, j % 4 / 2))); },
        [&](int j) { return j / 4 * 8 + 2 * t + j % 2; });
  }

  if (a.sampled) return;

  __syncthreads();
  for (int q = warp; q < a.count; q += warps) {
    Key* key = lists.key + q * a.slots;
    const int passed = min(lists.reserved[q], lists.room());
    Key* found = a.found + static_cast<int64_t>(q) * a.k * gridDim.x;
    const bool as_they_came = key[0] == 0 && passed <= a.k;  // never sorted, and need not be
    if (passed > 0 && !as_they_came) {
      int some = 32;
      while (some < a.k + passed) some *= 2;
      for (int i = a.k + passed + lane; i < some; i += 32) key[i] = 0;
      __syncwarp();
      sort_by_warp(key, some);
    }
    if (a.taken) {
      const Key* from = as_they_came ? key + a.k : key;
      const int some = as_they_came ? passed : a.k;
      int first = 0;
      if (lane == 0) first = atomicAdd(a.taken + q, some);
      first = __shfl_sync(0xffffffffu, first, 0);
      for (int j = lane; j < some; j += 32) found[first + j] = from[j];
    } else {
      for (int j = lane; j < a.k; j += 32) {
        found[j * static_cast<int>(gridDim.x) + static_cast<int>(blockIdx.x)] = !as_they_came ? key[j]
                                                                                : j < passed  ? key[a.k + j]
                                                                                              : 0;
      }
    }
  }
}

// A block a query. A first look at as many keys as its threads hold makes a bound; what passes it is sorted.
__global__ void __launch_bounds__(topk::threads)
    merge_kernel(const Key* found /*[Q, most]*/, const int* taken /*[Q] or null*/, float* score /*[Q, k]*/,
                 int64_t* idx /*[Q, k]*/, int k, int most /*k blocks*/, int64_t first_index) {
  constexpr int N = 16, warps = topk::threads / 32;
  __shared__ topk::Shared shared;
  __shared__ int counts[2][warps];
  const int64_t row = blockIdx.x;
  const Key* from = found + row * most;
  const int count = taken ? taken[row] : most;
  const int thread = static_cast<int>(threadIdx.x), lane = thread % 32;

  uint32_t order[held];
#pragma unroll
  for (int i = 0; i < held; ++i) {
    const int at = i * topk::threads + thread;
    order[i] = at < count ? topk::order_of(from[at]) : 0;
  }
  int turn = 0;
  const uint32_t reached = reached_by(order, k, [&](int own) {
    const int of_warp = __reduce_add_sync(0xffffffffu, own);
    if (lane == 0) counts[turn][thread / 32] = of_warp;
    __syncthreads();
    int all = 0;
#pragma unroll
    for (int i = 0; i < warps; ++i) all += counts[turn][i];
    turn ^= 1;  // nobody writes again what another still reads: a barrier lies between
    return all;
  });

  Selection selection(shared, k);
  selection.begin(false, [](int) { return Key{0}; });
  selection.raise(below(reached));
  for (int first = 0; first < count; first += topk::threads * N) {
    Key key[N];
    uint32_t mask = 0;
#pragma unroll
    for (int j = 0; j < N; ++j) {
      const int at = first + j * topk::threads + thread;
      key[j] = at < count ? from[at] : 0;
      if (key[j] > selection.bound()) mask |= 1u << j;
    }
    selection.take<N>(mask, [&](int j) { return key[j]; });
  }
  __syncthreads();
  if (selection.changed()) selection.settle();
  __syncthreads();
  if (thread >= k) return;
  const Key key = selection.key(thread);  // zero is below that of any score
  score[row * k + thread] = key ? from_order(topk::order_of(key)) : -INFINITY;
  idx[row * k + thread] = key ? first_index + topk::place_of(key) : -1;
}

// ---- right calls ---------------------------------------------------------------------------------------------------

template <bool Squares, bool Ragged, int Tiles, class T>
void run(const Context& context, Search a, int shared_bytes, const SearchPlan& plan, uint32_t* sample) {
  constexpr auto start = [](const Context& on, int blocks, int threads, int bytes, const Search& call) {
    launch_with_shared<products_kernel<Squares, Ragged, Tiles, T>>(on, dim3(static_cast<unsigned>(blocks)),
                                                                   dim3(static_cast<unsigned>(threads)), bytes, call);
  };
  a.tiles = search_tiles(a.rows);
  a.spread = 1;
  if (plan.tiles_a_group > 0) {
    Search first = a;
    first.tiles = groups * plan.tiles_a_group;
    first.spread = a.tiles / first.tiles;
    first.sampled = sample;
    start(context, groups / 8, 256, shared_bytes, first);
    a.sample = sample;
    a.tiles_a_group = plan.tiles_a_group;
  }
  start(context, plan.blocks, plan.threads, shared_bytes, a);
}

}  // namespace

std::tuple<Buffer, Buffer> topk_products(const Context& context, const Tensor& queries /*[Q, D]*/,
                                         const Tensor& corpus /*[C, D]*/, int64_t k,
                                         const std::optional<Tensor>& column_terms /*[C]*/, const std::string& metric,
                                         int64_t first_index) {
  must_be_floating(queries, "queries");
  if (queries.rank != 2) wrong_value("queries", "shape [Q, D]", shape_of(queries));
  const int64_t count = queries.shape[0], width = queries.shape[1];
  if (corpus.dtype != queries.dtype) {
    wrong_type("corpus", std::string(name_of(queries.dtype)) + " like queries", name_of(corpus.dtype));
  }
  if (corpus.rank != 2 || corpus.shape[1] != width) {
    wrong_value("corpus", "shape [C, " + std::to_string(width) + "]", shape_of(corpus));
  }
  constexpr int64_t most_int = int64_t{1} << 62;
  if (k < 1 || k > most_int) wrong_value("k", "1 to " + std::to_string(most_int), std::to_string(k));
  const Metric of = topk::metric_of(metric);
  if (column_terms) {
    if (of == Metric::dot) wrong_value("column_terms", "None for the metric 'dot'", "a tensor");
    const bool fits = column_terms->rank == 1 && column_terms->shape[0] == corpus.shape[0];
    must_be_wide(*column_terms, "column_terms", std::to_string(corpus.shape[0]), fits, queries, "queries");
  }
  if (first_index < 0 || first_index > most_int) {
    wrong_value("first_index", "0 to " + std::to_string(most_int), std::to_string(first_index));
  }

  std::optional<Buffer> scores, idx;
  dispatch(queries.dtype, Floats{}, [&]<class T>() {
    if (k > most_kept || corpus.shape[0] > most_rows) throw Refused{"size"};
    if (width * static_cast<int64_t>(sizeof(T)) > most_query_bytes) throw Refused{"size"};
    const auto strided = [](const Tensor& x) {
      const int last = x.rank - 1;
      return x.shape[last] > 1 && x.stride[last] != 1;
    };
    if (strided(queries) || strided(corpus) || (column_terms && strided(*column_terms))) throw Refused{"unit_stride"};
    scores.emplace(context.empty({count, k}, DType::f32));
    idx.emplace(context.empty({count, k}, DType::i64));
    if (count == 0) return;

    Search a{};
    a.query_stride = queries.stride[0];
    a.corpus = corpus.data, a.corpus_stride = corpus.stride[0];
    a.of_column = column_terms ? column_terms->as<const float>() : nullptr;
    a.metric = of;
    a.width = static_cast<int>(width), a.rows = static_cast<int>(corpus.shape[0]);
    a.k = static_cast<int>(k), a.slots = slots_of(k, a.rows);
    const bool squares = of != Metric::dot && !column_terms;
    const auto whole = [](const Tensor& x) {
      return aligned(x.data, x.stride[0] * static_cast<int64_t>(sizeof(T)), 16) && x.shape[1] % widest<T> == 0;
    };
    const bool ragged = !whole(queries) || !whole(corpus);
    const SharedMemory memory = shared_memory(context);
    const auto bytes_of = [&](int tiles) {
      const auto some = static_cast<int>(std::min<int64_t>(count, tiles * queries_a_tile));
      return tiles * queries_a_tile * query_bytes<T>(a.width) + some * list_bytes(a.slots);
    };
    const int most = ragged ? most_tiles<true, T> : most_tiles<false, T>;
    int tiles = 1;
    while (tiles < most && tiles * queries_a_tile < count && bytes_of(2 * tiles) <= memory.block) tiles *= 2;
    const int bytes = bytes_of(tiles);
    const int threads = ragged || tiles > 2 ? threads_of<true, 8, T> : threads_of<false, 1, T>;
    const int64_t together = std::min<int64_t>(count, tiles * queries_a_tile);
    const SearchPlan plan = search_plan(a.rows, k, together, multiprocessors(context), threads);

    Buffer found = context.empty({together, k, plan.blocks}, DType::i64);
    a.found = found.as<Key>();
    std::optional<Buffer> sample, taken;
    if (plan.tiles_a_group > 0) {
      sample.emplace(context.empty({together, plan.tiles_a_group, groups}, DType::i32));
      taken.emplace(context.empty({together}, DType::i32));
      a.taken = taken->as<int>();
    }
    auto* sampled = sample ? sample->as<uint32_t>() : nullptr;
    for (int64_t first = 0; first < count; first += together) {
      a.count = static_cast<int>(std::min(together, count - first));
      a.queries = queries.as<const T>() + first * a.query_stride;
      const auto start = [&]<int Tiles>() {
        if (tiles != Tiles) return;
        if constexpr (Tiles <= most_tiles<true, T>) {
          if (ragged && squares) return run<true, true, Tiles, T>(context, a, bytes, plan, sampled);
          if (ragged) return run<false, true, Tiles, T>(context, a, bytes, plan, sampled);
        }
        if constexpr (Tiles <= most_tiles<false, T>) {
          if (squares) return run<true, false, Tiles, T>(context, a, bytes, plan, sampled);
          run<false, false, Tiles, T>(context, a, bytes, plan, sampled);
        }
      };
      start.template operator()<1>();
      start.template operator()<2>();
      start.template operator()<4>();
      start.template operator()<8>();
      launch<merge_kernel>(context, dim3(static_cast<unsigned>(a.count)), dim3(topk::threads),
                           static_cast<const Key*>(a.found), static_cast<const int*>(a.taken),
                           scores->template as<float>() + first * k, idx->template as<int64_t>() + first * k, a.k,
                           a.k * plan.blocks, first_index);
    }
  });
  return {std::move(*scores), std::move(*idx)};
}

}  // namespace prequal::ops
