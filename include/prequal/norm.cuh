// Normalisation of rows, and its gradient: the kernels of rms_norm, fused_add_rms_norm and layer_norm.
//
// A team (lanes of a warp, a warp, a block, a cluster of blocks) owns a row, which it holds in registers or in shared
// memory: each byte is read once. Rows that no team can hold are read again, the second time from L2. Everything between
// a load and its store is fp32.
#pragma once

#include <algorithm>
#include <optional>
#include <stdexcept>
#include <string>

#include "prequal/dispatch.h"
#include "prequal/launch.h"
#include "prequal/ring.cuh"
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
  float offset;   // of the weight
  bool exact;     // round x * rstd to T before the weight
  float inverse;  // 1 / width
};

// ---- forward -----------------------------------------------------------------------------------------------------

struct RowStatistics {
  float mean, rstd;  // rms: the mean is 0
};

// The parameters are read from memory at each row.
template <Kind kind, class T, bool Ragged>
__device__ __forceinline__ Packet<T> normalised(const Forward<T>& a, const Packet<T>& x, const RowStatistics& of,
                                                int column) {
  constexpr int N = widest<T>;
  float value[N], parameter[N];
#pragma unroll
  for (int i = 0; i < N; ++i) value[i] = kind == Kind::rms ? x[i] * of.rstd : (x[i] - of.mean) * of.rstd;
  if (a.exact) {
#pragma unroll
    for (int i = 0; i < N; ++i) value[i] = rounded<T>(value[i]);
  }
  if (a.weight) {
    a.weight.template get<Ragged>(parameter, column, a.width);
    if (a.offset != 0.0f) {
#pragma unroll
      for (int i = 0; i < N; ++i) parameter[i] += a.offset;
    }
#pragma unroll
    for (int i = 0; i < N; ++i) value[i] *= parameter[i];
  }
  if (kind == Kind::layer && a.bias) {
    a.bias.template get<Ragged>(parameter, column, a.width);
#pragma unroll
    for (int i = 0; i < N; ++i) value[i] += parameter[i];
  }
  return pack<T>(value);
}

template <Kind kind, class T, bool Ragged>
__device__ __forceinline__ void write_packet(const Forward<T>& a, T* y, const Packet<T>& x, const RowStatistics& of,
                                             int column) {
  store_packet<Ragged>(y, column, a.width, normalised<kind, T, Ragged>(a, x, of, column));
}

template <class T>
__device__ __forceinline__ Packet<T> added(const Packet<T>& a, const Packet<T>& b) {
  float value[widest<T>];
#pragma unroll
  for (int i = 0; i < widest<T>; ++i) value[i] = a[i] + b[i];
  return pack<T>(value);
}

template <class T>
__device__ __forceinline__ float sum_of(const Packet<T>& x) {
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < widest<T>; ++i) sum += x[i];
  return sum;
}

// What a packet adds to the sum of squares: (x - mean)^2, and nothing beyond the row.
template <bool Ragged, class T>
__device__ __forceinline__ float squares(const Packet<T>& x, float mean, int column, int width) {
  float sum = 0.0f;
  const auto add = [&](int i) {
    const float value = x[i] - mean;
    sum += value * value;
  };
  if ((!Ragged || column >= 0) && column + widest<T> <= width) {
#pragma unroll
    for (int i = 0; i < widest<T>; ++i) add(i);
  } else if constexpr (Ragged) {
#pragma unroll
    for (int i = 0; i < widest<T>; ++i) {
      if (static_cast<unsigned>(column + i) < static_cast<unsigned>(width)) add(i);
    }
  }
  return sum;
}

