// dist2[n, j], idx[n, j] = the k nearest of references [M, D] to queries [N, D], for M <= 8192, in one launch.
// Every block builds the same grid of the whole cloud in its own shared memory, which costs it the reading of 12 M bytes
// and saves the launches, barriers and gathers from L2 of a shared one; a thread then takes a query through it.
// Bytes: 12 N read, 12 N k written, and 12 M from L2 for every block. No workspace, no host read.
// A query whose search would be long is taken through all points instead, by several lanes.
// Numerics: as knn.cu. The order of points in a cell changes from run to run, the answer does not: candidates are totally
// ordered by (distance, index).
#include <algorithm>

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
using grid::Grid;

// Dynamic shared memory, in this order. 16-byte members first.
struct Layout {
  int entries;  // one a point, and one a crowded cell
  int words;    // of counts, then starts: two 16-bit cells each, and one word for the end; whole 16 bytes

  static constexpr int corners = 6;  // of a box
  static constexpr int reductions = 8;

  explicit constexpr Layout(int references)
      : entries(references + grid::most_crowded), words((grid::cells_for(references) / 2 + 1 + 4) / 4 * 4) {}
  constexpr int bytes() const {
    return entries * 16 + words * 4 + (1 + grid::most_crowded) * static_cast<int>(sizeof(Grid)) +
           static_cast<int>(sizeof(grid::Box)) + 3 * 4 + (2 + corners) * grid::most_crowded * 4 + reductions * 32 * 4;
  }
};
static_assert(Layout(most_references).bytes() <= 163 * 1024);  // sm_80

struct Shared {
  grid::Entry* entries;  // [M + most_crowded]
  uint32_t* starts;      // [words]
  Grid* grids;           // [1 + most_crowded]
  grid::Box* box;        // of all points
  int* claimed;          // crowded cells
  int* next;             // first cell of the table that no grid has yet
  int* jumped;           // entries that walks jump over
  int* crowded;          // [most_crowded] number of the cell
  int* held;             // [most_crowded] points in it
  uint32_t* corner;      // [6, most_crowded] of some of those points, in order
  uint32_t* scratch;     // [8, 32]

  __device__ Shared(char* bytes, const Layout& layout) {
    entries = reinterpret_cast<grid::Entry*>(bytes);
    starts = reinterpret_cast<uint32_t*>(entries + layout.entries);
    grids = reinterpret_cast<Grid*>(starts + layout.words);
    box = reinterpret_cast<grid::Box*>(grids + 1 + grid::most_crowded);
    claimed = reinterpret_cast<int*>(box + 1);
    next = claimed + 1;
    jumped = next + 1;
    crowded = jumped + 1;
    held = crowded + grid::most_crowded;
    corner = reinterpret_cast<uint32_t*>(held + grid::most_crowded);
    scratch = corner + Layout::corners * grid::most_crowded;
  }

  __device__ __forceinline__ uint16_t* cells() const { return reinterpret_cast<uint16_t*>(starts); }
  __device__ __forceinline__ int start(int cell) const { return cells()[cell]; }
};

