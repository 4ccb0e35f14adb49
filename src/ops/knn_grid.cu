// dist2[n, j], idx[n, j] = the k nearest of references [M, D] to queries [N, D], for M <= 8192, in one launch.
// Every block builds the same grid of the whole cloud in its own shared memory, which costs it the reading of 12 M bytes
// and saves the launches, barriers and gathers from L2 of a shared one; a thread then takes a query through it.
// Bytes: 12 N read, 12 N k written, and 12 M from L2 for every block. No workspace, no host read.
// Numerics: as knn.cu. The order of points in a cell changes from run to run, the answer does not: candidates are totally
// ordered by (distance, index).
#include <algorithm>
#include <cfloat>

#include "knn_grid.h"
#include "prequal/knn_grid.h"
#include "prequal/launch.h"

namespace prequal::ops {
namespace {

struct Unit : FileOf<"knn"> {};

}  // namespace
}  // namespace prequal::ops

namespace prequal::ops::spatial {
namespace {

constexpr int most_references = 8192;
using grid::axes;

// Dynamic shared memory, in this order. 16-byte members first.
struct Layout {
  int points;  // float4 each
  int words;   // of counts, then starts: two 16-bit cells each, and one word for the end; whole 16 bytes

  static constexpr int cells_bytes = 80;

  constexpr Layout(int references, int cells) : points(references), words((cells / 2 + 1 + 4) / 4 * 4) {}
  constexpr int bytes() const {
    return points * 16 + words * 4 + cells_bytes + 2 * axes * grid::most_cells * 4 + axes * grid::sample * 4 +
           8 * 32 * 4;
  }
};

struct Cell {
  int x, y, z;
};

struct Shared;

struct Cells {
  grid::Even x, y, z;
  bool ranked;

  __device__ __forceinline__ int row(int cell_y, int cell_z) const { return (cell_z * y.cells + cell_y) * x.cells; }
  __device__ __forceinline__ int all() const { return x.cells * y.cells * z.cells; }
  __device__ __forceinline__ Cell of(const Point<float>& p, const Shared& shared) const;
};
static_assert(sizeof(Cells) <= Layout::cells_bytes);

struct Shared {
  float4* points;    // [M], w: reference index, or ~place of the next cell's first point
  uint32_t* starts;  // [words]
  Cells* cells;
  float* low;         // [3, most_cells]
  float* high;        // [3, most_cells]
  float* sample;      // [3, sample]
  uint32_t* scratch;  // [8, 32]

  __device__ Shared(char* bytes, const Layout& layout) {
    points = reinterpret_cast<float4*>(bytes);
    starts = reinterpret_cast<uint32_t*>(points + layout.points);
    cells = reinterpret_cast<Cells*>(starts + layout.words);
    low = reinterpret_cast<float*>(reinterpret_cast<char*>(cells) + Layout::cells_bytes);
    high = low + axes * grid::most_cells;
    sample = high + axes * grid::most_cells;
    scratch = reinterpret_cast<uint32_t*>(sample + axes * grid::sample);
  }

  __device__ __forceinline__ int start(int cell) const { return reinterpret_cast<const uint16_t*>(starts)[cell]; }
};

// Floats as unsigned integers in the same order.
__device__ __forceinline__ uint32_t in_order(float x) {
  const uint32_t bits = __float_as_uint(x);
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}
__device__ __forceinline__ float from_order(uint32_t order) {
  return __uint_as_float(order & 0x80000000u ? order & 0x7fffffffu : ~order);
}

__device__ __forceinline__ Cell Cells::of(const Point<float>& p, const Shared& shared) const {
  if (!ranked) return {x.cell(p.x), y.cell(p.y), z.cell(p.z)};
  return {grid::ranked_cell(p.x, shared.low), grid::ranked_cell(p.y, shared.low + grid::most_cells),
          grid::ranked_cell(p.z, shared.low + 2 * grid::most_cells)};
}

template <int Threads, int Items>
struct Builder {
  const Cloud& references;
  const Shared& shared;
  Point<float> point[Items];
  uint32_t place[Items];  // cell in the upper half, rank in the cell in the lower; or nowhere

