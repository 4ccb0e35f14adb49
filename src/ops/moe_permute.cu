// xp = the rows of x [T, H], each k times, sorted by the expert that they go to (then by token); row_map [T, k] says where,
// -1 where a row is dropped; offsets [E + 1], where each expert's rows begin. The rows of xp behind the last are zero.
// Four launches: a block counts its tokens' experts; sums over blocks; places from them; the rows, which warps move.
// Bytes: T H sizeof(T) read once, T k H sizeof(T) written; besides them T k 12, and the counts of the blocks.
// Numerics: none, rows are copied. Places come from integer sums in a fixed order: a stable sort.
#include <algorithm>
#include <optional>
#include <tuple>

#include "ops.h"
#include "prequal/dispatch.h"
#include "prequal/early.cuh"
#include "prequal/launch.h"
#include "prequal/vec.cuh"

namespace prequal::ops {
namespace {

struct Unit : FileOf<"moe_permute"> {};

constexpr int most_experts = 1024, most_chosen = 32;
constexpr int threads = 256, warps = threads / 32;
constexpr int tile = 32;         // tokens whose experts a block has at a time
constexpr int blocks_an_sm = 4;  // of those that count and place: the counts of more would cost more to add up
constexpr unsigned whole_warp = 0xffffffffu;

struct Permute {
  const void* experts;  // [T, k]
  bool wide;            // int64, else int32
  int64_t token_stride, choice_stride;
  int64_t tokens, tokens_a_block;
  int chosen, count;  // k, E
  int capacity;       // rows an expert
  int* before;        // [blocks, E]: rows of an expert that a block has; then those of the blocks before it
  int* totals;        // [E]
  int64_t x_stride;   // words from row to row
  int64_t width;      // words of a row
  int* row_map;       // [T, k]
  int64_t* offsets;   // [E + 1]

