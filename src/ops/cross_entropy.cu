// Of rows of logits: max, sum of exponentials, target and weighted mean (stats), and the gradient in their place.
// logits [n, V], target [n], coefficients [n, 4], class_weight [V], stats [n, 4].
// A block owns a row and walks it once (stats, gradient) or twice (both): the second walk begins where the first ended.
// Bytes: n V sizeof(T) for each read and each write; of both, the second read is the L2's while all rows in flight fit.
// Numerics: fp32 from the load on, base-2 exponentials, one rounding of the gradient at the store.
#include <algorithm>
#include <cfloat>
#include <cmath>
#include <optional>
#include <string>
#include <type_traits>

#include "ops.h"
#include "prequal/dispatch.h"
#include "prequal/host_device.h"
#include "prequal/launch.h"
#include "prequal/must_be.h"
#include "prequal/overlap.h"
#include "prequal/row_plan.h"
#include "prequal/vec.cuh"

namespace prequal::ops {
namespace {

struct Unit : FileOf<"cross_entropy"> {};

constexpr int most_threads = 1024;
constexpr int most_items = 4;  // 16-byte accesses that a thread has on their way
constexpr float log2_e = 1.4426950408889634f;
constexpr float minus_infinity = -INFINITY;

struct Rows4 {
  float* at;  // [n, 4]
  int64_t stride;
};

template <class T>
struct Chunk {
  T* logits;  // [n, V]
  int64_t stride;
  int width;
  const int64_t* target;  // [n]
  int64_t first_class;
  const float* class_weight;          // [V] or null
  float softcap, twice_over_softcap;  // twice: times log2 e
  Rows4 stats;
  Rows4 coefficients;
  const float* lse;  // [n], of the gradient alone
};

// 2^x; below 2^-126 zero.
__device__ __forceinline__ float exp2_of(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// 2^(log2e (x - y)) where x <= y; two infinities of one sign are one number.
__device__ __forceinline__ float ratio(float x, float y) { return x == y ? 1.0f : exp2_of((x - y) * log2_e); }

// tanh(x / softcap), right to 2^-23 of 1, which the exponential of its multiple asks for: not of itself, near 0.
template <class T>
__device__ __forceinline__ float tanh_of(float x, const Chunk<T>& chunk) {
  return 1.0f - __fdividef(2.0f, exp2_of(x * chunk.twice_over_softcap) + 1.0f);
}

// What has been seen of a row: `total` is sum exp(z - largest).
struct Seen {
  float largest, total, weighted;

  __device__ __forceinline__ void join(const Seen& other) {
    const float both = fmaxf(largest, other.largest);
    total = add(mul(total, ratio(largest, both)), mul(other.total, ratio(other.largest, both)));  // no FMA: it commutes
    largest = both;
    weighted += other.weighted;
  }
};

__device__ __forceinline__ Seen over_warp(Seen seen) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) {
    seen.join({__shfl_xor_sync(0xffffffffu, seen.largest, step), __shfl_xor_sync(0xffffffffu, seen.total, step),
               __shfl_xor_sync(0xffffffffu, seen.weighted, step)});
  }
  return seen;
}

// For every thread. In an order that depends on the number of threads alone; of two partners both join the same two
// values, whose sums commute.
__device__ __forceinline__ Seen over_block(Seen seen) {
  __shared__ Seen warps[most_threads / 32];
  seen = over_warp(seen);
  if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = seen;
  __syncthreads();
  const int lane = threadIdx.x % 32;
  return over_warp(lane < static_cast<int>(blockDim.x) / 32 ? warps[lane] : Seen{minus_infinity, 0.0f, 0.0f});
}

// NaN is left out. Of halves two at a time.
template <class T>
__device__ __forceinline__ float largest_in(const Packet<T>& packet) {
  if constexpr (sizeof(T) == 4) {
    float most = minus_infinity;
#pragma unroll
    for (int i = 0; i < widest<T>; ++i) most = fmaxf(most, packet[i]);
    return most;
  } else {
    using Pair = std::conditional_t<std::is_same_v<T, __half>, __half2, __nv_bfloat162>;
    Packet<T> most{};
    most.word.at[0] = std::is_same_v<T, __half> ? 0xfc00fc00u : 0xff80ff80u;  // two minus infinities
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      most.word.at[0] = bits_as<uint32_t>(__hmax2(bits_as<Pair>(most.word.at[0]), bits_as<Pair>(packet.word.at[i])));
    }
    return fmaxf(most[0], most[1]);
  }
}