  static constexpr uint32_t nowhere = 0xffffffffu;

  // All loads before the first question: one after the other they would be the whole cost.
  template <class S>
  __device__ __forceinline__ void read_as() {
#pragma unroll
    for (int item = 0; item < Items; ++item) {
      const int i = item * Threads + threadIdx.x;
      point[item] = {INFINITY, INFINITY, INFINITY};
      if (i < references.count) point[item] = references.from<S, float>(i);
    }
  }

  // A contiguous cloud comes through shared memory, whole lines at a time (where the sorted points will lie): three words
  // of every thread's own point touch each line three times, and were 1.5k of 3.6k cycles.
  __device__ __forceinline__ void read_lines() {
    const auto* from = static_cast<const float4*>(references.data);
    auto* raw = reinterpret_cast<float*>(shared.points);
    const int words = 3 * static_cast<int>(references.count);
    for (int i = threadIdx.x; i < words / 4; i += Threads) {
      const auto to = static_cast<unsigned>(__cvta_generic_to_shared(shared.points + i));
      asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from + i) : "memory");
    }
    const int rest = words / 4 * 4 + threadIdx.x;
    if (rest < words) raw[rest] = static_cast<const float*>(references.data)[rest];
    asm volatile("cp.async.wait_all;" ::: "memory");
    __syncthreads();
#pragma unroll
    for (int item = 0; item < Items; ++item) {
      const int i = item * Threads + threadIdx.x;
      point[item] = {INFINITY, INFINITY, INFINITY};
      if (i < references.count) point[item] = {raw[3 * i], raw[3 * i + 1], raw[3 * i + 2]};
    }
  }

  __device__ __forceinline__ void read() {
    const bool lines = references.dtype == DType::f32 && references.dims == 3 && references.row == 3 &&
                       references.column == 1 && reinterpret_cast<uintptr_t>(references.data) % 16 == 0;
    if (lines) {
      read_lines();
    } else
      switch (references.dtype) {  // the same for every thread
        case DType::f16: read_as<__half>(); break;
        case DType::bf16: read_as<__nv_bfloat16>(); break;
        default: read_as<float>(); break;
      }
#pragma unroll
    for (int item = 0; item < Items; ++item) place[item] = tree::finite(point[item]) ? 0 : nowhere;
  }

  // The corners of all points, and even cells between them, in every thread.
  __device__ __forceinline__ Cells bound(int most) {
    Point<float> lo{INFINITY, INFINITY, INFINITY}, hi{-INFINITY, -INFINITY, -INFINITY};
#pragma unroll
    for (int item = 0; item < Items; ++item) {
      if (place[item] == nowhere) continue;
      const Point<float>& p = point[item];
      lo = {fminf(lo.x, p.x), fminf(lo.y, p.y), fminf(lo.z, p.z)};
      hi = {fmaxf(hi.x, p.x), fmaxf(hi.y, p.y), fmaxf(hi.z, p.z)};
    }
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const auto put = [&](int slot, uint32_t value) {
      if (lane == 0) shared.scratch[slot * 32 + warp] = value;
    };
    put(0, __reduce_min_sync(whole_warp, in_order(lo.x))), put(3, __reduce_max_sync(whole_warp, in_order(hi.x)));
    put(1, __reduce_min_sync(whole_warp, in_order(lo.y))), put(4, __reduce_max_sync(whole_warp, in_order(hi.y)));
    put(2, __reduce_min_sync(whole_warp, in_order(lo.z))), put(5, __reduce_max_sync(whole_warp, in_order(hi.z)));
    __syncthreads();
    if (warp == 0) {
      const Cells found = cells_between(most);
      if (lane == 0) *shared.cells = found;
    }
    __syncthreads();
    return *shared.cells;
  }

