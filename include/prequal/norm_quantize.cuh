// RMS normalisation whose result goes to FP8: the kernels of rms_norm_quantize_fp8 and fused_add_rms_norm_quantize_fp8.
//
// Rows that a warp or a block of rms_norm holds are held here too, and go to FP8 before they reach memory. They are summed
// in the order that rms_norm sums them by (its plan), so that the normalised row is the same to the bit. All others, which
// rms_norm streams through shared memory, go through memory: its kernels, then those of quantize_fp8.
#pragma once

#include <optional>
#include <stdexcept>

#include "prequal/norm.cuh"
#include "prequal/quantize.cuh"

namespace prequal::norm_quantize {

using norm::Forward;
using norm::Kind;
using norm::RowStatistics;
using quantize::Result;

// Who has which packets of a row, and its sum: the threads of rms_norm's plan, and its order. A warp does what a warp of
// rms_norm does.
class Warp {
 public:
  static constexpr RowKind kind = RowKind::warp;
  static constexpr int most_threads = 128;
  static constexpr int least_blocks(bool) { return 1; }
  struct Shared {};
  __device__ Warp(Shared&, int) {}

  __device__ int64_t index() const { return static_cast<int64_t>(blockIdx.x) * (blockDim.x / 32) + threadIdx.x / 32; }
  __device__ int64_t count() const { return static_cast<int64_t>(gridDim.x) * (blockDim.x / 32); }
  __device__ int thread() const { return threadIdx.x % 32; }
  // How many packets `item` lies behind a thread's first one, and whether the thread `thread` has such a one.
  __device__ __forceinline__ int behind(int item) const { return item * 32; }
  __device__ __forceinline__ bool has(int, int) const { return true; }

  template <int Items>
  __device__ __forceinline__ float sum(const float (&squares)[Items]) const {
    float total[1] = {};
#pragma unroll
    for (int item = 0; item < Items; ++item) total[0] += squares[item];
    spread(total, warp_sums(total));
    return total[0];
  }
};

// A thread does what `Fold` threads of rms_norm do, which lie its own block's width apart: with 2, what every thread does
// once a row is done half as often. Even items are the first one's.
template <int Fold>
class Block {
 public:
  static constexpr RowKind kind = RowKind::block;
  static constexpr int most_threads = 512 / Fold;
  // One more of what is added, and some bytes spill.
  static constexpr int least_blocks(bool add) { return add ? 2 * Fold - 1 : 2 * Fold; }
  struct Shared {
    float at[2][32];  // of each warp of rms_norm; two turns, as of BlockTeam
  };
  // threads: of rms_norm's block
  __device__ Block(Shared& shared, int threads) : shared_(shared), threads_(threads) {}

  __device__ int64_t index() const { return blockIdx.x; }
  __device__ int64_t count() const { return gridDim.x; }
  __device__ int thread() const { return threadIdx.x; }
  __device__ __forceinline__ int behind(int item) const {
    return item / Fold * threads_ + item % Fold * static_cast<int>(blockDim.x);
  }
  __device__ __forceinline__ bool has(int item, int thread) const {
    return item % Fold == 0 || thread + item % Fold * static_cast<int>(blockDim.x) < threads_;
  }

  template <int Items>
  __device__ __forceinline__ float sum(const float (&squares)[Items]) {
    float total[Fold] = {};
#pragma unroll
    for (int item = 0; item < Items; ++item) total[item % Fold] += squares[item];
    const float own = warp_sums(total);
    const int lane = threadIdx.x % 32, warps = blockDim.x / 32;
    if (lane < Fold) shared_.at[turn_][threadIdx.x / 32 + lane * warps] = own;
    __syncthreads();
    float all[1] = {lane < threads_ / 32 ? shared_.at[turn_][lane] : 0.0f};
    turn_ ^= 1;
    spread(all, warp_sums(all));
    return all[0];
  }

 private:
  Shared& shared_;
  int threads_;
  int turn_ = 0;
};

// Where a thread's packets lie, from its first column on.
template <class Team>
struct Place {
  const Team& team;
  int vec, thread, width;

