// Rows of tokens that belong to batches: y = gate[b] x + residual, its layer norm modulated by the row of the batch, and
// the gradients of both. Nothing of the size of the tokens is made of the rows [B, C] of gate, scale and shift.
//
// A team (a warp, a block) owns a token, which stays in its registers: each byte is read once. Rows that no team holds,
// and rows that are not whole words, are read again, from L2. Everything between a load and its store is fp32.
#pragma once

#include <algorithm>
#include <optional>
#include <stdexcept>
#include <string>

#include "prequal/add_teams.cuh"
#include "prequal/dispatch.h"
#include "prequal/host_device.h"
#include "prequal/launch.h"
#include "prequal/norm.cuh"
#include "prequal/row_plan.h"
#include "prequal/team.cuh"
#include "prequal/vec.cuh"

namespace prequal::sparse {

using norm::Rows;

// The batch of each token: listed in any order, or as offsets of runs.
struct Batches {
  const void* batch;  // [N] or null
  const void* ptr;    // [B + 1] or null
  bool wide;          // int64, else int32
  int64_t stride;     // elements from one to the next
  int64_t count;      // B

  __device__ __forceinline__ int64_t at(const void* from, int64_t place) const {
    return wide ? static_cast<const int64_t*>(from)[place * stride] : static_cast<const int32_t*>(from)[place * stride];
  }

  // -1 where the token has none.
  __device__ __forceinline__ int64_t of(int64_t token) const {
    if (batch) {
      const int64_t found = at(batch, token);
      return found >= 0 && found < count ? found : -1;
    }
    int64_t low = 0, high = count + 1;  // the first offset beyond the token
    while (low < high) {
      const int64_t middle = (low + high) / 2;
      if (at(ptr, middle) <= token) {
        low = middle + 1;
      } else {
        high = middle;
      }
    }
    return low > count ? -1 : low - 1;
  }
};

// A row for each batch, of x's dtype or fp32. Of no batch: NaN, which nobody can miss, and nothing is read.
template <class T>
struct Modulation {
  Parameter<T> rows;  // [B, C]
  int64_t stride;     // elements from row to row

  template <bool Ragged, int N>
  __device__ __forceinline__ void get(float (&value)[N], int64_t batch, int column, int width) const {
    if (batch < 0) {
#pragma unroll
      for (int i = 0; i < N; ++i) value[i] = __int_as_float(0x7fffffff);
      return;
    }
    const int64_t first = batch * stride;
    const Parameter<T> row{rows.same ? rows.same + first : nullptr, rows.full ? rows.full + first : nullptr};
    row.template get<Ragged>(value, column, width);
  }

