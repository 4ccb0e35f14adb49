// The gradient of a normalisation of rows: the kernels of rms_norm_backward and layer_norm_backward.
#pragma once

#include <algorithm>
#include <optional>

#include "prequal/add_teams.cuh"
#include "prequal/norm.cuh"

namespace prequal::norm {

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
  float inverse;  // 1 / width
};

// ---- backward ----------------------------------------------------------------------------------------------------
//
// With xhat = (x - mean) rstd and gw = grad (weight + offset), means over the row:
//   dx = rstd (gw - [mean(gw)] - xhat mean(gw xhat)) + more,   dweight = sum over rows of grad xhat,   dbias = of grad
// [mean(gw)] is layer norm's alone. A thread keeps its columns over all rows of its team, so their sums are registers.

// grad (weight + offset) of a packet; weight(value) gives the parenthesis at the packet's columns.
template <class T, class Weight>
__device__ __forceinline__ void weighted(const Backward<T>& a, float (&value)[widest<T>], const Packet<T>& grad,
                                         Weight&& weight) {
#pragma unroll
  for (int i = 0; i < widest<T>; ++i) value[i] = grad[i];
  if (a.weight) {
    float by[widest<T>];
    weight(by);
#pragma unroll
    for (int i = 0; i < widest<T>; ++i) value[i] *= by[i];
  }
}

// The weight where it is read from memory at each row.
template <bool Ragged, class T>
__device__ __forceinline__ auto weight_at(const Backward<T>& a, int column) {
  return [&a, column](float(&value)[widest<T>]) {
    a.weight.template get<Ragged>(value, column, a.width);
    if (a.offset == 0.0f) return;
#pragma unroll
    for (int i = 0; i < widest<T>; ++i) value[i] += a.offset;
  };
}

// rms: what a packet adds to the sums of x^2 and of gw x.
template <class T, class Weight>
__device__ __forceinline__ void add_products(const Backward<T>& a, float (&sum)[2], const Packet<T>& grad,
                                             const Packet<T>& x, Weight&& weight) {
  float gw[widest<T>];
  weighted(a, gw, grad, weight);
#pragma unroll
  for (int i = 0; i < widest<T>; ++i) {
    sum[0] += x[i] * x[i];
    sum[1] += gw[i] * x[i];
  }
}

// layer: what a packet adds to the sums of (x - mean)^2, of gw and of gw (x - mean).
template <bool Ragged, class T, class Weight>
__device__ __forceinline__ void add_centred(const Backward<T>& a, Moments<4>& of, const Packet<T>& grad,
                                            const Packet<T>& x, int column, Weight&& weight) {
  of.sum[0] += squares<Ragged>(x, of.mean, column, a.width);
  float gw[widest<T>];
  weighted(a, gw, grad, weight);
#pragma unroll
  for (int i = 0; i < widest<T>; ++i) {
    of.sum[1] += gw[i];
    of.sum[2] += gw[i] * (x[i] - of.mean);  // beyond the row gw is zero
  }
}

struct RowFigures {
  float mean, rstd;   // rms: the mean is 0
  float gw, gw_xhat;  // means of those; gw: layer norm's alone
};

// Of a row that the team has: `each(body)` calls body(x, grad, column, weight) for all that a thread has of it.
template <Kind kind, bool Ragged, class T, class Team, class Each>
__device__ __forceinline__ RowFigures figures(Team& team, const Backward<T>& a, Each&& each) {
  if constexpr (kind == Kind::rms) {
    float sum[2] = {};
    each([&](const Packet<T>& x, const Packet<T>& grad, int, auto&& weight) { add_products(a, sum, grad, x, weight); });
    team.sum(sum);
    const float rstd = rsqrtf(sum[0] * a.inverse + a.eps);
    return {0.0f, rstd, 0.0f, rstd * (sum[1] * a.inverse)};
  } else {
    float sum = 0.0f;
    each([&](const Packet<T>& x, const Packet<T>&, int, auto&&) { sum += sum_of(x); });
    Moments<4> of{warp_sum(sum) * team.inverse_of_warp(), {}};
    each([&](const Packet<T>& x, const Packet<T>& grad, int column, auto&& weight) {
      add_centred<Ragged>(a, of, grad, x, column, weight);
    });
    team.moments(of);
    const float rstd = rsqrtf(of.sum[0] * a.inverse + a.eps);
    return {of.mean, rstd, of.sum[1] * a.inverse, rstd * (of.sum[2] * a.inverse)};
  }
}

