// y[i, f] = reduce over edges e of row i of w[e] x[column[e], f]. x [M, F], from column M on previous [P, F] -> y [N, F]
// A team of 4 to 32 lanes owns a row and a tile of its columns, reads its edges' indices a team at a time and has four rows
// of x on their way. Rows longer than `long_row` are cut at multiples of `chunk`, a team a piece; then a block adds them up.
// Bytes: E F sizeof(T) gathered, mostly from L2, M F sizeof(T) of them from memory, N F sizeof(T) written, E 4 of indices.
// Numerics: fp32, in the order of the edges; of long rows by pieces in a fixed order. No atomics.
#include <algorithm>
#include <cmath>
#include <optional>
#include <string>
#include <tuple>
#include <type_traits>

#include "ops.h"
#include "prequal/access.cuh"
#include "prequal/dispatch.h"
#include "prequal/launch.h"
#include "prequal/vec.cuh"

namespace prequal::ops {
namespace {

struct Unit : FileOf<"message_passing"> {};

// None of these is chosen by a measurement yet.
constexpr int threads = 256;
constexpr int ahead = 4;  // rows of x that a team has on their way
constexpr int smallest_team = ahead;
constexpr int chunk = 128;           // edges of a piece of a long row
constexpr int long_row = 2 * chunk;  // above it a row is cut: a piece then never meets more than two long rows
constexpr int64_t widest_row = int64_t{1} << 20;
constexpr int64_t most_edges = 0xffffffff;  // places in a row are kept in 32 bits
constexpr unsigned whole_warp = 0xffffffffu, nowhere = 0xffffffffu;

// What an edge gives to its row. The last two are gradients: rows are those of x, what is gathered is grad's.
enum class Kind { sum, extreme, softmax, pull_extreme, pull_softmax };

// Rows of edges. Nothing in them is trusted: what points outside is left out.
struct Csr {
  const void* row_ptr;  // [rows + 1]
  const void* column;   // [edges]
  const void* edge;     // [edges] or null: numbers of edges, where weights and arguments know them by
  bool wide;            // all of int64, else int32
  int64_t rows, columns, edges;

  __device__ __forceinline__ int64_t at(const void* from, int64_t place) const {
    return wide ? static_cast<const int64_t*>(from)[place] : static_cast<const int32_t*>(from)[place];
  }
  __device__ __forceinline__ int64_t begin_of(int64_t row) const {
    return min(max(at(row_ptr, row), int64_t{0}), edges);
  }
  // -1 where there is no such column.
  __device__ __forceinline__ int64_t column_at(int64_t place) const {
    const int64_t found = at(column, place);
    return found >= 0 && found < columns ? found : -1;
  }
  // -1 where there is no such edge.
  __device__ __forceinline__ int64_t edge_at(int64_t place) const {
    const int64_t found = edge ? at(edge, place) : place;
    return found >= 0 && found < edges ? found : -1;
  }
  // The last row that begins at this place or before; in a sorted row_ptr that is the one that has it.
  __device__ __forceinline__ int64_t row_of(int64_t place) const {
    int64_t low = 0, high = rows;  // the answer is in [low, high)
    while (high - low > 1) {
      const int64_t middle = low + (high - low) / 2;
      (begin_of(middle) <= place ? low : high) = middle;
    }
    return low;
  }
};

struct Weights {
  const void* data;  // [E] or null: all of them one
  DType dtype;
  int64_t stride;