// What a whole packet can be asked is not asked of each of its values: 14 instructions a value of both walks, 25 before.
template <bool Capped, bool Ragged, class T>
__device__ __forceinline__ void see(Seen& seen, const Packet<T>& packet, int column, const Chunk<T>& chunk) {
  constexpr int N = widest<T>;
  const auto inside = [&](int i) { return !Ragged || column + i < chunk.width; };
  float z[N], largest = minus_infinity;
#pragma unroll
  for (int i = 0; i < N; ++i) {
    z[i] = packet[i];
    if constexpr (Capped) z[i] = chunk.softcap * tanh_of(z[i], chunk);
    if (!inside(i)) z[i] = minus_infinity;
    if constexpr (Capped || Ragged) largest = fmaxf(largest, z[i]);
  }
  if constexpr (!Capped && !Ragged) largest = largest_in(packet);

  const float both = fmaxf(seen.largest, largest);
  seen.total *= ratio(seen.largest, both);
  seen.largest = both;
  // The difference before the factor: it is exact where the sum matters. fma(z, log2 e, -largest log2 e) puts the rounding
  // of its last term, 2^-14 at logits of 1,024, into the whole sum, and so into a loss that is small.
  const float base = fmaxf(both, -FLT_MAX);  // less itself, minus infinity is no number
#pragma unroll
  for (int i = 0; i < N; ++i) seen.total += exp2_of((z[i] - base) * log2_e);

  if (chunk.class_weight) {
#pragma unroll
    for (int i = 0; i < N; ++i) {
      if (inside(i)) seen.weighted += chunk.class_weight[column + i] * z[i];
    }
  } else {
#pragma unroll
    for (int i = 0; i < N; ++i) {
      if (inside(i)) seen.weighted += z[i];
    }
  }
}

struct Slope {
  float p, target, all;  // what p, the target's one and the classes' weights are multiplied by
  float minus_lse;       // times log2 e
  int place;             // of the target; negative where it is none of these classes
  bool none;             // a gradient of zeros
};

template <bool Capped, bool Ragged, class T>
__device__ __forceinline__ Packet<T> gradient_of(const Packet<T>& packet, int column, const Slope& slope,
                                                 const Chunk<T>& chunk) {
  constexpr int N = widest<T>;
  if (slope.none) return {};
  float g[N], t[N] = {};
#pragma unroll
  for (int i = 0; i < N; ++i) {
    float z = packet[i];
    if constexpr (Capped) {
      t[i] = tanh_of(z, chunk);
      z = chunk.softcap * t[i];
    }
    g[i] = exp2_of(fmaf(z, log2_e, slope.minus_lse));
  }
  if (chunk.class_weight) {
#pragma unroll
    for (int i = 0; i < N; ++i) {
      const bool inside = !Ragged || column + i < chunk.width;
      g[i] = slope.p * g[i] - (inside ? slope.all * chunk.class_weight[column + i] : slope.all);
    }
  } else {
#pragma unroll
    for (int i = 0; i < N; ++i) g[i] = slope.p * g[i] - slope.all;
  }
  if (static_cast<unsigned>(slope.place - column) < N) {  // one thread of a row's
#pragma unroll
    for (int i = 0; i < N; ++i) {
      if (column + i == slope.place) g[i] -= slope.target;
    }
  }
  if constexpr (Capped) {
#pragma unroll
    for (int i = 0; i < N; ++i) g[i] *= 1.0f - t[i] * t[i];
  }
  return pack<T>(g);
}

