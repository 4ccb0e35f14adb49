// dist2[n, j], idx[n, j] = the k nearest of references [M, D] to queries [N, D], for M <= 8192, in one launch.
// Every block builds the same grid of the whole cloud in its own shared memory, which costs it the reading of 12 M bytes
// and saves the launches, barriers and gathers from L2 of a shared one; a thread then takes a query through it.
// Bytes: 12 N read, 12 N k written, and 12 M from L2 for every block. No workspace, no host read.
// Numerics: as knn.cu. The order of points in a cell changes from run to run, the answer does not: candidates are totally
// ordered by (distance, index).
#include <algorithm>

#include "knn_grid.h"
#include "prequal/knn_grid.h"
#include "prequal/launch.h"

#ifndef STAMP
#define STAMP(n)
#endif
namespace prequal::ops::spatial {
namespace {

constexpr int most_references = 8192;
constexpr int axes = 3;

// Dynamic shared memory, in this order. 16-byte members first.
struct Layout {
  int points;  // float4 each
  int words;   // of starts: two 16-bit cells each, and one for the end; whole 16 bytes

  static constexpr int round4(int n) { return (n + 3) / 4 * 4; }
  constexpr Layout(int references, int cells) : points(references), words(round4(cells * cells * cells / 2 + 1)) {}
  constexpr int bytes() const {
    return points * 16 + words * 4 + 2 * axes * grid::most_cells * 4 + axes * grid::sample * 4 + 32 * 8 * 4;
  }
};

struct Shared {
  float4* points;     // [M], w: reference index, or ~place of the next cell's first point
  uint32_t* starts;   // [words]: counts, then starts, of two cells a word
  float* low;         // [3, most_cells]
  float* high;        // [3, most_cells]
  float* sample;      // [3, sample]
  uint32_t* scratch;  // [8, 32]