// Of a row that the team has: `each(body)` calls body(packet, column) for all that a thread has of it. rms: the mean is 0.
template <Kind kind, bool Ragged, class T, class Team, class Each>
__device__ __forceinline__ RowStatistics statistics(Team& team, const Forward<T>& a, Each&& each) {
  if constexpr (kind == Kind::rms) {
    float total[1] = {};
    each([&](const Packet<T>& x, int) { total[0] += squares<false>(x, 0.0f, 0, widest<T>); });
    team.sum(total);
    return {0.0f, rsqrtf(total[0] * a.inverse + a.eps)};
  } else if constexpr (Team::kind == RowKind::block) {
    // two exchanges, where moments() has one: in [16384, 8192] 148 us and 172, whose joining takes instructions
    float total[1] = {};
    each([&](const Packet<T>& x, int) { total[0] += sum_of(x); });
    team.sum(total);
    const float mean = total[0] * a.inverse;
    total[0] = 0.0f;
    each([&](const Packet<T>& x, int column) { total[0] += squares<Ragged>(x, mean, column, a.width); });
    team.sum(total);
    return {mean, rsqrtf(total[0] * a.inverse + a.eps)};
  } else {
    float sum = 0.0f;
    each([&](const Packet<T>& x, int) { sum += sum_of(x); });
    Moments<2> of{team.first_mean(sum), {}};
    each([&](const Packet<T>& x, int column) { of.sum[0] += squares<Ragged>(x, of.mean, column, a.width); });
    team.moments(of);
    return {of.mean, rsqrtf(of.sum[0] * a.inverse + a.eps)};
  }
}

template <Kind kind>
inline constexpr int sums_of = kind == Kind::layer ? 2 : 1;

// Resident blocks decide, and instructions: rms_norm of bf16 [16384, 4096] took 69.7 us at no more than 40 registers (6
// blocks of 256 threads on an SM of sm_90), 77.8 at 48, 72.6 at 32; streamed through shared memory, 75 (docs/rows.md). A
// warp's rows come 4 to a block.
template <int Items>
constexpr int most_threads(RowKind team) {
  return team == RowKind::warp ? 128 : 512;
}
template <Kind kind, int Items>
constexpr int least_blocks(RowKind team) {
  if (team == RowKind::warp) return 1;
  return kind == Kind::rms && Items == 2 ? 3 : 2;  // layer norm of 2 takes 56 registers, and 40 only with a frame
}

// A row into registers; what is added is added there, and the sum is stored. column(item): where a packet begins.
template <bool Add, bool Ragged, class T, int Items, class Column>
__device__ __forceinline__ void hold_row(Packet<T> (&held)[Items], const Forward<T>& a, int64_t row, Column&& column) {
  const T* x = a.x.row(row);
#pragma unroll
  for (int item = 0; item < Items; ++item) held[item] = load_packet<Ragged>(x, column(item), a.width);
  if constexpr (Add) {
    constexpr int at_once = Items < 2 ? Items : 2;  // 4 would not leave 64 registers for the shifts of a ragged row
    const T* from = a.other.row(row);
    T* to = a.sum.row(row);
#pragma unroll
    for (int first = 0; first < Items; first += at_once) {
      Packet<T> other[at_once];
#pragma unroll
      for (int i = 0; i < at_once; ++i) other[i] = load_packet<Ragged>(from, column(first + i), a.width);
#pragma unroll
      for (int i = 0; i < at_once; ++i) {
        held[first + i] = added<T>(held[first + i], other[i]);
        store_packet<Ragged>(to, column(first + i), a.width, held[first + i]);
      }
    }
  }
}

template <Kind kind, bool Add, class T, bool Ragged, int Items, class Team>
__global__ void __launch_bounds__((most_threads<Items>(Team::kind)), (least_blocks<kind, Items>(Team::kind)))
    held_rows(const Forward<T> a) {
  constexpr int N = widest<T>;
  __shared__ typename Team::Shared shared;
  Team team(shared);
  if constexpr (kind == Kind::layer && Team::kind == RowKind::warp) team.share_out(a.width, 0, 0, Items, N);
  const auto column = [&](int item) { return (item * team.threads() + team.thread()) * N; };
  for (int64_t row = team.index(); row < a.rows; row += team.count()) {
    Packet<T> held[Items];
    hold_row<Add, Ragged>(held, a, row, column);
    const auto each = [&](auto&& body) {
#pragma unroll
      for (int item = 0; item < Items; ++item) body(held[item], column(item));
      keep_packed(held);
    };
    const RowStatistics figures = statistics<kind, Ragged, T>(team, a, each);
    T* y = a.y.row(row);
    each([&](const Packet<T>& of, int at) { write_packet<kind, T, Ragged>(a, y, of, figures, at); });
  }
}

