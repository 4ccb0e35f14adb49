// experts[t] = the k best of logits [T, E] (softmax or sigmoid; with a bias and by groups, of what they make of it), their
// weights [T, k], and how many tokens each expert got, counts [E].
// A warp or half of one owns a token, a lane some experts that follow each other; up to 8, no bias or groups: a thread does.
// Bytes: T E sizeof(logit) read, T k 8 and 4 E written. Counts: shared memory, then one integer atomic a block and expert.
// Numerics: fp32, with torch's own sigmoid (1 / (1 + exp(-x)), each step rounded); quotients of weights to 2 ulp.
#include <algorithm>
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
  int64_t stride, bias_stride;  // elements from token to token, from expert to expert
  int64_t tokens;
  int experts, chosen;          // E, k
  int groups, kept_groups;      // 0: none
  int group_size, group_lanes;  // experts of a group; lanes that look at it, a power of two
  bool sigmoid, renormalize;
  bool words;    // a lane's experts come in whole words, and no lane has a part of its own
  bool full;     // every lane has as many as there is code for
  bool bounded;  // k lanes or more have experts
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
  constexpr int word = word_of(Bytes), count = word ? Bytes / word : 0;
#pragma unroll
  for (int i = 0; i < count; ++i) {
    if constexpr (word == 16) {
      const uint4 four = static_cast<const uint4*>(from)[i];
      raw[4 * i] = four.x, raw[4 * i + 1] = four.y, raw[4 * i + 2] = four.z, raw[4 * i + 3] = four.w;
    } else if constexpr (word == 8) {
      const uint2 two = static_cast<const uint2*>(from)[i];
      raw[2 * i] = two.x, raw[2 * i + 1] = two.y;
    } else {
      raw[i] = static_cast<const uint32_t*>(from)[i];
    }
  }
}

// A lane's logits as they are stored, not looked at, so that nothing waits for them: in words two halves a register, else
// one value a register. `row` is where the lane's first one lies.
template <int V>
__device__ __forceinline__ void load_raw(uint32_t (&raw)[V], const Route& a, const void* row, int inside) {
  if (a.words) {
    if (inside <= 0) return;
    if (a.dtype == DType::f32) {
      load_words<4 * V>(raw, row);
    } else {
      load_words<2 * V>(raw, row);
    }
    return;
  }
#pragma unroll
  for (int j = 0; j < V; ++j) {
    if (j >= inside) continue;
    raw[j] = a.dtype == DType::f32 ? static_cast<const uint32_t*>(row)[j] : static_cast<const uint16_t*>(row)[j];
  }
}

// The same in order; below all what is no expert.
template <int V>
__device__ __forceinline__ void order_raw(uint32_t (&order)[V], const uint32_t (&raw)[V], const Route& a, int inside) {
  const auto half = [&](int j) { return a.words ? raw[j / 2] >> (j % 2 * 16) & 0xffffu : raw[j]; };
  switch (a.dtype) {  // the same for every thread
    case DType::f32:
#pragma unroll
      for (int j = 0; j < V; ++j) order[j] = in_order(__uint_as_float(raw[j]));
      break;
    case DType::bf16:
#pragma unroll
      for (int j = 0; j < V; ++j) order[j] = in_order(__uint_as_float(half(j) << 16));
      break;
    default:
#pragma unroll
      for (int j = 0; j < V; ++j) order[j] = in_order(to_float(bits_as<__half>(static_cast<uint16_t>(half(j)))));
  }
  if (a.full) return;
#pragma unroll
  for (int j = 0; j < V; ++j) order[j] = j < inside ? order[j] : below_all;
}

__device__ __forceinline__ float sigmoid_of(float x) { return 1.0f / (1.0f + expf(-x)); }

// No sum of sigmoids is as small, but one of zeros.
constexpr float least_sum = 1e-20f;

template <int V>
__device__ __forceinline__ uint32_t best_of(const uint32_t (&order)[V]) {
  uint32_t best = order[0];
#pragma unroll
  for (int j = 1; j < V; ++j) best = max(best, order[j]);
  return best;
}

// The lanes that own a token: a warp, or one half of it.
template <int Lanes>
struct Team {
  static_assert(Lanes == 32 || Lanes == 16);