// Floats as unsigned integers in the same order.
__device__ __forceinline__ uint32_t in_order(float x) {
  const uint32_t bits = __float_as_uint(x);
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}
__device__ __forceinline__ float from_order(uint32_t order) {
  return __uint_as_float(order & 0x80000000u ? order & 0x7fffffffu : ~order);
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
    auto* raw = reinterpret_cast<float*>(shared.entries);
    const int words = 3 * static_cast<int>(references.count);
    for (int i = threadIdx.x; i < words / 4; i += Threads) {
      const auto to = static_cast<unsigned>(__cvta_generic_to_shared(shared.entries + i));
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

  // The box of all points and a grid over it.
  __device__ __forceinline__ void bound(int most) {
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
    if (warp == 0) {  // the others would do the same again, and wait for each other's turn
      const bool there = lane < Threads / 32;
      const auto lowest = [&](int slot) {
        return from_order(__reduce_min_sync(whole_warp, there ? shared.scratch[slot * 32 + lane] : 0xffffffffu));
      };
      const auto highest = [&](int slot) {
        return from_order(__reduce_max_sync(whole_warp, there ? shared.scratch[slot * 32 + lane] : 0u));
      };
      const grid::Box box{{lowest(0), lowest(1), lowest(2)}, {highest(3), highest(4), highest(5)}};
      const Grid found = finest(box, most);
      if (lane == 0) *shared.box = box, shared.grids[0] = found;
    }
    __syncthreads();
  }

  // By a warp: each lane tries a width; the finest whose cells are not too many wins.
  __device__ __forceinline__ static Grid finest(const grid::Box& box, int most) {
    const float width = grid::candidate_width(Grid::longest(box.lo, box.hi), threadIdx.x % 32);
    const unsigned fits = __ballot_sync(whole_warp, Grid::all_of(box.lo, box.hi, width) <= most);
    const int winner = 31 - __clz(fits | 1);
    return Grid::of(box.lo, box.hi, __shfl_sync(whole_warp, width, winner));
  }

  __device__ __forceinline__ void zero_counts(int words) {
    auto* four = reinterpret_cast<uint4*>(shared.starts);
    for (int i = threadIdx.x; i < words / 4; i += Threads) four[i] = make_uint4(0, 0, 0, 0);
  }

  // Counts a point in a cell of this grid; how many the cell then has.
  __device__ __forceinline__ int count_in(const Grid& grid, int item) {
    const auto cell = static_cast<unsigned>(grid.number(grid.of(point[item])));
    const unsigned shift = cell % 2 * 16;
    const uint32_t rank = atomicAdd(&shared.starts[cell / 2], 1u << shift) >> shift & 0xffff;
    place[item] = cell << 16 | rank;
    return static_cast<int>(rank) + 1;
  }

  // Counts the points of every cell; the most in one, in every thread. Counts must be zero, and a barrier passed since.
  __device__ __forceinline__ int count() {
    const Grid grid = shared.grids[0];
    int most = 0;
#pragma unroll
    for (int item = 0; item < Items; ++item) {
      if (place[item] != nowhere) most = max(most, count_in(grid, item));
    }
    most = __reduce_max_sync(whole_warp, most);
    if (threadIdx.x % 32 == 0) shared.scratch[6 * 32 + threadIdx.x / 32] = most;
    __syncthreads();
    return __reduce_max_sync(whole_warp,
                             threadIdx.x % 32 < Threads / 32 ? shared.scratch[6 * 32 + threadIdx.x % 32] : 0u);
  }

  // In the place of a count: that the cell is crowded, and its number among those.
  static constexpr int is_crowded = 0x8000;

  // An uneven cloud, counted again: in a coarser grid, whose crowded cells get grids of their own from the rest of the table.
  // Those lie between the corners of some of the cell's points, an eighth of all: what lies beyond is in the outermost
  // cells, which have no outer edge. Afterwards a crowded cell counts as one entry, which says where its grid is.
  __device__ __forceinline__ void refine(int cells, int words, int threshold) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    zero_counts(words);
    if (warp == 0) {
      const Grid found = finest(*shared.box, grid::coarse_cells_for(cells));
      __syncwarp();
      if (lane == 0) {
        shared.grids[0] = found, *shared.claimed = 0, *shared.next = (found.all() + 1) / 2 * 2, *shared.jumped = 0;
      }
    }
    for (int i = threadIdx.x; i < Layout::corners * grid::most_crowded; i += Threads) {
      shared.corner[i] = i < 3 * grid::most_crowded ? 0xffffffffu : 0u;
    }
    __syncthreads();
    count();

    const int coarse = *shared.next;  // whole words
    claim(coarse, 8 * threshold);     // whatever else is crowded, the worst come first
    __syncthreads();
    claim(coarse, threshold);
    __syncthreads();
    const int crowded = min(*shared.claimed, grid::most_crowded);

    widen(threadIdx.x % Items);
    __syncthreads();

    for (int n = warp; n < crowded; n += Threads / 32) {
      const auto corner = [&](int which) { return from_order(shared.corner[which * grid::most_crowded + n]); };
      const grid::Box box{{corner(0), corner(1), corner(2)}, {corner(3), corner(4), corner(5)}};
      const int share = shared.held[n] * (cells - coarse) / static_cast<int>(references.count);
      Grid found = finest(box, max(1, share));
      if (lane == 0) {
        found.first = atomicAdd(shared.next, found.all());
        shared.grids[1 + n] = found;
      }
    }
    __syncthreads();

#pragma unroll
    for (int item = 0; item < Items; ++item) {
      if (place[item] == nowhere) continue;
      const int number = crowded_cell(item);
      if (number >= 0) count_in(shared.grids[1 + number], item);
    }
    __syncthreads();
    if (threadIdx.x < crowded) shared.cells()[shared.crowded[threadIdx.x]] = 1;
    __syncthreads();
  }

  // Numbers the cells that hold more points than this, while there are numbers.
  __device__ __forceinline__ void claim(int coarse, int threshold) {
    for (int i = threadIdx.x; i < coarse / 2; i += Threads) {
      const uint32_t both = shared.starts[i];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int points = both >> 16 * half & 0xffff;
        if (points <= threshold || (points & is_crowded)) continue;
        const int number = atomicAdd(shared.claimed, 1);
        if (number >= grid::most_crowded) continue;
        shared.crowded[number] = 2 * i + half;
        shared.held[number] = points;
        shared.cells()[2 * i + half] = static_cast<uint16_t>(is_crowded | number);
      }
    }
  }

  // Number of the crowded cell that holds this point, or -1. Its own grid counts elsewhere in the table.
  __device__ __forceinline__ int crowded_cell(int item) const {
    const int in = shared.start(static_cast<int>(place[item] >> 16));
    return in & is_crowded ? in & ~is_crowded : -1;
  }

  // Widens the box of a crowded cell by this item of the thread, if it is in one. Where all of a warp are in the same, which
  // is what an outlier does, once for all.
  __device__ __forceinline__ void widen(int chosen) {
    Point<float> p{0, 0, 0};
    int number = -1;
#pragma unroll
    for (int item = 0; item < Items; ++item) {
      if (item == chosen && place[item] != nowhere) p = point[item], number = crowded_cell(item);
    }
    const bool in = number >= 0;
    const int lowest = __reduce_min_sync(whole_warp, in ? number : grid::most_crowded);
    const int highest = __reduce_max_sync(whole_warp, number);
    if (highest < 0) return;
    const uint32_t at[3] = {in_order(p.x), in_order(p.y), in_order(p.z)};
#pragma unroll
    for (int axis = 0; axis < 3; ++axis) {
      uint32_t* low = shared.corner + axis * grid::most_crowded;
      uint32_t* high = shared.corner + (3 + axis) * grid::most_crowded;
      if (lowest == highest) {
        const uint32_t least = __reduce_min_sync(whole_warp, in ? at[axis] : 0xffffffffu);
        const uint32_t most = __reduce_max_sync(whole_warp, in ? at[axis] : 0u);
        if (threadIdx.x % 32 == 0) atomicMin(&low[lowest], least), atomicMax(&high[lowest], most);
      } else if (in) {
        atomicMin(&low[number], at[axis]), atomicMax(&high[number], at[axis]);
      }
    }
  }

  // Counts become starts. Four words a lane and step; all of a warp's loads come first.
  __device__ __forceinline__ void scan(int words) {
    constexpr int most_quads = Layout(most_references).words / 4, most_steps = (most_quads + Threads - 1) / Threads;
    constexpr int warps = Threads / 32;
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
      put(at, point[item], item * Threads + threadIdx.x);
    }
    __syncthreads();
  }

  __device__ __forceinline__ void put(int at, const Point<float>& p, int index) {
    reinterpret_cast<float4*>(shared.entries)[at] = make_float4(p.x, p.y, p.z, __int_as_float(index));
  }

  // What stands for the crowded cells. After starts are known.
  __device__ __forceinline__ void point_to_grids() {
    const int crowded = min(*shared.claimed, grid::most_crowded);
    if (threadIdx.x >= crowded) return;
    const int n = threadIdx.x;
    put(shared.start(shared.crowded[n]), {__int_as_float(0x7fffffff), 0.0f, 0.0f}, ~(1 + n));
  }

  // A cell of many points that are all one place: the k of lowest index are in front, and the rest is jumped over.
  __device__ __forceinline__ void trim(int cells, int least, int k) {
    for (int base = threadIdx.x / 32 * 32; base < cells; base += Threads) {
      const int cell = base + threadIdx.x % 32;
      const bool full = cell < cells && shared.start(cell + 1) - shared.start(cell) > least;
      for (unsigned left = __ballot_sync(whole_warp, full); left != 0; left &= left - 1) {
        trim_cell(base + __ffs(left) - 1, k);
      }
    }
    __syncthreads();
  }

  __device__ __forceinline__ void trim_cell(int cell, int k) {
    const int lane = threadIdx.x % 32;
    const int first = shared.start(cell), last = shared.start(cell + 1);
    auto* entries = shared.entries;
    const grid::Entry one = entries[first];
    bool same = true;
#pragma unroll 4
    for (int i = first + lane; i < last; i += 32) {
      const grid::Entry p = entries[i];
      same = same && p.x == one.x && p.y == one.y && p.z == one.z;
    }
    if (!__all_sync(whole_warp, same)) return;
    for (int j = 0; j < k; ++j) {  // the j-th lowest index changes places with what stands there
      int lowest = tree::nobody, where = first;
#pragma unroll 4
      for (int i = first + j + lane; i < last; i += 32) {
        const int index = entries[i].index;
        if (index < lowest) lowest = index, where = i;
      }
      const int winner = __reduce_min_sync(whole_warp, lowest);
      const int owner = __ffs(__ballot_sync(whole_warp, lowest == winner)) - 1;
      where = __shfl_sync(whole_warp, where, owner);
      if (lane == 0) {
        entries[where].index = entries[first + j].index;
        entries[first + j].index = winner;
      }
      __syncwarp();
    }
    if (lane == 0) entries[first + k].index = ~last, atomicAdd(shared.jumped, last - (first + k + 1));
    __syncwarp();
  }
};