  // -1 where there is no such expert.
  __device__ __forceinline__ int expert_at(int64_t token, int choice) const {
    const int64_t place = token * token_stride + choice * choice_stride;
    const int64_t found =
        wide ? static_cast<const int64_t*>(experts)[place] : static_cast<const int32_t*>(experts)[place];
    return found >= 0 && found < count ? static_cast<int>(found) : -1;
  }
  __device__ __forceinline__ int64_t first_token() const { return blockIdx.x * tokens_a_block; }
  __device__ __forceinline__ int64_t last_token() const { return min(first_token() + tokens_a_block, tokens); }
};

__global__ void __launch_bounds__(threads) count_kernel(Permute a) {
  let_next_begin();
  __shared__ int histogram[most_experts];
  for (int e = threadIdx.x; e < a.count; e += threads) histogram[e] = 0;
  __syncthreads();

  const int64_t first = a.first_token(), items = (a.last_token() - first) * a.chosen;
  for (int64_t i = threadIdx.x; i < items; i += threads) {
    const int expert = a.expert_at(first + i / a.chosen, static_cast<int>(i % a.chosen));
    if (expert >= 0) atomicAdd(histogram + expert, 1);
  }
  __syncthreads();

  for (int e = threadIdx.x; e < a.count; e += threads)
    a.before[static_cast<int64_t>(blockIdx.x) * a.count + e] = histogram[e];
}

// A lane is an expert, a warp some of the blocks.
constexpr int scan_threads = 1024, segments = scan_threads / 32;
constexpr int read_at_once = 8;  // one after the other, a block's numbers would each wait for those of the one before

__global__ void __launch_bounds__(scan_threads) scan_kernel(Permute a, int blocks) {
  let_next_begin();
  __shared__ int sums[segments][32];
  const int lane = threadIdx.x % 32, segment = threadIdx.x / 32, expert = static_cast<int>(blockIdx.x) * 32 + lane;
  const bool there = expert < a.count;
  const int each = (blocks + segments - 1) / segments, from = min(segment * each, blocks),
            to = min(from + each, blocks);
  wait_for_kernel_before();

  const auto place = [&](int block) { return a.before + static_cast<int64_t>(block) * a.count + expert; };
  const auto read = [&](int(&own)[read_at_once], int b) {
#pragma unroll
    for (int i = 0; i < read_at_once; ++i) own[i] = there && b + i < to ? *place(b + i) : 0;
  };

  int sum = 0;
  for (int b = from; b < to; b += read_at_once) {
    int own[read_at_once];
    read(own, b);
#pragma unroll
    for (int i = 0; i < read_at_once; ++i) sum += own[i];
  }
  sums[segment][lane] = sum;
  __syncthreads();

  if (!there) return;
  int before = 0;
  for (int other = 0; other < segment; ++other) before += sums[other][lane];
  if (segment == segments - 1) a.totals[expert] = before + sum;
  for (int b = from; b < to; b += read_at_once) {
    int own[read_at_once];
    read(own, b);
#pragma unroll
    for (int i = 0; i < read_at_once; ++i) {
      if (b + i < to) *place(b + i) = before;
      before += own[i];
    }
  }
}

// start[e] = the rows that the experts before e keep; returns those of all.
__device__ __forceinline__ int scan_experts(int* start /*[E]*/, const Permute& a) {
  constexpr int each = most_experts / threads;
  __shared__ int sums[warps];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, first = threadIdx.x * each;
  int kept[each], sum = 0;
#pragma unroll
  for (int i = 0; i < each; ++i) {
    kept[i] = first + i < a.count ? min(a.totals[first + i], a.capacity) : 0;
    sum += kept[i];
  }
  int upto = sum;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const int theirs = __shfl_up_sync(whole_warp, upto, step);
    if (lane >= step) upto += theirs;
  }
  if (lane == 31) sums[warp] = upto;
  __syncthreads();
  int before = upto - sum, all = 0;
  for (int other = 0; other < warps; ++other) {
    if (other < warp) before += sums[other];
    all += sums[other];
  }
#pragma unroll
  for (int i = 0; i < each; ++i) {
    if (first + i < a.count) start[first + i] = before;
    before += kept[i];
  }
  return all;
}

// By one warp: the places of `items` choices that follow each other, 32 at a time. next[e]: how many rows of the expert
// came before.
__device__ __forceinline__ void place_choices(const int* experts, const int* start, int* next, const Permute& a,
                                              int64_t token, int items) {
  const int lane = threadIdx.x % 32;
  for (int first = 0; first < items; first += 32) {
    const int i = first + lane;
    const int expert = i < items ? experts[i] : -1;
    const unsigned same = __match_any_sync(whole_warp, expert);
    const int rank = __popc(same & ((1u << lane) - 1));
    int before = 0;
    if (expert >= 0) before = next[expert] + rank;
    __syncwarp();
    if (expert >= 0 && rank == 0) next[expert] = before + __popc(same);
    if (i < items) {
      a.row_map[token * a.chosen + i] = expert >= 0 && before < a.capacity ? start[expert] + before : -1;
    }
    __syncwarp();
  }
}

// Places of a block's tokens; by the first block, where experts begin.
__global__ void __launch_bounds__(threads) place_kernel(Permute a) {
  let_next_begin();
  __shared__ int start[most_experts], next[most_experts], experts[tile * most_chosen];
  const int64_t begin = a.first_token(), last = a.last_token();
  const auto items_from = [&](int64_t token) {
    return static_cast<int>(max(min(static_cast<int64_t>(tile), last - token), int64_t{0})) * a.chosen;
  };
  const auto load_experts = [&](int64_t token) {
    const int items = items_from(token);
    for (int i = threadIdx.x; i < items; i += threads) experts[i] = a.expert_at(token + i / a.chosen, i % a.chosen);
  };
  load_experts(begin);

  wait_for_kernel_before();
  const int kept = scan_experts(start, a);
  for (int e = threadIdx.x; e < a.count; e += threads)
    next[e] = a.before[static_cast<int64_t>(blockIdx.x) * a.count + e];
  __syncthreads();
  if (blockIdx.x == 0) {
    for (int e = threadIdx.x; e < a.count; e += threads) a.offsets[e] = start[e];
    if (threadIdx.x == 0) a.offsets[a.count] = kept;
  }

  for (int64_t token = begin; token < last; token += tile) {
    if (threadIdx.x < 32) place_choices(experts, start, next, a, token, items_from(token));
    __syncthreads();
    load_experts(token + tile);
    __syncthreads();
  }
}

// A warp moves a row of x, a block the next one for each of its warps. Blocks that stay and take row after row were slower:
// a kernel that only copies 512 words 8 times took 342 us so, 331 as here; 2 times 114 and 109.
constexpr int held_words = 16;  // of a row that a lane has on its way; with 8 336 and 110

template <class Piece>
__global__ void __launch_bounds__(threads) move_kernel(Permute a, const Piece* x /*[T, H]*/, Piece* xp /*[T k, H]*/) {
  const int lane = threadIdx.x % 32;
  const int64_t worker = static_cast<int64_t>(blockIdx.x) * warps + threadIdx.x / 32;
  const int64_t workers = static_cast<int64_t>(gridDim.x) * warps;
  Piece held[held_words];
  const auto load = [&](int64_t token, int64_t first) {
#pragma unroll
    for (int i = 0; i < held_words; ++i) {
      if (first + 32 * i < a.width) held[i] = x[token * a.x_stride + first + 32 * i];
    }
  };
  if (worker < a.tokens) load(worker, lane);  // x is older than these launches
  wait_for_kernel_before();

  for (int64_t token = worker; token < a.tokens; token += workers) {
    const int own = lane < a.chosen ? a.row_map[token * a.chosen + lane] : -1;
    for (int64_t first = lane; first - lane < a.width; first += 32 * held_words) {
      if (token != worker || first != lane) load(token, first);
      for (int j = 0; j < a.chosen; ++j) {
        const int row = __shfl_sync(whole_warp, own, j);
        if (row < 0) continue;
        Piece* out = xp + row * a.width + first;
#pragma unroll
        for (int i = 0; i < held_words; ++i) {
          if (first + 32 * i < a.width) out[32 * i] = held[i];
        }
      }
    }
  }

  const int64_t rows = a.tokens * a.chosen;
  for (int64_t row = a.offsets[a.count] + worker; row < rows; row += workers) {
    for (int64_t i = lane; i < a.width; i += 32) xp[row * a.width + i] = Piece{};
  }
}

}  // namespace