  // By one warp: the others would do the same again, and wait for each other's turn.
  __device__ __forceinline__ Cells cells_between(int most) {
    const int lane = threadIdx.x % 32;
    const bool there = lane < Threads / 32;
    const auto lowest = [&](int slot) {
      return from_order(__reduce_min_sync(whole_warp, there ? shared.scratch[slot * 32 + lane] : 0xffffffffu));
    };
    const auto highest = [&](int slot) {
      return from_order(__reduce_max_sync(whole_warp, there ? shared.scratch[slot * 32 + lane] : 0u));
    };
    const Point<float> lo{lowest(0), lowest(1), lowest(2)}, hi{highest(3), highest(4), highest(5)};

    // each lane tries a width; the finest whose cells are not too many wins
    const float dx = hi.x - lo.x, dy = hi.y - lo.y, dz = hi.z - lo.z;
    const float longest = fmaxf(fmaxf(grid::Even::divides(dx) ? dx : 0.0f, grid::Even::divides(dy) ? dy : 0.0f),
                                grid::Even::divides(dz) ? dz : 0.0f);
    float width = grid::candidate_width(longest, lane);
    int nx = grid::cells_along(dx, width), ny = grid::cells_along(dy, width), nz = grid::cells_along(dz, width);
    const unsigned fits = __ballot_sync(whole_warp, nx * ny * nz <= most);
    const int winner = 31 - __clz(fits | 1);
    width = __shfl_sync(whole_warp, width, winner);
    nx = __shfl_sync(whole_warp, nx, winner);
    ny = __shfl_sync(whole_warp, ny, winner);
    nz = __shfl_sync(whole_warp, nz, winner);
    return {grid::Even::of(lo.x, hi.x, width, nx), grid::Even::of(lo.y, hi.y, width, ny),
            grid::Even::of(lo.z, hi.z, width, nz), false};
  }

  __device__ __forceinline__ void zero_counts(int words) {
    auto* four = reinterpret_cast<uint4*>(shared.starts);
    for (int i = threadIdx.x; i < words / 4; i += Threads) four[i] = make_uint4(0, 0, 0, 0);
  }

  // Counts the points of every cell; the most in one, in every thread. Counts must be zero, and a barrier passed since.
  __device__ __forceinline__ int count(const Cells& cells) {
    int most = 0;
#pragma unroll
    for (int item = 0; item < Items; ++item) {
      if (place[item] == nowhere) continue;
      const Cell at = cells.of(point[item], shared);
      const int cell = cells.row(at.y, at.z) + at.x;
      const int shift = cell % 2 * 16;
      const uint32_t rank = atomicAdd(&shared.starts[cell / 2], 1u << shift) >> shift & 0xffff;
      most = max(most, static_cast<int>(rank) + 1);
      place[item] = static_cast<uint32_t>(cell) << 16 | rank;
    }
    most = __reduce_max_sync(whole_warp, most);
    if (threadIdx.x % 32 == 0) shared.scratch[6 * 32 + threadIdx.x / 32] = most;
    __syncthreads();
    return __reduce_max_sync(whole_warp,
                             threadIdx.x % 32 < Threads / 32 ? shared.scratch[6 * 32 + threadIdx.x % 32] : 0u);
  }

