// y[i, f] = reduce over edges e of row i of w[e] x[column[e], f]. x [M, F], from column M on previous [P, F] -> y [N, F]
// A team of 4 to 32 lanes takes a row and a tile of its columns, 4 or 8 rows of x on their way; of few rows all teams of a
// warp take one, its edges by turns. Rows longer than `long_row` are cut at multiples of `chunk`, a warp a piece; then a
// block adds them up. Backward, the walk that gathers gradients for x takes the dot products for the weights, too.
// Bytes: E F sizeof(T) gathered, mostly from L2, M F sizeof(T) of them from memory, N F sizeof(T) written, E 4 of indices.
// Numerics: fp32, each team in the order of its edges, teams and pieces in a fixed order. No atomics.
#include <algorithm>
#include <cmath>
#include <limits>
#include <optional>
#include <string>
#include <tuple>
#include <type_traits>

#include "ops.h"
#include "prequal/access.cuh"
#include "prequal/dispatch.h"
#include "prequal/edge_pieces.h"
#include "prequal/launch.h"
#include "prequal/vec.cuh"

namespace prequal::ops {
namespace {

struct Unit : FileOf<"message_passing"> {};

constexpr int threads = 64;           // 256: sums 2 to 10 % slower on uniform graphs, 2 % faster by a power law
constexpr int combining = 256;        // threads that add up a long row's pieces
constexpr int chunk = edges_a_piece;  // edges of a piece of a long row
constexpr int long_row = 2 * chunk;   // above it a row is cut: a piece then never meets more than two long rows
constexpr int64_t few_rows = int64_t{1} << 14;  // below it a warp has one row: 2,000 of 50 edges 8.9 for 13.4 us
constexpr int64_t widest_row = int64_t{1} << 20;
constexpr int64_t most_edges = 0xffffffff;  // places in a row are kept in 32 bits
constexpr unsigned whole_warp = 0xffffffffu, nowhere = 0xffffffffu;

// What an edge gives to its row. The last three are gradients: rows are those of x, what is gathered is grad's.
enum class Kind { sum, extreme, softmax, pull_sum, pull_extreme, pull_softmax };

constexpr bool is_sum(Kind kind) { return kind == Kind::sum || kind == Kind::pull_sum; }

// Rows of x that a team has on their way. Sums of float32 are 2 to 11 % faster by 8; others, and halves, then hold fewer warps
// and are 2 to 65 % slower (20,000 nodes and more).
constexpr int ahead = 4;
template <class T, Kind kind>
constexpr int ahead_of = is_sum(kind) && sizeof(T) == 4 ? 2 * ahead : ahead;

// Blocks that a multiprocessor is to have room for; 0 leaves it to the compiler, which would put a softmax of halves, a value
// at a time, into 32 registers and spill two.
template <class T, bool Words, Kind kind>
constexpr int resident = kind == Kind::softmax && sizeof(T) == 2 && !Words ? 8 : 0;

// By a power law, 100,000 nodes of 20 edges (256 threads, 4 rows ahead): sums 108 to 103 us, gradients of both 171 to 143;
// but max 157 to 173, softmax 216 to 270. Not of int64 nor a value at a time: that would be 18 copies of the walk more.
template <class Index, bool Words, Kind kind>
constexpr bool has_rows_beside_pieces = is_sum(kind) && sizeof(Index) == 4 && Words;

// Rows of edges. Nothing in them is trusted: what points outside is left out. Numbers are compared unsigned, so that one
// comparison finds those below 0, too; the bounds are at most what an index can say.
template <class Index>
struct Csr {
  using Place = std::make_unsigned_t<Index>;
  static constexpr Place nobody = ~Place{0};
  const Index* row_ptr;  // [rows + 1]
  const Index* column;   // [edges]
  const Index* edge;     // [edges] or null: numbers of edges, where weights and arguments know them by
  int64_t rows;
  Place columns, edges;

  __device__ __forceinline__ Place begin_of(int64_t row) const {
    const Index found = row_ptr[row];
    return found < 0 ? 0 : min(static_cast<Place>(found), edges);
  }
  __device__ __forceinline__ unsigned length_of(int64_t row, Place begin) const {
    const Place end = begin_of(row + 1);
    return end > begin ? static_cast<unsigned>(end - begin) : 0;
  }
  // `nobody` where there is no such column.
  __device__ __forceinline__ Place column_at(Place place) const {
    const auto found = static_cast<Place>(__ldcs(column + place));
    return found < columns ? found : nobody;
  }
  // `nobody` where there is no such edge.
  __device__ __forceinline__ Place edge_at(Place place) const {
    const Place found = edge ? static_cast<Place>(__ldcs(edge + place)) : place;
    return found < edges ? found : nobody;
  }
  // The last row that begins at this place or before; in a sorted row_ptr that is the one that has it.
  __device__ __forceinline__ int64_t row_of(Place place) const {
    int64_t low = 0, high = rows;  // the answer is in [low, high)
    while (high - low > 1) {
      const int64_t middle = low + (high - low) / 2;
      (begin_of(middle) <= place ? low : high) = middle;
    }
    return low;
  }
  // The same, by a whole warp that asks for one place: a probe a lane, so that 20 bits of rows take 4 rounds.
  __device__ __forceinline__ int64_t row_of_by_warp(Place place) const {
    int64_t low = 0, high = rows;
    const int lane = threadIdx.x % 32;
    while (high - low > 1) {
      const int64_t step = (high - low + 31) / 32, probe = low + lane * step;
      const bool before = lane == 0 || (probe < high && begin_of(probe) <= place);
      const int last = 31 - __clz(static_cast<int>(__ballot_sync(whole_warp, before)));
      low += last * step;
      high = min(high, low + step);
    }
    return low;
  }
};

struct Weights {
  const void* data;  // [E] or null: all of them one
  DType dtype;
  int64_t stride;