  __device__ __forceinline__ static int lane() { return threadIdx.x % Lanes; }
  __device__ __forceinline__ static int number() { return threadIdx.x / Lanes; }  // in the block

  __device__ __forceinline__ static uint32_t most(uint32_t value) {
    if constexpr (Lanes == 32) {
      return __reduce_max_sync(whole_warp, value);
    } else {
#pragma unroll
      for (int step = Lanes / 2; step > 0; step /= 2) value = max(value, __shfl_xor_sync(whole_warp, value, step));
      return value;
    }
  }
  __device__ __forceinline__ static float sum(float value) {
#pragma unroll
    for (int step = Lanes / 2; step > 0; step /= 2) value += __shfl_xor_sync(whole_warp, value, step);
    return value;
  }
  // A bit for each of its lanes, of a mask of the warp.
  __device__ __forceinline__ static unsigned own(unsigned mask) {
    if constexpr (Lanes == 32) {
      return mask;
    } else {
      return mask >> (threadIdx.x / Lanes % 2 * Lanes) & ((1u << Lanes) - 1);
    }
  }
};

// The sum over all experts of exp(x - top).
template <int Lanes, int V>
__device__ __forceinline__ float sum_of_exp(const uint32_t (&order)[V], float top) {
  float sum = 0.0f;
#pragma unroll
  for (int j = 0; j < V; ++j) sum += order[j] != below_all ? expf(from_order(order[j]) - top) : 0.0f;
  return Team<Lanes>::sum(sum);
}

struct Two {
  uint32_t first = below_all, second = below_all;

  __device__ __forceinline__ void see(uint32_t order) {
    second = max(second, min(first, order));
    first = max(first, order);
  }
};

// Nothing stays of the experts of groups that are not kept: those whose two best add up to the most are. A group belongs
// to `group_lanes` lanes, each of which looks at a part of it: at its own experts where they are that, else at those of
// others in shared memory.
template <int V>
__device__ __forceinline__ void keep_groups(uint32_t (&order)[V], const Route& a, uint32_t (&all)[V][32], int lane) {
  const int lanes = a.group_lanes, group = lane / lanes;
  const int part = (a.group_size + lanes - 1) / lanes;
  Two best;
  if (a.group_size == V * lanes) {
#pragma unroll
    for (int j = 0; j < V; ++j) best.see(order[j]);
  } else {
#pragma unroll
    for (int j = 0; j < V; ++j) all[j][lane] = order[j];
    __syncwarp();
    const int from = lane % lanes * part, to = min(from + part, a.group_size);
    if (group < a.groups) {
      for (int i = from; i < to; ++i) {
        const int expert = group * a.group_size + i;
        best.see(all[expert % V][expert / V]);
      }
    }
    __syncwarp();
  }
  for (int step = 1; step < lanes; step *= 2) {
    const uint32_t first = __shfl_xor_sync(whole_warp, best.first, step);
    const uint32_t second = __shfl_xor_sync(whole_warp, best.second, step);
    best.see(first), best.see(second);
  }

  float sum = from_order(best.first);
  if (a.group_size > 1) sum += from_order(best.second);
  const uint32_t mine = in_order(sum);
  int better = 0;
  for (int other = 0; other < a.groups; ++other) {
    const uint32_t theirs = __shfl_sync(whole_warp, mine, other * lanes);
    better += theirs > mine || (theirs == mine && other < group);
  }
  const unsigned kept = __ballot_sync(whole_warp, group < a.groups && better < a.kept_groups);  // a bit a lane

  int at = lane * V / a.group_size, within = lane * V % a.group_size;
#pragma unroll
  for (int j = 0; j < V; ++j) {
    const int holds = min(at * lanes, 31);  // experts past the last one are below all as they are
    if ((kept >> holds & 1) == 0) order[j] = below_all;
    if (++within == a.group_size) ++at, within = 0;
  }
}