template <class Team>
__device__ __forceinline__ int rows_of_team(const Team& team, int64_t rows) {
  const int64_t left = rows - team.index();
  return left > 0 ? static_cast<int>((left + team.count() - 1) / team.count()) : 0;
}

// Rows that are wide or ragged, through shared memory, where the next ones arrive while a team works on two: it sums one
// row's squares and, while the sum is under way, writes the row before. The parameters of a thread's columns stay in fp32.
// Layer norm's bias leaves 1,024 threads too few registers.
template <Kind kind>
inline constexpr int streamed_threads = kind == Kind::layer ? 512 : 1024;

template <Kind kind, bool Add, class T, bool Ragged, int Items, class Team>
__global__ void __launch_bounds__(streamed_threads<kind>, 1) streamed_rows(const Forward<T> a, int stages) {
  if constexpr (!Team::exists) {
    __trap();
  } else {
    constexpr int N = widest<T>, inputs = Add ? 2 : 1;
    extern __shared__ uint4 dynamic[];
    __shared__ typename Team::Shared shared;
    Team team(shared);
    const int first_word = team.block() * static_cast<int>(blockDim.x) * Items;
    T* y_row = a.y.row(team.index());
    const int past = Ragged ? elements_past(y_row) : 0;
    const Columns<T, Ragged, Items> columns(first_word, past, a.width);
    if constexpr (kind == Kind::layer) team.share_out(a.width, first_word, past, Items, N);

    Ring<T, Ragged, Items, inputs> ring(reinterpret_cast<Word*>(dynamic), stages, inputs, first_word);
    const int64_t step = team.count();
    ring.input(0, a.x.row(team.index()), step * a.x.stride, a.width, past);
    if constexpr (Add) ring.input(1, a.other.row(team.index()), step * a.other.stride, a.width, past);
    const int rows = rows_of_team(team, a.rows);
    for (int ahead = 0; ahead < stages - 1; ++ahead) ring.ask(ahead < rows);
    RowOut<T, Ragged, Items> y(y_row, step * a.y.stride, columns);
    RowOut<T, Ragged, Items> sum(Add ? a.sum.row(team.index()) : y_row, step * a.sum.stride, columns);
    float weight[Items][N], bias[Items][N];
    get_parameter(weight, a.weight, a.offset, 1.0f, columns);
    if constexpr (kind == Kind::layer) get_parameter(bias, a.bias, 0.0f, 0.0f, columns);

    const auto packet = [&](bool ahead, int item) {
      Packet<T> x = ring.packet(ahead, 0, item, columns);
      if constexpr (Add) x = added<T>(x, ring.packet(ahead, 1, item, columns));
      return x;
    };
    const auto offer = [&](bool ahead) {
      if constexpr (kind == Kind::rms) {
        float total[1] = {};
#pragma unroll
        for (int item = 0; item < Items; ++item) total[0] += squares<false>(packet(ahead, item), 0.0f, 0, N);
        team.offer(total);
      } else {
        float total = 0.0f;
        Packet<T> x[Items];
#pragma unroll
        for (int item = 0; item < Items; ++item) total += sum_of(x[item] = packet(ahead, item));
        Moments<2> of{warp_sum(total) * team.inverse_of_warp(), {}};
#pragma unroll
        for (int item = 0; item < Items; ++item) {
          of.sum[0] += squares<Ragged>(x[item], of.mean, columns.of(item), a.width);
        }
        team.offer_moments(of);
      }
    };
    const auto take = [&]() -> RowStatistics {
      if constexpr (kind == Kind::rms) {
        float total[1];
        team.take(total);
        return {0.0f, rsqrtf(total[0] * a.inverse + a.eps)};
      } else {
        Moments<2> of;
        team.take_moments(of);
        return {of.mean, rsqrtf(of.sum[0] * a.inverse + a.eps)};
      }
    };

    if (rows > 0) {
      ring.arrive_first();
      offer(false);
    }
    for (int row = 0; row < rows; ++row) {
      const RowStatistics of = take();
      ring.next();
      if (row + 1 < rows) {
        ring.arrive();
        ring.ask(row + stages - 1 < rows);
        offer(true);
      }
#pragma unroll
      for (int item = 0; item < Items; ++item) {
        const Packet<T> x = packet(false, item);
        if constexpr (Add) sum.write(item, x, columns);
        float value[N];
#pragma unroll
        for (int i = 0; i < N; ++i) value[i] = kind == Kind::rms ? x[i] * of.rstd : (x[i] - of.mean) * of.rstd;
        if (kind == Kind::rms && a.exact) {
#pragma unroll
          for (int i = 0; i < N; ++i) value[i] = rounded<T>(value[i]);
        }
#pragma unroll
        for (int i = 0; i < N; ++i) {
          value[i] = kind == Kind::rms ? value[i] * weight[item][i] : fmaf(value[i], weight[item][i], bias[item][i]);
        }
        y.write(item, pack<T>(value), columns);
      }
      y.next(), sum.next();
    }
    team.leave();
  }
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
        total[0] += squares<false>(held, 0.0f, 0, widest<T>);
      }
    }
    team.sum(total);  // and what the block stored is seen by the block
    if constexpr (kind == Kind::layer) {
      mean = total[0] * a.inverse;
      total[0] = 0.0f;
      for (int first = 0; first < a.width; first += step) {
        const int column = first + team.thread() * N;
        total[0] += squares<true>(load_packet<Ragged>(x, column, a.width), mean, column, a.width);
      }
      team.sum(total);
    }
    const RowStatistics figures{mean, rsqrtf(total[0] * a.inverse + a.eps)};

    for (int first = 0; first < a.width; first += step) {
      const int column = first + team.thread() * N;
      write_packet<kind, T, Ragged>(a, a.y.row(row), load_packet<Ragged>(x, column, a.width), figures, column);
    }
  }
}