  __device__ __forceinline__ float at(uint64_t edge) const {
    if (!data) return 1.0f;
    const int64_t place = static_cast<int64_t>(edge) * stride;
    if (dtype == DType::f32) return static_cast<const float*>(data)[place];
    if (dtype == DType::bf16) return to_float(static_cast<const __nv_bfloat16*>(data)[place]);
    return to_float(static_cast<const __half*>(data)[place]);
  }
};

template <class T, class Index>
struct Work {
  using Place = typename Csr<Index>::Place;
  Csr<Index> csr;
  Weights weights;
  const T* x;  // [x_rows, width]: what is gathered
  int64_t x_rows, stride;
  int width;
  T* y;          // [csr.rows, width]
  Index* arg;    // [csr.rows, width] or null
  float* state;  // [2, csr.rows, width] or null: softmax's log of its sum of exponentials, and its result
  float sign;    // -1: the least one, as the greatest of the negatives
  bool divides;  // by the length of the row
  // of gradients
  const Index* divisors;  // [csr.columns + 1] or null: a row_ptr, by whose lengths what is gathered is divided
  const T* own;           // [own_rows, width]: x
  int64_t own_rows, own_stride;
  void* dweights;  // [E] of the weights' dtype, or null
  // of two inputs: the nodes past x_rows, of gradients past own_rows
  const T* previous;  // [P, width]
  int64_t previous_stride;
  const Index* chosen;    // [csr.columns, width]: arg of the forward call
  const float* softened;  // [2, csr.columns, width]: state of the forward call
  // how it is cut
  int team, group;  // lanes that a row's columns need, and that take a row: several teams, with edges by turns
  unsigned piece_blocks;
  float* partial;   // [planes, 2 chunks, width]
  int64_t* starts;  // [chunks]: the long row that begins there, or -1
  int64_t chunks;

  __device__ __forceinline__ const T* gathered(Place node) const {
    const auto row = static_cast<int64_t>(node);
    return row < x_rows ? x + row * stride : previous + (row - x_rows) * previous_stride;
  }
  __device__ __forceinline__ const T* owned(int64_t node) const {
    return node < own_rows ? own + node * own_stride : previous + (node - own_rows) * previous_stride;
  }
  // What a gradient that arrived by this row is shared out by.
  __device__ __forceinline__ float divisor_of(Place row) const {
    return static_cast<float>(max(static_cast<int64_t>(divisors[row + 1]) - divisors[row], int64_t{1}));
  }
  __device__ __forceinline__ void answer(Place edge, float dot) const {
    if (weights.dtype == DType::f32) {
      static_cast<float*>(dweights)[edge] = dot;
    } else if (weights.dtype == DType::bf16) {
      static_cast<__nv_bfloat16*>(dweights)[edge] = from_float<__nv_bfloat16>(dot);
    } else {
      static_cast<__half*>(dweights)[edge] = from_float<__half>(dot);
    }
  }
};

// What a row, or a piece of one, has come to.
template <Kind kind, int N>
struct State {
  static constexpr int planes = 1;
  float total[N];

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int i = 0; i < N; ++i) total[i] = 0.0f;
  }
  __device__ __forceinline__ void merge(int i, const State& other) { total[i] += other.total[i]; }
  template <class Visit>
  __device__ __forceinline__ void each(int i, Visit&& visit) {
    visit(0, total[i]);
  }
};

// The greatest, of equals the first; the first NaN before all of them, as in torch.
template <int N>
struct State<Kind::extreme, N> {
  static constexpr int planes = 2;
  float best[N];
  unsigned at[N];  // places from the beginning of the row

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int i = 0; i < N; ++i) best[i] = 0.0f, at[i] = nowhere;
  }
  // A place behind all that were met: `first` where there were none, in whatever column.
  __device__ __forceinline__ void follow(int i, float value, unsigned place, bool first) {
    if (first || (!(value <= best[i]) && !isnan(best[i]))) best[i] = value, at[i] = place;
  }
  // Any place.
  __device__ __forceinline__ void meet(int i, float value, unsigned place) {
    const bool both = isnan(value) && isnan(best[i]);
    const bool greater = value > best[i] || (isnan(value) && !isnan(best[i]));
    const bool first = (value == best[i] || both) && place < at[i];
    if (at[i] == nowhere || greater || first) best[i] = value, at[i] = place;
  }
  __device__ __forceinline__ void merge(int i, const State& other) {
    if (other.at[i] != nowhere) meet(i, other.best[i], other.at[i]);
  }
  template <class Visit>
  __device__ __forceinline__ void each(int i, Visit&& visit) {
    visit(0, best[i]);
    float bits = __uint_as_float(at[i]);
    visit(1, bits);
    at[i] = __float_as_uint(bits);
  }
};

// sum(exp(m - top)) and sum(exp(m - top) m), top the greatest so far.
template <int N>
struct State<Kind::softmax, N> {
  static constexpr int planes = 3;
  float top[N], exponentials[N], total[N];

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int i = 0; i < N; ++i) top[i] = -INFINITY, exponentials[i] = 0.0f, total[i] = 0.0f;
  }
  __device__ __forceinline__ void rescale(int i, float higher) {
    const float factor = exponentials[i] == 0.0f ? 0.0f : __expf(top[i] - higher);
    top[i] = higher, exponentials[i] *= factor, total[i] *= factor;
  }
  __device__ __forceinline__ void merge(int i, const State& other) {
    if (other.exponentials[i] == 0.0f) return;
    const float higher = fmaxf(top[i], other.top[i]), factor = __expf(other.top[i] - higher);
    rescale(i, higher);
    exponentials[i] += factor * other.exponentials[i], total[i] += factor * other.total[i];
  }
  template <class Visit>
  __device__ __forceinline__ void each(int i, Visit&& visit) {
    visit(0, top[i]);
    visit(1, exponentials[i]);
    visit(2, total[i]);
  }
};

// What `Ahead` edges hand on: the node that is gathered (nobody: none), the weight, the edge. Gradients know it by number.
template <class T, class Index, int Ahead>
struct Edges {
  typename Csr<Index>::Place from[Ahead], edge[Ahead];
  const T* at[Ahead];
  float weight[Ahead];
  unsigned place[Ahead];

  __device__ __forceinline__ bool there(int n) const { return at[n] != nullptr; }
};