// More than a team's lanes are as good as the k-th best of the lanes' best: one after the other. Of equals it is the lowest
// lane, and in it the lowest place.
template <int Lanes, int V>
__device__ __forceinline__ void list_one_by_one(int* list, uint32_t (&order)[V], int chosen, int lane) {
  for (int r = 0; r < chosen; ++r) {
    const uint32_t best = best_of(order);
    const uint32_t winner = Team<Lanes>::most(best);
    const int owner = __ffs(Team<Lanes>::own(__ballot_sync(whole_warp, best == winner))) - 1;
    if (lane != owner) continue;
    bool found = false;
#pragma unroll
    for (int j = 0; j < V; ++j) {
      if (found || order[j] != winner) continue;
      list[r] = lane * V + j;
      order[j] = below_all;
      found = true;
    }
  }
}

// A list of at most as many experts as the team has lanes, among which the k best are; how many. Equal ones stand in the
// order of the experts. The k-th best of the lanes' best bounds the k-th best of all from below: what is not below it is
// listed.
template <int Lanes, int V>
__device__ __forceinline__ int list_candidates(int* list, uint32_t (&order)[V], uint32_t best, bool bounded, int chosen,
                                               int lane) {
  uint32_t bound = 1;  // where fewer lanes than k have any, every expert is a candidate
  if (bounded) {
#pragma unroll 4
    for (int r = 0; r < chosen; ++r) {
      const uint32_t winner = Team<Lanes>::most(best);
      bound = winner != below_all ? winner : bound;  // lanes that are equal leave together: there may be none left
      best = best != winner ? best : below_all;
    }
  }

  unsigned mine = 0;
#pragma unroll
  for (int j = 0; j < V; ++j) {
    if (order[j] >= bound) mine |= 1u << j;
  }
  const int own = __popc(mine);
  int upto = own;  // of the lanes to this one
#pragma unroll
  for (int step = 1; step < Lanes; step *= 2) {
    const int theirs = __shfl_up_sync(whole_warp, upto, step);
    if (lane >= step) upto += theirs;
  }
  const int count = __shfl_sync(whole_warp, upto, threadIdx.x % 32 | (Lanes - 1));
  if (__any_sync(whole_warp, count > Lanes)) {  // of either team: they go together
    list_one_by_one<Lanes>(list, order, chosen, lane);
    if (count > Lanes) return chosen;
    __syncwarp();  // the order of a team's list is that of its sums: another token must not move it
  }
  for (int place = upto - own; mine != 0; mine &= mine - 1) list[place++] = lane * V + __ffs(mine) - 1;
  return count;
}

// How many of the listed orders, which the lanes have, are better than the lane's own.
template <int Lanes>
__device__ __forceinline__ int rank_of(uint32_t own, uint32_t (&shared)[Lanes], int listed, int lane) {
  shared[lane] = own;
  __syncwarp();
  int better = 0;
#pragma unroll 1  // mostly two or three times: unrolled, what is left over costs more
  for (int i = 0; i < listed; i += 4) {
    const uint4 four = *reinterpret_cast<const uint4*>(shared + i);  // past the last one: below all
    better += four.x > own, better += four.y > own, better += four.z > own, better += four.w > own;
  }
  __syncwarp();
  const unsigned equal = Team<Lanes>::own(__match_any_sync(whole_warp, own));
  return better + __popc(equal & ((1u << lane) - 1));
}

// counts += histogram, once the kernel before has set them to zero.
__device__ __forceinline__ void add_counts(const int* histogram, const Route& a) {
  __syncthreads();
  wait_for_kernel_before();
  for (int e = threadIdx.x; e < a.experts; e += blockDim.x) {
    if (const int count = histogram[e]) atomicAdd(a.counts + e, count);
  }
}

template <int V, bool Biased>
constexpr int threads_of =
    V <= (Biased ? 8 : 16) ? 512 : 256;  // registers: a lane's experts, the next ones, their bias