  __device__ __forceinline__ float at(int64_t edge) const {
    if (!data) return 1.0f;
    const int64_t place = edge * stride;
    if (dtype == DType::f32) return static_cast<const float*>(data)[place];
    if (dtype == DType::bf16) return to_float(static_cast<const __nv_bfloat16*>(data)[place]);
    return to_float(static_cast<const __half*>(data)[place]);
  }
};

template <class T>
struct Work {
  Csr csr;
  Weights weights;
  const T* x;  // [x_rows, width]: what is gathered
  int64_t x_rows, stride;
  int width;
  T* y;          // [csr.rows, width]
  void* arg;     // [csr.rows, width] of the dtype of csr, or null
  float* state;  // [2, csr.rows, width] or null: softmax's log of its sum of exponentials, and its result
  float sign;    // -1: the least one, as the greatest of the negatives
  bool divides;  // by the length of the row
  // of gradients
  const void* divisors;  // [csr.columns + 1] or null: a row_ptr, by whose lengths what is gathered is divided
  const T* own;          // [own_rows, width]: x
  int64_t own_rows, own_stride;
  // of two inputs: the nodes past x_rows, of gradients past own_rows
  const T* previous;  // [P, width]
  int64_t previous_stride;
  const void* chosen;     // [csr.columns, width]: arg of the forward call, of the dtype of csr
  const float* softened;  // [2, csr.columns, width]: state of the forward call
  // how it is cut
  int team;  // lanes
  bool split;
  float* partial;   // [planes, 2 chunks, width]
  int64_t* starts;  // [chunks]: the long row that begins there, or -1
  int64_t chunks;