// N values of [columns, width] that belong to those of a lane: whole words where its row is made of whole words.
template <int N, class V>
__device__ __forceinline__ Vec<V, N> beside(const V* from) {
  if constexpr (N == 1) {
    return {{*from}};
  } else {
    constexpr int each = widest<V>;
    Vec<V, N> found;
#pragma unroll
    for (int i = 0; i < N; i += each) {
      const auto word = load<each>(from + i);
#pragma unroll
      for (int k = 0; k < each; ++k) found.at[i + k] = word.at[k];
    }
    return found;
  }
}

// What arrives at an edge's message out of a row of grad: visit(i, value) of each of a lane's values.
template <class T, class Index, bool Words, Kind kind, class Visit>
__device__ __forceinline__ void pulled(const Work<T, Index>& work, typename Csr<Index>::Place from,
                                       typename Csr<Index>::Place edge, float weight,
                                       const typename Access<T, Words>::Held& grad,
                                       const typename Access<T, Words>::Held& own, int column, Visit&& visit) {
  using Of = Access<T, Words>;
  const int64_t there = static_cast<int64_t>(from) * work.width + column;
  if constexpr (kind == Kind::pull_sum) {
#pragma unroll
    for (int i = 0; i < Of::values; ++i) visit(i, Of::value(grad, i));
  } else if constexpr (kind == Kind::pull_extreme) {
    const auto chosen = beside<Of::values>(work.chosen + there);
#pragma unroll
    for (int i = 0; i < Of::values; ++i) {
      if (static_cast<typename Csr<Index>::Place>(chosen.at[i]) == edge) visit(i, Of::value(grad, i));
    }
  } else {
    const int64_t plane = static_cast<int64_t>(work.csr.columns) * work.width;
    const auto lse = beside<Of::values>(work.softened + there),
               mean = beside<Of::values>(work.softened + plane + there);
#pragma unroll
    for (int i = 0; i < Of::values; ++i) {
      const float message = weight * Of::value(own, i), part = __expf(message - lse.at[i]);
      visit(i, Of::value(grad, i) * part * (1.0f + message - mean.at[i]));
    }
  }
}

// Takes `Ahead` edges up into state. Of gradients, dots[n]: what edge n adds to its weight's, of this lane's columns.
template <int Ahead, class T, class Index, bool Words, Kind kind>
__device__ __forceinline__ void take(const Work<T, Index>& work, State<kind, Access<T, Words>::values>& state,
                                     const Edges<T, Index, Ahead>& edges, const typename Access<T, Words>::Held& own,
                                     int column, float (&dots)[Ahead]) {
  using Of = Access<T, Words>;
  constexpr auto nobody = Csr<Index>::nobody;
  typename Of::Held held[Ahead];
#pragma unroll
  for (int n = 0; n < Ahead; ++n) {
    held[n] = edges.at[n] && column < work.width ? Of::read(edges.at[n] + column) : Of::none();
  }

  if constexpr (kind == Kind::softmax) {
#pragma unroll
    for (int i = 0; i < Of::values; ++i) {
      float message[Ahead], higher = state.top[i];
#pragma unroll
      for (int n = 0; n < Ahead; ++n) {
        message[n] = edges.weight[n] * Of::value(held[n], i);
        if (edges.there(n)) higher = fmaxf(higher, message[n]);
      }
      state.rescale(i, higher);
#pragma unroll
      for (int n = 0; n < Ahead; ++n) {
        const float part = edges.there(n) ? __expf(message[n] - higher) : 0.0f;
        state.exponentials[i] += part, state.total[i] += part * message[n];
      }
    }
  } else {
#pragma unroll
    for (int n = 0; n < Ahead; ++n) {
      dots[n] = 0.0f;
      if constexpr (kind == Kind::sum) {  // nobody's row is zeros, and so is its weight
#pragma unroll
        for (int i = 0; i < Of::values; ++i) state.total[i] += edges.weight[n] * Of::value(held[n], i);
        continue;
      }
      if (!edges.there(n) || column >= work.width) continue;
      if constexpr (kind == Kind::extreme) {
        const float weight = work.sign * edges.weight[n];
        const bool first = state.at[0] == nowhere;
#pragma unroll
        for (int i = 0; i < Of::values; ++i) state.follow(i, weight * Of::value(held[n], i), edges.place[n], first);
      } else if constexpr (kind >= Kind::pull_sum) {
        pulled<T, Index, Words, kind>(work, edges.from[n], edges.edge[n], edges.weight[n], held[n], own, column,
                                      [&](int i, float value) {
                                        state.total[i] += edges.weight[n] * value;
                                        dots[n] += value * Of::value(own, i);
                                      });
      }
    }
  }
}

// dots[n] summed over the lanes of a team: halves are exchanged, so that lane n ends with number n's sum: Ahead - 1
// shuffles and one for each doubling of the team beyond Ahead, where one sum at a time would take all its doublings.
template <int Ahead>
__device__ __forceinline__ float shared_out(float (&dots)[Ahead], int lane, int team) {
#pragma unroll
  for (int half = Ahead / 2; half > 0; half /= 2) {
    const bool upper = lane & half;
#pragma unroll
    for (int n = 0; n < half; ++n) {
      const float given = upper ? dots[n] : dots[n + half], kept = upper ? dots[n + half] : dots[n];
      dots[n] = kept + __shfl_xor_sync(whole_warp, given, half);
    }
  }
  for (int step = Ahead; step < team; step *= 2) dots[0] += __shfl_xor_sync(whole_warp, dots[0], step);
  return dots[0];
}