// Biased: experts are chosen by their scores, with a bias, by groups; else by their logits, which are in the same order.
template <int V, int Lanes, bool Biased>
__global__ void __launch_bounds__(threads_of<V, Biased>) route_kernel(Route a) {
  static_assert(!Biased || Lanes == 32);
  constexpr int teams = threads_of<V, Biased> / Lanes, together = 32 / Lanes;  // of a block; of a warp
  __shared__ int histogram[most_experts], lists[teams][Lanes];
  __shared__ alignas(16) uint32_t orders[teams][Lanes];
  __shared__ uint32_t spread[Biased ? teams : 1][V][32];
  for (int e = threadIdx.x; e < a.experts; e += blockDim.x) histogram[e] = 0;
  __syncthreads();

  using Own = Team<Lanes>;
  const int lane = Own::lane(), team = Own::number();
  const int first = lane * V, inside = a.experts - first;  // its experts are the first `inside` of V
  const auto bias_of = [&](int expert) {
    return a.bias ? value_at(a.bias, a.bias_dtype, expert * a.bias_stride) : 0.0f;
  };
  constexpr bool keeps_bias = Biased && V <= 8;  // in registers; more of them spill, and it is read again
  float bias[keeps_bias ? V : 1];
  if constexpr (keeps_bias) {
#pragma unroll
    for (int j = 0; j < V; ++j) bias[j] = j < inside ? bias_of(first + j) : 0.0f;
  }

  const int step = static_cast<int>(gridDim.x) * teams, size = a.dtype == DType::f32 ? 4 : 2;
  // past the last token, the other team of a warp goes through the last one again and writes nothing
  const auto row_of = [&](int64_t token) {
    return static_cast<const char*>(a.logits) + min(token, a.tokens - 1) * a.stride * size;
  };
  int64_t token = static_cast<int64_t>(blockIdx.x) * teams + team;
  const char* row = row_of(token);
  uint32_t raw[V] = {};
  if (token - team % together < a.tokens) load_raw(raw, a, row + first * size, inside);
  for (; token - team % together < a.tokens; token += step) {
    uint32_t order[V];
    order_raw(order, raw, a, inside);
    const char* next = row_of(token + step);
    load_raw(raw, a, next + first * size, inside);  // arrives meanwhile

    uint32_t best = best_of(order);
    float top = 0.0f, sum = 1.0f;  // of all experts
    if (!a.sigmoid && (Biased || !a.renormalize)) {
      top = from_order(Own::most(best));
      sum = sum_of_exp<Lanes>(order, top);
    }
    const float inverse = 1.0f / sum;
    const auto score_of = [&](float x) { return a.sigmoid ? sigmoid_of(x) : expf(x - top) * inverse; };
    bool bounded = a.bounded;
    if constexpr (Biased) {
#pragma unroll
      for (int j = 0; j < V; ++j) {
        if (j >= inside) continue;  // below all already
        float more;
        if constexpr (keeps_bias) {
          more = bias[j];
        } else {
          more = bias_of(first + j);
        }
        order[j] = in_order(score_of(from_order(order[j])) + more);
      }
      if (a.groups) keep_groups(order, a, spread[team], lane);
      best = best_of(order);
      bounded = __popc(__ballot_sync(whole_warp, best != below_all)) >= a.chosen;
    }

    const int listed = list_candidates<Lanes>(lists[team], order, best, bounded, a.chosen, lane);
    __syncwarp();
    const bool there = lane < listed;
    const int expert = there ? lists[team][lane] : 0;
    const float logit = value_at(row, a.dtype, expert);  // once more, from L1: a lane has others' experts now
    uint32_t own = below_all;
    if (there) {
      if constexpr (Biased) {
        own = in_order(score_of(logit) + bias_of(expert));
      } else {
        own = in_order(logit);
      }
    }
    const int better = rank_of<Lanes>(own, orders[team], listed, lane);
    const bool chosen = there && better < a.chosen;

    float weight;
    if (a.sigmoid) {
      weight = chosen ? sigmoid_of(logit) : 0.0f;
      if (a.renormalize) weight = __fdividef(weight, Own::sum(weight) + least_sum);
    } else if (a.renormalize) {
      const float highest = from_order(Own::most(chosen ? in_order(logit) : below_all));
      weight = chosen ? expf(logit - highest) : 0.0f;
      weight = __fdividef(weight, Own::sum(weight));
    } else {
      weight = expf(logit - top) * inverse;
    }
    if (chosen && token < a.tokens) {
      const int64_t place = token * a.chosen + better;
      a.weights[place] = weight * a.scale;
      a.expert[place] = expert;
      atomicAdd(histogram + expert, 1);
    }
    row = next;
    __syncwarp();  // the next token's list and orders are written into the same places
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

  const int64_t step = static_cast<int64_t>(gridDim.x) * few_threads;
  const int size = a.dtype == DType::f32 ? 4 : 2;
  for (int64_t token = static_cast<int64_t>(blockIdx.x) * few_threads + threadIdx.x; token < a.tokens; token += step) {
    uint32_t raw[V] = {}, order[V];
    load_raw(raw, a, static_cast<const char*>(a.logits) + token * a.stride * size, a.experts);
    order_raw(order, raw, a, a.experts);

    float value[V], sum = 0.0f;  // of the chosen ones; value: logits, then weights before they are scaled
    int expert[V];
    float all = 1.0f;
    const float top = from_order(best_of(order));
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
      a.weights[token * a.chosen + r] = __fdividef(value[r], by) * a.scale;
      a.expert[token * a.chosen + r] = expert[r];
      atomicAdd(histogram + expert[r], 1);
    }
  }
  add_counts(histogram, a);
}