  __device__ __forceinline__ const T* gathered(int64_t node) const {
    return node < x_rows ? x + node * stride : previous + (node - x_rows) * previous_stride;
  }
  __device__ __forceinline__ const T* owned(int64_t node) const {
    return node < own_rows ? own + node * own_stride : previous + (node - own_rows) * previous_stride;
  }
  __device__ __forceinline__ int64_t length_of_gathered(int64_t row) const {
    return csr.at(divisors, row + 1) - csr.at(divisors, row);
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
  __device__ __forceinline__ void merge(const State& other) {
#pragma unroll
    for (int i = 0; i < N; ++i) total[i] += other.total[i];
  }
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
  __device__ __forceinline__ void meet(int i, float value, unsigned place) {
    const bool both = isnan(value) && isnan(best[i]);
    const bool greater = value > best[i] || (isnan(value) && !isnan(best[i]));
    const bool first = (value == best[i] || both) && place < at[i];
    if (at[i] == nowhere || greater || first) best[i] = value, at[i] = place;
  }
  __device__ __forceinline__ void merge(const State& other) {
#pragma unroll
    for (int i = 0; i < N; ++i) {
      if (other.at[i] != nowhere) meet(i, other.best[i], other.at[i]);
    }
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
  __device__ __forceinline__ void merge(const State& other) {
#pragma unroll
    for (int i = 0; i < N; ++i) {
      if (other.exponentials[i] == 0.0f) continue;
      const float higher = fmaxf(top[i], other.top[i]), factor = __expf(other.top[i] - higher);
      rescale(i, higher);
      exponentials[i] += factor * other.exponentials[i], total[i] += factor * other.total[i];
    }
  }
  template <class Visit>
  __device__ __forceinline__ void each(int i, Visit&& visit) {
    visit(0, top[i]);
    visit(1, exponentials[i]);
    visit(2, total[i]);
  }
};

// What `ahead` edges hand on: the row that is gathered (null: none), the weight, the edge. Gradients know it by its number.
template <class T>
struct Edges {
  const T* at[ahead];
  int64_t from[ahead], edge[ahead];
  float weight[ahead];
  unsigned place[ahead];
};

template <class T, bool Words, Kind kind>
__device__ __forceinline__ void take(const Work<T>& work, State<kind, Access<T, Words>::values>& state,
                                     const Edges<T>& edges, const typename Access<T, Words>::Held& own, int column) {
  using Of = Access<T, Words>;
  typename Of::Held held[ahead];
#pragma unroll
  for (int n = 0; n < ahead; ++n) {
    held[n] = edges.at[n] && column < work.width ? Of::read(edges.at[n] + column) : Of::none();
  }

  if constexpr (kind == Kind::softmax) {
#pragma unroll
    for (int i = 0; i < Of::values; ++i) {
      float message[ahead], higher = state.top[i];
#pragma unroll
      for (int n = 0; n < ahead; ++n) {
        message[n] = edges.weight[n] * Of::value(held[n], i);
        if (edges.at[n]) higher = fmaxf(higher, message[n]);
      }
      state.rescale(i, higher);
#pragma unroll
      for (int n = 0; n < ahead; ++n) {
        const float part = edges.at[n] ? __expf(message[n] - higher) : 0.0f;
        state.exponentials[i] += part, state.total[i] += part * message[n];
      }
    }
  } else {
#pragma unroll
    for (int n = 0; n < ahead; ++n) {
      if (!edges.at[n]) continue;
      int64_t there = 0, plane = 0;
      if constexpr (kind >= Kind::pull_extreme) {
        if (column >= work.width) continue;
        there = edges.from[n] * work.width + column, plane = work.csr.columns * work.width;
      }
#pragma unroll
      for (int i = 0; i < Of::values; ++i) {
        const float value = Of::value(held[n], i);
        if constexpr (kind == Kind::sum) {
          state.total[i] += edges.weight[n] * value;
        } else if constexpr (kind == Kind::extreme) {
          state.meet(i, work.sign * (edges.weight[n] * value), edges.place[n]);
        } else if constexpr (kind == Kind::pull_extreme) {
          if (work.csr.at(work.chosen, there + i) == edges.edge[n]) state.total[i] += edges.weight[n] * value;
        } else {
          const float message = edges.weight[n] * Of::value(own, i);
          const float part = __expf(message - work.softened[there + i]);
          state.total[i] += edges.weight[n] * value * part * (1.0f + message - work.softened[plane + there + i]);
        }
      }
    }
  }
}

// The edges from `begin` to `end` of a row that begins at `first`. Every lane of the warp calls; teams have rows of their own.
template <class T, bool Words, Kind kind>
__device__ __forceinline__ State<kind, Access<T, Words>::values> walk(const Work<T>& work, int64_t row, int64_t first,
                                                                      int64_t begin, int64_t end, int column) {
  using Of = Access<T, Words>;
  const int lane = threadIdx.x % work.team;
  State<kind, Of::values> state;
  state.clear();
  typename Of::Held own = Of::none();
  if constexpr (kind == Kind::pull_softmax) {
    if (begin < end && column < work.width) own = Of::read(work.owned(row) + column);
  }

  for (int64_t base = begin; __any_sync(whole_warp, base < end); base += work.team) {
    const T* at = nullptr;
    int64_t from = -1, edge = -1;
    float weight = 0.0f;
    if (base + lane < end) {
      edge = work.csr.edge_at(base + lane);
      if (edge >= 0) from = work.csr.column_at(base + lane);
      if (from >= 0) at = work.gathered(from), weight = work.weights.at(edge);
      if (from >= 0 && work.divisors) weight /= static_cast<float>(max(work.length_of_gathered(from), int64_t{1}));
    }
    for (int j = 0; j < work.team; j += ahead) {
      if (!__any_sync(whole_warp, base + j < end)) break;
      Edges<T> edges;
#pragma unroll
      for (int n = 0; n < ahead; ++n) {
        edges.at[n] = reinterpret_cast<const T*>(
            __shfl_sync(whole_warp, reinterpret_cast<unsigned long long>(at), j + n, work.team));
        edges.weight[n] = __shfl_sync(whole_warp, weight, j + n, work.team);
        if constexpr (kind >= Kind::pull_extreme) edges.from[n] = __shfl_sync(whole_warp, from, j + n, work.team);
        if constexpr (kind == Kind::pull_extreme) edges.edge[n] = __shfl_sync(whole_warp, edge, j + n, work.team);
        if constexpr (kind == Kind::extreme) edges.place[n] = static_cast<unsigned>(base + j + n - first);
      }
      take<T, Words, kind>(work, state, edges, own, column);
    }
  }
  return state;
}

template <class T, bool Words, Kind kind>
__device__ __forceinline__ void finish(const Work<T>& work, const State<kind, Access<T, Words>::values>& state,
                                       int64_t row, int64_t begin, int64_t length, int column) {
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
      const int64_t taken = begin + state.at[i];
      const int64_t edge = any && taken < work.csr.edges ? work.csr.edge_at(taken) : -1;
      if (work.csr.wide) {
        static_cast<int64_t*>(work.arg)[place + i] = edge;
      } else {
        static_cast<int32_t*>(work.arg)[place + i] = static_cast<int32_t>(edge);
      }
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
  Of::write(work.y + place, value);
}

template <class T, bool Words, Kind kind>
__global__ void __launch_bounds__(threads) rows_kernel(Work<T> work) {
  const int64_t row = (static_cast<int64_t>(blockIdx.x) * threads + threadIdx.x) / work.team;
  const int lane = threadIdx.x % work.team;
  const int column = (static_cast<int>(blockIdx.y) * work.team + lane) * Access<T, Words>::values;
  const bool there = row < work.csr.rows;
  const int64_t begin = there ? work.csr.begin_of(row) : 0;
  const int64_t length = there ? max(work.csr.begin_of(row + 1) - begin, int64_t{0}) : 0;
  const bool cut = work.split && length > long_row;

  const int64_t end = cut ? begin : begin + length;
  const auto state = walk<T, Words, kind>(work, row, begin, begin, end, column);
  if (there && !cut) finish<T, Words, kind>(work, state, row, begin, length, column);
}

// A team takes the edges of a chunk that long rows have: of the row that has its first edge, and of one that begins later.
template <class T, bool Words, Kind kind>
__global__ void __launch_bounds__(threads, 2) pieces_kernel(Work<T> work) {
  using Of = Access<T, Words>;
  const int64_t own = (static_cast<int64_t>(blockIdx.x) * threads + threadIdx.x) / work.team;
  const int lane = threadIdx.x % work.team;
  const int column = (static_cast<int>(blockIdx.y) * work.team + lane) * Of::values;
  const bool there = own < work.chunks;
  const int64_t low = there ? own * chunk : 0, high = there ? min(low + chunk, work.csr.edges) : 0;
  const int64_t row_of_first = there ? work.csr.row_of(low) : 0, row_of_last = there ? work.csr.row_of(high - 1) : 0;

  int64_t started = -1;
#pragma unroll 1
  for (int piece = 0; piece < 2; ++piece) {
    const int64_t row = piece == 0 ? row_of_first : row_of_last, begin = work.csr.begin_of(row),
                  end = work.csr.begin_of(row + 1);
    const bool mine =
        there && end - begin > long_row && begin < high && end > low && (piece == 0 || row != row_of_first);
    if (mine && begin >= low) started = row;
    auto state = walk<T, Words, kind>(work, row, begin, mine ? max(begin, low) : 0, mine ? min(end, high) : 0, column);
    if (!mine || column >= work.width) continue;
    float* to = work.partial + (2 * own + piece) * work.width + column;
    const int64_t plane = 2 * work.chunks * work.width;
#pragma unroll
    for (int i = 0; i < Of::values; ++i) {
      state.each(i, [&](int which, float& value) { to[which * plane + i] = value; });
    }
  }
  if (there && lane == 0 && blockIdx.y == 0) work.starts[own] = started;
}

// A block adds up a long row: its teams take its pieces by turns, then the first takes what the teams have, in order.
template <class T, bool Words, Kind kind>
__global__ void __launch_bounds__(threads) combine_kernel(Work<T> work) {
  using Of = Access<T, Words>;
  __shared__ State<kind, Of::values> found[threads];
  __shared__ int64_t starts[threads];
  const int lane = threadIdx.x % work.team, team = threadIdx.x / work.team, teams = threads / work.team;
  const int column = (static_cast<int>(blockIdx.y) * work.team + lane) * Of::values;
  const int64_t plane = 2 * work.chunks * work.width, step = gridDim.x;

  for (int64_t group = blockIdx.x; group < work.chunks; group += threads * step) {
    const int64_t own = group + threadIdx.x * step;
    starts[threadIdx.x] = own < work.chunks ? work.starts[own] : -1;
    __syncthreads();
    for (int at = 0; at < threads && group + at * step < work.chunks; ++at) {
      const int64_t row = starts[at];
      if (row < 0) continue;
      const int64_t begin = work.csr.begin_of(row), end = work.csr.begin_of(row + 1);
      const int64_t first = begin / chunk, last = (end - 1) / chunk;
      State<kind, Of::values> state;
      state.clear();
      for (int64_t q = first + team; q <= last && column < work.width; q += teams) {
        const int64_t slot = 2 * q + (q == first && begin % chunk != 0);
        State<kind, Of::values> next;
        next.clear();
#pragma unroll
        for (int i = 0; i < Of::values; ++i) {
          next.each(i, [&](int which, float& value) {
            value = work.partial[which * plane + slot * work.width + column + i];
          });
        }
        state.merge(next);
      }
      found[threadIdx.x] = state;
      __syncthreads();
      if (team == 0) {
        for (int other = 1; other < teams; ++other) state.merge(found[other * work.team + lane]);
        finish<T, Words, kind>(work, state, row, begin, end - begin, column);
      }
      __syncthreads();
    }
    __syncthreads();
  }
}

// dweights[e] = the dot product of what the edge is answerable for and its row of x. A team has as many edges as lanes.
template <class T, bool Words, Kind forward>
__global__ void __launch_bounds__(threads) weights_kernel(Work<T> work, void* dweights /*[E], of the weights' dtype*/) {
  using Of = Access<T, Words>;
  const int lane = threadIdx.x % work.team;
  const int64_t place = static_cast<int64_t>(blockIdx.x) * threads + threadIdx.x;
  int64_t row = -1, from = -1, edge = -1;
  float weight = 0.0f, dot = 0.0f;
  if (place < work.csr.edges) {
    row = work.csr.row_of(place), edge = work.csr.edge_at(place), from = work.csr.column_at(place);
    const bool has = work.csr.begin_of(row) <= place && place < work.csr.begin_of(row + 1);
    if (edge < 0 || from < 0 || !has) row = -1;
    if (row >= 0) weight = work.weights.at(edge);
  }

  const int64_t plane = work.csr.columns * work.width;
  for (int j = 0; j < work.team; ++j) {
    const int64_t its_row = __shfl_sync(whole_warp, row, j, work.team);
    const int64_t its_from = __shfl_sync(whole_warp, from, j, work.team);
    const int64_t its_edge = __shfl_sync(whole_warp, edge, j, work.team);
    const float its_weight = __shfl_sync(whole_warp, weight, j, work.team);
    float sum = 0.0f;
    for (int column = lane * Of::values; its_row >= 0 && column < work.width; column += work.team * Of::values) {
      const auto grad = Of::read(work.x + its_from * work.stride + column);
      const auto own = Of::read(work.owned(its_row) + column);
      const int64_t there = its_from * work.width + column;
#pragma unroll
      for (int i = 0; i < Of::values; ++i) {
        const float product = Of::value(grad, i) * Of::value(own, i);
        if constexpr (forward == Kind::sum) {
          sum += product;
        } else if constexpr (forward == Kind::extreme) {
          if (work.csr.at(work.chosen, there + i) == its_edge) sum += product;
        } else {
          const float message = its_weight * Of::value(own, i);
          const float part = __expf(message - work.softened[there + i]);
          sum += product * part * (1.0f + message - work.softened[plane + there + i]);
        }
      }
    }
    for (int step = work.team / 2; step > 0; step /= 2) sum += __shfl_xor_sync(whole_warp, sum, step);
    if (lane == j) dot = sum;
  }

  if (row < 0) return;
  if (work.divisors) dot /= static_cast<float>(max(work.length_of_gathered(from), int64_t{1}));
  if (work.weights.dtype == DType::f32) {
    static_cast<float*>(dweights)[edge] = dot;
  } else if (work.weights.dtype == DType::bf16) {
    static_cast<__nv_bfloat16*>(dweights)[edge] = from_float<__nv_bfloat16>(dot);
  } else {
    static_cast<__half*>(dweights)[edge] = from_float<__half>(dot);
  }
}

// ---- launches ------------------------------------------------------------------------------------------------------

dim3 blocks_for(int64_t count, int64_t each, int64_t tiles = 1) {
  return dim3(static_cast<unsigned>((count + each - 1) / each), static_cast<unsigned>(tiles));
}

int team_for(int64_t accesses) {
  int team = smallest_team;
  while (team < 32 && team < accesses) team *= 2;
  return team;
}

template <class T, bool Words, Kind kind>
void run(const Context& context, Work<T> work, int64_t longest) {
  if (work.csr.rows == 0 || work.width == 0) return;
  const int64_t accesses = (work.width + Access<T, Words>::values - 1) / Access<T, Words>::values;
  work.team = team_for(accesses);
  const int64_t tiles = (accesses + work.team - 1) / work.team;
  const int each = threads / work.team;
  work.split = longest > long_row && work.csr.edges > long_row;
  launch<rows_kernel<T, Words, kind>>(context, blocks_for(work.csr.rows, each, tiles), dim3(threads), work);
  if (!work.split) return;

  work.chunks = (work.csr.edges + chunk - 1) / chunk;
  constexpr int planes = State<kind, Access<T, Words>::values>::planes;
  const Buffer partial = context.empty({planes, 2 * work.chunks, work.width}, DType::f32);
  const Buffer starts = context.empty({work.chunks}, DType::i64);
  work.partial = partial.as<float>(), work.starts = starts.as<int64_t>();
  launch<pieces_kernel<T, Words, kind>>(context, blocks_for(work.chunks, each, tiles), dim3(threads), work);
  const int64_t most = 4 * static_cast<int64_t>(multiprocessors(context));
  constexpr Kind ends = kind >= Kind::pull_extreme ? Kind::sum : kind;  // gradients' pieces are sums
  launch<combine_kernel<T, Words, ends>>(context, blocks_for(std::min(work.chunks, most), 1, tiles), dim3(threads),
                                         work);
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

Csr csr_of(const Tensor& row_ptr, const Tensor& column, const std::optional<Tensor>& edge, int64_t columns,
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
  Csr csr{};
  csr.row_ptr = row_ptr.data, csr.column = column.data, csr.edge = edge ? edge->data : nullptr;
  csr.wide = row_ptr.dtype == DType::i64;
  csr.rows = row_ptr.shape[0] - 1, csr.columns = columns, csr.edges = column.shape[0];
  return csr;
}

Csr transpose_of(const Tensor& t_row_ptr, const Tensor& t_column, const Tensor& t_edge, int64_t rows, int64_t nodes,
                 const Tensor& row_ptr, const Tensor& column) {
  const Csr csr = csr_of(t_row_ptr, t_column, t_edge, rows, "t_row_ptr", "t_column", "t_edge", row_ptr);
  if (csr.rows != nodes) {
    wrong_value("t_row_ptr", "shape [" + std::to_string(nodes + 1) + "]", shape_of(t_row_ptr));
  }
  has_edges("t_column", t_column, column);
  return csr;
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
  const Csr csr = csr_of(row_ptr, column, edge, nodes, "row_ptr", "column", "edge", row_ptr);
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
    Work<T> work{};
    work.csr = csr, work.weights = weights;
    work.x = x.as<const T>(), work.stride = x.stride[0], work.width = static_cast<int>(width);
    work.y = y->template as<T>(), work.sign = reduce == "min" ? -1.0f : 1.0f, work.divides = is_mean(reduce);
    work.x_rows = x.shape[0];
    if (previous) work.previous = previous->as<const T>(), work.previous_stride = previous->stride[0];
    if (keep && kind == Kind::extreme) work.arg = arg->view().data;
    if (keep && kind == Kind::softmax) work.state = state->template as<float>();
    const auto with = [&]<bool Words>(std::bool_constant<Words>) {
      switch (kind) {
        case Kind::sum: return run<T, Words, Kind::sum>(context, work, longest);
        case Kind::extreme: return run<T, Words, Kind::extreme>(context, work, longest);
        default: return run<T, Words, Kind::softmax>(context, work, longest);
      }
    };
    in_words(x) && (!previous || in_words(*previous)) ? with(std::true_type{}) : with(std::false_type{});
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
  const Csr forward = csr_of(row_ptr, column, edge, nodes, "row_ptr", "column", "edge", row_ptr);
  const Weights weights = weights_of(edge_weight, column, x);
  is_length("t_longest", t_longest);
  const Csr csr = transpose_of(t_row_ptr, t_column, t_edge, forward.rows, nodes, row_ptr, column);
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
    Work<T> work{};
    work.csr = csr, work.weights = weights;
    work.x = grad.as<const T>(), work.stride = grad.stride[0], work.width = static_cast<int>(x.shape[1]);
    work.y = dx->template as<T>(), work.sign = 1.0f;
    work.divisors = is_mean(reduce) ? row_ptr.data : nullptr;
    work.x_rows = csr.columns;
    work.own = x.as<const T>(), work.own_rows = x.shape[0], work.own_stride = x.stride[0];
    if (previous) work.previous = previous->as<const T>(), work.previous_stride = previous->stride[0];
    work.chosen = arg.data, work.softened = state.as<const float>();
    const auto with = [&]<bool Words, Kind forwards, Kind pull>(std::bool_constant<Words>,
                                                                std::integral_constant<Kind, forwards>,
                                                                std::integral_constant<Kind, pull>) {
      run<T, Words, pull>(context, work, t_longest);
      if (!asks || csr.edges == 0) return;
      const auto stream = static_cast<cudaStream_t>(context.stream);
      const auto bytes = static_cast<size_t>(csr.edges * dweight->view().itemsize);
      check(cudaMemsetAsync(dweight->view().data, 0, bytes, stream), "memset");  // of edges that lie nowhere
      if (csr.rows == 0) return;
      constexpr int values = Access<T, Words>::values;
      work.team = team_for((work.width + values - 1) / values);
      launch<weights_kernel<T, Words, forwards>>(context, blocks_for(csr.edges, threads), dim3(threads), work,
                                                 dweight->view().data);
    };
    const auto each = [&]<bool Words>(std::bool_constant<Words> words) {
      using std::integral_constant;
      switch (kind) {
        case Kind::sum: return with(words, integral_constant<Kind, Kind::sum>{}, integral_constant<Kind, Kind::sum>{});
        case Kind::extreme:
          return with(words, integral_constant<Kind, Kind::extreme>{}, integral_constant<Kind, Kind::pull_extreme>{});
        default:
          return with(words, integral_constant<Kind, Kind::softmax>{}, integral_constant<Kind, Kind::pull_softmax>{});
      }
    };
    in_words(x) && in_words(grad) && (!previous || in_words(*previous)) ? each(std::true_type{})
                                                                        : each(std::false_type{});
  });
  return {std::move(*dx), std::move(*dweight)};
}

}  // namespace prequal::ops