// `length` edges from `begin` on, the first of which is number `first` of its row. Every lane of the warp calls, with the
// greatest length of the warp as `most`; groups have rows of their own, and the teams of a group edges by turns.
template <int Ahead, class T, class Index, bool Words, Kind kind>
__device__ __forceinline__ State<kind, Access<T, Words>::values> walk(const Work<T, Index>& work, int group,
                                                                      int64_t row, typename Csr<Index>::Place begin,
                                                                      unsigned first, unsigned length, unsigned most,
                                                                      int column) {
  using Of = Access<T, Words>;
  using Place = typename Csr<Index>::Place;
  constexpr bool pulls = kind >= Kind::pull_sum;
  constexpr Place nobody = Csr<Index>::nobody;
  const int lane = threadIdx.x % group, of_team = threadIdx.x % work.team;
  const int teams = group / work.team, team = lane / work.team;
  State<kind, Of::values> state;
  state.clear();
  typename Of::Held own = Of::none();
  if constexpr (pulls) {
    if (length > 0 && column < work.width) own = Of::read(work.owned(row) + column);
  }

  unsigned base = 0;
  for (unsigned left = most; left > 0; left -= min(left, static_cast<unsigned>(group)), base += group) {
    Place from = nobody, edge = nobody;
    const T* at = nullptr;
    float weight = 0.0f, divisor = 1.0f;
    if (base < length && lane < length - base) {
      from = work.csr.column_at(begin + base + lane);
      edge = work.csr.edge_at(begin + base + lane);
      if (edge == nobody) from = nobody;
      if (from != nobody) {
        weight = work.weights.at(edge);
        at = work.gathered(from);
        if (work.divisors) divisor = work.divisor_of(from), weight /= divisor;
      }
    }
    const int edges_here = min(left, static_cast<unsigned>(group));
#pragma unroll 1
    for (int j = 0; j < edges_here; j += Ahead * teams) {
      Edges<T, Index, Ahead> edges;
#pragma unroll
      for (int n = 0; n < Ahead; ++n) {
        const int source = j + n * teams + team;
        edges.at[n] = reinterpret_cast<const T*>(
            __shfl_sync(whole_warp, reinterpret_cast<unsigned long long>(at), source, group));
        if constexpr (kind > Kind::pull_sum) edges.from[n] = __shfl_sync(whole_warp, from, source, group);
        edges.weight[n] = __shfl_sync(whole_warp, weight, source, group);
        if constexpr (kind == Kind::pull_extreme) edges.edge[n] = __shfl_sync(whole_warp, edge, source, group);
        if constexpr (kind == Kind::extreme) edges.place[n] = first + base + source;
      }
      float dots[Ahead];
      take<Ahead, T, Index, Words, kind>(work, state, edges, own, column, dots);
      if constexpr (pulls) {
        if (!work.dweights) continue;
        const float dot = shared_out(dots, of_team, work.team);
        const int source = j + of_team % Ahead * teams + team;
        const Place its_edge = __shfl_sync(whole_warp, from != nobody ? edge : nobody, source, group);
        const float its_divisor = __shfl_sync(whole_warp, divisor, source, group);
        if (of_team < Ahead && its_edge != nobody) work.answer(its_edge, dot / its_divisor);
      }
    }
  }

  for (int step = work.team; step < group; step *= 2) {
#pragma unroll
    for (int i = 0; i < Of::values; ++i) {
      State<kind, Of::values> other = state;
      other.each(i, [&](int, float& value) { value = __shfl_xor_sync(whole_warp, value, step); });
      state.merge(i, other);
    }
  }
  return state;
}

template <class T, class Index, bool Words, Kind kind>
__device__ __forceinline__ void finish(const Work<T, Index>& work, const State<kind, Access<T, Words>::values>& state,
                                       int64_t row, typename Csr<Index>::Place begin, unsigned length, int column) {
  using Of = Access<T, Words>;
  if (column >= work.width) return;
  const int64_t place = row * work.width + column;
  float value[Of::values];
#pragma unroll
  for (int i = 0; i < Of::values; ++i) {
    if constexpr (kind == Kind::extreme) {
      const bool any = state.at[i] != nowhere;
      value[i] = any ? work.sign * state.best[i] : 0.0f;
      if (!work.arg) continue;
      // of a row_ptr that does not rise, pieces that nobody wrote may say any place
      const auto taken = begin + state.at[i];
      const bool there = any && taken >= begin && taken < work.csr.edges;
      work.arg[place + i] = there ? static_cast<Index>(work.csr.edge_at(taken)) : Index{-1};
    } else if constexpr (kind == Kind::softmax) {
      const bool any = state.exponentials[i] != 0.0f;
      value[i] = any ? state.total[i] / state.exponentials[i] : 0.0f;
      if (!work.state) continue;
      work.state[place + i] = any ? state.top[i] + logf(state.exponentials[i]) : 0.0f;
      work.state[work.csr.rows * work.width + place + i] = value[i];
    } else {
      value[i] = work.divides && length > 0 ? state.total[i] / static_cast<float>(length) : state.total[i];
    }
  }
  if constexpr (Words) {
    __stcs(reinterpret_cast<uint4*>(work.y + place), bits_as<uint4>(pack<T>(value).word));
  } else {
    Of::write(work.y + place, value);
  }
}

template <int Ahead, class T, class Index, bool Words, Kind kind>
__device__ __forceinline__ void take_row(const Work<T, Index>& work, unsigned block, int column) {
  using Place = typename Csr<Index>::Place;
  const int64_t row = (static_cast<int64_t>(block) * threads + threadIdx.x) / work.group;
  const bool there = row < work.csr.rows;
  const Place begin = there ? work.csr.begin_of(row) : 0;
  const unsigned length = there ? work.csr.length_of(row, begin) : 0;
  const bool cut = work.chunks > 0 && length > long_row;
  const unsigned mine = cut ? 0 : length, most = __reduce_max_sync(whole_warp, mine);
  const auto state = walk<Ahead, T, Index, Words, kind>(work, work.group, row, begin, 0, mine, most, column);
  if (there && !cut && threadIdx.x % work.group < work.team) {
    finish<T, Index, Words, kind>(work, state, row, begin, length, column);
  }
}