extern __shared__ __align__(16) char shared_bytes[];

// From the array itself, so that the compiler knows whose loads these are.
__device__ __forceinline__ grid::View view_of(int points, bool uneven) {
  const Shared shared(shared_bytes, Layout(points));
  return {shared.entries, shared.cells(), shared.grids, shared.box, shared.jumped, uneven};
}

// What a search found, and the patience that it has left.
template <int K>
struct Found {
  tree::Best<K> best;
  int patience;
};

// Apart, each: an even cloud's search does not pay for their registers, nor that of a cluster for the space between.
template <int K>
__device__ __noinline__ Found<K> search_crowded(Point<float> q, int points, tree::Best<K> best, int own) {
  const grid::View view = view_of(points, true);
  grid::Search<K> search{q, view, best, grid::patience_for(points)};
  search.template inside<true>(own);
  return {best, search.patience};
}

template <int K>
__device__ __noinline__ Found<K> search_between(Point<float> q, int points, Found<K> found, int own) {
  const grid::View view = view_of(points, true);
  grid::Search<K> search{q, view, found.best, found.patience};
  search.outside(own);
  return {found.best, search.patience};
}

// Whether it was carried through. Then `best` is right but for neighbours so far away that the distance overflows; else its
// last is a bound.
template <int K>
__device__ __forceinline__ bool search(const Point<float>& q, int points, bool uneven, tree::Best<K>& best) {
  const grid::View view = view_of(points, uneven);
  grid::Search<K> all{q, view, best, grid::patience_for(points)};
  if (!uneven) {
    all.template inside<false>(0);
    return !all.gave_up();
  }
  const grid::Cell c = view.grids[0].of(q);
  const int own = all.own_grid(c);
  Found<K> found{best, all.patience};
  if (own > 0) found = search_crowded<K>(q, points, best, own);
  best = found.best;
  if (found.patience >= 0 && (own == 0 || all.leaves(view.grids[0], c, c))) {
    found = search_between<K>(q, points, found, own);
    best = found.best;
  }
  return found.patience >= 0;
}

