// Normalisation of rows, and its gradient: the kernels of rms_norm, fused_add_rms_norm and layer_norm.
//
// A team (a warp, a block, a cluster of blocks) owns a row, which stays in its registers: each byte is read once. Rows
// that no team can hold are read again, the second time from L2. Everything between a load and its store is fp32.
#pragma once

#include <algorithm>
#include <optional>
#include <stdexcept>
#include <string>

#include "prequal/dispatch.h"
#include "prequal/launch.h"
#include "prequal/row_plan.h"
#include "prequal/team.cuh"
#include "prequal/vec.cuh"

namespace prequal::norm {

enum class Kind { rms, layer };

template <class T>
struct Rows {
  T* at;           // [rows, H]
  int64_t stride;  // elements from row to row

  __device__ __forceinline__ T* row(int64_t row) const { return at + row * stride; }
};

template <class T>
struct Forward {
  Rows<const T> x;      // [rows, H]
  Rows<const T> other;  // [rows, H], added to x; only where the kernel adds
  Rows<T> sum;          // [rows, H], x + other; only where the kernel adds
  Rows<T> y;            // [rows, H]
  Parameter<T> weight;  // [H] or none
  Parameter<T> bias;    // [H] or none
  int64_t rows;
  int width;
  float eps;
  float offset;  // of the weight
  bool exact;    // round x * rstd to T before the weight
};

template <class T>
struct Backward {
  Rows<const T> grad;   // [rows, H]
  Rows<const T> x;      // [rows, H]
  Rows<const T> more;   // [rows, H], added to dx; null for none
  Rows<T> dx;           // [rows, H]
  Parameter<T> weight;  // [H] or none
  float* dweight;       // [teams, partial_stride], sums over a team's rows; null where it is not asked for
  float* dbias;         // [teams, partial_stride]; null where it is not asked for
  int64_t partial_stride;
  int64_t rows;
  int width;
  float eps;
  float offset;
};

// ---- forward -----------------------------------------------------------------------------------------------------

template <Kind kind, class T, bool Ragged>
__device__ __forceinline__ void write_packet(const Forward<T>& a, T* y, const Packet<T>& x, float mean, float rstd,
                                             int column) {
  constexpr int N = widest<T>;
  float value[N], parameter[N];
#pragma unroll
  for (int i = 0; i < N; ++i) value[i] = (x[i] - mean) * rstd;
  if (a.exact) {
#pragma unroll
    for (int i = 0; i < N; ++i) value[i] = rounded<T>(value[i]);
  }
  if (a.weight) {
    a.weight.template get<Ragged>(parameter, column, a.width);
#pragma unroll
    for (int i = 0; i < N; ++i) value[i] *= parameter[i] + a.offset;
  }
  if (kind == Kind::layer && a.bias) {
    a.bias.template get<Ragged>(parameter, column, a.width);
#pragma unroll
    for (int i = 0; i < N; ++i) value[i] += parameter[i];
  }
  store_packet<Ragged>(y, column, a.width, pack<T>(value));
}

template <class T>
__device__ __forceinline__ Packet<T> added(const Packet<T>& a, const Packet<T>& b) {
  float value[widest<T>];
#pragma unroll
  for (int i = 0; i < widest<T>; ++i) value[i] = a[i] + b[i];
  return pack<T>(value);
}

// What column i of a packet adds to the sum: (x - mean)^2, and nothing beyond the row.
template <bool Guarded, class T>
__device__ __forceinline__ float squares(const Packet<T>& x, float mean, int column, int width) {
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < widest<T>; ++i) {
    const float value = x[i] - mean;
    if (!Guarded || column + i < width) sum += value * value;
  }
  return sum;
}