// A warp takes the edges of a chunk that long rows have: of the row that has its first edge, and of one that begins later.
template <int Ahead, class T, class Index, bool Words, Kind kind>
__device__ __forceinline__ void take_pieces(const Work<T, Index>& work, unsigned block, int column) {
  using Of = Access<T, Words>;
  using Place = typename Csr<Index>::Place;
  const int64_t own = (static_cast<int64_t>(block) * threads + threadIdx.x) / 32;
  if (own >= work.chunks) return;
  const auto low = static_cast<Place>(own * chunk), high = min(static_cast<Place>(low + chunk), work.csr.edges);
  auto [row, piece] = first_piece(
      low, high, [&](Place place) { return work.csr.row_of_by_warp(place); },
      [&](int64_t of) { return work.csr.begin_of(of); });
  int64_t started = -1;
#pragma unroll 1
  for (; piece < 2; ++piece) {
    const Place begin = work.csr.begin_of(row);
    const unsigned length = work.csr.length_of(row, begin);
    const Place end = begin + length;
    if (length > long_row && begin < high && end > low) {
      const Place from = max(begin, low);
      const auto mine = static_cast<unsigned>(min(end, high) - from);
      auto state = walk<Ahead, T, Index, Words, kind>(work, 32, row, from, static_cast<unsigned>(from - begin), mine,
                                                      mine, column);
      if (begin >= low) started = row;
      if (threadIdx.x % 32 < work.team && column < work.width) {
        float* at = work.partial + piece_slot(own, piece) * work.width + column;
        const int64_t plane = 2 * work.chunks * work.width;
#pragma unroll
        for (int i = 0; i < Of::values; ++i) {
          state.each(i, [&](int which, float& value) { at[which * plane + i] = value; });
        }
      }
    }
    if (end >= high) break;  // all of the chunk is the first one's
    const int64_t last = work.csr.row_of_by_warp(high - 1);
    if (last == row) break;
    row = last;
  }
  if (threadIdx.x % 32 == 0 && blockIdx.y == 0) work.starts[own] = started;
}

template <class T, class Index, bool Words, Kind kind>
__global__ void __launch_bounds__(threads, resident<T, Words, kind>) rows_kernel(Work<T, Index> work) {
  const int column = (static_cast<int>(blockIdx.y) * work.team + threadIdx.x % work.team) * Access<T, Words>::values;
  take_row<ahead_of<T, kind>, T, Index, Words, kind>(work, blockIdx.x, column);
}

// Pieces of long rows; where they leave registers for it, behind them all other rows in the same launch.
template <class T, class Index, bool Words, Kind kind>
__global__ void __launch_bounds__(threads, 8) pieces_kernel(Work<T, Index> work) {
  const int column = (static_cast<int>(blockIdx.y) * work.team + threadIdx.x % work.team) * Access<T, Words>::values;
  if (blockIdx.x < work.piece_blocks) {
    take_pieces<ahead, T, Index, Words, kind>(work, blockIdx.x, column);
  } else if constexpr (has_rows_beside_pieces<Index, Words, kind>) {
    take_row<ahead, T, Index, Words, kind>(work, blockIdx.x - work.piece_blocks, column);
  }
}

// A block adds up a long row: its teams take its pieces by turns, then the first takes what the teams have, in order.
template <class T, class Index, bool Words, Kind kind>
__global__ void __launch_bounds__(combining) combine_kernel(Work<T, Index> work) {
  using Of = Access<T, Words>;
  __shared__ State<kind, Of::values> found[combining];
  __shared__ int64_t starts[combining];
  const int lane = threadIdx.x % work.team, team = threadIdx.x / work.team, teams = combining / work.team;
  const int column = (static_cast<int>(blockIdx.y) * work.team + lane) * Of::values;
  const int64_t plane = 2 * work.chunks * work.width, step = gridDim.x;

  for (int64_t group = blockIdx.x; group < work.chunks; group += combining * step) {
    const int64_t own = group + threadIdx.x * step;
    starts[threadIdx.x] = own < work.chunks ? work.starts[own] : -1;
    __syncthreads();
    for (int at = 0; at < combining && group + at * step < work.chunks; ++at) {
      const int64_t row = starts[at];
      if (row < 0) continue;
      const auto begin = work.csr.begin_of(row), end = work.csr.begin_of(row + 1);
      const auto first = static_cast<int64_t>(begin / chunk), last = static_cast<int64_t>((end - 1) / chunk);
      State<kind, Of::values> state;
      state.clear();
      for (int64_t q = first + team; q <= last && column < work.width; q += teams) {
        const int64_t slot = piece_slot(q, piece_of(q, first, begin));
        State<kind, Of::values> next;
#pragma unroll
        for (int i = 0; i < Of::values; ++i) {
          next.each(i, [&](int which, float& value) {
            value = work.partial[which * plane + slot * work.width + column + i];
          });
          state.merge(i, next);
        }
      }
      found[threadIdx.x] = state;
      __syncthreads();
      if (team == 0) {
        for (int other = 1; other < teams; ++other) {
#pragma unroll
          for (int i = 0; i < Of::values; ++i) state.merge(i, found[other * work.team + lane]);
        }
        finish<T, Index, Words, kind>(work, state, row, begin, static_cast<unsigned>(end - begin), column);
      }
      __syncthreads();
    }
    __syncthreads();
  }
}

// dweights[e] = the dot product of what the edge is answerable for and its row of x: where a row is wider than a team, so
// that no walk has all of it. A team has as many edges as lanes.
template <class T, class Index, bool Words, Kind kind>
__global__ void __launch_bounds__(threads) weights_kernel(Work<T, Index> work) {
  using Of = Access<T, Words>;
  using Place = typename Csr<Index>::Place;
  constexpr Place nobody = Csr<Index>::nobody;
  const int lane = threadIdx.x % work.team;
  const int64_t place = static_cast<int64_t>(blockIdx.x) * threads + threadIdx.x;
  int64_t row = 0;
  Place from = nobody, edge = nobody;
  float weight = 0.0f, divisor = 1.0f, dot = 0.0f;
  if (place < static_cast<int64_t>(work.csr.edges)) {
    const auto at = static_cast<Place>(place);
    row = work.csr.row_of(at), edge = work.csr.edge_at(at);
    const Place begin = work.csr.begin_of(row);
    const bool has = begin <= at && at - begin < work.csr.length_of(row, begin);
    if (edge != nobody && has) from = work.csr.column_at(at);
    if (from != nobody) weight = work.weights.at(edge);
    if (from != nobody && work.divisors) divisor = work.divisor_of(from);
  }

  for (int j = 0; j < work.team; ++j) {
    const int64_t its_row = __shfl_sync(whole_warp, row, j, work.team);
    const Place its_from = __shfl_sync(whole_warp, from, j, work.team);
    const Place its_edge = __shfl_sync(whole_warp, edge, j, work.team);
    const float its_weight = __shfl_sync(whole_warp, weight, j, work.team);
    float sum = 0.0f;
    for (int column = lane * Of::values; its_from != nobody && column < work.width; column += work.team * Of::values) {
      const auto grad = Of::read(work.gathered(its_from) + column);
      const auto own = Of::read(work.owned(its_row) + column);
      pulled<T, Index, Words, kind>(work, its_from, its_edge, its_weight, grad, own, column,
                                    [&](int i, float value) { sum += value * Of::value(own, i); });
    }
    for (int step = work.team / 2; step > 0; step /= 2) sum += __shfl_xor_sync(whole_warp, sum, step);
    if (lane == j) dot = sum;
  }

  if (from != nobody) work.answer(edge, dot / divisor);
}