// Capped and ragged: left to itself, the compiler gives sm_80 32 registers and a frame on the stack.
template <bool Stats, bool Gradient, bool Capped, bool Ragged, class T>
__global__ void __launch_bounds__(most_threads, (Capped && Ragged ? 1 : 0))
    rows_kernel(Chunk<T> chunk /*logits [n, V]*/) {
  constexpr int N = widest<T>;
  constexpr int items = Capped ? 2 : most_items;  // four leave sm_80 too few of the 64 registers for tanh
  const int64_t row = blockIdx.x;
  T* logits = chunk.logits + row * chunk.stride;
  const int64_t local = chunk.target[row] - chunk.first_class;  // wraps for no target that is a class
  const int place = local >= 0 && local < chunk.width ? static_cast<int>(local) : -1;
  const int step = static_cast<int>(blockDim.x) * N * items;
  const int steps = (chunk.width + step - 1) / step;
  const auto column_of = [&](int turn, int item) {
    return turn * step + (item * static_cast<int>(blockDim.x) + static_cast<int>(threadIdx.x)) * N;
  };

  float lse = 0.0f;
  if constexpr (Stats) {
    Seen seen{minus_infinity, 0.0f, 0.0f};
    for (int turn = 0; turn < steps; ++turn) {
      Packet<T> packets[items];
#pragma unroll
      for (int item = 0; item < items; ++item) {
        packets[item] = load_packet<Ragged>(static_cast<const T*>(logits), column_of(turn, item), chunk.width);
      }
#pragma unroll
      for (int item = 0; item < items; ++item) {
        if (column_of(turn, item) >= chunk.width) continue;
        see<Capped, Ragged>(seen, packets[item], column_of(turn, item), chunk);
      }
    }
    float picked = 0.0f;
    if (threadIdx.x == 0 && place >= 0) {
      picked = to_float(logits[place]);  // before the barrier behind which it is overwritten
      if constexpr (Capped) picked = chunk.softcap * tanh_of(picked, chunk);
    }
    seen = over_block(seen);
    if (isnan(seen.total) && seen.largest != INFINITY) seen.largest = NAN;
    lse = seen.largest + logf(seen.total);
    if (threadIdx.x == 0) {
      float* out = chunk.stats.at + row * chunk.stats.stride;
      out[0] = seen.largest, out[1] = seen.total, out[2] = picked,
      out[3] = seen.weighted / static_cast<float>(chunk.width);
    }
  } else {
    lse = chunk.lse[row];
  }

  if constexpr (Gradient) {
    const float* c = chunk.coefficients.at + row * chunk.coefficients.stride;
    const bool none = c[0] == 0.0f && c[1] == 0.0f && c[2] == 0.0f && c[3] == 0.0f;
    const Slope slope{fmaf(c[1], lse, c[0]), c[2], c[3], -lse * log2_e, place, none};
    for (int turn = steps - 1; turn >= 0; --turn) {
      Packet<T> packets[items];
#pragma unroll
      for (int item = 0; item < items; ++item) {
        packets[item] = load_packet<Ragged>(static_cast<const T*>(logits), column_of(turn, item), chunk.width);
      }
#pragma unroll
      for (int item = 0; item < items; ++item) {
        const int column = column_of(turn, item);
        const Packet<T> gradient = gradient_of<Capped, Ragged>(packets[item], column, slope, chunk);
        store_packet<Ragged>(logits, column, chunk.width, gradient);
      }
    }
  }
}

// A block takes pieces of `piece` values; all of them begin alike in their first word.
template <class T>
constexpr int piece = 256 * most_items * widest<T>;

template <bool Ragged, class T>
__global__ void __launch_bounds__(256) scale_kernel(T* x /*[numel]*/, int64_t numel, const float* factor /*[1]*/) {
  const float by = *factor;
  if (by == 1.0f) return;
  constexpr int N = widest<T>;
  for (int64_t begin = static_cast<int64_t>(blockIdx.x) * piece<T>; begin < numel;
       begin += static_cast<int64_t>(gridDim.x) * piece<T>) {
    const int width = static_cast<int>(numel - begin < piece<T> ? numel - begin : piece<T>);
    Packet<T> packets[most_items];
#pragma unroll
    for (int item = 0; item < most_items; ++item) {
      packets[item] = load_packet<Ragged>(static_cast<const T*>(x + begin),
                                          (item * 256 + static_cast<int>(threadIdx.x)) * N, width);
    }
#pragma unroll
    for (int item = 0; item < most_items; ++item) {
      float value[N];
#pragma unroll
      for (int i = 0; i < N; ++i) value[i] = packets[item][i] * by;
      store_packet<Ragged>(x + begin, (item * 256 + static_cast<int>(threadIdx.x)) * N, width, pack<T>(value));
    }
  }
}

// ---- right calls ---------------------------------------------------------------------------------------------------

void must_be_fours(const Tensor& x, const char* argument, const Tensor& logits) {
  const bool fits = x.rank == 2 && x.shape[0] == logits.shape[0] && x.shape[1] == 4;
  must_be_wide(x, argument, std::to_string(logits.shape[0]) + ", 4", fits, logits, "logits");
}