__global__ void zero_counts_kernel(int* counts /*[E]*/, int experts) {
  let_next_begin();
  if (static_cast<int>(threadIdx.x) < experts) counts[threadIdx.x] = 0;
}

template <int V, int Lanes, bool Biased>
void run(const Context& context, Route& a) {
  const int size = static_cast<int>(item_size(a.dtype)), word = word_of(V * size);
  a.words = word != 0 && a.experts % V == 0 && aligned(a.logits, a.stride * size, word);
  a.full = a.experts == Lanes * V;
  a.bounded = (a.experts + V - 1) / V >= a.chosen;
  constexpr int threads = threads_of<V, Biased>, teams = threads / Lanes;
  constexpr auto kernel = route_kernel<V, Lanes, Biased>;
  const int64_t blocks = std::min((a.tokens + teams - 1) / teams, resident_blocks<kernel>(context, threads));
  launch_early<kernel>(context, dim3(static_cast<unsigned>(blocks)), dim3(threads), a);
}

// Half a warp a token shares a warp's instructions among two. It lists 16 candidates at most, which k near 16 would often
// fill: they would be taken one by one.
constexpr int most_by_halves = 10;

void run_plain(const Context& context, Route& a) {
  if (a.chosen <= most_by_halves) {
    const int each = (a.experts + 15) / 16;  // experts a lane, rounded up to what there is code for
    if (each <= 4) return run<4, 16, false>(context, a);
    if (each <= 8) return run<8, 16, false>(context, a);
    if (each <= 10) return run<10, 16, false>(context, a);
    if (each <= 16) return run<16, 16, false>(context, a);
  }
  const int each = (a.experts + 31) / 32;
  if (each <= 2) return run<2, 32, false>(context, a);
  if (each <= 8) return run<8, 32, false>(context, a);
  if (each <= 12) return run<12, 32, false>(context, a);
  if (each <= 16) return run<16, 32, false>(context, a);
  run<32, 32, false>(context, a);
}

void run_biased(const Context& context, Route& a) {
  const int each = (a.experts + 31) / 32;
  if (each <= 1) return run<1, 32, true>(context, a);
  if (each <= 2) return run<2, 32, true>(context, a);
  if (each <= 4) return run<4, 32, true>(context, a);
  if (each <= 5) return run<5, 32, true>(context, a);
  if (each <= 8) return run<8, 32, true>(context, a);
  if (each <= 12) return run<12, 32, true>(context, a);
  if (each <= 16) return run<16, 32, true>(context, a);
  run<32, 32, true>(context, a);
}

void run_few(const Context& context, Route& a) {
  const int size = static_cast<int>(item_size(a.dtype));
  a.full = a.experts == few_experts;
  a.words = a.full && aligned(a.logits, a.stride * size, 16);
  const int64_t wanted = (a.tokens + few_threads - 1) / few_threads;
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
    a.tokens = tokens, a.experts = static_cast<int>(experts), a.chosen = static_cast<int>(k);
    if (groups && *topk_groups < *groups) {  // else all are kept
      a.groups = static_cast<int>(*groups), a.kept_groups = static_cast<int>(*topk_groups);
      a.group_size = a.experts / a.groups, a.group_lanes = 1;
      while (2 * a.group_lanes * a.groups <= 32) a.group_lanes *= 2;
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