// ---- launches ------------------------------------------------------------------------------------------------------

dim3 blocks_for(int64_t count, int64_t each, int64_t tiles = 1) {
  return dim3(static_cast<unsigned>((count + each - 1) / each), static_cast<unsigned>(tiles));
}

int team_for(int64_t accesses, int smallest) {
  int team = smallest;
  while (team < 32 && team < accesses) team *= 2;
  return team;
}

template <class T, class Index, bool Words, Kind kind>
void run(const Context& context, Work<T, Index> work, int64_t longest) {
  if (work.csr.rows == 0 || work.width == 0) return;
  const int64_t accesses = (work.width + Access<T, Words>::values - 1) / Access<T, Words>::values;
  work.team = team_for(accesses, ahead_of<T, kind>);
  work.group = work.csr.rows < few_rows ? 32 : work.team;
  const int64_t tiles = (accesses + work.team - 1) / work.team;
  const auto edges = static_cast<int64_t>(work.csr.edges);
  const bool split = longest > long_row && edges > long_row;

  std::optional<Buffer> partial, starts;
  if (split) {
    work.chunks = (edges + chunk - 1) / chunk;
    work.piece_blocks = static_cast<unsigned>((work.chunks + threads / 32 - 1) / (threads / 32));
    constexpr int planes = State<kind, Access<T, Words>::values>::planes;
    partial.emplace(context.empty({planes, 2 * work.chunks, work.width}, DType::f32));
    starts.emplace(context.empty({work.chunks}, DType::i64));
    work.partial = partial->as<float>(), work.starts = starts->as<int64_t>();
  }
  dim3 grid = blocks_for(work.csr.rows, threads / work.group, tiles);
  if (split) {
    dim3 pieces(work.piece_blocks, grid.y);
    if (has_rows_beside_pieces<Index, Words, kind>) pieces.x += grid.x;
    launch<pieces_kernel<T, Index, Words, kind>>(context, pieces, dim3(threads), work);
  }
  if (!split || !has_rows_beside_pieces<Index, Words, kind>) {
    launch<rows_kernel<T, Index, Words, kind>>(context, grid, dim3(threads), work);
  }
  if (!split) return;

  const int64_t most = 4 * static_cast<int64_t>(multiprocessors(context));
  constexpr Kind ends = kind >= Kind::pull_sum ? Kind::sum : kind;  // gradients' pieces are sums
  launch<combine_kernel<T, Index, Words, ends>>(context, blocks_for(std::min(work.chunks, most), 1, tiles),
                                                dim3(combining), work);
}

// The gradient of x and, where dweights is not null, of the weights: by the same walk where a team has a whole row.
template <class T, class Index, bool Words, Kind kind>
void pull(const Context& context, Work<T, Index> work, void* dweights /*[E], of the weights' dtype*/, int64_t longest) {
  constexpr int values = Access<T, Words>::values;
  const bool whole = work.width <= 32 * values;
  if (whole) work.dweights = dweights;
  run<T, Index, Words, kind>(context, work, longest);
  if (!dweights || whole || work.csr.edges == 0 || work.csr.rows == 0) return;

  work.dweights = dweights, work.team = 32;
  launch<weights_kernel<T, Index, Words, kind>>(context, blocks_for(static_cast<int64_t>(work.csr.edges), threads),
                                                dim3(threads), work);
}

bool is_mean(const std::string& reduce) { return reduce == "mean"; }

Kind kind_of(const std::string& reduce) {
  if (reduce == "sum" || reduce == "mean") return Kind::sum;
  if (reduce == "max" || reduce == "min") return Kind::extreme;
  if (reduce == "softmax") return Kind::softmax;
  wrong_value("reduce", "'sum', 'mean', 'max', 'min' or 'softmax'", "'" + reduce + "'");
}

void is_indices(const char* name, const Tensor& x, const char* like, const Tensor& y) {
  if (x.dtype != DType::i32 && x.dtype != DType::i64) wrong_type(name, "int32 or int64", name_of(x.dtype));
  if (x.dtype != y.dtype) wrong_type(name, std::string(name_of(y.dtype)) + " like " + like, name_of(x.dtype));
  if (x.rank != 1) wrong_value(name, "shape [E]", shape_of(x));
}

void has_edges(const char* name, const Tensor& x, const Tensor& column) {
  if (x.shape[0] != column.shape[0]) wrong_value(name, "the shape " + shape_of(column) + " of column", shape_of(x));
}

// Indices as they come: checked, of int32 or int64.
struct Indices {
  const Tensor* row_ptr;  // [rows + 1]
  const Tensor* column;   // [edges]
  const Tensor* edge;     // [edges] or null
  int64_t rows, columns, edges;

  template <class Index>
  Csr<Index> as() const {
    using Place = typename Csr<Index>::Place;
    const uint64_t most = static_cast<uint64_t>(std::numeric_limits<Index>::max()) + 1;
    const auto bound = [most](int64_t count) {
      return static_cast<Place>(std::min(static_cast<uint64_t>(count), most));
    };
    return {row_ptr->as<const Index>(),
            column->as<const Index>(),
            edge ? edge->as<const Index>() : nullptr,
            rows,
            bound(columns),
            bound(edges)};
  }
};