void must_be_logits(const Tensor& logits, const Tensor& target, const std::optional<Tensor>& class_weight,
                    int64_t first_class, double softcap) {
  must_be_floating(logits, "logits");
  if (logits.rank != 2) wrong_value("logits", "shape [n, V]", shape_of(logits));
  if (logits.shape[1] == 0) wrong_value("logits", "at least one class", "shape " + shape_of(logits));
  if (target.dtype != DType::i64) wrong_type("target", "int64", name_of(target.dtype));
  if (target.rank != 1 || target.shape[0] != logits.shape[0]) {
    wrong_value("target", "shape [" + std::to_string(logits.shape[0]) + "]", shape_of(target));
  }
  if (class_weight) {
    const bool fits = class_weight->rank == 1 && class_weight->shape[0] == logits.shape[1];
    must_be_wide(*class_weight, "class_weight", std::to_string(logits.shape[1]), fits, logits, "logits");
  }
  constexpr int64_t most = int64_t{1} << 62;
  if (first_class < 0 || first_class > most) {
    wrong_value("first_class", "0 to " + std::to_string(most), std::to_string(first_class));
  }
  if (!(softcap >= 0 && softcap < INFINITY)) {
    wrong_value("softcap", "a finite number >= 0", std::to_string(softcap));
  }
}

// ---- what a kernel covers --------------------------------------------------------------------------------------------

template <class T>
Chunk<T> chunk_of(const Tensor& logits, const Tensor& target, const std::optional<Tensor>& class_weight,
                  int64_t first_class, double softcap) {
  if (logits.shape[1] > 1 && logits.stride[1] != 1) throw Refused{"unit_stride"};
  if (target.shape[0] > 1 && target.stride[0] != 1) throw Refused{"unit_stride"};
  if (class_weight && class_weight->shape[0] > 1 && class_weight->stride[0] != 1) throw Refused{"unit_stride"};
  // columns are counted in 32 bits, to the end of the last turn; rows are blocks of a grid
  if (logits.shape[1] > 1 << 30 || logits.shape[0] >= int64_t{1} << 31) throw Refused{"size"};
  Chunk<T> chunk{};
  chunk.logits = logits.as<T>();
  chunk.stride = logits.stride[0];
  chunk.width = static_cast<int>(logits.shape[1]);
  chunk.target = target.as<const int64_t>();
  chunk.first_class = first_class;
  chunk.class_weight = class_weight ? class_weight->as<const float>() : nullptr;
  chunk.softcap = static_cast<float>(softcap);
  chunk.twice_over_softcap = softcap > 0 ? static_cast<float>(2.0 * static_cast<double>(log2_e) / softcap) : 0.0f;
  return chunk;
}

Rows4 fours(const Tensor& x /*[n, 4]*/) {
  if (x.stride[1] != 1 && x.shape[0] > 0) throw Refused{"unit_stride"};
  return {x.as<float>(), x.stride[0]};
}

template <bool Stats, bool Gradient, class T>
void run(const Context& context, const Chunk<T>& chunk, int64_t rows) {
  if (rows == 0) return;
  const int64_t accesses = (chunk.width + widest<T> - 1) / widest<T>;
  const dim3 grid(static_cast<unsigned>(rows)),
      block(std::clamp(whole_warps((accesses + most_items - 1) / most_items), 32, most_threads));
  const auto start = [&]<bool Capped>() {
    if (aligned(chunk.logits, rows > 1 ? chunk.stride * sizeof(T) : 0, 16) && chunk.width % widest<T> == 0) {
      launch<rows_kernel<Stats, Gradient, Capped, false, T>>(context, grid, block, chunk);
    } else {
      launch<rows_kernel<Stats, Gradient, Capped, true, T>>(context, grid, block, chunk);
    }
  };
  if (chunk.softcap > 0) {
    start.template operator()<true>();
  } else {
    start.template operator()<false>();
  }
}

}  // namespace