inline dim3 grid_of(int64_t blocks) { return dim3(static_cast<unsigned>(std::min<int64_t>(blocks, 0x7fffffff))); }

// The clusters of a kernel that fit on the device, by size, where one or two blocks share a multiprocessor's memory.
template <auto kernel, int per_sm>
int64_t clusters_that_fit(const Context& context, int blocks, int threads) {
  struct Class;
  const auto [shared_sm, shared_block] = shared_memory(context);
  const int shared = shared_for(per_sm, shared_sm, shared_block);
  switch (blocks) {
    case 2: return resident_clusters<kernel, 2, Class>(context, threads, shared);
    case 4: return resident_clusters<kernel, 4, Class>(context, threads, shared);
    case 8: return resident_clusters<kernel, 8, Class>(context, threads, shared);
    case 16: return resident_clusters<kernel, 16, Class>(context, threads, shared);
  }
  throw std::logic_error("norm: stream_plan made a cluster of a size that no kernel has");
}

// The plan for a streamed kernel of blocks and its twin of clusters, and how many teams of it the device holds.
struct Streams {
  StreamPlan plan;
  int64_t teams;
};

template <auto in_block, auto in_cluster>
Streams streams_of(const Context& context, int64_t width, int vec, bool ragged, int items, int inputs, int most) {
  const auto [shared_sm, shared_block] = shared_memory(context);
  const int registers = std::max(registers_of<in_block>(context), registers_of<in_cluster>(context));
  const auto resident = [&](int threads) { return blocks_by_registers(registers, threads); };
  for (int largest = has_clusters<in_cluster>(context) ? largest_cluster : 1; largest > 0; largest /= 2) {
    const StreamPlan plan =
        stream_plan(width, vec, ragged, items, inputs, most, largest, shared_sm, shared_block, resident);
    if (plan.blocks <= 1) return {plan, static_cast<int64_t>(multiprocessors(context)) * plan.per_sm};
    const int64_t fit = plan.per_sm > 1 ? clusters_that_fit<in_cluster, 2>(context, plan.blocks, plan.threads)
                                        : clusters_that_fit<in_cluster, 1>(context, plan.blocks, plan.threads);
    if (fit > 0) return {plan, fit};
  }
  return {};
}

// Of rows of whole words. [8192, 8192] of bf16: rms_norm 72.5 us with 2 accesses a thread and 70.4 with 4,
// fused_add_rms_norm 133.6 and 136.5.
template <bool Add, class T>
constexpr RowPlan plan_of_rms(int64_t width) {
  return row_plan(width, widest<T>, Add ? 1024 : 512, 2048);
}