// Resident blocks decide: rms_norm of bf16 [16384, 4096] took 69.7 us at no more than 40 registers (6 blocks of 256
// threads on an SM of sm_90), 77.8 at 48, 72.6 at 32; a persistent grid that holds the weight and fetches the next row
// ahead, 73.5 at best. A block of 1024 may have 64, in which 4 items of a ragged row or of layer norm's find no room.
// Layer norm's ragged rows have none for 4 items at all, and for 2 only where no second block must fit. A warp's rows come
// 4 to a block, and a cluster's 4 items are for blocks of any size.
template <Kind kind, int Items, bool Ragged>
constexpr int most_threads(RowKind team) {
  if (team == RowKind::warp) return 128;
  if (Items == 2) return 512;
  if (team == RowKind::cluster) return 1024;
  if (Ragged && kind == Kind::layer) return 256;
  return Ragged || kind == Kind::layer ? 512 : 1024;
}
template <Kind kind, int Items, bool Ragged>
constexpr int least_blocks(RowKind team) {
  if (team == RowKind::warp || Items != 2) return 1;
  return !Ragged ? 3 : kind == Kind::rms ? 2 : 1;
}

template <Kind kind, bool Add, class T, bool Ragged, int Items, class Team>
__global__ void __launch_bounds__((most_threads<kind, Items, Ragged>(Team::kind)),
                                  (least_blocks<kind, Items, Ragged>(Team::kind))) held_rows(const Forward<T> a) {
  constexpr int N = widest<T>;
  __shared__ typename Team::Shared shared;
  Team team(shared);
  for (int64_t row = team.index(); row < a.rows; row += team.count()) {
    const auto column = [&](int item) { return (item * team.threads() + team.thread()) * N; };
    Packet<T> held[Items];
#pragma unroll
    for (int item = 0; item < Items; ++item) held[item] = load_packet<Ragged>(a.x.row(row), column(item), a.width);
    if constexpr (Add) {
      constexpr int at_once = Items < 2 ? Items : 2;  // 4 would not leave 64 registers for the shifts of a ragged row
#pragma unroll
      for (int first = 0; first < Items; first += at_once) {
        Packet<T> other[at_once];
#pragma unroll
        for (int i = 0; i < at_once; ++i) {
          other[i] = load_packet<Ragged>(a.other.row(row), column(first + i), a.width);
        }
#pragma unroll
        for (int i = 0; i < at_once; ++i) {
          held[first + i] = added<T>(held[first + i], other[i]);
          store_packet<Ragged>(a.sum.row(row), column(first + i), a.width, held[first + i]);
        }
      }
    }

    float mean = 0.0f;
    if constexpr (kind == Kind::layer) {
      float total[1] = {};
#pragma unroll
      for (int item = 0; item < Items; ++item) {
#pragma unroll
        for (int i = 0; i < N; ++i) total[0] += held[item][i];
      }
      team.sum(total);
      mean = total[0] / a.width;
      keep_packed(held);
    }
    float total[1] = {};
#pragma unroll
    for (int item = 0; item < Items; ++item) {
      total[0] += squares < kind == Kind::layer > (held[item], mean, column(item), a.width);
    }
    team.sum(total);
    const float rstd = rsqrtf(total[0] / a.width + a.eps);
    keep_packed(held);

#pragma unroll
    for (int item = 0; item < Items; ++item) {
      write_packet<kind, T, Ragged>(a, a.y.row(row), held[item], mean, rstd, column(item));
    }
  }
  team.leave();
}