// The sums over rows of grad xhat and of grad, of the columns that a thread owns.
template <Kind kind, class T, int Items>
struct ColumnSums {
  static constexpr int N = widest<T>, biases = kind == Kind::layer ? Items : 0;
  float dweight[Items][N] = {}, dbias[biases + 1][N] = {};

  // dx of a packet, whose terms the sums take up. gw is rounded before its mean is taken off: in a row of one column that
  // leaves zero.
  __device__ __forceinline__ void gradient(float (&value)[N], int item, const RowFigures& of, const Packet<T>& grad,
                                           const Packet<T>& x, const float (&weight)[N]) {
#pragma unroll
    for (int i = 0; i < N; ++i) {
      const float g = grad[i], xhat = kind == Kind::rms ? x[i] * of.rstd : (x[i] - of.mean) * of.rstd;
      dweight[item][i] += g * xhat;
      if constexpr (kind == Kind::layer) dbias[item][i] += g;
      const float gw = __fmul_rn(g, weight[i]);
      value[i] = ((kind == Kind::rms ? gw : gw - of.gw) - xhat * of.gw_xhat) * of.rstd;
    }
  }

  // The same where the weight is read from memory at each row.
  template <bool Ragged>
  __device__ __forceinline__ Packet<T> gradient(const Backward<T>& a, const RowFigures& of, const Packet<T>& grad,
                                                const Packet<T>& x, const Packet<T>& more, int column) {
    float value[N], weight[N];
#pragma unroll
    for (int i = 0; i < N; ++i) weight[i] = 1.0f;
    if (a.weight) weight_at<Ragged>(a, column)(weight);
    gradient(value, 0, of, grad, x, weight);
    if (kind == Kind::rms && a.more.at) {
#pragma unroll
      for (int i = 0; i < N; ++i) value[i] += more[i];
    }
    return pack<T>(value);
  }

  // A team's row of them. has(item, i): whether that is a column.
  template <class Column, class Has>
  __device__ __forceinline__ void write(const Backward<T>& a, int64_t team, Column&& column, Has&& has) const {
    const int64_t mine = team * a.partial_stride;
#pragma unroll
    for (int item = 0; item < Items; ++item) {
#pragma unroll
      for (int i = 0; i < N; ++i) {
        if (!has(item, i)) continue;
        if (a.dweight) a.dweight[mine + column(item) + i] = dweight[item][i];
        if constexpr (kind == Kind::layer) {
          if (a.dbias) a.dbias[mine + column(item) + i] = dbias[item][i];
        }
      }
    }
  }
};

template <Kind kind>
inline constexpr int gradient_sums = kind == Kind::layer ? 4 : 2;