// Layer norm is held where rows are wide or a multiprocessor gets few: [16384, 8192] 158 us streamed and 148 held,
// [1024, 4096] 7.7 and 6.8, but [16384, 4096] 73 and 79. Ragged rows are streamed (docs/rows.md).
template <Kind kind, bool Add, class T, bool Ragged>
RowPlan forward_plan(const Context& context, int64_t rows, int64_t width) {
  const int64_t accesses = (width + widest<T> - 1) / widest<T>;
  if (!Ragged && accesses <= widest_part) return part_plan(width, widest<T>);  // a ragged store is a whole warp's
  const bool held =
      !Ragged && (kind == Kind::rms || accesses >= 1024 || rows <= 8 * static_cast<int64_t>(multiprocessors(context)));
  return held ? plan_of_rms<Add, T>(width) : row_plan(width, widest<T>, 0, 0);
}

template <Kind kind, bool Add, class T, bool Ragged>
void run(const Context& context, const Forward<T>& a) {
  constexpr int sums = sums_of<kind>;
  const RowPlan plan = forward_plan<kind, Add, T, Ragged>(context, a.rows, a.width);
  const auto start = [&]<auto kernel>() {
    launch<kernel>(context, grid_of((a.rows + plan.rows - 1) / plan.rows), dim3(plan.threads), a);
  };
  switch (plan.kind) {
    case RowKind::warp:
      if constexpr (!Ragged) {
        switch (plan.threads / plan.rows) {
          case 8: return start.template operator()<held_rows<kind, Add, T, false, 1, PartTeam<8, sums>>>();
          case 16: return start.template operator()<held_rows<kind, Add, T, false, 1, PartTeam<16, sums>>>();
        }
      }
      switch (plan.items) {
        case 1: return start.template operator()<held_rows<kind, Add, T, Ragged, 1, WarpTeam<sums>>>();
        case 2: return start.template operator()<held_rows<kind, Add, T, Ragged, 2, WarpTeam<sums>>>();
        case 4: return start.template operator()<held_rows<kind, Add, T, Ragged, 4, WarpTeam<sums>>>();
      }
      break;
    case RowKind::block:
      if constexpr (!Ragged) {
        switch (plan.items) {
          case 2: return start.template operator()<held_rows<kind, Add, T, false, 2, BlockTeam<1>>>();
          case 4: return start.template operator()<held_rows<kind, Add, T, false, 4, BlockTeam<1>>>();
        }
      }
      break;
    case RowKind::loop: {
      constexpr int alike = Ragged ? widest<T> : 1, threads = streamed_threads<kind>;
      const auto stream = [&]<int Items>() {
        constexpr auto in_block = streamed_rows<kind, Add, T, Ragged, Items, BlockTeam<sums>>;
        constexpr auto in_cluster = streamed_rows<kind, Add, T, Ragged, Items, ClusterTeam<sums>>;
        const auto [found, fit] =
            streams_of<in_block, in_cluster>(context, a.width, widest<T>, Ragged, Items, Add ? 2 : 1, threads);
        if (found.blocks == 0 || fit < alike) return false;
        const dim3 grid = grid_of(streamed_teams(a.rows, fit, alike) * found.blocks), block(found.threads);
        if (found.blocks == 1) {
          launch_with_shared<in_block>(context, grid, block, found.shared, a, found.stages);
        } else {
          launch_clusters<in_cluster>(context, found.blocks, grid, block, found.shared, a, found.stages);
        }
        return true;
      };
      // layer norm of ragged rows: [16384, 5119] 135 us with 4 accesses a thread, 191 with 2
      if constexpr (kind == Kind::rms || !Ragged) {
        if (stream.template operator()<2>()) return;
      }
      if constexpr (kind == Kind::layer) {
        if (stream.template operator()<4>()) return;
      }
      return start.template operator()<read_twice<kind, Add, T, Ragged>>();
    }
  }
  throw std::logic_error("norm: row_plan made a plan that no kernel follows");
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

}  // namespace prequal::norm