template <Kind kind, bool Add, class T, bool Ragged>
__global__ void __launch_bounds__(1024) read_twice(const Forward<T> a) {
  constexpr int N = widest<T>;
  __shared__ typename BlockTeam<1>::Shared shared;
  BlockTeam<1> team(shared);
  const int step = team.threads() * N;
  for (int64_t row = team.index(); row < a.rows; row += team.count()) {
    const T* x = Add ? a.sum.row(row) : a.x.row(row);
    float mean = 0.0f, total[1] = {};
    for (int first = 0; first < a.width; first += step) {
      const int column = first + team.thread() * N;
      Packet<T> held = load_packet<Ragged>(a.x.row(row), column, a.width);
      if constexpr (Add) {
        held = added<T>(held, load_packet<Ragged>(a.other.row(row), column, a.width));
        store_packet<Ragged>(a.sum.row(row), column, a.width, held);
      }
      if constexpr (kind == Kind::layer) {
#pragma unroll
        for (int i = 0; i < N; ++i) total[0] += held[i];
      } else {
        total[0] += squares<false>(held, 0.0f, column, a.width);
      }
    }
    team.sum(total);  // and what the block stored is seen by the block
    if constexpr (kind == Kind::layer) {
      mean = total[0] / a.width;
      total[0] = 0.0f;
      for (int first = 0; first < a.width; first += step) {
        const int column = first + team.thread() * N;
        total[0] += squares<true>(load_packet<Ragged>(x, column, a.width), mean, column, a.width);
      }
      team.sum(total);
    }
    const float rstd = rsqrtf(total[0] / a.width + a.eps);

    for (int first = 0; first < a.width; first += step) {
      const int column = first + team.thread() * N;
      write_packet<kind, T, Ragged>(a, a.y.row(row), load_packet<Ragged>(x, column, a.width), mean, rstd, column);
    }
  }
}

inline dim3 grid_of(int64_t blocks, int multiple = 1) {
  const int64_t most = 0x7fffffff / multiple * multiple;
  return dim3(static_cast<unsigned>(std::min(blocks, most)));
}

template <Kind kind, bool Add, class T, bool Ragged>
void run(const Context& context, const Forward<T>& a) {
  const bool clusters = has_clusters<held_rows<kind, Add, T, Ragged, 2, ClusterTeam<1>>>(context);
  const RowPlan plan = row_plan(a.width, widest<T>, clusters, most_threads<kind, 4, Ragged>(RowKind::block));
  const auto start = [&]<auto kernel>() {
    launch<kernel>(context, grid_of((a.rows + plan.rows - 1) / plan.rows), dim3(plan.threads), a);
  };
  const auto start_clusters = [&]<auto kernel>() {
    launch_clusters<kernel>(context, plan.blocks, grid_of(a.rows * plan.blocks, plan.blocks), dim3(plan.threads), a);
  };

  switch (plan.kind) {
    case RowKind::warp:
      switch (plan.items) {
        case 1: return start.template operator()<held_rows<kind, Add, T, Ragged, 1, WarpTeam<1>>>();
        case 2: return start.template operator()<held_rows<kind, Add, T, Ragged, 2, WarpTeam<1>>>();
        case 4: return start.template operator()<held_rows<kind, Add, T, Ragged, 4, WarpTeam<1>>>();
      }
      break;
    case RowKind::block:
      switch (plan.items) {
        case 2: return start.template operator()<held_rows<kind, Add, T, Ragged, 2, BlockTeam<1>>>();
        case 4: return start.template operator()<held_rows<kind, Add, T, Ragged, 4, BlockTeam<1>>>();
      }
      break;
    case RowKind::cluster:
      switch (plan.items) {
        case 2: return start_clusters.template operator()<held_rows<kind, Add, T, Ragged, 2, ClusterTeam<1>>>();
        case 4: return start_clusters.template operator()<held_rows<kind, Add, T, Ragged, 4, ClusterTeam<1>>>();
      }
      break;
    case RowKind::loop: return start.template operator()<read_twice<kind, Add, T, Ragged>>();
  }
  throw std::logic_error("norm: row_plan made a plan that no kernel follows");
}

// ---- backward ----------------------------------------------------------------------------------------------------
//
// With xhat = (x - mean) rstd and gw = grad (weight + offset), means over the row:
//   dx = rstd (gw - [mean(gw)] - xhat mean(gw xhat)) + more,   dweight = sum over rows of grad xhat,   dbias = of grad
// [mean(gw)] is layer norm's alone. A thread keeps its columns over all rows of its team, so their sums are registers.