// The queries of these lanes (not none) among all points, by the warp: each of them by as many lanes as there are. Apart
// like the others, and rare.
template <int K>
__device__ __noinline__ tree::Best<K> search_all(unsigned asking, Point<float> q, int points, tree::Best<K> best,
                                                 int k) {
  const grid::View view = view_of(points, false);
  const int lane = threadIdx.x % 32, queries = __popc(asking), lanes = grid::lanes_for(queries);
  const int mine = lane / lanes;
  const int asks = mine < queries ? static_cast<int>(__fns(asking, 0, mine + 1)) : 0;
  const Point<float> p{__shfl_sync(whole_warp, q.x, asks), __shfl_sync(whole_warp, q.y, asks),
                       __shfl_sync(whole_warp, q.z, asks)};
  const float bound = __shfl_sync(whole_warp, best.worst(), asks);
  tree::Best<K> found;
  found.clear(k, mine < queries ? bound : -1.0f);  // nothing comes before -1
  grid::walk_all(p, view, lane % lanes, lanes, view.start(grid::cells_for(points)), found);

  const auto of_lane = [&](int from) {
    tree::Best<K> other;
#pragma unroll
    for (int place = 0; place < K; ++place) {
      other.d[place] = __shfl_sync(whole_warp, found.d[place], from);
      other.i[place] = __shfl_sync(whole_warp, found.i[place], from);
    }
    return other;
  };
  for (int step = lanes / 2; step > 0; step /= 2) grid::join(found, of_lane(lane ^ step));
  const tree::Best<K> answer = of_lane(__popc(asking & ((1u << lane) - 1)) * lanes % 32);
  return asking >> lane & 1 ? answer : best;
}

