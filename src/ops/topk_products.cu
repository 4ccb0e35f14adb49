// The k best rows of corpus [C, D] for each query [Q, D], in one pass: no score goes to memory.   -> scores, idx [Q, k]
// score = z (dot); z column[c] row[q] (cosine); -max(0, column[c] + row[q] - 2 z) (l2), z the inner product.
// A warp owns 16 rows of the corpus at a time, which it reads once, 16 bytes a lane; up to 64 queries lie in shared memory,
// with a list of the k best for each that the warps of a block share. A second launch merges the lists of the blocks.
// Bytes: C D sizeof(T) for every 64 queries, C 4 where column terms are given, blocks Q k 16 of lists.
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
constexpr int rows_a_warp = 16, queries_a_tile = 8;
constexpr int words_a_step = 2;  // of a lane and row, on their way at a time

// A lane has one 16-byte word of every four: 8 rows, 4 neighbouring words of each.
template <class T>
inline constexpr int columns_a_group = 4 * widest<T>;

struct Search {
  const void* queries;  // [Q, D], Q of this launch
  int64_t query_stride;
  const void* corpus;  // [C, D]
  int64_t corpus_stride;
  const float* of_column;  // [C] or null
  Key* found;              // [Q, k, blocks], zero where a block has fewer
  Metric metric;
  int count, width, rows, k, slots;  // Q, D, C
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

constexpr int slots_of(int64_t k) { return k <= 64 ? 128 : 256; }

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
  while (__any_sync(0xffffffffu, mask != 0)) {
    uint32_t refused = 0;
#pragma unroll
    for (int j = 0; j < N; ++j) {
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
        const int first = __ffs(static_cast<int>(refused)) - 1;
#pragma unroll
        for (int j = 0; j < N; ++j) {
          if (j == first) q = query_at(j);
        }
        refused &= refused - 1;
      }
      q = __shfl_sync(0xffffffffu, q, lane);
      settle(lists.key + q * lists.slots, lists.slots, lists.k, lists.bound + q, lists.reserved + q, lists.written + q);
    }
  }
}

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

// Squares: the terms of the corpus are made of the rows as they pass.
template <bool Squares, bool Ragged, int Tiles, int Threads, class T>
__global__ void __launch_bounds__(Threads) products_kernel(Search a /*queries [Q, D], corpus [C, D]*/) {
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

  const int tiles = (a.rows + rows_a_warp - 1) / rows_a_warp, stride = static_cast<int>(gridDim.x) * warps;
  const auto row_of = [&](int tile, int r) { return tile * rows_a_warp + r * 8 + g; };
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

    uint32_t order[Tiles * 4], mask = 0;
    const auto rank = [&]<Metric M>() {
#pragma unroll
      for (int j = 0; j < Tiles * 4; ++j) {
        const int q = j / 4 * 8 + 2 * t + j % 2, r = j % 4 / 2;
        if (q >= a.count) continue;
        const float of_query = M == Metric::dot ? 0.0f : lists.term[q];
        order[j] = in_order(topk::score_of<M>(products.z[j / 4][j % 4], column[r], of_query));
        if (order[j] >= topk::order_of(lists.bound[q]) && row_of(tile, r) < a.rows) mask |= 1u << j;
      }
    };
    switch (a.metric) {
      case Metric::dot: rank.template operator()<Metric::dot>(); break;
      case Metric::cosine: rank.template operator()<Metric::cosine>(); break;
      case Metric::l2: rank.template operator()<Metric::l2>(); break;
    }
    add_keys<Tiles * 4>(
        lists, mask, [&](int j) { return key_of(order[j], static_cast<uint32_t>(row_of(tile, j % 4 / 2))); },
        [&](int j) { return j / 4 * 8 + 2 * t + j % 2; });
  }

  __syncthreads();
  for (int q = warp; q < a.count; q += warps) {
    Key* key = lists.key + q * a.slots;
    const int passed = min(lists.reserved[q], lists.room());
    if (passed > 0) {
      for (int i = a.k + passed + lane; i < a.slots; i += 32) key[i] = 0;
      __syncwarp();
      sort_by_warp(key, a.slots);
    }
    Key* found = a.found + static_cast<int64_t>(q) * a.k * gridDim.x + blockIdx.x;
    for (int j = lane; j < a.k; j += 32) found[static_cast<int64_t>(j) * gridDim.x] = key[j];
  }
}

