// RMS normalisation whose result goes to FP8 and not to memory: the kernels of rms_norm_quantize_fp8 and
// fused_add_rms_norm_quantize_fp8.
//
// Rows of halves that a warp or a block holds are summed by the threads, and in the order, that rms_norm sums them by (the
// same plan, the same code), so that the normalised row is the same to the bit. All others are read again: what
// rms_norm streams through shared memory, what is ragged, and fp32.
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

// Where groups are made, one block fewer than the norm's: else some bytes of a block's packets spill.
template <bool Groups, int Items>
constexpr int least_blocks(RowKind team) {
  return norm::least_blocks<Items>(team) - (Groups && team == RowKind::block ? 1 : 0);
}

template <bool Groups, bool Add, class T, Fp8 F, int Items, class Team>
__global__ void __launch_bounds__((norm::most_threads<Items>(Team::kind)), (least_blocks<Groups, Items>(Team::kind)))
    held(const Forward<T> a, const Result to) {
  constexpr int N = widest<T>, lanes = quantize::group_lanes<T>;
  constexpr bool warps = Team::kind == RowKind::warp;
  __shared__ typename Team::Shared shared;
  __shared__ BlockMax::Shared most;
  Team team(shared);
  BlockMax whole(most);
  const auto column = [&](int item) { return (item * team.threads() + team.thread()) * N; };
  const int64_t in_row = quantize::blocks_of(a.width);
  for (int64_t row = team.index(); row < a.rows; row += team.count()) {
    Packet<T> held[Items];
    norm::hold_row<Add, false>(held, a, row, column);
    const auto each = [&](auto&& body) {
#pragma unroll
      for (int item = 0; item < Items; ++item) body(held[item], column(item));
      keep_packed(held);
    };
    const RowStatistics figures = norm::statistics<Kind::rms, false, T>(team, a, each);
    each([&](Packet<T>& x, int at) { x = norm::normalised<Kind::rms, T, false>(a, x, figures, at); });

    uint8_t* q = to.q + row * to.width;
    const auto store = [&](int item, const Codes<T>& codes) { store_codes<false>(q, column(item), a.width, codes); };
    if constexpr (Groups) {
      quantize::group_codes<F>(
          held, to, [](int) { return 1.0f; },
          [&](int item, float scale) {
            const int64_t group = (item * team.threads() + team.thread() / lanes * lanes) * N / quantize::block;
            if (group < in_row) to.scale[to.place(row, group, to.rows, in_row)] = scale;
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
      if (team.thread() == 0) to.scale[row] = divisor.by;
    }
  }
}

// A row a block, read from memory for its sum, for its largest value where one scale serves the row, and for its codes.
template <bool Add, class T, Fp8 F>
__global__ void __launch_bounds__(1024) read_again(const Forward<T> a, const Result to, bool groups) {
  constexpr int N = widest<T>;
  __shared__ typename BlockTeam<1>::Shared shared;
  __shared__ BlockMax::Shared most;
  BlockTeam<1> team(shared);
  BlockMax whole(most);
  const int step = team.threads() * N;
  const int64_t in_row = quantize::blocks_of(a.width);
  for (int64_t row = team.index(); row < a.rows; row += team.count()) {
    float total[1] = {};
    for (int first = 0; first < a.width; first += step) {
      const int column = first + team.thread() * N;
      Packet<T> x = load_packet<true>(a.x.row(row), column, a.width);
      if constexpr (Add) {
        x = norm::added<T>(x, load_packet<true>(a.other.row(row), column, a.width));
        store_packet<true>(a.sum.row(row), column, a.width, x);
      }
      total[0] += norm::squares<false>(x, 0.0f, 0, N);
    }
    team.sum(total);  // and what the block stored is seen by the block
    const RowStatistics figures{0.0f, rsqrtf(total[0] * a.inverse + a.eps)};

    const T* x = Add ? a.sum.row(row) : a.x.row(row);
    // Every thread of the block calls body, also past the row's end: what is there is zero, or NaN where rstd is infinite,
    // and neither moves a maximum.
    const auto each = [&](auto&& body) {
      for (int first = 0; first < a.width; first += step) {
        const int column = first + team.thread() * N;
        const Packet<T> held = load_packet<true>(x, column, a.width);
        body(norm::normalised<Kind::rms, T, true>(a, held, figures, column), column);
      }
    };
    uint8_t* q = to.q + row * to.width;
    if (groups) {
      each([&](const Packet<T>& y, int column) {
        Packet<T> one[1] = {y};
        quantize::group_codes<F>(
            one, to, [](int) { return 1.0f; },
            [&](int, float scale) {
              const int64_t group = column / quantize::block;
              if (group < in_row) to.scale[to.place(row, group, to.rows, in_row)] = scale;
            },
            [&](int, const Codes<T>& codes) { store_codes<true>(q, column, a.width, codes); });
      });
      continue;
    }

    float size = 0.0f;
    each([&](const Packet<T>& y, int) { size = fmaxf(size, largest_in(y)); });
    float finite = size = whole.of(size);
    if (size == INFINITY) {
      finite = 0.0f;
      each([&](const Packet<T>& y, int) { finite = fmaxf(finite, largest_finite_in(y)); });
      finite = whole.of(finite);
    }
    const Divisor divisor = divisor_of<T>(to.scale_from<F>(finite), size);
    each([&](const Packet<T>& y, int column) {
      Packet<T> one[1] = {y};
      each_codes<F>(one, divisor, [&](int, const Codes<T>& codes) { store_codes<true>(q, column, a.width, codes); });
    });
    if (team.thread() == 0) to.scale[row] = divisor.by;
  }
}

// whole_words: every row and parameter begins at a 16-byte word, and is made of such.
template <bool Add, class T>
void run(const Context& context, const Forward<T>& a, const Result& to, const quantize::Options& options,
         bool whole_words) {
  quantize::by_format(options.dtype, [&]<Fp8 F>() {
    const RowPlan plan = norm::plan_of_rms<Add, T>(a.width);
    const auto start = [&]<auto kernel>() {
      launch<kernel>(context, norm::grid_of((a.rows + plan.rows - 1) / plan.rows), dim3(plan.threads), a, to);
    };
    const auto hold = [&]<int Items, class Team>() {
      if (options.groups) return start.template operator()<held<true, Add, T, F, Items, Team>>();
      return start.template operator()<held<false, Add, T, F, Items, Team>>();
    };
    if constexpr (sizeof(T) == 2) {
      if (whole_words && plan.kind == RowKind::warp) {
        if (plan.items == 1) return hold.template operator()<1, WarpTeam<1>>();
        return hold.template operator()<4, WarpTeam<1>>();
      }
      if (whole_words && plan.kind == RowKind::block) {
        if (plan.items == 2) return hold.template operator()<2, BlockTeam<1>>();
        return hold.template operator()<4, BlockTeam<1>>();
      }
    }
    launch<read_again<Add, T, F>>(context, norm::grid_of(a.rows), dim3(quantize::threads_for(a.width, widest<T>)), a,
                                  to, options.groups);
  });
}

}  // namespace prequal::norm_quantize