  // Knots between cells of equal count in a sample: what the even cells cannot tell apart, these can. Knot c is the value at
  // place c * used / cells of the sorted sample: the largest with no more than that many below it.
  __device__ __forceinline__ Cells rank(Cells even, int cells) {
    constexpr int size = grid::sample;
    const int count = static_cast<int>(references.count);
    const int used = min(size, count);
    auto* knots = reinterpret_cast<uint32_t*>(shared.scratch);  // [3, 32]
    __syncthreads();
    for (int i = threadIdx.x; i < size; i += Threads) {
      Point<float> p{INFINITY, INFINITY, INFINITY};
      if (i < used) {
        const Point<float> found = references.at<float>(count <= size ? i : i * count / size);
        if (tree::finite(found)) p = found;
      }
      shared.sample[i] = p.x, shared.sample[size + i] = p.y, shared.sample[2 * size + i] = p.z;
    }
    if (threadIdx.x < axes * 32) knots[threadIdx.x] = 0;
    __syncthreads();
    for (int i = threadIdx.x; i < axes * size; i += Threads) {
      const auto* others = reinterpret_cast<const float4*>(shared.sample + i / size * size);
      const float mine = shared.sample[i];
      int below = 0;
#pragma unroll 8
      for (int j = 0; j < size / 4; ++j) {
        const float4 four = others[j];
        below += (four.x < mine) + (four.y < mine) + (four.z < mine) + (four.w < mine);
      }
      const int c = (below * cells + used - 1) / used;
      if (c < cells) atomicMax(&knots[i / size * 32 + c], in_order(mine));
    }
    __syncthreads();
    if (threadIdx.x < axes * 32) {
      static_assert(grid::ranked_cells == 32);
      const int a = threadIdx.x / 32, c = threadIdx.x % 32;
      uint32_t knot = knots[threadIdx.x];
#pragma unroll
      for (int step = 1; step < 32; step *= 2) {
        const uint32_t other = __shfl_up_sync(whole_warp, knot, step);
        if (c >= step) knot = max(knot, other);
      }
      const float lo = a == 0 ? even.x.lo : a == 1 ? even.y.lo : even.z.lo;
      const float hi = a == 0 ? even.x.hi : a == 1 ? even.y.hi : even.z.hi;
      const float low = c == 0 ? lo : c < cells ? from_order(knot) : INFINITY;
      // a point of a lower cell is below the next knot, not at it
      const float next = from_order(__shfl_down_sync(whole_warp, in_order(low), 1) - 1);
      shared.low[a * grid::most_cells + c] = low;
      if (c < cells) shared.high[a * grid::most_cells + c] = c < cells - 1 ? next : hi;
    }
    even.x.cells = even.y.cells = even.z.cells = cells;
    even.ranked = true;
    __syncthreads();
    return even;
  }

  __device__ __forceinline__ void even_edges(const Cells& cells) {
    const auto fill = [&](const grid::Even& axis, int which) {
      for (int c = threadIdx.x; c < axis.cells; c += Threads) {
        shared.low[which * grid::most_cells + c] = axis.low(c);
        shared.high[which * grid::most_cells + c] = axis.high(c);
      }
    };
    fill(cells.x, 0), fill(cells.y, 1), fill(cells.z, 2);
  }

  // Counts become starts. Four words a lane and step; all of a warp's loads come first.
  __device__ __forceinline__ void scan(int words) {
    constexpr int warps = Threads / 32, most_steps = (32768 / 8 + 1 + warps * 32 - 1) / (warps * 32) + 1;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int quads = words / 4, steps = (quads + warps * 32 - 1) / (warps * 32);
    const int first = warp * steps * 32 + lane;
    auto* four = reinterpret_cast<uint4*>(shared.starts);
    const auto halves = [](uint32_t word) { return (word & 0xffff) + (word >> 16); };

    uint32_t sum[most_steps], mine[most_steps];
    uint32_t total = 0;
#pragma unroll
    for (int step = 0; step < most_steps; ++step) {
      const int i = first + step * 32;
      mine[step] = 0;
      if (step < steps && i < quads) {
        const uint4 w = four[i];
        mine[step] = halves(w.x) + halves(w.y) + halves(w.z) + halves(w.w);
      }
      total += mine[step];
      sum[step] = mine[step];
    }
    total = __reduce_add_sync(whole_warp, total);
    if (lane == 0) shared.scratch[7 * 32 + warp] = total;
#pragma unroll
    for (int by = 1; by < 32; by *= 2) {
#pragma unroll
      for (int step = 0; step < most_steps; ++step) {
        if (step >= steps) continue;  // the same for every thread
        const uint32_t other = __shfl_up_sync(whole_warp, sum[step], by);
        if (lane >= by) sum[step] += other;
      }
    }
    __syncthreads();
    uint32_t before = __reduce_add_sync(whole_warp, lane < warp ? shared.scratch[7 * 32 + lane] : 0u);
#pragma unroll
    for (int step = 0; step < most_steps; ++step) {
      const int i = first + step * 32;
      if (step < steps && i < quads) {
        uint4 w = four[i];
        uint32_t at = before + sum[step] - mine[step];
        const auto place = [&](uint32_t word) {
          const uint32_t second = at + (word & 0xffff);
          const uint32_t starts = at | second << 16;
          at = second + (word >> 16);
          return starts;
        };
        w.x = place(w.x), w.y = place(w.y), w.z = place(w.z), w.w = place(w.w);
        four[i] = w;
      }
      if (step < steps) before += __shfl_sync(whole_warp, sum[step], 31);
    }
    __syncthreads();
  }