template <int K, int Threads, class Answer>
__device__ __forceinline__ void build_and_search(const GridCall& call, Answer&& answer) {
  const int points = static_cast<int>(call.references.count), cells = grid::cells_for(points);
  const Layout layout(points);
  const Shared shared(shared_bytes, layout);

  // 32 queries to a warp of each block in turn: neighbours in the list are often neighbours in space, and as hard. The first
  // is on its way while the grid is built.
  const int64_t mine = (threadIdx.x / 32 * static_cast<int64_t>(gridDim.x) + blockIdx.x) * 32 + threadIdx.x % 32;
  const int64_t step = static_cast<int64_t>(gridDim.x) * Threads;
  const int64_t rounded = (call.queries.count + 31) / 32 * 32;  // whole warps: the gather shuffles
  if (mine < call.queries.count) call.queries.prefetch(mine);

  Builder<Threads, most_references / Threads> builder{call.references, shared};
  builder.zero_counts(layout.words);
  builder.read();
  builder.bound(cells);  // passes a barrier: the counts are zero
  const int threshold = grid::crowded_for(points, cells);
  const bool uneven = builder.count() > threshold;
  if (uneven) builder.refine(cells, layout.words, threshold);
  builder.scan(layout.words);
  if (uneven) builder.point_to_grids();
  builder.scatter();
  if (uneven) builder.trim(cells, max(2 * threshold, call.k), call.k);

  for (int64_t query = mine; query < rounded; query += step) {
    const bool there = query < call.queries.count;
    tree::Best<K> best;
    best.clear(call.k, call.limit);
    bool give_up = false;
    if (there) {
      const Point<float> q = call.queries.at<float>(query);
      if (tree::finite(q)) {
        const bool through = search(q, points, uneven, best);
        // a distance that overflows has an index all the same, and no bound leads to it
        give_up = !through || (best.worst() == INFINITY && !(call.limit < INFINITY));
      }
    }
    const unsigned asking = __ballot_sync(whole_warp, give_up);
    if (asking != 0) {  // the query is read again: kept, it was in the way of every search
      const Point<float> q = there ? call.queries.at<float>(query) : Point<float>{0, 0, 0};
      best = search_all<K>(asking, q, points, best, call.k);
    }
    answer(query, there, best);
  }
}

template <int K, int Threads>
__global__ void __launch_bounds__(Threads, 1)
    grid_search_kernel(const __grid_constant__ GridCall call, float* dist2 /*[N, k]*/, int64_t* idx /*[N, k]*/,
                       int64_t* counts /*[N] or null*/) {
  build_and_search<K, Threads>(call, [&](int64_t query, bool there, const tree::Best<K>& best) {
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
    grid_gather_kernel(const __grid_constant__ GridCall call, ValueRows values) {
  build_and_search<1, Threads>(call, [&](int64_t query, bool there, const tree::Best<1>& best) {
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
  launch_with_shared<grid_search_kernel<K, block_threads>>(
      context, blocks_for(context, call.queries.count), block_threads,
      Layout(static_cast<int>(call.references.count)).bytes(), call, dist2, idx, counts);
}

}  // namespace

bool grid_serves(int device, const GridCall& call) {
  // from 9 neighbours up the insertions of a thread cost more than the tree does: k = 32 took 590 us, the tree 455
  if (call.k > 8 || call.references.count > most_references) return false;
  return Layout(static_cast<int>(call.references.count)).bytes() <=
         attribute_of(device, cudaDevAttrMaxSharedMemoryPerBlockOptin);
}

void grid_search(const Context& context, const GridCall& call, float* dist2 /*[N, k]*/, int64_t* idx /*[N, k]*/,
                 int64_t* counts /*[N] or null*/) {
  if (call.k == 1) return launch_grid<1>(context, call, dist2, idx, counts);
  if (call.k <= 4) return launch_grid<4>(context, call, dist2, idx, counts);
  launch_grid<8>(context, call, dist2, idx, counts);
}

void grid_gather(const Context& context, const GridCall& call, const ValueRows& values) {
  launch_with_shared<grid_gather_kernel<block_threads>>(context, blocks_for(context, call.queries.count), block_threads,
                                                        Layout(static_cast<int>(call.references.count)).bytes(), call,
                                                        values);
}

}  // namespace prequal::ops::spatial