Indices indices_of(const Tensor& row_ptr, const Tensor& column, const Tensor* edge, int64_t columns,
                   const char* row_ptr_name, const char* column_name, const char* edge_name, const Tensor& first) {
  if (row_ptr.dtype != DType::i32 && row_ptr.dtype != DType::i64) {
    wrong_type(row_ptr_name, "int32 or int64", name_of(row_ptr.dtype));
  }
  if (row_ptr.dtype != first.dtype) {
    wrong_type(row_ptr_name, std::string(name_of(first.dtype)) + " like row_ptr", name_of(row_ptr.dtype));
  }
  if (row_ptr.rank != 1 || row_ptr.shape[0] < 1) wrong_value(row_ptr_name, "shape [N + 1]", shape_of(row_ptr));
  is_indices(column_name, column, "row_ptr", first);
  if (edge) {
    is_indices(edge_name, *edge, "row_ptr", first);
    has_edges(edge_name, *edge, column);
  }
  return {&row_ptr, &column, edge, row_ptr.shape[0] - 1, columns, column.shape[0]};
}

Indices transpose_of(const Tensor& t_row_ptr, const Tensor& t_column, const Tensor& t_edge, int64_t rows, int64_t nodes,
                     const Tensor& row_ptr, const Tensor& column) {
  const Indices found = indices_of(t_row_ptr, t_column, &t_edge, rows, "t_row_ptr", "t_column", "t_edge", row_ptr);
  if (found.rows != nodes) {
    wrong_value("t_row_ptr", "shape [" + std::to_string(nodes + 1) + "]", shape_of(t_row_ptr));
  }
  has_edges("t_column", t_column, column);
  return found;
}

void is_length(const char* name, int64_t value) {
  if (value < 0) wrong_value(name, "0 to 9223372036854775807", std::to_string(value));
}

void is_dense(const Tensor& x) {
  if (x.shape[x.rank - 1] > 1 && x.stride[x.rank - 1] != 1) throw Refused{"unit_stride"};
}

Weights weights_of(const std::optional<Tensor>& edge_weight, const Tensor& column, const Tensor& x) {
  if (!edge_weight) return {};
  if (edge_weight->dtype > DType::f64 && edge_weight->dtype != DType::other) {
    wrong_type("edge_weight", "a floating dtype", name_of(edge_weight->dtype));
  }
  if (edge_weight->rank != 1) wrong_value("edge_weight", "shape [E]", shape_of(*edge_weight));
  has_edges("edge_weight", *edge_weight, column);
  if (edge_weight->dtype != DType::f32 && edge_weight->dtype != x.dtype) throw Refused{"dtype"};
  return {edge_weight->data, edge_weight->dtype, edge_weight->stride[0]};
}

// How many there are to gather: rows of x, then of previous.
int64_t nodes_of(const Tensor& x, const std::optional<Tensor>& previous) {
  if (!previous) return x.shape[0];
  if (previous->dtype != x.dtype) {
    wrong_type("previous", std::string(name_of(x.dtype)) + " like x", name_of(previous->dtype));
  }
  if (previous->rank != 2 || previous->shape[1] != x.shape[1]) {
    wrong_value("previous", "shape [P, " + std::to_string(x.shape[1]) + "]", shape_of(*previous));
  }
  return x.shape[0] + previous->shape[0];
}

bool in_words(const Tensor& x) {
  return x.shape[1] * x.itemsize % 16 == 0 && aligned(x.data, x.stride[0] * x.itemsize, 16);
}

// body.operator()<Index, Words>()
template <class Body>
void by_index(DType dtype, bool words, Body&& body) {
  const auto with = [&]<class Index>() {
    words ? body.template operator()<Index, true>() : body.template operator()<Index, false>();
  };
  switch (dtype) {
    case DType::i32: return with.template operator()<int32_t>();
    case DType::i64: return with.template operator()<int64_t>();
    default: wrong_type("row_ptr", "int32 or int64", name_of(dtype));
  }
}

}  // namespace

std::tuple<Buffer, Buffer, Buffer> message_passing_csr(
    const Context& context, const Tensor& x /*[M, F]*/, const Tensor& row_ptr /*[N + 1]*/, const Tensor& column /*[E]*/,
    const std::optional<Tensor>& edge /*[E]*/, const std::optional<Tensor>& edge_weight /*[E]*/,
    const std::optional<Tensor>& t_row_ptr /*[M + 1]*/, const std::optional<Tensor>& t_column /*[E]*/,
    const std::optional<Tensor>& t_edge /*[E]*/, const std::optional<Tensor>& previous /*[P, F]*/,
    const std::string& reduce, bool keep, int64_t longest, int64_t t_longest) {
  const Kind kind = kind_of(reduce);
  if (x.rank != 2) wrong_value("x", "shape [M, F]", shape_of(x));
  const int64_t nodes = nodes_of(x, previous);
  const Tensor* edges = edge ? &*edge : nullptr;
  const Indices csr = indices_of(row_ptr, column, edges, nodes, "row_ptr", "column", "edge", row_ptr);
  const Weights weights = weights_of(edge_weight, column, x);
  is_length("longest", longest), is_length("t_longest", t_longest);
  if (t_row_ptr && t_column && t_edge) {  // for the gradient alone; wrong ones are told now
    transpose_of(*t_row_ptr, *t_column, *t_edge, csr.rows, nodes, row_ptr, column);
  }
  if (x.shape[1] > widest_row || csr.edges > most_edges) throw Refused{"size"};
  for (const Tensor* each : {&x, &row_ptr, &column}) is_dense(*each);
  if (edge) is_dense(*edge);
  if (previous) is_dense(*previous);

  std::optional<Buffer> y, arg, state;
  dispatch(x.dtype, Floats{}, [&]<class T>() {
    const int64_t rows = csr.rows, width = x.shape[1];
    y.emplace(context.empty({rows, width}, x.dtype));
    arg.emplace(context.empty({keep && kind == Kind::extreme ? rows : 0, width}, row_ptr.dtype));
    state.emplace(context.empty({keep && kind == Kind::softmax ? 2 : 0, rows, width}, DType::f32));
    by_index(row_ptr.dtype, in_words(x) && (!previous || in_words(*previous)), [&]<class Index, bool Words>() {
      Work<T, Index> work{};
      work.csr = csr.as<Index>(), work.weights = weights;
      work.x = x.as<const T>(), work.stride = x.stride[0], work.width = static_cast<int>(width);
      work.y = y->template as<T>(), work.sign = reduce == "min" ? -1.0f : 1.0f, work.divides = is_mean(reduce);
      work.x_rows = x.shape[0];
      if (previous) work.previous = previous->as<const T>(), work.previous_stride = previous->stride[0];
      if (keep && kind == Kind::extreme) work.arg = arg->template as<Index>();
      if (keep && kind == Kind::softmax) work.state = state->template as<float>();
      switch (kind) {
        case Kind::sum: return run<T, Index, Words, Kind::sum>(context, work, longest);
        case Kind::extreme: return run<T, Index, Words, Kind::extreme>(context, work, longest);
        default: return run<T, Index, Words, Kind::softmax>(context, work, longest);
      }
    });
  });
  return {std::move(*y), std::move(*arg), std::move(*state)};
}