template <class T, bool Ragged>
__device__ __forceinline__ void weighted(const Backward<T>& a, float (&value)[widest<T>], const Packet<T>& grad,
                                         int column) {
#pragma unroll
  for (int i = 0; i < widest<T>; ++i) value[i] = grad[i];
  if (a.weight) {
    float weight[widest<T>];
    a.weight.template get<Ragged>(weight, column, a.width);
#pragma unroll
    for (int i = 0; i < widest<T>; ++i) value[i] *= weight[i] + a.offset;
  }
}

// What a packet adds to the first sums (layer norm: of x and of gw) and to the second (of squares and of gw (x -
// mean)).
template <class T, bool Ragged>
__device__ __forceinline__ void first_sums(const Backward<T>& a, float (&sum)[2], const Packet<T>& grad,
                                           const Packet<T>& x, int column) {
  float gw[widest<T>];
  weighted<T, Ragged>(a, gw, grad, column);
#pragma unroll
  for (int i = 0; i < widest<T>; ++i) sum[0] += x[i], sum[1] += gw[i];
}

template <Kind kind, class T, bool Ragged>
__device__ __forceinline__ void second_sums(const Backward<T>& a, float (&sum)[2], const Packet<T>& grad,
                                            const Packet<T>& x, float mean, int column) {
  float gw[widest<T>];
  weighted<T, Ragged>(a, gw, grad, column);
#pragma unroll
  for (int i = 0; i < widest<T>; ++i) {
    const float centred = x[i] - mean;
    if (kind == Kind::rms || column + i < a.width) sum[0] += centred * centred;
    sum[1] += gw[i] * centred;  // beyond the row gw is zero
  }
}

struct RowFigures {
  float mean, rstd, gw, gw_xhat;  // means, of which rms has the last two only as zero and itself
};

template <class T>
__device__ __forceinline__ RowFigures figures(const Backward<T>& a, float mean, float gw, const float (&sum)[2]) {
  const float rstd = rsqrtf(sum[0] / a.width + a.eps);
  return {mean, rstd, gw, rstd * sum[1] / a.width};
}

template <class T, bool Ragged>
__device__ __forceinline__ void write_gradient(const Backward<T>& a, int64_t row, const RowFigures& of,
                                               const Packet<T>& grad, const Packet<T>& x, const Packet<T>& more,
                                               int column) {
  float value[widest<T>];
  weighted<T, Ragged>(a, value, grad, column);
#pragma unroll
  for (int i = 0; i < widest<T>; ++i) {
    const float xhat = (x[i] - of.mean) * of.rstd;
    value[i] = of.rstd * (value[i] - of.gw - xhat * of.gw_xhat) + more[i];
  }
  store_packet<Ragged>(a.dx.row(row), column, a.width, pack<T>(value));
}