  // of x's dtype, of whole words, and of a batch: nothing to ask for each word
  __device__ __forceinline__ bool plain(int64_t batch) const { return rows.same && batch >= 0; }
  __device__ __forceinline__ void get_plain(float (&value)[widest<T>], int64_t batch, int column, int width) const {
    const Packet<T> word = load_packet<false, true>(rows.same + batch * stride, column, width);
#pragma unroll
    for (int i = 0; i < widest<T>; ++i) value[i] = word[i];
  }
};

template <class T>
struct Forward {
  Rows<const T> x;         // [N, C]
  Rows<const T> residual;  // [N, C]; only where the kernel gates
  Rows<T> total;           // [N, C], gate x + residual; only where the kernel gates
  Rows<T> y;               // [N, C]; only where the kernel normalises
  Modulation<T> gate, scale, shift;
  Batches batches;
  int64_t rows;
  int width;
  float eps;
  float offset;  // of the scale
};

template <class T>
struct Backward {
  Rows<const T> grad;        // [N, C], of y; without a norm, of total
  Rows<const T> grad_total;  // [N, C], added to that of the norm; null for none
  Rows<const T> x;           // [N, C], what was normalised; only where the kernel normalises
  Rows<const T> gated;       // [N, C], what was gated; only where the kernel gates
  Rows<T> dx;                // [N, C], of what was normalised; only where the kernel normalises
  Rows<T> dgated;            // [N, C]; only where the kernel gates
  Modulation<T> gate, scale;
  float *dscale, *dshift, *dgate;  // [teams, B, C], sums over a team's rows; null where not asked for
  Batches batches;
  int64_t rows;
  int64_t rows_a_team;  // that follow each other: those of a batch are mostly neighbours
  int width;
  float eps;
  float offset;
};

// ---- forward -----------------------------------------------------------------------------------------------------

template <class T>
__device__ __forceinline__ Packet<T> gated(const float (&gate)[widest<T>], const Packet<T>& x,
                                           const Packet<T>& residual) {
  float value[widest<T>];
#pragma unroll
  for (int i = 0; i < widest<T>; ++i) value[i] = add(mul(gate[i], x[i]), residual[i]);  // the reference's bits
  return pack<T>(value);
}

template <class T>
__device__ __forceinline__ Packet<T> modulated(const Forward<T>& a, const Packet<T>& x, float mean, float rstd,
                                               const float (&scale)[widest<T>], const float (&shift)[widest<T>]) {
  float value[widest<T>];
#pragma unroll
  for (int i = 0; i < widest<T>; ++i) value[i] = (x[i] - mean) * rstd * (scale[i] + a.offset) + shift[i];
  return pack<T>(value);
}

template <class T, bool Ragged>
__device__ __forceinline__ Packet<T> gated_sum(const Forward<T>& a, int64_t batch, const Packet<T>& x,
                                               const Packet<T>& residual, int column) {
  float gate[widest<T>];
  a.gate.template get<Ragged>(gate, batch, column, a.width);
  return gated<T>(gate, x, residual);
}

template <class T, bool Ragged>
__device__ __forceinline__ void write_modulated(const Forward<T>& a, int64_t row, int64_t batch, const Packet<T>& x,
                                                float mean, float rstd, int column) {
  float scale[widest<T>], shift[widest<T>];
  a.scale.template get<Ragged>(scale, batch, column, a.width);
  a.shift.template get<Ragged>(shift, batch, column, a.width);
  store_packet<Ragged>(a.y.row(row), column, a.width, modulated<T>(a, x, mean, rstd, scale, shift));
}

// The mean, then the squares about it, out of registers.
template <class T, int Items, class Team, class Column>
__device__ __forceinline__ void statistics(Packet<T> (&held)[Items], Team& team, Column&& column, int width, float eps,
                                           float& mean, float& rstd) {
  float total[1] = {};
#pragma unroll
  for (int item = 0; item < Items; ++item) {
#pragma unroll
    for (int i = 0; i < widest<T>; ++i) total[0] += held[item][i];
  }
  team.sum(total);
  mean = total[0] / width;
  keep_packed(held);

  total[0] = 0.0f;
#pragma unroll
  for (int item = 0; item < Items; ++item) total[0] += norm::squares<true>(held[item], mean, column(item), width);
  team.sum(total);
  rstd = rsqrtf(total[0] / width + eps);
  keep_packed(held);
}

// Threads of a block, and how many blocks registers must leave room for on an SM: a warp's rows come 4 to a block. As many
// as no kernel needs a frame on the stack for.
template <class Team>
inline constexpr int most_threads = Team::kind == RowKind::warp ? 128 : 512;
template <class Team, bool Gate, int Items>
inline constexpr int least_blocks = Team::kind == RowKind::block ? 2
                                    : Items == 4                 ? (Gate ? 7 : 8)
                                    : Items == 2 && Gate         ? 10
                                                                 : 12;

template <bool Gate, bool Norm, class T, int Items, class Team>
__global__ void __launch_bounds__((most_threads<Team>), (least_blocks<Team, Gate, Items>))
    held_rows(const Forward<T> a) {
  constexpr int N = widest<T>;
  __shared__ typename Team::Shared shared;
  Team team(shared);
  const auto column = [&](int item) { return (item * team.threads() + team.thread()) * N; };
  for (int64_t row = team.index(); row < a.rows; row += team.count()) {
    Packet<T> held[Items];
#pragma unroll
    for (int item = 0; item < Items; ++item) held[item] = load_packet<false>(a.x.row(row), column(item), a.width);
    Packet<T> residual[Gate ? Items : 1];
    if constexpr (Gate) {
#pragma unroll
      for (int item = 0; item < Items; ++item) {
        residual[item] = load_packet<false>(a.residual.row(row), column(item), a.width);
      }
    }
    const int64_t batch = a.batches.of(row);

    // What a row can be asked is not asked of each of its words, whose loads then wait for each other: bf16 [30227, 1024]
    // took 42.8 us with such branches, the same kernel without any 33.1.
    if constexpr (Gate) {
      const auto gate_all = [&](auto&& sum) {
#pragma unroll
        for (int item = 0; item < Items; ++item) {
          held[item] = sum(held[item], residual[item], column(item));
          store_packet<false>(a.total.row(row), column(item), a.width, held[item]);
        }
      };
      // both, gated and normalised, 4 accesses of a thread of a block would not fit 64 registers
      constexpr bool asks = !(Norm && Team::kind == RowKind::block && Items == 4);
      if (asks && a.gate.plain(batch)) {
        gate_all([&](const Packet<T>& x, const Packet<T>& other, int at) {
          float gate[N];
          a.gate.get_plain(gate, batch, at, a.width);
          return gated<T>(gate, x, other);
        });
      } else {
        gate_all([&](const Packet<T>& x, const Packet<T>& other, int at) {
          return gated_sum<T, false>(a, batch, x, other, at);
        });
      }
    }
    if constexpr (Norm) {
      float mean, rstd;
      statistics<T>(held, team, column, a.width, a.eps, mean, rstd);
      if (a.scale.plain(batch) && a.shift.plain(batch)) {
#pragma unroll
        for (int item = 0; item < Items; ++item) {
          float scale[N], shift[N];
          a.scale.get_plain(scale, batch, column(item), a.width);
          a.shift.get_plain(shift, batch, column(item), a.width);
          const Packet<T> y = modulated<T>(a, held[item], mean, rstd, scale, shift);
          store_packet<false>(a.y.row(row), column(item), a.width, y);
        }
      } else {
#pragma unroll
        for (int item = 0; item < Items; ++item) {
          write_modulated<T, false>(a, row, batch, held[item], mean, rstd, column(item));
        }
      }
    }
  }
}

// Any width, any address: what does not stay in registers is read again.
template <bool Gate, bool Norm, class T>
__global__ void __launch_bounds__(512) read_again(const Forward<T> a) {
  __shared__ typename BlockTeam<1>::Shared shared;
  BlockTeam<1> team(shared);
  const int step = team.threads() * widest<T>;
  const auto each = [&](auto&& body) {
    for (int first = 0; first < a.width; first += step) body(first + team.thread() * widest<T>);
  };
  for (int64_t row = team.index(); row < a.rows; row += team.count()) {
    const int64_t batch = a.batches.of(row);
    const T* from = Gate ? a.total.row(row) : a.x.row(row);
    if constexpr (Gate) {
      each([&](int column) {
        const Packet<T> x = load_packet<true>(a.x.row(row), column, a.width);
        const Packet<T> residual = load_packet<true>(a.residual.row(row), column, a.width);
        // in place: a lane stores elements that its neighbour reads
        __syncwarp();
        store_packet<true>(a.total.row(row), column, a.width, gated_sum<T, true>(a, batch, x, residual, column));
      });
    }
    if constexpr (Norm) {
      if (Gate) __syncthreads();  // a thread stored elements of its neighbour's columns
      float total[1] = {};
      each([&](int column) {
        const Packet<T> x = load_packet<true>(from, column, a.width);
#pragma unroll
        for (int i = 0; i < widest<T>; ++i) total[0] += x[i];
      });
      team.sum(total);
      const float mean = total[0] / a.width;
      total[0] = 0.0f;
      each([&](int column) {
        total[0] += norm::squares<true>(load_packet<true>(from, column, a.width), mean, column, a.width);
      });
      team.sum(total);
      const float rstd = rsqrtf(total[0] / a.width + a.eps);
      each([&](int column) {
        write_modulated<T, true>(a, row, batch, load_packet<true>(from, column, a.width), mean, rstd, column);
      });
    }
  }
}

// whole: every row is made of whole words, at addresses of whole words.
template <bool Gate, bool Norm, class T>
void run(const Context& context, const Forward<T>& a, bool whole) {
  RowPlan plan = row_plan(a.width, widest<T>, 1024, 2048);
  if (!whole) {
    const int64_t accesses = (a.width + widest<T> - 1) / widest<T>;
    plan = {RowKind::loop, 1, whole_warps(std::min<int64_t>(512, accesses)), 1};
  }
  const auto start = [&]<auto kernel>() {
    launch<kernel>(context, norm::grid_of((a.rows + plan.rows - 1) / plan.rows), dim3(plan.threads), a);
  };
  switch (plan.kind) {
    case RowKind::warp:
      switch (plan.items) {
        case 1: return start.template operator()<held_rows<Gate, Norm, T, 1, WarpTeam<1>>>();
        case 2: return start.template operator()<held_rows<Gate, Norm, T, 2, WarpTeam<1>>>();
        case 4: return start.template operator()<held_rows<Gate, Norm, T, 4, WarpTeam<1>>>();
      }
      break;
    case RowKind::block:
      switch (plan.items) {
        case 2: return start.template operator()<held_rows<Gate, Norm, T, 2, BlockTeam<1>>>();
        case 4: return start.template operator()<held_rows<Gate, Norm, T, 4, BlockTeam<1>>>();
      }
      break;
    case RowKind::loop:
      plan.threads = std::min(plan.threads, 512);
      return start.template operator()<read_again<Gate, Norm, T>>();
  }
  throw std::logic_error("sparse: row_plan made a plan that no kernel follows");
}

// ---- backward ----------------------------------------------------------------------------------------------------
//
// With xhat = (x - mean) rstd and gw = grad (scale[b] + offset), means over the row:
//   dtotal = rstd (gw - mean(gw) - xhat mean(gw xhat)) + grad_total      (without a norm: grad)
//   dscale[b] = sum over the rows of b of grad xhat,   dshift[b] = of grad,   dgate[b] = of gated dtotal
//   dgated = gate[b] dtotal
// A team takes rows that follow each other and keeps the sums of one batch in registers, until another batch begins.
// The teams' sums are added in a fixed order.

struct Figures {
  float mean, rstd, gw, gw_xhat;  // of a row
};

template <class T, bool Ragged>
__device__ __forceinline__ void weighted(const Backward<T>& a, float (&gw)[widest<T>], const Packet<T>& grad,
                                         int64_t batch, int column) {
  a.scale.template get<Ragged>(gw, batch, column, a.width);
#pragma unroll
  for (int i = 0; i < widest<T>; ++i) gw[i] = column + i < a.width ? grad[i] * (gw[i] + a.offset) : 0.0f;
}

template <class T, bool Ragged>
__device__ __forceinline__ void first_sums(const Backward<T>& a, float (&sum)[2], const Packet<T>& grad,
                                           const Packet<T>& x, int64_t batch, int column) {
  float gw[widest<T>];
  weighted<T, Ragged>(a, gw, grad, batch, column);
#pragma unroll
  for (int i = 0; i < widest<T>; ++i) sum[0] += x[i], sum[1] += gw[i];
}

template <class T, bool Ragged>
__device__ __forceinline__ void second_sums(const Backward<T>& a, float (&sum)[2], const Packet<T>& grad,
                                            const Packet<T>& x, float mean, int64_t batch, int column) {
  float gw[widest<T>];
  weighted<T, Ragged>(a, gw, grad, batch, column);
#pragma unroll
  for (int i = 0; i < widest<T>; ++i) {
    const float centred = x[i] - mean;
    if (column + i < a.width) sum[0] += centred * centred;
    sum[1] += gw[i] * centred;
  }
}

template <class T>
__device__ __forceinline__ Figures figures(const Backward<T>& a, float mean, float gw, const float (&sum)[2]) {
  const float rstd = rsqrtf(sum[0] / a.width + a.eps);
  return {mean, rstd, gw, rstd * sum[1] / a.width};
}

// What the row adds to the sums of its batch in one packet: of scale, shift, gate.
template <class T>
struct Terms {
  float scale[widest<T>], shift[widest<T>], gate[widest<T>];
};

template <bool Gate, bool Norm, class T, bool Ragged>
__device__ __forceinline__ Terms<T> write_gradients(const Backward<T>& a, int64_t row, int64_t batch, const Figures& of,
                                                    const Packet<T>& grad, const Packet<T>& x, const Packet<T>& more,
                                                    const Packet<T>& gated, int column) {
  constexpr int N = widest<T>;
  Terms<T> terms{};
  float value[N];
  if constexpr (Norm) {
    weighted<T, Ragged>(a, value, grad, batch, column);
#pragma unroll
    for (int i = 0; i < N; ++i) {
      const float xhat = (x[i] - of.mean) * of.rstd;
      value[i] = of.rstd * (value[i] - of.gw - xhat * of.gw_xhat) + more[i];
      terms.scale[i] = grad[i] * xhat;
      terms.shift[i] = grad[i];
    }
    store_packet<Ragged>(a.dx.row(row), column, a.width, pack<T>(value));
  } else {
#pragma unroll
    for (int i = 0; i < N; ++i) value[i] = grad[i];
  }
  if constexpr (Gate) {
    float gate[N];
    a.gate.template get<Ragged>(gate, batch, column, a.width);
#pragma unroll
    for (int i = 0; i < N; ++i) {
      terms.gate[i] = gated[i] * value[i];
      gate[i] *= value[i];
    }
    store_packet<Ragged>(a.dgated.row(row), column, a.width, pack<T>(gate));
  }
  return terms;
}

// The sums of a team are its own memory, and a column of them its thread's.
template <class T>
__device__ __forceinline__ void clear(float* sums /*[teams, B, C]*/, const Backward<T>& a, int64_t team, int column) {
  if (!sums || column >= a.width) return;
  for (int64_t batch = 0; batch < a.batches.count; ++batch) {
    float* at = sums + (team * a.batches.count + batch) * a.width + column;
#pragma unroll
    for (int i = 0; i < widest<T>; ++i) {
      if (column + i < a.width) at[i] = 0.0f;
    }
  }
}

template <class T>
__device__ __forceinline__ void add_to(float* sums /*[teams, B, C]*/, const Backward<T>& a, int64_t team, int64_t batch,
                                       int column, const float (&value)[widest<T>]) {
  if (!sums || batch < 0 || column >= a.width) return;
  float* at = sums + (team * a.batches.count + batch) * a.width + column;
#pragma unroll
  for (int i = 0; i < widest<T>; ++i) {
    if (column + i < a.width) at[i] += value[i];
  }
}

// One access a thread.
template <bool Gate, bool Norm, class T>
__global__ void __launch_bounds__(512, 1) held_gradients(const Backward<T> a) {
  constexpr int N = widest<T>;
  __shared__ typename BlockTeam<2>::Shared shared;
  BlockTeam<2> team(shared);
  const int column = team.thread() * N;
  const int64_t mine = blockIdx.x, end = std::min((mine + 1) * a.rows_a_team, a.rows);
  float dscale[N] = {}, dshift[N] = {}, dgate[N] = {};
  if (Norm) clear(a.dscale, a, mine, column), clear(a.dshift, a, mine, column);
  if (Gate) clear(a.dgate, a, mine, column);

  int64_t current = -1;
  const auto keep_sums = [&] {
    if (Norm) add_to(a.dscale, a, mine, current, column, dscale), add_to(a.dshift, a, mine, current, column, dshift);
    if (Gate) add_to(a.dgate, a, mine, current, column, dgate);
#pragma unroll
    for (int i = 0; i < N; ++i) dscale[i] = dshift[i] = dgate[i] = 0.0f;
  };

  for (int64_t row = mine * a.rows_a_team; row < end; ++row) {
    Packet<T> grad[1], x[1] = {}, more{}, gated{};
    grad[0] = load_packet<false>(a.grad.row(row), column, a.width);
    if (Norm) x[0] = load_packet<false>(a.x.row(row), column, a.width);
    if (Norm && a.grad_total.at) more = load_packet<false>(a.grad_total.row(row), column, a.width);
    if (Gate) gated = load_packet<false>(a.gated.row(row), column, a.width);
    const int64_t batch = a.batches.of(row);
    if (batch != current) {
      keep_sums();
      current = batch;
    }

    Figures of{};
    if constexpr (Norm) {
      float sum[2] = {};
      first_sums<T, false>(a, sum, grad[0], x[0], batch, column);
      team.sum(sum);
      const float mean = sum[0] / a.width, gw = sum[1] / a.width;
      keep_packed(x), keep_packed(grad);
      sum[0] = sum[1] = 0.0f;
      second_sums<T, false>(a, sum, grad[0], x[0], mean, batch, column);
      team.sum(sum);
      of = figures(a, mean, gw, sum);
      keep_packed(x), keep_packed(grad);
    }
    const Terms<T> terms = write_gradients<Gate, Norm, T, false>(a, row, batch, of, grad[0], x[0], more, gated, column);
#pragma unroll
    for (int i = 0; i < N; ++i) {
      if (Norm) dscale[i] += terms.scale[i], dshift[i] += terms.shift[i];
      if (Gate) dgate[i] += terms.gate[i];
    }
  }
  keep_sums();
}

template <bool Gate, bool Norm, class T>
__global__ void __launch_bounds__(512, 1) read_again_gradients(const Backward<T> a) {
  __shared__ typename BlockTeam<2>::Shared shared;
  BlockTeam<2> team(shared);
  const int step = team.threads() * widest<T>;
  const auto each = [&](auto&& body) {
    for (int first = 0; first < a.width; first += step) body(first + team.thread() * widest<T>);
  };
  const int64_t mine = blockIdx.x, end = std::min((mine + 1) * a.rows_a_team, a.rows);
  each([&](int column) {
    if (Norm) clear(a.dscale, a, mine, column), clear(a.dshift, a, mine, column);
    if (Gate) clear(a.dgate, a, mine, column);
  });
  for (int64_t row = mine * a.rows_a_team; row < end; ++row) {
    const int64_t batch = a.batches.of(row);
    const auto load_of = [&](const Rows<const T>& rows, int column) {
      return rows.at ? load_packet<true>(rows.row(row), column, a.width) : Packet<T>{};
    };
    Figures of{};
    if constexpr (Norm) {
      float sum[2] = {};
      each([&](int column) {
        first_sums<T, true>(a, sum, load_of(a.grad, column), load_of(a.x, column), batch, column);
      });
      team.sum(sum);
      const float mean = sum[0] / a.width, gw = sum[1] / a.width;
      sum[0] = sum[1] = 0.0f;
      each([&](int column) {
        second_sums<T, true>(a, sum, load_of(a.grad, column), load_of(a.x, column), mean, batch, column);
      });
      team.sum(sum);
      of = figures(a, mean, gw, sum);
    }
    each([&](int column) {
      const Terms<T> terms =
          write_gradients<Gate, Norm, T, true>(a, row, batch, of, load_of(a.grad, column), load_of(a.x, column),
                                               load_of(a.grad_total, column), load_of(a.gated, column), column);
      if constexpr (Norm) {
        add_to(a.dscale, a, mine, batch, column, terms.scale);
        add_to(a.dshift, a, mine, batch, column, terms.shift);
      }
      if constexpr (Gate) add_to(a.dgate, a, mine, batch, column, terms.gate);
    });
  }
}

// What a launcher wants to have of the gradients of gate, scale and shift; null for none of it.
struct Wanted {
  const Buffer *scale, *shift, *gate;  // [B, C]
};

// At 16 rows a team and batch, its sums are few bytes beside its rows'; and they are some 64 MB at most.
inline constexpr int64_t most_sums = int64_t{1} << 24;

template <bool Gate, bool Norm, class T>
void gradients(const Context& context, Backward<T>& a, bool whole, const Wanted& wanted) {
  const int64_t size = a.batches.count * a.width;
  const int64_t kinds = (wanted.scale ? 1 : 0) + (wanted.shift ? 1 : 0) + (wanted.gate ? 1 : 0);
  int64_t teams = 0;
  std::optional<Buffer> partial;
  const auto go = [&]<auto kernel>(int threads) {
    const int64_t room = size > 0 ? std::max<int64_t>(1, most_sums / size) : a.rows;
    const int64_t few = std::max<int64_t>(1, a.rows / (16 * std::max<int64_t>(1, a.batches.count)));
    const int64_t resident = resident_blocks<kernel>(context, threads);
    a.rows_a_team = (a.rows + std::min({room, few, resident}) - 1) / std::min({room, few, resident});
    teams = (a.rows + a.rows_a_team - 1) / a.rows_a_team;
    if (kinds > 0 && size > 0) {
      partial.emplace(context.empty({kinds, teams, size}, DType::f32));
      auto* next = partial->template as<float>();
      const auto take = [&](const Buffer* asked) {
        float* mine = asked ? next : nullptr;
        if (asked) next += teams * size;
        return mine;
      };
      a.dscale = take(wanted.scale), a.dshift = take(wanted.shift), a.dgate = take(wanted.gate);
    }
    launch<kernel>(context, norm::grid_of(teams), dim3(threads), a);
  };
  const int64_t accesses = (a.width + widest<T> - 1) / widest<T>;
  if (a.rows > 0 && a.width > 0) {
    if (whole && accesses <= 512) {
      go.template operator()<held_gradients<Gate, Norm, T>>(whole_warps(accesses));
    } else {
      go.template operator()<read_again_gradients<Gate, Norm, T>>(whole_warps(std::min<int64_t>(512, accesses)));
    }
  }
  if (size == 0) return;
  for (const auto& [out, sums] :
       {std::pair(wanted.scale, a.dscale), {wanted.shift, a.dshift}, {wanted.gate, a.dgate}}) {
    if (!out) continue;
    dispatch(out->view().dtype, Floats{}, [&]<class P>() {
      launch<add_teams<P>>(context, dim3(static_cast<unsigned>((size + 31) / 32)), dim3(1024),
                           static_cast<const float*>(sums), out->template as<P>(), teams, size, static_cast<int>(size));
    });
  }
}

// ---- what the launchers share ------------------------------------------------------------------------------------

inline constexpr int64_t widest_row = int64_t{1} << 30;
inline constexpr int64_t most_modulation = int64_t{1} << 30;  // elements of scale: sums over batches are counted in int

inline void must_be_tokens(const Tensor& x, const char* argument) {
  if (x.rank != 2) wrong_value(argument, "shape [N, C]", shape_of(x));
}

inline void must_be_like(const Tensor& x, const char* argument, const Tensor& other, const char* name) {
  norm::must_be_like(x, argument, other, name);
  if (x.dtype != other.dtype) {
    wrong_type(argument, std::string(name_of(other.dtype)) + " like " + name, name_of(x.dtype));
  }
}

// [B, C], floating like `other` where there is one.
inline void must_modulate(const Tensor& rows, const char* argument, const Tensor& x) {
  if (rows.rank == 2 && rows.shape[1] == x.shape[1]) return;
  std::string wanted("shape [B, ");
  wanted.append(std::to_string(x.shape[1])).append("]");
  wrong_value(argument, wanted, shape_of(rows));
}

inline void must_share(const Tensor& rows, const char* argument, const Tensor& other, const char* name) {
  norm::must_be_like(rows, argument, other, name);
  if (rows.dtype != other.dtype) {
    wrong_type(argument, std::string(name_of(other.dtype)) + " like " + name, name_of(rows.dtype));
  }
}

// One of batch [N] and ptr [B + 1].
inline Batches batches_of(const std::optional<Tensor>& batch, const std::optional<Tensor>& ptr, int64_t tokens,
                          int64_t count) {
  if (!batch && !ptr) wrong_type("batch", "a torch.Tensor where ptr is None", "NoneType");
  if (batch && ptr) wrong_type("ptr", "None beside batch", "Tensor");
  const Tensor& given = batch ? *batch : *ptr;
  const char* name = batch ? "batch" : "ptr";
  if (given.dtype != DType::i32 && given.dtype != DType::i64) wrong_type(name, "int32 or int64", name_of(given.dtype));
  const int64_t entries = batch ? tokens : count + 1;
  if (given.rank != 1 || given.shape[0] != entries) {
    wrong_value(name, "shape [" + std::to_string(entries) + "]", shape_of(given));
  }
  Batches out{};
  (batch ? out.batch : out.ptr) = given.data;
  out.wide = given.dtype == DType::i64, out.stride = given.stride[0], out.count = count;
  return out;
}

// Gathers whether every row begins at a 16-byte word.
template <class T>
class Alignment : public norm::Alignment<T> {
 public:
  explicit Alignment(int64_t width) : norm::Alignment<T>(width) {}

  Modulation<T> modulation(const Tensor& rows, DType dtype) {
    if (rows.shape[1] > 1 && rows.stride[1] != 1) throw Refused{"unit_stride"};
    Modulation<T> out{};
    if (rows.dtype == dtype) {
      out.rows.same = rows.as<const T>();
    } else if (rows.dtype == DType::f32) {
      out.rows.full = rows.as<const float>();
    } else {
      throw Refused{"dtype"};
    }
    out.stride = rows.stride[0];
    modulations_whole_ =
        modulations_whole_ && aligned(rows.data, rows.shape[0] > 1 ? out.stride * rows.itemsize : 0, 16);
    return out;
  }

  bool whole() const { return norm::Alignment<T>::whole() && modulations_whole_; }

 private:
  bool modulations_whole_ = true;
};

inline void must_fit(const Tensor& x, const Tensor& modulation) {
  if (x.shape[1] > widest_row || modulation.shape[0] * std::max<int64_t>(1, x.shape[1]) > most_modulation) {
    throw Refused{"size"};
  }
}

}  // namespace prequal::sparse