  __device__ Shared(char* bytes, const Layout& layout) {
    points = reinterpret_cast<float4*>(bytes);
    starts = reinterpret_cast<uint32_t*>(points + layout.points);
    low = reinterpret_cast<float*>(starts + layout.words);
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

template <int Threads, int Items>
struct Builder {
  const Cloud& references;
  const Shared& shared;
  int cells;  // an axis
  Point<float> point[Items];
  uint32_t place[Items];  // cell in the upper half, rank in the cell in the lower; or nowhere
  grid::Even even[axes];
  bool ranked = false;

  static constexpr uint32_t nowhere = 0xffffffffu;

  __device__ __forceinline__ static float& axis(Point<float>& p, int which) {
    return which == 0 ? p.x : which == 1 ? p.y : p.z;
  }

  // All loads before the first question: one after the other they would be the whole cost.
  __device__ __forceinline__ void read() {
    references.with_storage([&]<class S>() {
#pragma unroll
      for (int item = 0; item < Items; ++item) {
        const int i = item * Threads + threadIdx.x;
        if (i < references.count) point[item] = references.from<S, float>(i);
      }
    });
#pragma unroll
    for (int item = 0; item < Items; ++item) {
      const bool there = item * Threads + threadIdx.x < references.count && tree::finite(point[item]);
      place[item] = there ? 0 : nowhere;
    }
  }

  // The corners of all points, in every thread.
  __device__ __forceinline__ void bound() {
    uint32_t lo[axes], hi[axes];
#pragma unroll
    for (int a = 0; a < axes; ++a) {
      lo[a] = 0xffffffffu, hi[a] = 0;
#pragma unroll
      for (int item = 0; item < Items; ++item) {
        if (place[item] == nowhere) continue;
        const uint32_t x = in_order(axis(point[item], a));
        lo[a] = min(lo[a], x), hi[a] = max(hi[a], x);
      }
      lo[a] = __reduce_min_sync(whole_warp, lo[a]), hi[a] = __reduce_max_sync(whole_warp, hi[a]);
    }
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    if (lane == 0) {
#pragma unroll
      for (int a = 0; a < axes; ++a) shared.scratch[a * 32 + warp] = lo[a], shared.scratch[(3 + a) * 32 + warp] = hi[a];
    }
    __syncthreads();
    const bool there = lane < Threads / 32;
#pragma unroll
    for (int a = 0; a < axes; ++a) {
      const uint32_t low = __reduce_min_sync(whole_warp, there ? shared.scratch[a * 32 + lane] : 0xffffffffu);
      const uint32_t high = __reduce_max_sync(whole_warp, there ? shared.scratch[(3 + a) * 32 + lane] : 0u);
      even[a] = grid::Even::of(from_order(low), from_order(high), cells);
    }
  }

  __device__ __forceinline__ int cell_of(const Point<float>& p, int a) const {
    const float x = a == 0 ? p.x : a == 1 ? p.y : p.z;
    return ranked ? grid::ranked_cell(x, shared.low + a * grid::most_cells, cells) : even[a].cell(x, cells);
  }

  __device__ __forceinline__ void zero_counts(int words) {
    auto* four = reinterpret_cast<uint4*>(shared.starts);
    for (int i = threadIdx.x; i < words / 4; i += Threads) four[i] = make_uint4(0, 0, 0, 0);
  }

  // Counts the points of every cell; the most in one, in every thread. Counts must be zero, and a barrier passed since.
  // A warp adds once for all its points of one cell: thousands of points in one cell would wait for each other.
  __device__ __forceinline__ int count() {
    const unsigned below = (1u << threadIdx.x % 32) - 1;
    int most = 0;
#pragma unroll
    for (int item = 0; item < Items; ++item) {
      const bool there = place[item] != nowhere;
      const int cell =
          there ? (cell_of(point[item], 2) * cells + cell_of(point[item], 1)) * cells + cell_of(point[item], 0) : -1;
#ifdef AGG
      const unsigned alike = __match_any_sync(whole_warp, cell);
      const int shift = cell % 2 * 16, first = __ffs(alike) - 1;
      uint32_t before = 0;
      if (there && static_cast<int>(threadIdx.x % 32) == first) {
        before = atomicAdd(&shared.starts[cell / 2], __popc(alike) << shift) >> shift & 0xffff;
      }
      before = __shfl_sync(whole_warp, before, first);
      if (!there) continue;
      const uint32_t rank = before + __popc(alike & below);
#else
      if (!there) continue;
      const int shift = cell % 2 * 16;
      const uint32_t rank = atomicAdd(&shared.starts[cell / 2], 1u << shift) >> shift & 0xffff;
#endif
      most = max(most, static_cast<int>(rank) + 1);
      place[item] = static_cast<uint32_t>(cell) << 16 | rank;
    }
    most = __reduce_max_sync(whole_warp, most);
    if (threadIdx.x % 32 == 0) shared.scratch[6 * 32 + threadIdx.x / 32] = most;
    __syncthreads();
    return __reduce_max_sync(whole_warp,
                             threadIdx.x % 32 < Threads / 32 ? shared.scratch[6 * 32 + threadIdx.x % 32] : 0u);
  }

  // Knots between cells of equal count in a sample: what the even cells cannot tell apart, these can.
  __device__ __forceinline__ void rank() {
    constexpr int size = grid::sample;
    const int count = static_cast<int>(references.count);
    const int used = min(size, count);
    for (int i = threadIdx.x; i < size; i += Threads) {
      Point<float> p{INFINITY, INFINITY, INFINITY};
      if (i < used) {
        const Point<float> found = references.at<float>(count <= size ? i : i * count / size);
        if (tree::finite(found)) p = found;
      }
      shared.sample[i] = p.x, shared.sample[size + i] = p.y, shared.sample[2 * size + i] = p.z;
    }
    for (int i = threadIdx.x; i < axes * grid::most_cells; i += Threads) {
      const int a = i / grid::most_cells;
      const grid::Even& box = a == 0 ? even[0] : a == 1 ? even[1] : even[2];
      shared.low[i] = i % grid::most_cells == 0 ? box.lo : INFINITY;
      shared.high[i] = box.hi;
    }
    __syncthreads();
    for (int i = threadIdx.x; i < axes * size; i += Threads) {
      const int a = i / size, mine = i % size;
      const auto* others = reinterpret_cast<const float4*>(shared.sample + a * size);
      const float x = shared.sample[i];
      int before = 0;
      const auto comes = [&](float other, int index) { before += other < x || (other == x && index < mine); };
#pragma unroll 4
      for (int j = 0; j < size / 4; ++j) {
        const float4 four = others[j];
        comes(four.x, 4 * j), comes(four.y, 4 * j + 1), comes(four.z, 4 * j + 2), comes(four.w, 4 * j + 3);
      }
      // knot c stands at place c * used / cells of the sorted sample
      for (int c = before * cells / used; c <= before * cells / used + 1; ++c) {
        if (c > 0 && c < cells && c * used / cells == before) {
          shared.low[a * grid::most_cells + c] = x;
          shared.high[a * grid::most_cells + c - 1] = x;
        }
      }
    }
    __syncthreads();
  }

  __device__ __forceinline__ void even_edges() {
    for (int i = threadIdx.x; i < axes * grid::most_cells; i += Threads) {
      const int a = i / grid::most_cells, c = i % grid::most_cells;
#pragma unroll
      for (int which = 0; which < axes; ++which) {
        if (which != a || c >= cells) continue;
        shared.low[i] = even[which].low(c);
        shared.high[i] = even[which].high(c, cells);
      }
    }
  }

  // Counts become starts.
  __device__ __forceinline__ void scan(int words) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    constexpr int warps = Threads / 32;
    const int quads = words / 4, quads_a_warp = (quads + warps - 1) / warps;
    const int first = warp * quads_a_warp, last = min(first + quads_a_warp, quads);
    auto* four = reinterpret_cast<uint4*>(shared.starts);
    const auto halves = [](uint32_t word) { return (word & 0xffff) + (word >> 16); };

    uint32_t total = 0;
    for (int i = first + lane; i < last; i += 32) {
      const uint4 w = four[i];
      total += halves(w.x) + halves(w.y) + halves(w.z) + halves(w.w);
    }
    total = __reduce_add_sync(whole_warp, total);
    if (lane == 0) shared.scratch[7 * 32 + warp] = total;
    __syncthreads();
    uint32_t before = __reduce_add_sync(whole_warp, lane < warp ? shared.scratch[7 * 32 + lane] : 0u);

    for (int base = first; base < last; base += 32) {
      const int i = base + lane;
      uint4 w = i < last ? four[i] : make_uint4(0, 0, 0, 0);
      const uint32_t mine = halves(w.x) + halves(w.y) + halves(w.z) + halves(w.w);
      uint32_t sum = mine;
#pragma unroll
      for (int step = 1; step < 32; step *= 2) {
        const uint32_t other = __shfl_up_sync(whole_warp, sum, step);
        if (lane >= step) sum += other;
      }
      uint32_t at = before + sum - mine;
      const auto place = [&](uint32_t word) {
        const uint32_t second = at + (word & 0xffff);
        const uint32_t starts = at | second << 16;
        at = second + (word >> 16);
        return starts;
      };
      w.x = place(w.x), w.y = place(w.y), w.z = place(w.z), w.w = place(w.w);
      if (i < last) four[i] = w;
      before += __shfl_sync(whole_warp, sum, 31);
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
  __device__ __forceinline__ void trim(int crowded, int k) {
    const int all = cells * cells * cells;
    for (int base = threadIdx.x / 32 * 32; base < all; base += Threads) {
      const int cell = base + threadIdx.x % 32;
      const bool full = cell < all && shared.start(cell + 1) - shared.start(cell) > crowded;
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
    for (int base = first; base < last; base += 32) {
      const float4 p = shared.points[min(base + lane, last - 1)];
      if (!__all_sync(whole_warp, p.x == one.x && p.y == one.y && p.z == one.z)) return;
    }
    for (int j = 0; j < k; ++j) {  // the j-th lowest index changes places with what stands there
      int lowest = tree::nobody, where = first;
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

// One query, by one thread.
template <int K>
__device__ __forceinline__ void search(const Point<float>& q, int cx, int cy, int cz, const Shared& shared, int cells,
                                       tree::Best<K>& best) {
  const auto scan = [&](int row, int from, int to) {  // the points of cells [from, to] of a row
    const int last = shared.start(row + to + 1);
    for (int i = shared.start(row + from); i < last;) {
      const float4 p = shared.points[i];
      const int index = __float_as_int(p.w);
      if (index < 0) {
        i = ~index;
        continue;
      }
      best.offer(tree::distance2(q, {p.x, p.y, p.z}), index);
      ++i;
    }
  };
  const auto row_of = [&](int y, int z) { return (z * cells + y) * cells; };
  const auto gap2 = [&](int axis, float x, int c) {
    return grid::gap2(x, shared.low[axis * grid::most_cells + c], shared.high[axis * grid::most_cells + c]);
  };

  // Close by first: what is found there says how far to look. A box of cells around the query grows until k were seen.
  const int last = cells - 1;
  int near = 0;     // rows this far off (in y and in z) were looked at from x - reach to x + reach
  int reach = 1;
  int whole = 0;    // and rows beyond, this far off, from end to end
  scan(row_of(cy, cz), max(cx - 1, 0), min(cx + 1, last));
  while (!best.full() && best.worst() == INFINITY && near < 3 && near < cells) {
    ++near;
    const int wider = max(near, 1);
    for (int z = max(cz - near, 0); z <= min(cz + near, last); ++z) {
      for (int y = max(cy - near, 0); y <= min(cy + near, last); ++y) {
        if (max(abs(y - cy), abs(z - cz)) == near) {
          scan(row_of(y, z), max(cx - wider, 0), min(cx + wider, last));
        } else if (wider > reach) {
          if (cx - wider >= 0) scan(row_of(y, z), cx - wider, cx - wider);
          if (cx + wider <= last) scan(row_of(y, z), cx + wider, cx + wider);
        }
      }
    }
    reach = wider;
  }
  whole = near;
  while (!best.full() && best.worst() == INFINITY && whole < cells) {
    ++whole;
    for (int z = max(cz - whole, 0); z <= min(cz + whole, last); ++z) {
      const bool all = z == cz - whole || z == cz + whole;
      for (int y = cy - whole; y <= cy + whole; y += all ? 1 : 2 * whole) {
        if (y >= 0 && y <= last) scan(row_of(y, z), 0, last);
      }
    }
  }

  // Then every cell that is near enough and was not looked at.
  const auto range = [&](int axis, float x, int center, float other2, int& from, int& to) {
    for (from = center; from > 0 && add(gap2(axis, x, from - 1), other2) <= best.worst();) --from;
    for (to = center; to < last && add(gap2(axis, x, to + 1), other2) <= best.worst();) ++to;
  };
  const float own_x2 = gap2(0, q.x, cx), own_y2 = gap2(1, q.y, cy);
  int y_from, y_to, z_from, z_to, x_from, x_to;
  range(2, q.z, cz, add(own_x2, own_y2), z_from, z_to);
  range(1, q.y, cy, own_x2, y_from, y_to);
  range(0, q.x, cx, 0.0f, x_from, x_to);
  for (int z = z_from; z <= z_to; ++z) {
    const float z2 = gap2(2, q.z, z);
    for (int y = y_from; y <= y_to; ++y) {
      if (add(add(own_x2, gap2(1, q.y, y)), z2) > best.worst()) continue;
      const int ring = max(abs(y - cy), abs(z - cz));
      const int row = row_of(y, z);
      if (ring > whole) {
        scan(row, x_from, x_to);
      } else if (ring <= near) {
        if (x_from < cx - reach) scan(row, x_from, cx - reach - 1);
        if (x_to > cx + reach) scan(row, cx + reach + 1, x_to);
      }
    }
  }
}

template <int K, int Threads, class Answer>
__device__ __forceinline__ void build_and_search(const GridCall& call, int cells, Answer&& answer) {
  extern __shared__ __align__(16) char bytes[];
  const Layout layout(static_cast<int>(call.references.count), cells);
  const Shared shared(bytes, layout);

  Builder<Threads, most_references / Threads> builder{call.references, shared, cells, {}, {}, {}};
  STAMP(0);
  builder.zero_counts(layout.words);
  builder.read();
  STAMP(1);
  builder.bound();  // passes a barrier: the counts are zero
  STAMP(2);
  int most = builder.count();
  STAMP(3);
  // Volumes and surfaces stay far below; what does not is uneven (an outlier, clusters, scales), and is counted again
  // between knots.
  const int crowded = 16 + 16 * layout.points / (cells * cells * cells);
  if (most > crowded) {
    builder.zero_counts(layout.words);
    builder.rank();  // passes barriers
    builder.ranked = true;
    most = builder.count();
  } else {
    builder.even_edges();
  }
  STAMP(4);
  builder.scan(layout.words);
  STAMP(5);
  builder.scatter();
  STAMP(6);
  if (most > 2 * crowded) builder.trim(max(2 * crowded, call.k), call.k);

  STAMP(7);
  // Contiguous queries for each block, as many for each.
  const int64_t share = (call.queries.count + gridDim.x - 1) / gridDim.x;
  const int64_t first = blockIdx.x * share, last = min(first + share, call.queries.count);
  for (int64_t base = first; base < last; base += Threads) {
    const int64_t query = base + threadIdx.x;
    const bool there = query < last;
    tree::Best<K> best;
    best.clear(call.k, call.limit);
    if (there) {
      const Point<float> q = call.queries.at<float>(query);
      if (tree::finite(q)) {
        search<K>(q, builder.cell_of(q, 0), builder.cell_of(q, 1), builder.cell_of(q, 2), shared, cells, best);
      }
    }
    answer(query, there, best);
  }
  STAMP(8);
}

template <int K, int Threads>
__global__ void __launch_bounds__(Threads, 1)
    grid_search_kernel(GridCall call, int cells, float* dist2 /*[N, k]*/, int64_t* idx /*[N, k]*/,
                       int64_t* counts /*[N] or null*/) {
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
__global__ void __launch_bounds__(Threads, 1) grid_gather_kernel(GridCall call, int cells, ValueRows values) {
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

constexpr int threads_for(int K) { return K <= 8 ? 1024 : 512; }

int blocks_for(const Context& context, int64_t queries) {
  // one block an SM; fewer where a block would have less than a warp's worth of work each
  const int64_t sms = attribute_of(context.device, cudaDevAttrMultiProcessorCount);
  return static_cast<int>(std::max<int64_t>(1, std::min<int64_t>(sms, (queries + 127) / 128)));
}

template <int K>
void launch_grid(const Context& context, const GridCall& call, float* dist2, int64_t* idx, int64_t* counts) {
  const int cells = grid::cells_for(call.references.count, call.k);
  constexpr int threads = threads_for(K);
  launch_with_shared<grid_search_kernel<K, threads>>(context, blocks_for(context, call.queries.count), threads,
                                                     Layout(static_cast<int>(call.references.count), cells).bytes(),
                                                     call, cells, dist2, idx, counts);
}

}  // namespace

bool grid_serves(int device, const GridCall& call) {
  if (call.k > 32 || call.references.count > most_references) return false;
  const int cells = grid::cells_for(call.references.count, call.k);
  return Layout(static_cast<int>(call.references.count), cells).bytes() <=
         attribute_of(device, cudaDevAttrMaxSharedMemoryPerBlockOptin);
}

void grid_search(const Context& context, const GridCall& call, float* dist2 /*[N, k]*/, int64_t* idx /*[N, k]*/,
                 int64_t* counts /*[N] or null*/) {
  if (call.k == 1) return launch_grid<1>(context, call, dist2, idx, counts);
  if (call.k <= 4) return launch_grid<4>(context, call, dist2, idx, counts);
  if (call.k <= 8) return launch_grid<8>(context, call, dist2, idx, counts);
  launch_grid<32>(context, call, dist2, idx, counts);
}

void grid_gather(const Context& context, const GridCall& call, const ValueRows& values) {
  const int cells = grid::cells_for(call.references.count, 1);
  constexpr int threads = threads_for(1);
  launch_with_shared<grid_gather_kernel<threads>>(context, blocks_for(context, call.queries.count), threads,
                                                  Layout(static_cast<int>(call.references.count), cells).bytes(), call,
                                                  cells, values);
}

}  // namespace prequal::ops::spatial