// A row a warp.
template <Kind kind, class T, bool Ragged>
__global__ void __launch_bounds__(128, 6) held_gradient(const Backward<T> a) {
  using Team = WarpTeam<gradient_sums<kind>>;
  typename Team::Shared shared;
  Team team(shared);
  if constexpr (kind == Kind::layer) team.share_out(a.width, 0, 0, 1, widest<T>);
  const int column = team.thread() * widest<T>;
  ColumnSums<kind, T, 1> sums;
  for (int64_t row = team.index(); row < a.rows; row += team.count()) {
    Packet<T> x[1] = {load_packet<Ragged>(a.x.row(row), column, a.width)};
    Packet<T> grad[1] = {load_packet<Ragged>(a.grad.row(row), column, a.width)};
    Packet<T> more{};
    if (kind == Kind::rms && a.more.at) more = load_packet<Ragged>(a.more.row(row), column, a.width);
    const auto each = [&](auto&& body) {
      body(x[0], grad[0], column, weight_at<Ragged>(a, column));
      keep_packed(x), keep_packed(grad);
    };
    const RowFigures of = figures<kind, Ragged, T>(team, a, each);
    const auto dx = sums.template gradient<Ragged>(a, of, grad[0], x[0], more, column);
    store_packet<Ragged>(a.dx.row(row), column, a.width, dx);
  }
  sums.write(a, team.index(), [&](int) { return column; }, [&](int, int i) { return column + i < a.width; });
}

// Through shared memory, where the next rows arrive while a team works on two: it takes one row's sums and, while those
// are under way, writes the row before. A thread has the same columns in all rows of its team, so that their sums are
// registers, and so is the weight.
template <Kind kind, class T, bool Ragged, int Items, class Team, int Most>
__global__ void __launch_bounds__(Most, 1) streamed_gradient(const Backward<T> a, int stages) {
  if constexpr (!Team::exists) {
    __trap();
  } else {
    constexpr int N = widest<T>, inputs = kind == Kind::rms ? 3 : 2;
    extern __shared__ uint4 dynamic[];
    __shared__ typename Team::Shared shared;
    Team team(shared);
    const int first_word = team.block() * static_cast<int>(blockDim.x) * Items;
    T* dx_row = a.dx.row(team.index());
    const int past = Ragged ? elements_past(dx_row) : 0;
    const Columns<T, Ragged, Items> columns(first_word, past, a.width);
    if constexpr (kind == Kind::layer) team.share_out(a.width, first_word, past, Items, N);

    const int given = inputs == 3 && a.more.at ? 3 : 2;
    Ring<T, Ragged, Items, inputs> ring(reinterpret_cast<Word*>(dynamic), stages, given, first_word);
    const int64_t step = team.count();
    ring.input(0, a.x.row(team.index()), step * a.x.stride, a.width, past);
    ring.input(1, a.grad.row(team.index()), step * a.grad.stride, a.width, past);
    if constexpr (inputs == 3) {
      if (given == 3) ring.input(2, a.more.row(team.index()), step * a.more.stride, a.width, past);
    }
    const int rows = rows_of_team(team, a.rows);
    for (int ahead = 0; ahead < stages - 1; ++ahead) ring.ask(ahead < rows);
    RowOut<T, Ragged, Items> dx(dx_row, step * a.dx.stride, columns);
    float weight[Items][N];
    get_parameter(weight, a.weight, a.offset, 1.0f, columns);

    const auto offer = [&](bool ahead) {
      Packet<T> x[Items];
      float total = 0.0f;
#pragma unroll
      for (int item = 0; item < Items; ++item) {
        x[item] = ring.packet(ahead, 0, item, columns);
        if constexpr (kind == Kind::layer) total += sum_of(x[item]);
      }
      if constexpr (kind == Kind::rms) {
        float sums[2] = {};
#pragma unroll
        for (int item = 0; item < Items; ++item) {
          const Packet<T> grad = ring.packet(ahead, 1, item, columns);
#pragma unroll
          for (int i = 0; i < N; ++i) {
            sums[0] += x[item][i] * x[item][i];
            sums[1] += grad[i] * weight[item][i] * x[item][i];
          }
        }
        team.offer(sums);
      } else {
        Moments<4> of{warp_sum(total) * team.inverse_of_warp(), {}};
#pragma unroll
        for (int item = 0; item < Items; ++item) {
          const Packet<T> grad = ring.packet(ahead, 1, item, columns);
#pragma unroll
          for (int i = 0; i < N; ++i) {
            const float centred = columns.part(item, i) ? x[item][i] - of.mean : 0.0f, gw = grad[i] * weight[item][i];
            of.sum[0] += centred * centred;
            of.sum[1] += gw;
            of.sum[2] += gw * centred;
          }
        }
        team.offer_moments(of);
      }
    };
    const auto take = [&]() -> RowFigures {
      if constexpr (kind == Kind::rms) {
        float sums[2];
        team.take(sums);
        const float rstd = rsqrtf(sums[0] * a.inverse + a.eps);
        return {0.0f, rstd, 0.0f, rstd * (sums[1] * a.inverse)};
      } else {
        Moments<4> of;
        team.take_moments(of);
        const float rstd = rsqrtf(of.sum[0] * a.inverse + a.eps);
        return {of.mean, rstd, of.sum[1] * a.inverse, rstd * (of.sum[2] * a.inverse)};
      }
    };

    ColumnSums<kind, T, Items> sums;
    if (rows > 0) {
      ring.arrive_first();
      offer(false);
    }
    for (int row = 0; row < rows; ++row) {
      const RowFigures of = take();
      ring.next();
      if (row + 1 < rows) {
        ring.arrive();
        ring.ask(row + stages - 1 < rows);
        offer(true);
      }
#pragma unroll
      for (int item = 0; item < Items; ++item) {
        const Packet<T> x = ring.packet(false, 0, item, columns), grad = ring.packet(false, 1, item, columns);
        float value[N];
        sums.gradient(value, item, of, grad, x, weight[item]);
        if (given == 3) {
          const Packet<T> more = ring.packet(false, inputs - 1, item, columns);
#pragma unroll
          for (int i = 0; i < N; ++i) value[i] += more[i];
        }
        dx.write(item, pack<T>(value), columns);
      }
      dx.next();
    }
    team.leave();
    sums.write(
        a, team.index(), [&](int item) { return columns.of(item); },
        [&](int item, int i) { return columns.has(item, i); });
  }
}