  __device__ __forceinline__ void scatter() {
#pragma unroll
    for (int item = 0; item < Items; ++item) {
      if (place[item] == nowhere) continue;
      const int at = shared.start(place[item] >> 16) + static_cast<int>(place[item] & 0xffff);
      shared.points[at] =
          make_float4(point[item].x, point[item].y, point[item].z, __int_as_float(item * Threads + threadIdx.x));
    }
    __syncthreads();
  }

  // A crowded cell whose points are all one place: the k of lowest index are in front, and the rest is jumped over.
  __device__ __forceinline__ void trim(int cells, int crowded, int k) {
    for (int base = threadIdx.x / 32 * 32; base < cells; base += Threads) {
      const int cell = base + threadIdx.x % 32;
      const bool full = cell < cells && shared.start(cell + 1) - shared.start(cell) > crowded;
      for (unsigned left = __ballot_sync(whole_warp, full); left != 0; left &= left - 1) {
        trim_cell(base + __ffs(left) - 1, k);
      }
    }
    __syncthreads();
  }

  __device__ __forceinline__ void trim_cell(int cell, int k) {
    const int lane = threadIdx.x % 32;
    const int first = shared.start(cell), last = shared.start(cell + 1);
    const float4 one = shared.points[first];
    bool same = true;
#pragma unroll 4
    for (int i = first + lane; i < last; i += 32) {
      const float4 p = shared.points[i];
      same = same && p.x == one.x && p.y == one.y && p.z == one.z;
    }
    if (!__all_sync(whole_warp, same)) return;
    for (int j = 0; j < k; ++j) {  // the j-th lowest index changes places with what stands there
      int lowest = tree::nobody, where = first;
#pragma unroll 4
      for (int i = first + j + lane; i < last; i += 32) {
        const int index = __float_as_int(shared.points[i].w);
        if (index < lowest) lowest = index, where = i;
      }
      const int winner = __reduce_min_sync(whole_warp, lowest);
      const int owner = __ffs(__ballot_sync(whole_warp, lowest == winner)) - 1;
      where = __shfl_sync(whole_warp, where, owner);
      if (lane == 0) {
        const float there = shared.points[first + j].w;
        shared.points[first + j].w = __int_as_float(winner);
        shared.points[where].w = there;
      }
      __syncwarp();
    }
    if (lane == 0) shared.points[first + k].w = __int_as_float(~last);
    __syncwarp();
  }
};