// Threads: up to Most, at registers that leave room for Least such blocks on an SM.
template <Kind kind, class T, bool Ragged, int Items, class Team, int Most, int Least>
__global__ void __launch_bounds__(Most, Least) held_gradient(const Backward<T> a) {
  constexpr int N = widest<T>;
  constexpr int biases = kind == Kind::layer ? Items : 0;
  __shared__ typename Team::Shared shared;
  Team team(shared);
  const auto column = [&](int item) { return (item * team.threads() + team.thread()) * N; };
  float dweight[Items][N] = {}, dbias[biases + 1][N] = {};
  for (int64_t row = team.index(); row < a.rows; row += team.count()) {
    Packet<T> x[Items], grad[Items], more[Items];
#pragma unroll
    for (int item = 0; item < Items; ++item) {
      x[item] = load_packet<Ragged>(a.x.row(row), column(item), a.width);
      grad[item] = load_packet<Ragged>(a.grad.row(row), column(item), a.width);
    }
#pragma unroll
    for (int item = 0; item < Items; ++item) {
      more[item] = Packet<T>{};
      if (kind == Kind::rms && a.more.at) more[item] = load_packet<Ragged>(a.more.row(row), column(item), a.width);
    }

    float mean = 0.0f, mean_gw = 0.0f;
    if constexpr (kind == Kind::layer) {
      float sum[2] = {};
#pragma unroll
      for (int item = 0; item < Items; ++item) first_sums<T, Ragged>(a, sum, grad[item], x[item], column(item));
      team.sum(sum);
      mean = sum[0] / a.width, mean_gw = sum[1] / a.width;
      keep_packed(x), keep_packed(grad);
    }
    float sum[2] = {};
#pragma unroll
    for (int item = 0; item < Items; ++item) {
      second_sums<kind, T, Ragged>(a, sum, grad[item], x[item], mean, column(item));
    }
    team.sum(sum);
    const RowFigures of = figures(a, mean, mean_gw, sum);
    keep_packed(x), keep_packed(grad);

#pragma unroll
    for (int item = 0; item < Items; ++item) {
      write_gradient<T, Ragged>(a, row, of, grad[item], x[item], more[item], column(item));
#pragma unroll
      for (int i = 0; i < N; ++i) {
        const float g = grad[item][i];
        dweight[item][i] += g * ((x[item][i] - of.mean) * of.rstd);
        if constexpr (kind == Kind::layer) dbias[item][i] += g;
      }
    }
  }
  team.leave();

  const int64_t mine = team.index() * a.partial_stride;
#pragma unroll
  for (int item = 0; item < Items; ++item) {
    if (column(item) >= a.width) continue;
#pragma unroll
    for (int i = 0; i < N; i += 4) {
      const auto four = [](const float(&of)[N], int at) {
        return Vec<float, 4>{of[at], of[at + 1], of[at + 2], of[at + 3]};
      };
      if (a.dweight) store(a.dweight + mine + column(item) + i, four(dweight[item], i));
      if constexpr (kind == Kind::layer) {
        if (a.dbias) store(a.dbias + mine + column(item) + i, four(dbias[item], i));
      }
    }
  }
}

// Rows that no team holds: read once more, from L2, and the sums over columns kept in memory by the thread that owns
// them.
template <Kind kind, class T, bool Ragged>
__global__ void __launch_bounds__(512) read_again_gradient(const Backward<T> a) {
  constexpr int N = widest<T>;
  __shared__ typename BlockTeam<2>::Shared shared;
  BlockTeam<2> team(shared);
  const int step = team.threads() * N;
  const auto each = [&](auto&& body) {
    for (int first = 0; first < a.width; first += step) body(first + team.thread() * N);
  };
  const int64_t mine = team.index() * a.partial_stride;
  for (int64_t row = team.index(); row < a.rows; row += team.count()) {
    const bool first_row = row == team.index();
    const auto load_both = [&](int column, Packet<T>& grad, Packet<T>& x) {
      x = load_packet<Ragged>(a.x.row(row), column, a.width);
      grad = load_packet<Ragged>(a.grad.row(row), column, a.width);
    };
    Packet<T> grad, x;
    float mean = 0.0f, mean_gw = 0.0f;
    if constexpr (kind == Kind::layer) {
      float sum[2] = {};
      each([&](int column) {
        load_both(column, grad, x);
        first_sums<T, Ragged>(a, sum, grad, x, column);
      });
      team.sum(sum);
      mean = sum[0] / a.width, mean_gw = sum[1] / a.width;
    }
    float sum[2] = {};
    each([&](int column) {
      load_both(column, grad, x);
      second_sums<kind, T, Ragged>(a, sum, grad, x, mean, column);
    });
    team.sum(sum);
    const RowFigures of = figures(a, mean, mean_gw, sum);

    each([&](int column) {
      load_both(column, grad, x);
      Packet<T> more = Packet<T>{};
      if (kind == Kind::rms && a.more.at) more = load_packet<Ragged>(a.more.row(row), column, a.width);
      write_gradient<T, Ragged>(a, row, of, grad, x, more, column);
      if (column >= a.width) return;
#pragma unroll
      for (int i = 0; i < N; i += 4) {
        const auto keep = [&](float* sums, auto&& term) {
          Vec<float, 4> four{};
          if (!first_row) four = load<4>(sums + mine + column + i);
#pragma unroll
          for (int j = 0; j < 4; ++j) four.at[j] += term(i + j);
          store(sums + mine + column + i, four);
        };
        const auto g = [&](int j) { return grad[j]; };
        if (a.dweight) keep(a.dweight, [&](int j) { return g(j) * ((x[j] - of.mean) * of.rstd); });
        if (kind == Kind::layer && a.dbias) keep(a.dbias, g);
      }
    });
  }
}