// Rows that no team holds: read once more, from L2, and the sums over columns kept in memory by the thread that owns
// them.
template <Kind kind, class T, bool Ragged>
__global__ void __launch_bounds__(512) read_again_gradient(const Backward<T> a) {
  __shared__ typename BlockTeam<2>::Shared shared;
  BlockTeam<2> team(shared);
  const int step = team.threads() * widest<T>;
  const auto each = [&](auto&& body) {
    for (int first = 0; first < a.width; first += step) body(first + team.thread() * widest<T>);
  };
  const int64_t mine = team.index() * a.partial_stride;
  for (int64_t row = team.index(); row < a.rows; row += team.count()) {
    const bool first_row = row == team.index();
    const auto load_both = [&](int column, Packet<T>& grad, Packet<T>& x) {
      x = load_packet<Ragged>(a.x.row(row), column, a.width);
      grad = load_packet<Ragged>(a.grad.row(row), column, a.width);
    };
    Packet<T> grad, x;
    float mean = 0.0f, mean_gw = 0.0f, sum[2] = {};
    if constexpr (kind == Kind::layer) {
      each([&](int column) {
        load_both(column, grad, x);
        float gw[widest<T>];
        weighted(a, gw, grad, weight_at<Ragged>(a, column));
#pragma unroll
        for (int i = 0; i < widest<T>; ++i) sum[0] += x[i], sum[1] += gw[i];
      });
      team.sum(sum);
      Moments<4> moments{sum[0] * a.inverse, {}};
      mean = moments.mean, mean_gw = sum[1] * a.inverse;
      each([&](int column) {
        load_both(column, grad, x);
        add_centred<Ragged>(a, moments, grad, x, column, weight_at<Ragged>(a, column));
      });
      sum[0] = moments.sum[0], sum[1] = moments.sum[2];
    } else {
      each([&](int column) {
        load_both(column, grad, x);
        add_products(a, sum, grad, x, weight_at<Ragged>(a, column));
      });
    }
    team.sum(sum);
    const float rstd = rsqrtf(sum[0] * a.inverse + a.eps);
    const RowFigures of{mean, rstd, mean_gw, rstd * (sum[1] * a.inverse)};

    each([&](int column) {
      load_both(column, grad, x);
      Packet<T> more = Packet<T>{};
      if (kind == Kind::rms && a.more.at) more = load_packet<Ragged>(a.more.row(row), column, a.width);
      ColumnSums<kind, T, 1> terms;
      const auto dx = terms.template gradient<Ragged>(a, of, grad, x, more, column);
      store_packet<Ragged>(a.dx.row(row), column, a.width, dx);
      if (column >= a.width) return;
#pragma unroll
      for (int i = 0; i < widest<T>; i += 4) {
        const auto keep = [&](float* sums, auto&& term) {
          Vec<float, 4> four{};
          if (!first_row) four = load<4>(sums + mine + column + i);
#pragma unroll
          for (int j = 0; j < 4; ++j) four.at[j] += term(i + j);
          store(sums + mine + column + i, four);
        };
        if (a.dweight) keep(a.dweight, [&](int j) { return terms.dweight[0][j]; });
        if (kind == Kind::layer && a.dbias) keep(a.dbias, [&](int j) { return terms.dbias[0][j]; });
      }
    });
  }
}