// One query, by one thread: the eight cells that meet nearest it, more around it until k were seen, then whatever else is near
// enough. One loop for all three: a second copy of `offer` would cost instruction cache. Rows run
// upwards, the same for every lane: from the middle outwards, lanes of different halves took turns (20k cycles, not 15).
template <int K>
__device__ __forceinline__ void search(const Point<float>& q, const Cells& cells, const Shared& shared, bool trimmed,
                                       tree::Best<K>& best) {
  const Cell c = cells.of(q, shared);
  const Cell last{cells.x.cells - 1, cells.y.cells - 1, cells.z.cells - 1};
  const float* low = shared.low;
  const float* high = shared.high;
  constexpr int stride = grid::most_cells;
  const auto gap2 = [&](int axis, float x, int center, int cell) {
    return cell > center   ? grid::gap2_up(x, low[axis * stride + cell])
           : cell < center ? grid::gap2_down(x, high[axis * stride + cell])
                           : 0.0f;
  };
  // to the grid itself, for a query outside it
  const auto outside2 = [&](float x, const grid::Even& axis) {
    return fmaxf(grid::gap2_up(x, axis.lo), grid::gap2_down(x, axis.hi));
  };
  const float out_x = outside2(q.x, cells.x), out_y = outside2(q.y, cells.y), out_z = outside2(q.z, cells.z);
  // what overflows is found by its index, afterwards
  const auto worst = [&] { return fminf(best.worst(), FLT_MAX); };

  const auto half = [&](int axis, float x, int cell) {
    return sub(x, low[axis * stride + cell]) < sub(high[axis * stride + cell], x) ? cell - 1 : cell;
  };
  Cell from{half(0, q.x, c.x), half(1, q.y, c.y), half(2, q.z, c.z)};
  Cell to{min(from.x + 1, last.x), min(from.y + 1, last.y), min(from.z + 1, last.z)};
  from = {max(from.x, 0), max(from.y, 0), max(from.z, 0)};
  Cell seen_from{0, 0, 0}, seen_to{-1, -1, -1};  // the cells that were looked at; none yet
  int reach = 1;
  while (true) {
    int y = from.y, z = from.z;
    bool behind = false;  // of a row of which the middle was seen: on to the part behind that
    while (z <= to.z) {
      // Four stretches of points at a time, walked as one: lanes then wait for the longest sum, not for every longest stretch.
      constexpr int together = 4;
      int ends[together], shift[together];
      int total = 0;
#pragma unroll
      for (int slot = 0; slot < together; ++slot) {
        int begin = 0, end = 0;
        if (z <= to.z) {
          const float y2 = fmaxf(gap2(1, q.y, c.y, y), out_y), z2 = fmaxf(gap2(2, q.z, c.z, z), out_z);
          const bool again = y >= seen_from.y && y <= seen_to.y && z >= seen_from.z && z <= seen_to.z;
          int x = behind ? seen_to.x + 1 : from.x;
          int x_end = again && !behind ? seen_from.x - 1 : to.x;
          if (x <= x_end && add(add(out_x, y2), z2) <= worst()) {
            if (x_end - x > 4) {  // a long one, cut to what is near enough
              while (x < min(c.x, x_end) && add(add(gap2(0, q.x, c.x, x), y2), z2) > worst()) ++x;
              while (x_end > max(c.x, x) && add(add(gap2(0, q.x, c.x, x_end), y2), z2) > worst()) --x_end;
            }
            const int row = cells.row(y, z);
            begin = shared.start(row + x);
            end = shared.start(row + x_end + 1);
          }
          behind = again && !behind;
          if (!behind && ++y > to.y) y = from.y, ++z;
        }
        shift[slot] = begin - total;
        total += end - begin;
        ends[slot] = total;
      }
      for (int i = 0; i < total; ++i) {
        const int p = i + (i < ends[0] ? shift[0] : i < ends[1] ? shift[1] : i < ends[2] ? shift[2] : shift[3]);
        const float4 at = shared.points[p];
        const int index = __float_as_int(at.w);
        if (trimmed && index < 0) {  // the rest of this cell is what was seen: on with what lies behind it
          i += ~index - p - 1;
          continue;
        }
        best.offer(tree::distance2(q, {at.x, at.y, at.z}), index);
      }
    }

    seen_from = from, seen_to = to;
    const bool all = from.x == 0 && from.y == 0 && from.z == 0 && to.x == last.x && to.y == last.y && to.z == last.z;
    if (all || reach < 0) return;
    if (!best.full() && best.worst() == INFINITY) {
      from = {max(c.x - reach, 0), max(c.y - reach, 0), max(c.z - reach, 0)};
      to = {min(c.x + reach, last.x), min(c.y + reach, last.y), min(c.z + reach, last.z)};
      reach *= 2;
      continue;
    }
    const float w = worst(), xy = add(out_x, out_y);
    while (from.x > 0 && fmaxf(gap2(0, q.x, c.x, from.x - 1), out_x) <= w) --from.x;
    while (to.x < last.x && fmaxf(gap2(0, q.x, c.x, to.x + 1), out_x) <= w) ++to.x;
    while (from.y > 0 && add(out_x, fmaxf(gap2(1, q.y, c.y, from.y - 1), out_y)) <= w) --from.y;
    while (to.y < last.y && add(out_x, fmaxf(gap2(1, q.y, c.y, to.y + 1), out_y)) <= w) ++to.y;
    while (from.z > 0 && add(xy, fmaxf(gap2(2, q.z, c.z, from.z - 1), out_z)) <= w) --from.z;
    while (to.z < last.z && add(xy, fmaxf(gap2(2, q.z, c.z, to.z + 1), out_z)) <= w) ++to.z;
    if (from.x == seen_from.x && from.y == seen_from.y && from.z == seen_from.z && to.x == seen_to.x &&
        to.y == seen_to.y && to.z == seen_to.z) {
      return;
    }
    reach = -1;
  }
}