// The sums of the teams, added in a fixed order. A block takes 32 columns, 32 threads a column.
template <class T>
__global__ void __launch_bounds__(1024)
    add_teams(const float* __restrict__ partial /*[teams, stride]*/, T* __restrict__ out /*[H]*/, int64_t teams,
              int64_t stride, int width) {
  __shared__ float scratch[32][33];
  const int column = blockIdx.x * 32 + threadIdx.x % 32, slice = threadIdx.x / 32;
  float sum = 0.0f;
  if (column < width) {
#pragma unroll 4
    for (int64_t team = slice; team < teams; team += 32) sum += partial[team * stride + column];
  }
  scratch[slice][threadIdx.x % 32] = sum;
  __syncthreads();

  sum = warp_sum(scratch[threadIdx.x % 32][slice]);
  const int own = blockIdx.x * 32 + slice;
  if (threadIdx.x % 32 == 0 && own < width) out[own] = from_float<T>(sum);
}

// `start(teams)` gives the sums of that many teams their memory.
template <Kind kind, class T, bool Ragged, class Start>
int64_t run(const Context& context, Backward<T>& a, Start&& start) {
  // 80 registers hold rms norm's sums of columns, but not layer norm's two nor the shifts of a ragged row
  constexpr int small = kind == Kind::rms && !Ragged ? 3 : 2, large = 1;
  constexpr auto in_small_block = held_gradient<kind, T, Ragged, 2, BlockTeam<2>, 256, small>;
  constexpr auto in_large_block = held_gradient<kind, T, Ragged, 2, BlockTeam<2>, 512, large>;
  constexpr auto in_small_cluster = held_gradient<kind, T, Ragged, 2, ClusterTeam<2>, 256, small>;
  constexpr auto in_large_cluster = held_gradient<kind, T, Ragged, 2, ClusterTeam<2>, 512, large>;
  const RowPlan plan = gradient_plan(a.width, widest<T>, has_clusters<in_small_cluster>(context));
  int64_t teams = 0;
  const auto go = [&]<auto kernel>() {
    const int64_t resident = resident_blocks<kernel>(context, plan.threads) * plan.rows;
    teams = gradient_teams(a.rows, resident);
    teams = (teams + plan.rows - 1) / plan.rows * plan.rows;
    start(teams);
    launch<kernel>(context, grid_of(teams / plan.rows), dim3(plan.threads), a);
  };
  const auto go_in_clusters = [&]<auto kernel>() {
    teams = gradient_teams(a.rows, std::max<int64_t>(1, resident_blocks<kernel>(context, plan.threads) / plan.blocks));
    start(teams);
    launch_clusters<kernel>(context, plan.blocks, grid_of(teams * plan.blocks, plan.blocks), dim3(plan.threads), a);
  };

  const bool is_small = plan.threads <= 256;
  switch (plan.kind) {
    case RowKind::warp: go.template operator()<held_gradient<kind, T, Ragged, 1, WarpTeam<2>, 128, 6>>(); break;
    case RowKind::block:
      is_small ? go.template operator()<in_small_block>() : go.template operator()<in_large_block>();
      break;
    case RowKind::cluster:
      is_small ? go_in_clusters.template operator()<in_small_cluster>()
               : go_in_clusters.template operator()<in_large_cluster>();
      break;
    case RowKind::loop: go.template operator()<read_again_gradient<kind, T, Ragged>>(); break;
  }
  return teams;
}