std::tuple<Buffer, Buffer, Buffer> moe_permute(const Context& context, const Tensor& x /*[T, H]*/,
                                               const Tensor& experts /*[T, k]*/, const Tensor& counts /*[E]*/,
                                               const std::optional<int64_t>& capacity) {
  if (x.rank != 2) wrong_value("x", "shape [T, H]", shape_of(x));
  if (experts.dtype != DType::i32 && experts.dtype != DType::i64) {
    wrong_type("experts", "int32 or int64", name_of(experts.dtype));
  }
  if (experts.rank != 2 || experts.shape[0] != x.shape[0]) {
    wrong_value("experts", "shape [" + std::to_string(x.shape[0]) + ", k]", shape_of(experts));
  }
  if (counts.dtype != DType::i32 && counts.dtype != DType::i64) {
    wrong_type("counts", "int32 or int64", name_of(counts.dtype));
  }
  if (counts.rank != 1) wrong_value("counts", "shape [E]", shape_of(counts));
  const int64_t tokens = x.shape[0], chosen = experts.shape[1], count = counts.shape[0], rows = tokens * chosen;
  if (rows > INT32_MAX) wrong_value("experts", "T * k <= 2,147,483,647", shape_of(experts));
  if (capacity && *capacity < 0) wrong_value("capacity", "a number from 0", std::to_string(*capacity));
  if (count > most_experts || chosen > most_chosen) throw Refused{"size"};
  if (x.shape[1] > 1 && x.stride[1] != 1) throw Refused{"unit_stride"};
  dispatch(x.dtype, Floats{}, [&]<class T>() {});

  const int64_t wanted = blocks_an_sm * static_cast<int64_t>(multiprocessors(context));
  Permute a{};
  a.tokens_a_block = std::max<int64_t>(1, (tokens + wanted - 1) / wanted);
  const int blocks = static_cast<int>(std::max<int64_t>(1, (tokens + a.tokens_a_block - 1) / a.tokens_a_block));
  Buffer xp = context.empty({rows, x.shape[1]}, x.dtype), row_map = context.empty({tokens, chosen}, DType::i32);
  Buffer offsets = context.empty({count + 1}, DType::i64);
  Buffer before = context.empty({blocks, count}, DType::i32), totals = context.empty({count}, DType::i32);

  a.experts = experts.data, a.wide = experts.dtype == DType::i64;
  a.token_stride = experts.stride[0], a.choice_stride = experts.stride[1];
  a.tokens = tokens, a.chosen = static_cast<int>(chosen), a.count = static_cast<int>(count);
  a.capacity = static_cast<int>(std::min<int64_t>(capacity.value_or(INT32_MAX), INT32_MAX));
  a.before = before.as<int>(), a.totals = totals.as<int>();
  a.row_map = row_map.as<int>(), a.offsets = offsets.as<int64_t>();

  const dim3 grid(static_cast<unsigned>(blocks));
  launch<count_kernel>(context, grid, dim3(threads), a);
  const auto columns = static_cast<unsigned>(std::max<int64_t>(1, (count + 31) / 32));
  launch_early<scan_kernel>(context, dim3(columns), dim3(scan_threads), a, blocks);
  launch_early<place_kernel>(context, grid, dim3(threads), a);
  const auto move = [&]<class Piece>(Piece) {
    const int each = static_cast<int>(sizeof(Piece)) / x.itemsize;
    a.width = x.shape[1] / each, a.x_stride = x.stride[0] / each;
    const int64_t workers = std::max<int64_t>(1, (tokens + warps - 1) / warps);
    const dim3 all(static_cast<unsigned>(std::min<int64_t>(workers, INT32_MAX)));
    launch_early<move_kernel<Piece>>(context, all, dim3(threads), a, x.as<const Piece>(), xp.as<Piece>());
  };
  const auto made_of = [&](int bytes) {
    return x.shape[1] * x.itemsize % bytes == 0 && aligned(x.data, x.stride[0] * x.itemsize, bytes);
  };
  if (made_of(16)) {
    move(uint4{});
  } else if (made_of(4)) {
    move(uint32_t{});
  } else {
    move(uint16_t{});
  }
  return {std::move(xp), std::move(row_map), std::move(offsets)};
}

}  // namespace prequal::ops