// Neighbours so far away that the distance overflows come by index alone. What is not finite is nobody's.
template <int K>
__device__ __forceinline__ void add_overflowing(const Point<float>& q, const Cloud& references, tree::Best<K>& best) {
  for (int i = 0; i < references.count; ++i) {
    if (best.full() && (best.worst() < INFINITY || best.i[K - 1] < i)) return;
    const Point<float> p = references.at<float>(i);
    if (!tree::finite(p) || tree::distance2(q, p) < INFINITY) continue;
    bool held = false;
#pragma unroll
    for (int place = 0; place < K; ++place) held = held || best.i[place] == i;
    if (!held) best.offer(INFINITY, i);
  }
}

template <int K, int Threads, class Answer>
__device__ __forceinline__ void build_and_search(const GridCall& call, int cells, Answer&& answer) {
  extern __shared__ __align__(16) char bytes[];
  const Layout layout(static_cast<int>(call.references.count), cells);
  const Shared shared(bytes, layout);

  // 32 queries to a warp of each block in turn: neighbours in the list are often neighbours in space, and as hard. The first
  // is on its way while the grid is built.
  const int64_t mine = (threadIdx.x / 32 * static_cast<int64_t>(gridDim.x) + blockIdx.x) * 32 + threadIdx.x % 32;
  const int64_t step = static_cast<int64_t>(gridDim.x) * Threads;
  const int64_t rounded = (call.queries.count + 31) / 32 * 32;  // whole warps: the gather shuffles
  if (mine < call.queries.count) call.queries.prefetch(mine);

  Builder<Threads, most_references / Threads> builder{call.references, shared};
  builder.zero_counts(layout.words);
  builder.read();
  Cells grid = builder.bound(cells);  // passes a barrier: the counts are zero
  builder.even_edges(grid);
  int most = builder.count(grid);
  // Volumes and surfaces stay far below; what does not is uneven (an outlier, clusters, scales), and is counted again
  // between knots.
  const int crowded = 16 + 16 * layout.points / cells;
  if (most > crowded) {
    builder.zero_counts(layout.words);
    grid = builder.rank(grid, grid::ranked_cells_for(cells));  // passes barriers
    most = builder.count(grid);
  }
  builder.scan(layout.words);
  builder.scatter();
  const bool trimmed = most > 2 * crowded;
  if (trimmed) builder.trim(grid.all(), max(2 * crowded, call.k), call.k);

  for (int64_t query = mine; query < rounded; query += step) {
    const bool there = query < call.queries.count;
    tree::Best<K> best;
    best.clear(call.k, call.limit);
    if (there) {
      const Point<float> q = call.queries.at<float>(query);
      if (tree::finite(q)) {
        search<K>(q, grid, shared, trimmed, best);
        if (best.worst() == INFINITY && !(call.limit < INFINITY)) add_overflowing<K>(q, call.references, best);
      }
    }
    answer(query, there, best);
  }
}