Buffer cross_entropy_stats(const Context& context, const Tensor& logits /*[n, V]*/, const Tensor& target /*[n]*/,
                           const std::optional<Tensor>& class_weight /*[V]*/, int64_t first_class, double softcap) {
  must_be_logits(logits, target, class_weight, first_class, softcap);
  std::optional<Buffer> stats;
  dispatch(logits.dtype, Floats{}, [&]<class T>() {
    Chunk<T> chunk = chunk_of<T>(logits, target, class_weight, first_class, softcap);
    stats.emplace(context.empty({logits.shape[0], 4}, DType::f32));
    chunk.stats = {stats->template as<float>(), 4};
    run<true, false>(context, chunk, logits.shape[0]);
  });
  return std::move(*stats);
}

void cross_entropy_gradient_(const Context& context, const Tensor& logits /*[n, V], written*/,
                             const Tensor& lse /*[n]*/, const Tensor& target /*[n]*/,
                             const Tensor& coefficients /*[n, 4]*/, const std::optional<Tensor>& class_weight /*[V]*/,
                             int64_t first_class, double softcap) {
  must_be_logits(logits, target, class_weight, first_class, softcap);
  const bool fits = lse.rank == 1 && lse.shape[0] == logits.shape[0];
  must_be_wide(lse, "lse", std::to_string(logits.shape[0]), fits, logits, "logits");
  must_be_fours(coefficients, "coefficients", logits);
  must_be_apart(logits, "logits");
  must_be_apart(lse, "lse", logits, "logits");
  must_be_apart(coefficients, "coefficients", logits, "logits");
  dispatch(logits.dtype, Floats{}, [&]<class T>() {
    Chunk<T> chunk = chunk_of<T>(logits, target, class_weight, first_class, softcap);
    if (lse.shape[0] > 1 && lse.stride[0] != 1) throw Refused{"unit_stride"};
    if (!(are_apart(logits, target) && (!class_weight || are_apart(logits, *class_weight)))) throw Refused{"aliasing"};
    chunk.lse = lse.as<const float>();
    chunk.coefficients = fours(coefficients);
    run<false, true>(context, chunk, logits.shape[0]);
  });
}

void cross_entropy_chunk_(const Context& context, const Tensor& logits /*[n, V], written*/,
                          const Tensor& stats /*[n, 4], written*/, const Tensor& target /*[n]*/,
                          const Tensor& coefficients /*[n, 4]*/, const std::optional<Tensor>& class_weight /*[V]*/,
                          int64_t first_class, double softcap) {
  must_be_logits(logits, target, class_weight, first_class, softcap);
  must_be_fours(stats, "stats", logits);
  must_be_fours(coefficients, "coefficients", logits);
  must_be_apart(logits, "logits");
  must_be_apart(stats, "stats");
  must_be_apart(stats, "stats", logits, "logits");
  must_be_apart(coefficients, "coefficients", logits, "logits");
  must_be_apart(coefficients, "coefficients", stats, "stats");
  dispatch(logits.dtype, Floats{}, [&]<class T>() {
    Chunk<T> chunk = chunk_of<T>(logits, target, class_weight, first_class, softcap);
    const auto apart = [&](const Tensor& x) { return are_apart(logits, x) && are_apart(stats, x); };
    if (!(apart(target) && (!class_weight || apart(*class_weight)))) throw Refused{"aliasing"};
    chunk.stats = fours(stats);
    chunk.coefficients = fours(coefficients);
    run<true, true>(context, chunk, logits.shape[0]);
  });
}

void scale_unless_one_(const Context& context, const Tensor& x /*[...], written*/, const Tensor& factor /*[1]*/) {
  must_be_floating(x, "x");
  must_be_wide(factor, "factor", "1", factor.rank == 1 && factor.shape[0] == 1, x, "x");
  must_be_apart(x, "x");
  must_be_apart(factor, "factor", x, "x");
  dispatch(x.dtype, Floats{}, [&]<class T>() {
    if (!x.contiguous_from(0)) throw Refused{"contiguous"};
    const int64_t numel = x.numel();
    if (numel == 0) return;
    const int64_t pieces = (numel + piece<T> - 1) / piece<T>;
    const dim3 grid(static_cast<unsigned>(std::min<int64_t>(pieces, int64_t{8} * multiprocessors(context)))),
        block(256);
    if (aligned(x.data, 0, 16) && numel % widest<T> == 0) {
      launch<scale_kernel<false, T>>(context, grid, block, x.as<T>(), numel, factor.as<const float>());
    } else {
      launch<scale_kernel<true, T>>(context, grid, block, x.as<T>(), numel, factor.as<const float>());
    }
  });
}

}  // namespace prequal::ops