// ---- what the launchers of the three ops share ---------------------------------------------------------------------

inline constexpr int64_t widest_row = int64_t{1}
                                      << 30;  // columns are counted in int, with room for a step past the end

inline int64_t width_of(const Tensor& x, const char* argument) {
  if (x.rank < 1) wrong_value(argument, "at least one dimension", "a 0-dimensional tensor");
  return x.shape[x.rank - 1];
}

inline void must_fit(const std::optional<Tensor>& parameter, const char* argument, int64_t width, const char* x) {
  if (!parameter || (parameter->rank == 1 && parameter->shape[0] == width)) return;
  wrong_value(argument, "shape [" + std::to_string(width) + "] to match the last dimension of " + x,
              shape_of(*parameter));
}

inline void must_be_like(const Tensor& x, const char* argument, const Tensor& other, const char* name) {
  const bool same = x.rank == other.rank && std::equal(x.shape.begin(), x.shape.begin() + x.rank, other.shape.begin());
  if (!same) wrong_value(argument, "the shape " + shape_of(other) + " of " + name, shape_of(x));
}

// Gathers whether every row begins at a 16-byte word: the plain kernels, else the ragged ones.
template <class T>
class Alignment {
 public:
  explicit Alignment(int64_t width) : whole_(width % widest<T> == 0) {}

  template <class U>
  Rows<U> rows(const Tensor& x) {
    const prequal::Rows found = rows_of(x);
    const auto* at = x.as<U>();
    whole_ = whole_ && aligned(at, found.count > 1 ? found.stride * static_cast<int64_t>(sizeof(T)) : 0, 16);
    return {x.as<U>(), found.stride};
  }

  Parameter<T> parameter(const std::optional<Tensor>& given, DType dtype) {
    Parameter<T> out{};
    if (!given) return out;
    if (given->stride[0] != 1 && given->shape[0] > 1) throw Refused{"unit_stride"};
    if (given->dtype == dtype) {
      out.same = given->as<const T>();
    } else if (given->dtype == DType::f32) {
      out.full = given->as<const float>();
    } else {
      throw Refused{"dtype"};
    }
    whole_ = whole_ && aligned(given->data, 0, 16);
    return out;
  }

  bool whole() const { return whole_; }

 private:
  bool whole_;
};

// One gradient of a parameter out of the sums of the teams.
inline void add_up(const Context& context, const float* partial, int64_t teams, int64_t stride, const Buffer& out) {
  const auto width = static_cast<int>(out.view().shape[0]);
  dispatch(out.view().dtype, Floats{}, [&]<class P>() {
    launch<add_teams<P>>(context, dim3((width + 31) / 32), dim3(1024), partial, out.as<P>(), teams, stride, width);
  });
}

// dx, and the gradients of the parameters that are asked for. a.rows may be 0: then these are sums of nothing.
template <Kind kind, class T>
void gradient(const Context& context, Backward<T>& a, bool whole, const Buffer* dweight, const Buffer* dbias) {
  a.partial_stride = (a.width + 7) / 8 * 8;
  std::optional<Buffer> partial;
  const auto start = [&](int64_t teams) {
    const int64_t kinds = (dweight ? 1 : 0) + (dbias ? 1 : 0);
    if (kinds == 0) return;
    partial.emplace(context.empty({kinds, teams, a.partial_stride}, DType::f32));
    auto* sums = partial->template as<float>();
    if (dweight) a.dweight = sums;
    if (dbias) a.dbias = sums + (dweight ? teams * a.partial_stride : 0);
  };
  int64_t teams = 0;
  if (a.rows > 0) teams = whole ? run<kind, T, false>(context, a, start) : run<kind, T, true>(context, a, start);
  if (dweight) add_up(context, a.dweight, teams, a.partial_stride, *dweight);
  if (dbias) add_up(context, a.dbias, teams, a.partial_stride, *dbias);
}

}  // namespace prequal::norm