template <int K, int Threads>
__global__ void __launch_bounds__(Threads, 1)
    grid_search_kernel(const __grid_constant__ GridCall call, int cells, float* dist2 /*[N, k]*/,
                       int64_t* idx /*[N, k]*/, int64_t* counts /*[N] or null*/) {
  build_and_search<K, Threads>(call, cells, [&](int64_t query, bool there, const tree::Best<K>& best) {
    if (!there) return;
    int count = 0;
#pragma unroll
    for (int place = 0; place < K; ++place) {
      const int out = place - (K - call.k);
      if (out < 0) continue;
      const bool exists = best.i[place] != tree::nobody;
      dist2[query * call.k + out] = exists ? best.d[place] : INFINITY;
      idx[query * call.k + out] = exists ? best.i[place] : -1;
      count += exists;
    }
    if (counts) counts[query] = count;
  });
}

// Rows of one word are copied by their own thread; longer ones by the warp together, whole lines at a time.
template <int Threads>
__global__ void __launch_bounds__(Threads, 1)
    grid_gather_kernel(const __grid_constant__ GridCall call, int cells, ValueRows values) {
  build_and_search<1, Threads>(call, cells, [&](int64_t query, bool there, const tree::Best<1>& best) {
    const unsigned having = __ballot_sync(whole_warp, there);
    if (values.row_bytes == 8 && values.word == 8) {
      if (!there) return;
      uint64_t fill;
      memset(&fill, values.fill, sizeof(fill));
      reinterpret_cast<uint64_t*>(values.to)[query] =
          best.i[0] == tree::nobody ? fill
                                    : *reinterpret_cast<const uint64_t*>(values.from + best.i[0] * values.row_stride);
      return;
    }
    for (int lane = 0; lane < 32; ++lane) {
      if (!(having >> lane & 1)) continue;
      copy_row(values, __shfl_sync(whole_warp, query, lane), __shfl_sync(whole_warp, best.i[0], lane));
    }
  });
}

constexpr int block_threads = 1024;

int blocks_for(const Context& context, int64_t queries) {
  // one block an SM; fewer where a block would have less than a warp's worth of work each
  const int64_t sms = attribute_of(context.device, cudaDevAttrMultiProcessorCount);
  return static_cast<int>(std::max<int64_t>(1, std::min<int64_t>(sms, (queries + 127) / 128)));
}

template <int K>
void launch_grid(const Context& context, const GridCall& call, float* dist2, int64_t* idx, int64_t* counts) {
  const int cells = grid::cells_for(call.references.count, call.k);
  launch_with_shared<grid_search_kernel<K, block_threads>>(
      context, blocks_for(context, call.queries.count), block_threads,
      Layout(static_cast<int>(call.references.count), cells).bytes(), call, cells, dist2, idx, counts);
}

}  // namespace

bool grid_serves(int device, const GridCall& call) {
  // from 9 neighbours up the insertions of a thread cost more than the tree does: k = 32 took 590 us, the tree 455
  if (call.k > 8 || call.references.count > most_references) return false;
  const int cells = grid::cells_for(call.references.count, call.k);
  return Layout(static_cast<int>(call.references.count), cells).bytes() <=
         attribute_of(device, cudaDevAttrMaxSharedMemoryPerBlockOptin);
}

void grid_search(const Context& context, const GridCall& call, float* dist2 /*[N, k]*/, int64_t* idx /*[N, k]*/,
                 int64_t* counts /*[N] or null*/) {
  if (call.k == 1) return launch_grid<1>(context, call, dist2, idx, counts);
  if (call.k <= 4) return launch_grid<4>(context, call, dist2, idx, counts);
  launch_grid<8>(context, call, dist2, idx, counts);
}

void grid_gather(const Context& context, const GridCall& call, const ValueRows& values) {
  const int cells = grid::cells_for(call.references.count, 1);
  launch_with_shared<grid_gather_kernel<block_threads>>(context, blocks_for(context, call.queries.count), block_threads,
                                                        Layout(static_cast<int>(call.references.count), cells).bytes(),
                                                        call, cells, values);
}

}  // namespace prequal::ops::spatial