std::tuple<Buffer, Buffer> message_passing_csr_backward(
    const Context& context, const Tensor& grad /*[N, F]*/, const Tensor& x /*[M, F]*/,
    const Tensor& row_ptr /*[N + 1]*/, const Tensor& column /*[E]*/, const std::optional<Tensor>& edge /*[E]*/,
    const std::optional<Tensor>& edge_weight /*[E]*/, const Tensor& t_row_ptr /*[M + 1]*/,
    const Tensor& t_column /*[E]*/, const Tensor& t_edge /*[E]*/, const Tensor& arg /*[N, F] or [0, F]*/,
    const Tensor& state /*[2, N, F] or [0, N, F]*/, const std::optional<Tensor>& previous /*[P, F]*/,
    const std::string& reduce, bool weight_grad, int64_t t_longest) {
  const Kind kind = kind_of(reduce);
  if (x.rank != 2) wrong_value("x", "shape [M, F]", shape_of(x));
  const int64_t nodes = nodes_of(x, previous);
  const Tensor* edges = edge ? &*edge : nullptr;
  const Indices forward = indices_of(row_ptr, column, edges, nodes, "row_ptr", "column", "edge", row_ptr);
  const Weights weights = weights_of(edge_weight, column, x);
  is_length("t_longest", t_longest);
  const Indices csr = transpose_of(t_row_ptr, t_column, t_edge, forward.rows, nodes, row_ptr, column);
  const std::string rows = std::to_string(forward.rows), width = std::to_string(x.shape[1]);
  if (grad.dtype != x.dtype) wrong_type("grad", std::string(name_of(x.dtype)) + " like x", name_of(grad.dtype));
  if (grad.rank != 2 || grad.shape[0] != forward.rows || grad.shape[1] != x.shape[1]) {
    wrong_value("grad", "shape [" + rows + ", " + width + "]", shape_of(grad));
  }
  if (kind == Kind::extreme) {
    if (arg.dtype != row_ptr.dtype) {
      wrong_type("arg", std::string(name_of(row_ptr.dtype)) + " like row_ptr", name_of(arg.dtype));
    }
    if (arg.rank != 2 || arg.shape[0] != forward.rows || arg.shape[1] != x.shape[1]) {
      wrong_value("arg", "shape [" + rows + ", " + width + "]", shape_of(arg));
    }
  }
  if (kind == Kind::softmax) {
    if (state.rank != 3 || state.shape[0] != 2 || state.shape[1] != forward.rows || state.shape[2] != x.shape[1]) {
      wrong_value("state", "shape [2, " + rows + ", " + width + "]", shape_of(state));
    }
    if (state.dtype != DType::f32) throw Refused{"dtype"};
  }
  if (x.shape[1] > widest_row || csr.edges > most_edges) throw Refused{"size"};
  for (const Tensor* each : {&x, &grad, &row_ptr, &column, &t_row_ptr, &t_column, &t_edge}) is_dense(*each);
  if (edge) is_dense(*edge);
  if (previous) is_dense(*previous);
  if (!arg.contiguous_from(0) || !state.contiguous_from(0)) throw Refused{"contiguous"};

  std::optional<Buffer> dx, dweight;
  dispatch(x.dtype, Floats{}, [&]<class T>() {
    const bool asks = edge_weight && weight_grad;
    dx.emplace(context.empty({csr.rows, x.shape[1]}, x.dtype));
    dweight.emplace(context.empty({asks ? csr.edges : 0}, edge_weight ? edge_weight->dtype : DType::f32));
    if (asks && csr.edges > 0) {
      const auto bytes = static_cast<size_t>(csr.edges * dweight->view().itemsize);
      const auto stream = static_cast<cudaStream_t>(context.stream);
      check(cudaMemsetAsync(dweight->view().data, 0, bytes, stream), "memset");  // of edges that lie nowhere
    }
    const bool words = in_words(x) && in_words(grad) && (!previous || in_words(*previous)) &&
                       aligned(arg.data, 0, 16) && aligned(state.data, 0, 16);
    by_index(row_ptr.dtype, words, [&]<class Index, bool Words>() {
      Work<T, Index> work{};
      work.csr = csr.as<Index>(), work.weights = weights;
      work.x = grad.as<const T>(), work.stride = grad.stride[0], work.width = static_cast<int>(x.shape[1]);
      work.y = dx->template as<T>(), work.sign = 1.0f;
      work.divisors = is_mean(reduce) ? row_ptr.as<const Index>() : nullptr;
      work.x_rows = csr.columns;
      work.own = x.as<const T>(), work.own_rows = x.shape[0], work.own_stride = x.stride[0];
      if (previous) work.previous = previous->as<const T>(), work.previous_stride = previous->stride[0];
      work.chosen = arg.as<const Index>(), work.softened = state.as<const float>();
      switch (kind) {
        case Kind::sum:
          return asks ? pull<T, Index, Words, Kind::pull_sum>(context, work, dweight->view().data, t_longest)
                      : run<T, Index, Words, Kind::sum>(context, work, t_longest);
        case Kind::extreme:
          return pull<T, Index, Words, Kind::pull_extreme>(context, work, asks ? dweight->view().data : nullptr,
                                                           t_longest);
        default:
          return pull<T, Index, Words, Kind::pull_softmax>(context, work, asks ? dweight->view().data : nullptr,
                                                           t_longest);
      }
    });
  });
  return {std::move(*dx), std::move(*dweight)};
}

}  // namespace prequal::ops