// The best of every block stand first, then the second best: what is read first makes a bound for the rest.
__global__ void __launch_bounds__(topk::threads)
    merge_kernel(const Key* found /*[Q, k, blocks]*/, float* score /*[Q, k]*/, int64_t* idx /*[Q, k]*/, int k,
                 int blocks, int64_t first_index) {
  constexpr int N = 4;
  __shared__ topk::Shared shared;
  const int64_t row = blockIdx.x, count = static_cast<int64_t>(k) * blocks;
  Selection selection(shared, k);
  selection.begin(false, [](int) { return Key{0}; });
  for (int64_t from = 0; from < count; from += topk::threads * N) {
    Key key[N];
    uint32_t mask = 0;
#pragma unroll
    for (int j = 0; j < N; ++j) {
      const int64_t at = from + j * topk::threads + threadIdx.x;
      key[j] = at < count ? found[row * count + at] : 0;
      if (key[j] > selection.bound()) mask |= 1u << j;
    }
    selection.take<N>(mask, [&](int j) { return key[j]; });
    if (from == 0 && count > topk::threads * N) {
      __syncthreads();
      selection.settle();
      __syncthreads();
    }
  }
  __syncthreads();
  if (selection.changed()) selection.settle();
  __syncthreads();
  const int j = threadIdx.x;
  if (j >= k) return;
  const Key key = selection.key(j);  // zero is below that of any score
  score[row * k + j] = key ? from_order(topk::order_of(key)) : -INFINITY;
  idx[row * k + j] = key ? first_index + topk::place_of(key) : -1;
}

// ---- right calls ---------------------------------------------------------------------------------------------------

constexpr int most_threads = 512, least_threads = 128;

// Of a launch. Rows of the corpus are in no order: each warp takes every so many-th 16 of them.
struct Plan {
  int threads, blocks;
};

// As many blocks as are resident; where the corpus is small, so that each warp has 16 rows, with few warps a block, on as
// many multiprocessors as there are. `lists` is what the memory of the lists of blocks comes to: a 24th of the scores in
// halves, so that with all else a search takes less than a tenth.
Plan plan_of(int64_t rows, int64_t k, int64_t resident, int64_t multiprocessors) {
  const int64_t tiles = (rows + rows_a_warp - 1) / rows_a_warp;
  int threads = most_threads;
  while (threads > least_threads && tiles <= multiprocessors * threads / 64) threads /= 2;
  const int64_t most = resident * (most_threads / threads);
  const int64_t by_memory = std::max<int64_t>(rows / (96 * k), multiprocessors / 2);
  return {threads, static_cast<int>(std::max<int64_t>(1, std::min({tiles, most, by_memory})))};
}

template <bool Squares, bool Ragged, int Tiles, class T>
void run(const Context& context, const Search& a, int shared_bytes, const Plan& plan) {
  launch_with_shared<products_kernel<Squares, Ragged, Tiles, most_threads, T>>(
      context, dim3(static_cast<unsigned>(plan.blocks)), dim3(static_cast<unsigned>(plan.threads)), shared_bytes, a);
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
  constexpr int64_t most = int64_t{1} << 62;
  if (k < 1 || k > most) wrong_value("k", "1 to " + std::to_string(most), std::to_string(k));
  const Metric of = topk::metric_of(metric);
  if (column_terms) {
    if (of == Metric::dot) wrong_value("column_terms", "None for the metric 'dot'", "a tensor");
    const bool fits = column_terms->rank == 1 && column_terms->shape[0] == corpus.shape[0];
    must_be_wide(*column_terms, "column_terms", std::to_string(corpus.shape[0]), fits, queries, "queries");
  }
  if (first_index < 0 || first_index > most) {
    wrong_value("first_index", "0 to " + std::to_string(most), std::to_string(first_index));
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
    a.k = static_cast<int>(k), a.slots = slots_of(k);
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
    constexpr int most_tiles = sizeof(T) == 4 ? 2 : 8;
    int tiles = 1;
    while (tiles < most_tiles && tiles * queries_a_tile < count && bytes_of(2 * tiles) <= memory.block) tiles *= 2;
    const int bytes = bytes_of(tiles);
    const int64_t a_sm = std::max(1, std::min(tiles > 4 ? 1 : 2, memory.multiprocessor / (bytes + 1024)));
    const Plan plan = plan_of(a.rows, k, a_sm * multiprocessors(context), multiprocessors(context));

    const int64_t together = std::min<int64_t>(count, tiles * queries_a_tile);
    Buffer found(context.empty({together, k, plan.blocks}, DType::i64));
    a.found = found.as<Key>();
    for (int64_t first = 0; first < count; first += together) {
      a.count = static_cast<int>(std::min(together, count - first));
      a.queries = queries.as<const T>() + first * a.query_stride;
      const auto with = [&]<int Tiles>() {
        if (squares && ragged) return run<true, true, Tiles, T>(context, a, bytes, plan);
        if (squares) return run<true, false, Tiles, T>(context, a, bytes, plan);
        if (ragged) return run<false, true, Tiles, T>(context, a, bytes, plan);
        run<false, false, Tiles, T>(context, a, bytes, plan);
      };
      switch (tiles) {
        case 1: with.template operator()<1>(); break;
        case 2: with.template operator()<2>(); break;
        case 4:
          if constexpr (most_tiles >= 4) with.template operator()<4>();
          break;
        case 8:
          if constexpr (most_tiles >= 8) with.template operator()<8>();
          break;
      }
      launch<merge_kernel>(context, dim3(static_cast<unsigned>(a.count)), dim3(topk::threads),
                           static_cast<const Key*>(a.found), scores->template as<float>() + first * k,
                           idx->template as<int64_t>() + first * k, a.k, plan.blocks, first_index);
    }
  });
  return {std::move(*scores), std::move(*idx)};
}

}  // namespace prequal::ops