// `start(teams)` gives the sums of that many teams their memory.
template <Kind kind, class T, bool Ragged, class Start>
int64_t run(const Context& context, Backward<T>& a, Start&& start) {
  constexpr int vec = widest<T>, alike = Ragged ? vec : 1;
  if (gradient_in_warp(a.width, vec)) {
    constexpr auto kernel = held_gradient<kind, T, Ragged>;
    constexpr int threads = 128, rows = threads / 32;
    const int64_t fit = resident_blocks<kernel>(context, threads) * rows;
    const int64_t blocks = (gradient_teams(a.rows, fit, alike) + rows - 1) / rows;
    start(blocks * rows);
    launch<kernel>(context, grid_of(blocks), dim3(threads), a);
    return blocks * rows;
  }

  int64_t teams = 0;
  const auto stream = [&]<int most>() {
    constexpr int items = 2, sums = gradient_sums<kind>;
    constexpr auto in_block = streamed_gradient<kind, T, Ragged, items, BlockTeam<sums>, most>;
    constexpr auto in_cluster = streamed_gradient<kind, T, Ragged, items, ClusterTeam<sums>, most>;
    const auto [plan, fit] =
        streams_of<in_block, in_cluster>(context, a.width, vec, Ragged, items, a.more.at ? 3 : 2, most);
    if (plan.blocks == 0 || fit < alike) return false;
    teams = gradient_teams(a.rows, fit, alike);
    start(teams);
    if (plan.blocks == 1) {
      launch_with_shared<in_block>(context, grid_of(teams), dim3(plan.threads), plan.shared, a, plan.stages);
    } else {
      launch_clusters<in_cluster>(context, plan.blocks, grid_of(teams * plan.blocks), dim3(plan.threads), plan.shared,
                                  a, plan.stages);
    }
    return true;
  };
  // Up to 512 threads, whose registers hold all. 1,024 spill, and are for rows that only a cluster of those has room for:
  // rms_norm's of bf16 [512, 262144] took 424 us with them and 2,244 where rows are read again.
  if (stream.template operator()<512>()) return teams;
  if constexpr (!Ragged) {
    if (stream.template operator()<1024>()) return teams;
  }

  constexpr auto kernel = read_again_gradient<kind, T, Ragged>;
  teams = gradient_teams(a.rows, resident_blocks<kernel>(context, 512), alike);
  start(teams);
  launch<kernel>(context, grid_of(teams), dim3(512), a);
  return teams;
}

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