  __device__ __forceinline__ int first() const { return thread * vec; }
  __device__ __forceinline__ int column(int item) const { return team.behind(item) * vec; }
  // Columns from the first one to the row's end; none where the thread has no such packet.
  __device__ __forceinline__ int left(int item) const { return team.has(item, thread) ? width - first() : 0; }
};

// The bits of norm::normalised, of all packets of a thread. Of a weight of x's dtype one question for all of them, and two
// halves rounded by one instruction where x * rstd is; of another, or of none, the packets take turns.
template <class T, int Items, class Team>
__device__ __forceinline__ void normalise(Packet<T> (&held)[Items], const Forward<T>& a, float rstd,
                                          const Place<Team>& at) {
  constexpr int N = widest<T>;
  const auto by_weight = [&]<bool exact>() {
    const T* from = kept(a.weight.same + at.first());
#pragma unroll
    for (int item = 0; item < Items; ++item) {
      const Packet<T> weight = load_packet<false, true>(from, at.column(item), at.left(item));
      float value[N], parameter[N];
#pragma unroll
      for (int i = 0; i < N; ++i) value[i] = held[item][i] * rstd, parameter[i] = weight[i];
      if constexpr (exact) {
        const Packet<T> rounded = pack<T>(value);
#pragma unroll
        for (int i = 0; i < N; ++i) value[i] = rounded[i];
      }
      if (a.offset != 0.0f) {
#pragma unroll
        for (int i = 0; i < N; ++i) parameter[i] += a.offset;
      }
#pragma unroll
      for (int i = 0; i < N; ++i) value[i] *= parameter[i];
      held[item] = pack<T>(value);
    }
  };
  if (a.weight.same) {
    if (a.exact) return by_weight.template operator()<true>();
    return by_weight.template operator()<false>();
  }
#pragma unroll 1
  for (int item = 0; item < Items; ++item) {
    const Packet<T> first = held[0];
#pragma unroll
    for (int i = 1; i < Items; ++i) held[i - 1] = held[i];
    const int column = at.column(item) < at.left(item) ? at.first() + at.column(item) : a.width;
    held[Items - 1] = norm::normalised<Kind::rms, T, false>(a, first, RowStatistics{0.0f, rstd}, column);
  }
}

// threads: of rms_norm's team
template <bool Groups, bool Add, class T, Fp8 F, int Items, class Team>
__global__ void __launch_bounds__((Team::most_threads), (Team::least_blocks(Add)))
    held(const Forward<T> a, const Result to, int threads) {
  constexpr int N = widest<T>, lanes = quantize::group_lanes<T>;
  constexpr bool warps = Team::kind == RowKind::warp;
  __shared__ typename Team::Shared shared;
  __shared__ BlockMax::Shared most;
  Team team(shared, threads);
  BlockMax whole(most);
  for (int64_t row = team.index(); row < a.rows; row += team.count()) {
    const Place<Team> at{team, N, team.thread(), a.width};
    Packet<T> held[Items];
    const T* x = kept(a.x.row(row) + at.first());
#pragma unroll
    for (int item = 0; item < Items; ++item) held[item] = load_packet<false>(x, at.column(item), at.left(item));
    if constexpr (Add) {
      const T* from = kept(a.other.row(row) + at.first());
      T* sum = kept(a.sum.row(row) + at.first());
#pragma unroll
      for (int item = 0; item < Items; ++item) {
        held[item] = norm::added<T>(held[item], load_packet<false>(from, at.column(item), at.left(item)));
        store_packet<false>(sum, at.column(item), at.left(item), held[item]);
      }
    }
    float squares[Items];
#pragma unroll
    for (int item = 0; item < Items; ++item) squares[item] = norm::squares<false>(held[item], 0.0f, 0, N);
    keep_packed(held);
    normalise(held, a, rsqrtf(team.sum(squares) * a.inverse + a.eps), at);
    keep_packed(held);

    uint8_t* q = kept(to.q + row * to.width + at.first());
    const auto store = [&](int item, const Codes<T>& codes) {
      store_codes<false>(q, at.column(item), at.left(item), codes);
    };
    if constexpr (Groups) {
      const int64_t in_row = quantize::blocks_of(a.width);
      quantize::group_codes<F>(
          held, to, [](int) { return 1.0f; },
          [&](int item, float scale) {  // of all lanes of a group: the first lane's columns tell whether there is one
            const int first = at.thread / lanes * lanes * N, column = first + at.column(item);
            if (team.has(item, at.thread) && column < a.width) {
              to.scale[to.place(row, column / quantize::block, to.rows, in_row)] = scale;
            }
          },
          store);
    } else {
      const Divisor divisor = quantize::shared_divisor<F>(
          held, to, [] { return 1.0f; },
          [&](float value) {
            if constexpr (warps) return warp_max(value);
            return whole.of(value);
          });
      keep_packed(held);
      each_codes<F>(held, divisor, store);
      if (at.thread == 0) to.scale[row] = divisor.by;
    }
  }
}

// x: of the shape of the rows. whole_words: every row and parameter begins at a 16-byte word, and is made of such.
template <bool Add, class T>
void run(const Context& context, Forward<T> a, Result to, const quantize::Options& options, const Tensor& x,
         bool whole_words) {
  const RowPlan plan = norm::plan_of_rms<Add, T>(a.width);
  if (whole_words && plan.kind != RowKind::loop) {
    return quantize::by_format(options.dtype, [&]<Fp8 F>() {
      const auto start = [&]<auto kernel>(int threads) {
        const dim3 grid = norm::grid_of((a.rows + plan.rows - 1) / plan.rows);
        launch<kernel>(context, grid, dim3(threads), a, to, plan.threads);
      };
      const auto hold = [&]<int Items, class Team>(int threads) {
        if (options.groups) return start.template operator()<held<true, Add, T, F, Items, Team>>(threads);
        return start.template operator()<held<false, Add, T, F, Items, Team>>(threads);
      };
      if (plan.kind == RowKind::warp) {
        if (plan.items == 1) return hold.template operator()<1, Warp>(plan.threads);
        return hold.template operator()<4, Warp>(plan.threads);
      }
      if (plan.items == 4) return hold.template operator()<4, Block<1>>(plan.threads);
      hold.template operator()<4, Block<2>>(whole_warps((plan.threads + 1) / 2));
    });
  }

  const Buffer y = context.empty_like(x);
  a.y = {y.as<T>(), a.width};
  if (whole_words) {
    norm::run<Kind::rms, Add, T, false>(context, a);
  } else {
    norm::run<Kind::rms, Add, T, true>(context, a);
  }
  if (options.joins_rows(false, to.width)) to.width *= to.rows, to.rows = 1;
  const quantize::Plain<T> from{y.as<const T>(), to.width};
  const bool words = a.width % widest<T> == 0;
  quantize::by_format(options.dtype, [&]<Fp8 F>() {
    if (options.groups) return quantize::by_group<F>(context, from, to, words);
    quantize::by_token<F>(context, from, to, words);
  });
}

}  // namespace prequal::norm_quantize
