// dist2[n, j], idx[n, j] = the k nearest of references [M, D] to queries [N, D], nearest first, ties to the lower index.
// The references are ranked along each axis by a sorted sample, ordered along a Morton curve of those ranks (of a batch:
// segment by segment), cut into leaves of 32 and boxed; a warp takes a query through the boxes, a lane a box (knn_tree.h
// says why that is exact). Nothing depends on the density of the cloud: the curve measures in points.
// Bytes: 12 (N + M) read, 12 N k written; some 45 M of workspace. No host read: the launches can be captured.
// Numerics: fp32 (fp64 for doubles), direct differences, each operation rounded once: the reference's bits.
#include <cstdio>
#include <cub/device/device_radix_sort.cuh>
#include <tuple>

#include "knn_cloud.cuh"
#include "knn_grid.h"
#include "ops.h"
#include "prequal/knn_tree.h"
#include "prequal/launch.h"
#include "prequal/vec.cuh"

namespace prequal::ops {
namespace {

struct Unit : FileOf<"knn"> {};

using namespace spatial;
using tree::Group, tree::Labelled;

template <class T>
struct Tree {
  Labelled<T>* points;  // [32 * leaves] in curve order
  Group<T>* groups;     // [levels.total]
  tree::Levels levels;
};

// ---- build -------------------------------------------------------------------------------------------------------

constexpr int build_threads = 1024;

// The sorted sample of each axis, by a bitonic network over all three at once: 55 barriers, against 96 of three radix
// sorts, and no scratch. Points that are no neighbours sort behind all others.
template <class T>
__global__ void __launch_bounds__(build_threads) knots_of(Cloud references, T* out /*[3, knots]*/) {
  static_assert(tree::knots == build_threads);
  __shared__ T sorted[3][tree::knots];
  const int me = threadIdx.x;
  const int64_t mine = references.count <= tree::knots ? me : me * references.count / tree::knots;
  Point<T> p{INFINITY, INFINITY, INFINITY};
  if (mine < references.count) {
    const Point<T> sample = references.at<T>(mine);
    if (tree::finite(sample)) p = sample;
  }
  sorted[0][me] = p.x, sorted[1][me] = p.y, sorted[2][me] = p.z;
  __syncthreads();

  for (int width = 2; width <= tree::knots; width *= 2) {
    for (int step = width / 2; step > 0; step /= 2) {
      const int partner = me ^ step;
      if (partner > me) {
        const bool ascending = (me & width) == 0;
#pragma unroll
        for (int axis = 0; axis < 3; ++axis) {
          const T a = sorted[axis][me], b = sorted[axis][partner];
          if ((a > b) == ascending) sorted[axis][me] = b, sorted[axis][partner] = a;
        }
      }
      __syncthreads();
    }
  }
#pragma unroll
  for (int axis = 0; axis < 3; ++axis) out[axis * tree::knots + me] = sorted[axis][me];
}

// Key: the segment, where there is a batch, above the place on the curve.
template <class T, class Key>
__global__ void keys_of(Cloud points, Pointers segments, const T* sorted /*[3, knots]*/, Key* key /*[count]*/,
                        int* index /*[count]*/) {
  __shared__ T knots[3 * tree::knots];
  for (int i = threadIdx.x; i < 3 * tree::knots; i += blockDim.x) knots[i] = sorted[i];
  __syncthreads();

  for (int64_t i = blockIdx.x * static_cast<int64_t>(blockDim.x) + threadIdx.x; i < points.count;
       i += static_cast<int64_t>(gridDim.x) * blockDim.x) {
    const Point<T> p = points.at<T>(i);
    Key found = tree::finite(p) ? tree::key_of(p, points.dims, knots) : tree::last_key;
    if constexpr (sizeof(Key) == 8) found |= static_cast<Key>(segments.segment_of(i)) << tree::key_bits;
    key[i] = found;
    index[i] = static_cast<int>(i);
  }
}

template <class T>
struct Box {
  T lo[3], hi[3];
  int lowest, highest;
};

template <class T>
__device__ __forceinline__ Box<T> nothing() {
  return {{INFINITY, INFINITY, INFINITY}, {-INFINITY, -INFINITY, -INFINITY}, tree::nobody, -1};
}

// The box over the boxes of a warp's lanes, in every lane.
template <class T>
__device__ __forceinline__ Box<T> over_warp(Box<T> box) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) {
#pragma unroll
    for (int axis = 0; axis < 3; ++axis) {
      box.lo[axis] = min(box.lo[axis], __shfl_xor_sync(whole_warp, box.lo[axis], step));
      box.hi[axis] = max(box.hi[axis], __shfl_xor_sync(whole_warp, box.hi[axis], step));
    }
  }
  box.lowest = __reduce_min_sync(whole_warp, box.lowest);
  box.highest = __reduce_max_sync(whole_warp, box.highest);
  return box;
}

template <class T>
__device__ __forceinline__ void put(const Tree<T>& tree, int level, int64_t place, const Box<T>& box) {
  Group<T>& group = tree.groups[tree.levels.first[level] + place / tree::fan];
  const int lane = place % tree::fan;
#pragma unroll
  for (int axis = 0; axis < 3; ++axis) group.lo[axis][lane] = box.lo[axis], group.hi[axis][lane] = box.hi[axis];
  group.lowest[lane] = box.lowest, group.highest[lane] = box.highest;
}

template <class T>
__device__ __forceinline__ Box<T> get(const Group<T>& group, int lane) {
  Box<T> box;
#pragma unroll
  for (int axis = 0; axis < 3; ++axis) box.lo[axis] = group.lo[axis][lane], box.hi[axis] = group.hi[axis][lane];
  box.lowest = group.lowest[lane], box.highest = group.highest[lane];
  return box;
}

constexpr int warps_a_block = 8;

// A warp a leaf, and on for the boxes of nothing that fill the last group up.
template <class T>
__global__ void leaves_of(Cloud references, const int* order /*[M]*/, Tree<T> tree) {
  const int lane = threadIdx.x % 32;
  const int64_t leaf = blockIdx.x * static_cast<int64_t>(warps_a_block) + threadIdx.x / 32;
  if (leaf >= static_cast<int64_t>(tree.levels.groups[0]) * tree::fan) return;
  Box<T> box = nothing<T>();
  const int64_t place = leaf * tree::fan + lane;
  if (leaf < tree.levels.boxes[0]) {
    Labelled<T> labelled{0, 0, 0, -1};
    if (place < references.count) {
      const int index = order[place];
      const Point<T> p = references.at<T>(index);
      if (tree::finite(p)) {
        labelled = {p.x, p.y, p.z, index};
        const T x = p.x + T(0), y = p.y + T(0), z = p.z + T(0);  // -0 as 0: a box has one zero
        box = {{x, y, z}, {x, y, z}, index, index};
      }
    }
    tree.points[place] = labelled;
  }
  box = over_warp(box);
  if (lane == 0) put(tree, 0, leaf, box);
}

template <class T>
__device__ __forceinline__ void make_box(const Tree<T>& tree, int level, int64_t place) {
  const int lane = threadIdx.x % 32;
  Box<T> box = nothing<T>();
  if (place < tree.levels.boxes[level]) box = get(tree.groups[tree.levels.first[level - 1] + place], lane);
  box = over_warp(box);
  if (lane == 0) put(tree, level, place, box);
}

template <class T>
__global__ void boxes_of(const __grid_constant__ Tree<T> tree, int level) {
  const int64_t place = blockIdx.x * static_cast<int64_t>(warps_a_block) + threadIdx.x / 32;
  if (place < static_cast<int64_t>(tree.levels.groups[level]) * tree::fan) make_box(tree, level, place);
}

// The levels from this one up, by one block.
template <class T>
__global__ void __launch_bounds__(build_threads) boxes_above(const __grid_constant__ Tree<T> tree, int level) {
  for (; level < tree.levels.count; ++level) {
    for (int place = threadIdx.x / 32; place < tree.levels.groups[level] * tree::fan; place += blockDim.x / 32) {
      make_box(tree, level, place);
    }
    __syncthreads();
  }
}

unsigned blocks_for(int64_t items, int block) {
  return static_cast<unsigned>(std::min<int64_t>((items + block - 1) / block, 0x7fffffff));
}

Buffer workspace(const Context& context, int64_t bytes) { return context.empty({bytes}, DType::u8); }

// Points, then groups; both begin at whole groups of 16 bytes.
template <class T>
int64_t index_bytes(const tree::Levels& levels) {
  return int64_t{levels.count ? levels.boxes[0] : 0} * tree::fan * int64_t{sizeof(Labelled<T>)} +
         levels.total * int64_t{sizeof(Group<T>)};
}

template <class T>
Tree<T> tree_in(void* bytes, int64_t count) {
  const tree::Levels levels = tree::levels_for(count);
  auto* points = static_cast<Labelled<T>*>(bytes);
  const int64_t padded = int64_t{levels.count ? levels.boxes[0] : 0} * tree::fan;
  return {points, reinterpret_cast<Group<T>*>(points + padded), levels};
}

// The order of the references along the curve. [count] ints
template <class T, class Key>
Buffer curve_order(const Context& context, const Cloud& points, const Pointers& segments,
                   const T* sorted /*[3, knots]*/) {
  const int64_t count = points.count, key_bytes = count * int64_t{sizeof(Key)};
  const Buffer key = workspace(context, key_bytes), index = workspace(context, count * 4);
  const Buffer sorted_key = workspace(context, key_bytes);
  Buffer order = workspace(context, count * 4);
  // 12 KB of knots a block: enough blocks to fill any GPU, not one for a few hundred points
  launch<keys_of<T, Key>>(context, std::min(blocks_for(count, 256), 1024u), 256, points, segments, sorted,
                          key.as<Key>(), index.as<int>());

  int last = tree::key_bits;
  if (sizeof(Key) == 8) {
    while (last < 63 && (segments.segments >> (last - tree::key_bits)) > 0) ++last;
  }
  size_t scratch_bytes = 0;
  const auto sort = [&](void* scratch) {
    check(cub::DeviceRadixSort::SortPairs(scratch, scratch_bytes, key.as<const Key>(), sorted_key.as<Key>(),
                                          index.as<const int>(), order.as<int>(), static_cast<int>(count),
                                          tree::key_bits - tree::sorted_bits(count), last,
                                          static_cast<cudaStream_t>(context.stream)),
          "radix sort");
  };
  sort(nullptr);
  const Buffer scratch = workspace(context, static_cast<int64_t>(std::max<size_t>(scratch_bytes, 1)));
  sort(scratch.view().data);
  return order;
}

template <class T>
void build_into(const Context& context, const Cloud& references, const Pointers& segments, const Tree<T>& tree) {
  const tree::Levels& levels = tree.levels;
  if (levels.count == 0) return;
  const Buffer knots = workspace(context, 3 * tree::knots * int64_t{sizeof(T)});
  launch<knots_of<T>>(context, 1, build_threads, references, knots.as<T>());
  const Buffer order = segments.data ? curve_order<T, uint64_t>(context, references, segments, knots.as<const T>())
                                     : curve_order<T, uint32_t>(context, references, segments, knots.as<const T>());
  launch<leaves_of<T>>(context, blocks_for(int64_t{levels.groups[0]} * tree::fan, warps_a_block), warps_a_block * 32,
                       references, order.as<const int>(), tree);
  int level = 1;
  for (; level < levels.count && levels.groups[level] > 4; ++level) {
    launch<boxes_of<T>>(context, blocks_for(int64_t{levels.groups[level]} * tree::fan, warps_a_block),
                        warps_a_block * 32, tree, level);
  }
  if (level < levels.count) launch<boxes_above<T>>(context, 1, build_threads, tree, level);
}

// ---- search ------------------------------------------------------------------------------------------------------

// The bits of a distance, in 32 of which the order is the distances' own (for doubles: not strictly).
__device__ __forceinline__ uint32_t ordered(float d) { return __float_as_uint(d); }
__device__ __forceinline__ uint32_t ordered(double d) { return static_cast<uint32_t>(__double2hiint(d)); }

template <class T>
struct Candidate {
  T d;
  int i;

  __device__ __forceinline__ bool before(const Candidate& other) const {
    return tree::comes_before(d, i, other.d, other.i);
  }
};

template <class T>
__device__ __forceinline__ Candidate<T> from_lane(const Candidate<T>& mine, int lane) {
  return {__shfl_sync(whole_warp, mine.d, lane), __shfl_sync(whole_warp, mine.i, lane)};
}

template <class T>
__device__ __forceinline__ Candidate<T> no_candidate() {
  return {INFINITY, tree::nobody};
}

// The nearest alone: the same in every lane.
template <class T>
struct Nearest {
  static constexpr int capacity = 1;
  Candidate<T> worst;

  __device__ void clear(int /*k*/, const Candidate<T>& limit) { worst = limit, found = no_candidate<T>(); }

  __device__ __forceinline__ void offer(Candidate<T> mine, bool take) {
    if (!__any_sync(whole_warp, take)) return;
    if (!take) mine = no_candidate<T>();
    if constexpr (sizeof(T) == 4) {
      const uint32_t nearest = __reduce_min_sync(whole_warp, ordered(mine.d));
      mine.i = __reduce_min_sync(whole_warp, ordered(mine.d) == nearest ? mine.i : tree::nobody);
      mine.d = __uint_as_float(nearest);
    } else {
#pragma unroll
      for (int step = 16; step > 0; step /= 2) {
        const Candidate<T> other{__shfl_xor_sync(whole_warp, mine.d, step), __shfl_xor_sync(whole_warp, mine.i, step)};
        if (other.before(mine)) mine = other;
      }
    }
    worst = found = mine;
  }

  __device__ __forceinline__ Candidate<T> at(int /*row*/) const { return found; }

  Candidate<T> found;
};

// The k best of what was offered, sorted over the warp: place p is row p / 32 of lane p % 32.
template <class T, int Rows>
struct Sorted {
  static constexpr int capacity = 32 * Rows;
  Candidate<T> best[Rows];
  Candidate<T> worst;  // the k-th, or the limit of the search: the same in every lane
  Candidate<T> limit;
  int last;  // place of the k-th

  __device__ void clear(int k, const Candidate<T>& limit) {
#pragma unroll
    for (int row = 0; row < Rows; ++row) best[row] = no_candidate<T>();
    this->limit = worst = limit;
    last = k - 1;
  }

  __device__ __forceinline__ Candidate<T> at(int row) const { return best[row]; }

  // Few newcomers are put in their places one by one; many are sorted first and merged. Eight one by one cost as much.
  __device__ __forceinline__ void offer(Candidate<T> mine, bool take) {
    unsigned taken = __ballot_sync(whole_warp, take);
    if (taken == 0) return;
    if (__popc(taken) <= 8) {
      for (; taken != 0; taken &= taken - 1) insert(from_lane(mine, __ffs(taken) - 1));
    } else {
      if (!take) mine = no_candidate<T>();
      sort(mine);
      merge(mine);
    }
    Candidate<T> kth = limit;
#pragma unroll
    for (int row = 0; row < Rows; ++row) {
      if (row == last / 32) kth = from_lane(best[row], last % 32);
    }
    worst = kth.before(limit) ? kth : limit;
  }

 private:
  __device__ __forceinline__ void insert(const Candidate<T>& newcomer) {
    const int lane = threadIdx.x % 32;
    Candidate<T> carried = newcomer;  // into lane 0 of this row: the newcomer, or the last of the row before
    bool placed = false;              // whether the newcomer went to an earlier row
#pragma unroll
    for (int row = 0; row < Rows; ++row) {
      const bool stays = best[row].before(newcomer);
      const Candidate<T> leaves = from_lane(best[row], 31);
      Candidate<T> below{__shfl_up_sync(whole_warp, best[row].d, 1), __shfl_up_sync(whole_warp, best[row].i, 1)};
      if (lane == 0) below = carried;
      // the first that does not stay takes the newcomer, those behind it their neighbour
      const unsigned staying = __ballot_sync(whole_warp, stays);
      const bool first = !placed && lane == __popc(staying);
      if (!stays) best[row] = first ? newcomer : below;
      placed = placed || staying != whole_warp;
      carried = leaves;
    }
  }

  __device__ __forceinline__ static void exchange(Candidate<T>& mine, int step, bool keep_lower) {
    const Candidate<T> other{__shfl_xor_sync(whole_warp, mine.d, step), __shfl_xor_sync(whole_warp, mine.i, step)};
    if (other.before(mine) == keep_lower) mine = other;
  }

  __device__ __forceinline__ static void sort(Candidate<T>& mine) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int width = 2; width <= 32; width *= 2) {
#pragma unroll
      for (int step = width / 2; step > 0; step /= 2) {
        exchange(mine, step, ((lane & width) == 0) == ((lane & step) == 0));
      }
    }
  }

  __device__ __forceinline__ static void settle(Candidate<T>& mine) {  // a bitonic sequence becomes a sorted one
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int step = 16; step > 0; step /= 2) exchange(mine, step, (lane & step) == 0);
  }

  __device__ __forceinline__ void merge(Candidate<T> mine /*sorted*/) {
#pragma unroll
    for (int row = 0; row < Rows; ++row) {
      const Candidate<T> other = from_lane(mine, 31 - threadIdx.x % 32);
      const bool swap = other.before(best[row]);
      mine = swap ? best[row] : other;
      if (swap) best[row] = other;
      settle(best[row]);
      if (row + 1 < Rows) settle(mine);
    }
  }
};

// A group that is open: what its boxes still promise, a lane a box. Each lane reads back only what it wrote.
template <class T>
struct Open {
  Candidate<T> box[warps_a_block][tree::max_levels][32];
};

template <class T, bool Batched, class List>
__device__ __forceinline__ void search(const Point<T>& q, const Range& range, const Tree<T>& tree, Open<T>& open,
                                       List& list) {
  if (tree.levels.count == 0) return;
  const int lane = threadIdx.x % 32;
  auto& waiting = open.box[threadIdx.x / 32];

  const auto look = [&](int level, int group) {
    const Box<T> box = get(tree.groups[tree.levels.first[level] + group], lane);
    Candidate<T> promised{tree::bound2(q, {box.lo[0], box.lo[1], box.lo[2]}, {box.hi[0], box.hi[1], box.hi[2]}),
                          box.lowest};
    if (Batched && !(box.lowest < range.end && box.highest >= range.begin)) promised = no_candidate<T>();
    return promised;
  };

  const int top = tree.levels.count - 1;
  int level = top, group = 0;
  Candidate<T> promised = look(level, group);
  while (true) {
    const uint32_t bits = promised.before(list.worst) ? ordered(promised.d) : 0xffffffffu;
    const uint32_t nearest = __reduce_min_sync(whole_warp, bits);
    if (nearest == 0xffffffffu) {  // nothing here can be nearer than what is held
      if (level == top) return;
      ++level;
      group /= tree::fan;
      promised = waiting[level][lane];
      continue;
    }
    const int next = __ffs(__ballot_sync(whole_warp, bits == nearest)) - 1;
    if (lane == next) promised = no_candidate<T>();
    const int child = group * tree::fan + next;
    if (level > 0) {
      waiting[level][lane] = promised;
      --level;
      group = child;
      promised = look(level, group);
      continue;
    }

    const Labelled<T> p = tree.points[static_cast<int64_t>(child) * tree::fan + lane];
    const Candidate<T> mine{tree::distance2(q, {p.x, p.y, p.z}), static_cast<int>(p.index)};
    bool take = mine.i >= 0 && mine.before(list.worst);
    if (Batched) take = take && mine.i >= range.begin && mine.i < range.end;
    list.offer(mine, take);
  }
}

// What every search is asked: who, among whom, how far.
template <class T>
struct Question {
  Cloud queries;
  Tree<T> tree;
  Pointers query_ptr, reference_ptr;  // both null: one segment; read where Batched
  int k;
  Candidate<T> limit;  // candidates before this one count
};

// Calls answer(query, list) for each query of this warp, found or not.
template <class T, bool Batched, class List, class Answer>
__device__ __forceinline__ void each_query(const Question<T>& question, Answer&& answer) {
  __shared__ Open<T> open;
  const int64_t step = static_cast<int64_t>(gridDim.x) * warps_a_block;
  for (int64_t query = blockIdx.x * static_cast<int64_t>(warps_a_block) + threadIdx.x / 32;
       query < question.queries.count; query += step) {
    const Point<T> q = question.queries.template at<T>(query);
    List list;
    list.clear(question.k, question.limit);
    Range range{0, INT_MAX};
    if (Batched && question.query_ptr.data) range = visible(question.query_ptr, question.reference_ptr, query);
    if (tree::finite(q)) search<T, Batched>(q, range, question.tree, open, list);
    answer(query, list);
  }
}

template <class T>
struct Neighbours {
  T* dist2;         // [N, k]
  int64_t* idx;     // [N, k]
  int64_t* counts;  // [N] or null
};

template <class T, bool Batched, class List>
__global__ void __launch_bounds__(warps_a_block * 32)
    search_kernel(const __grid_constant__ Question<T> question, Neighbours<T> out) {
  each_query<T, Batched, List>(question, [&](int64_t query, const List& list) {
    const int lane = threadIdx.x % 32;
    int count = 0;
#pragma unroll
    for (int row = 0; row < (List::capacity + 31) / 32; ++row) {
      const Candidate<T> found = list.at(row);
      const int place = row * 32 + lane;
      const bool exists = place < question.k && found.i != tree::nobody;
      if (place < question.k) {
        out.dist2[query * question.k + place] = exists ? found.d : T(INFINITY);
        out.idx[query * question.k + place] = exists ? found.i : -1;
      }
      count += __popc(__ballot_sync(whole_warp, exists));
    }
    if (out.counts && lane == 0) out.counts[query] = count;
  });
}

template <class T, bool Batched>
__global__ void __launch_bounds__(warps_a_block * 32)
    gather_kernel(const __grid_constant__ Question<T> question, ValueRows values) {
  each_query<T, Batched, Nearest<T>>(
      question, [&](int64_t query, const Nearest<T>& list) { copy_row(values, query, list.at(0).i); });
}

struct Blend {
  const void* values;  // [M, width], rows value_stride elements apart
  void* out;           // [N, width]
  int64_t width;
  int64_t value_stride;
  DType dtype;
};

// sum(w v) / sum(w) over the neighbours, nearest first, w = d[0] / d with d = max(dist2, 1e-16); lanes over the channels.
// In double where points or values are.
template <class V, class T, class List>
__device__ __forceinline__ void blend_row(const Blend& blend, int64_t query, const List& list, int k) {
  using A = std::conditional_t<sizeof(T) == 8 || sizeof(V) == 8, double, float>;
  constexpr int rows = List::capacity / 32;
  const int lane = threadIdx.x % 32;
  const auto distance = [](const Candidate<T>& near) { return max(static_cast<A>(near.d), static_cast<A>(1e-16)); };
  const A nearest = __shfl_sync(whole_warp, distance(list.at(0)), 0);
  A weight[rows], total = 0;
#pragma unroll
  for (int row = 0; row < rows; ++row) {
    const Candidate<T> near = list.at(row);
    const A d = distance(near);
    const bool counts = row * 32 + lane < k && near.i != tree::nobody;
    weight[row] = !counts ? A(0) : d == nearest ? A(1) : nearest / d;  // equal infinities too weigh the same
    for (int place = 0; place < 32; ++place) total += __shfl_sync(whole_warp, weight[row], place);
  }

  const auto* values = static_cast<const V*>(blend.values);
  auto* out = static_cast<V*>(blend.out) + query * blend.width;
  for (int64_t first = 0; first < blend.width; first += 32) {  // the whole warp stays: it shuffles
    const int64_t channel = first + lane;
    A sum = 0;
#pragma unroll
    for (int row = 0; row < rows; ++row) {
      for (int place = 0; place < 32 && row * 32 + place < k; ++place) {
        const A w = __shfl_sync(whole_warp, weight[row], place);
        const int near = __shfl_sync(whole_warp, list.at(row).i, place);
        if (near == tree::nobody) break;
        if (channel < blend.width) sum += w * static_cast<A>(values[near * blend.value_stride + channel]);
      }
    }
    if (channel < blend.width) out[channel] = static_cast<V>(sum / total);
  }
}

template <class T, class List>
__global__ void __launch_bounds__(warps_a_block * 32)
    interpolate_kernel(const __grid_constant__ Question<T> question, Blend blend) {
  each_query<T, true, List>(question, [&](int64_t query, const List& list) {
    switch (blend.dtype) {  // the same for every thread
      case DType::f16: return blend_row<__half, T>(blend, query, list, question.k);
      case DType::bf16: return blend_row<__nv_bfloat16, T>(blend, query, list, question.k);
      case DType::f64: return blend_row<double, T>(blend, query, list, question.k);
      default: return blend_row<float, T>(blend, query, list, question.k);
    }
  });
}

// ---- the launchers -------------------------------------------------------------------------------------------------

constexpr int max_k = 128;

Cloud cloud_of(const Tensor& points, const char* argument, const char* rows) {
  if (points.rank != 2 || (points.shape[1] != 2 && points.shape[1] != 3)) {
    wrong_value(argument, "shape [" + std::string(rows) + ", 2] or [" + rows + ", 3]", shape_of(points));
  }
  // boxes are counted in an int, and references in a positive one
  if (points.shape[0] > 0x7ffffff0) throw Refused{"size"};
  return {points.data,      points.shape[0], points.stride[0],
          points.stride[1], points.dtype,    static_cast<int>(points.shape[1])};
}

void is_floating(const Tensor& points, const char* argument) {
  const DType dtype = points.dtype;
  if (dtype == DType::f16 || dtype == DType::bf16 || dtype == DType::f32 || dtype == DType::f64) return;
  wrong_type(argument, "a floating dtype", name_of(dtype));
}

void check_k(const char* argument, int64_t k) {
  if (k < 1 || k > max_k) wrong_value(argument, "1 to 128", std::to_string(k));
}

void check_radius(const char* argument, double radius) {
  if (radius >= 0) return;
  char text[32];
  std::snprintf(text, sizeof(text), "%g", radius);
  wrong_value(argument, "a number from 0", text);
}

Pointers pointers_of(const std::optional<Tensor>& pointers, const char* argument) {
  if (!pointers) return {nullptr, 0, 0, false};
  if (pointers->dtype != DType::i32 && pointers->dtype != DType::i64) {
    wrong_type(argument, "int32 or int64", name_of(pointers->dtype));
  }
  if (pointers->rank != 1 || pointers->shape[0] < 1) wrong_value(argument, "shape [B + 1]", shape_of(*pointers));
  return {pointers->data, pointers->shape[0] - 1, pointers->stride[0], pointers->dtype == DType::i64};
}

// One call of the family, checked: the points, their segments, and what was built of the references before.
struct Asked {
  Cloud queries, references;
  Pointers query_ptr, reference_ptr;
  const std::optional<Tensor>& index;

  Asked(const Tensor& queries, const Tensor& references, const std::optional<Tensor>& query_ptr,
        const std::optional<Tensor>& reference_ptr, const std::optional<Tensor>& index)
      : index(index) {
    is_floating(queries, "queries");
    if (references.dtype != queries.dtype) {
      wrong_type("references", std::string(name_of(queries.dtype)) + " like queries", name_of(references.dtype));
    }
    this->queries = cloud_of(queries, "queries", "N");
    if (references.rank != 2 || references.shape[1] != queries.shape[1]) {
      wrong_value("references", "shape [M, " + std::to_string(queries.shape[1]) + "]", shape_of(references));
    }
    this->references = cloud_of(references, "references", "M");
    if (query_ptr.has_value() != reference_ptr.has_value()) {
      wrong_type(query_ptr ? "reference_ptr" : "query_ptr",
                 std::string("a torch.Tensor beside ") + (query_ptr ? "query_ptr" : "reference_ptr"), "NoneType");
    }
    this->query_ptr = pointers_of(query_ptr, "query_ptr");
    this->reference_ptr = pointers_of(reference_ptr, "reference_ptr");
    if (this->query_ptr.segments != this->reference_ptr.segments) {
      wrong_value("reference_ptr", "shape [" + std::to_string(this->query_ptr.segments + 1) + "] like query_ptr",
                  shape_of(*reference_ptr));
    }
    if (!index) return;
    if (index->dtype != DType::u8) wrong_type("index", "uint8, as knn_index makes it", name_of(index->dtype));
    if (index->rank != 1) wrong_value("index", "shape [bytes]", shape_of(*index));
    const auto levels = tree::levels_for(this->references.count);
    const int64_t bytes = doubles() ? index_bytes<double>(levels) : index_bytes<float>(levels);
    if (index->shape[0] != bytes) {
      wrong_value("index", "shape [" + std::to_string(bytes) + "], as knn_index makes it of these references",
                  shape_of(*index));
    }
  }

  bool doubles() const { return queries.dtype == DType::f64; }

  // What the grid in shared memory may be asked: one segment, in floats.
  std::optional<GridCall> grid_call(const Context& context, int64_t k, const std::optional<double>& radius) const {
    if (doubles() || query_ptr.data || references.count == 0) return std::nullopt;
    GridCall call{queries, references, static_cast<int>(k), INFINITY};
    if (radius) call.limit = mul(static_cast<float>(*radius), static_cast<float>(*radius));
    if (!grid_serves(context.device, call)) return std::nullopt;
    return call;
  }

  // Calls body.operator()<T, Batched>(question), with the tree built or taken from the index. Doubles have one form.
  template <class Body>
  void with_question(const Context& context, int64_t k, const std::optional<double>& radius, Body&& body) const {
    const auto with = [&]<class T, bool Batched>() {
      std::optional<Buffer> built;
      void* place = nullptr;
      if (index) {
        if (!index->contiguous_from(0)) throw Refused{"unit_stride"};
        if (reinterpret_cast<uintptr_t>(index->data) % 16 != 0) throw Refused{"alignment"};
        place = index->data;
      } else {
        built.emplace(workspace(context, index_bytes<T>(tree::levels_for(references.count))));
        place = built->view().data;
      }
      const Tree<T> tree = tree_in<T>(place, references.count);
      if (!index) build_into(context, references, reference_ptr, tree);
      Candidate<T> limit{INFINITY, tree::nobody};
      if (radius) limit.d = mul(static_cast<T>(*radius), static_cast<T>(*radius));
      body.template operator()<T, Batched>(
          Question<T>{queries, tree, query_ptr, reference_ptr, static_cast<int>(k), limit});
    };
    if (doubles()) return with.template operator()<double, true>();
    if (query_ptr.data) return with.template operator()<float, true>();
    with.template operator()<float, false>();
  }
};

template <auto kernel, class T, class Out>
void launch_search(const Context& context, const Question<T>& question, const Out& out) {
  launch<kernel>(context, blocks_for(question.queries.count, warps_a_block), warps_a_block * 32, question, out);
}

template <class T>
Neighbours<T> neighbours_in(const Buffer& dist2, const Buffer& idx, const Buffer* counts) {
  return {dist2.as<T>(), idx.as<int64_t>(), counts ? counts->as<int64_t>() : nullptr};
}

void find(const Context& context, const Asked& asked, int64_t k, const std::optional<double>& radius,
          const Buffer& dist2, const Buffer& idx, const Buffer* counts) {
  if (asked.queries.count == 0) return;
  if (const auto call = asked.grid_call(context, k, radius)) {
    return grid_search(context, *call, dist2.as<float>(), idx.as<int64_t>(), counts ? counts->as<int64_t>() : nullptr);
  }
  asked.with_question(context, k, radius, [&]<class T, bool Batched>(const Question<T>& question) {
    const auto out = neighbours_in<T>(dist2, idx, counts);
    if (k == 1) return launch_search<search_kernel<T, Batched, Nearest<T>>>(context, question, out);
    if (k <= 32) return launch_search<search_kernel<T, Batched, Sorted<T, 1>>>(context, question, out);
    if (k <= 64) return launch_search<search_kernel<T, true, Sorted<T, 2>>>(context, question, out);
    launch_search<search_kernel<T, true, Sorted<T, 4>>>(context, question, out);
  });
}

}  // namespace

std::tuple<Buffer, Buffer> knn(const Context& context, const Tensor& queries /*[N, D]*/,
                               const Tensor& references /*[M, D]*/, int64_t k,
                               const std::optional<Tensor>& query_ptr /*[B + 1]*/,
                               const std::optional<Tensor>& reference_ptr /*[B + 1]*/, std::optional<double> radius,
                               const std::optional<Tensor>& index /*bytes*/) {
  const Asked asked(queries, references, query_ptr, reference_ptr, index);
  check_k("k", k);
  if (radius) check_radius("radius", *radius);
  Buffer dist2 = context.empty({asked.queries.count, k}, asked.doubles() ? DType::f64 : DType::f32);
  Buffer idx = context.empty({asked.queries.count, k}, DType::i64);
  find(context, asked, k, radius, dist2, idx, nullptr);
  return {std::move(dist2), std::move(idx)};
}

std::tuple<Buffer, Buffer, Buffer> radius(const Context& context, const Tensor& queries /*[N, D]*/,
                                          const Tensor& references /*[M, D]*/, double r, int64_t max_neighbors,
                                          const std::optional<Tensor>& query_ptr /*[B + 1]*/,
                                          const std::optional<Tensor>& reference_ptr /*[B + 1]*/,
                                          const std::optional<Tensor>& index /*bytes*/) {
  const Asked asked(queries, references, query_ptr, reference_ptr, index);
  check_radius("r", r);
  check_k("max_neighbors", max_neighbors);
  const int64_t count = asked.queries.count;
  Buffer dist2 = context.empty({count, max_neighbors}, asked.doubles() ? DType::f64 : DType::f32);
  Buffer idx = context.empty({count, max_neighbors}, DType::i64);
  Buffer counts = context.empty({count}, DType::i64);
  find(context, asked, max_neighbors, r, dist2, idx, &counts);
  return {std::move(dist2), std::move(idx), std::move(counts)};
}

Buffer knn_index(const Context& context, const Tensor& references /*[M, D]*/,
                 const std::optional<Tensor>& reference_ptr /*[B + 1]*/) {
  is_floating(references, "references");
  const Cloud cloud = cloud_of(references, "references", "M");
  const Pointers segments = pointers_of(reference_ptr, "reference_ptr");
  const auto build = [&]<class T>() {
    Buffer bytes = workspace(context, index_bytes<T>(tree::levels_for(cloud.count)));
    build_into(context, cloud, segments, tree_in<T>(bytes.view().data, cloud.count));
    return bytes;
  };
  return references.dtype == DType::f64 ? build.template operator()<double>() : build.template operator()<float>();
}

Buffer knn_gather(const Context& context, const Tensor& queries /*[N, D]*/, const Tensor& references /*[M, D]*/,
                  const Tensor& values /*[M, ...]*/, const std::optional<Tensor>& query_ptr /*[B + 1]*/,
                  const std::optional<Tensor>& reference_ptr /*[B + 1]*/,
                  const std::optional<Tensor>& index /*bytes*/) {
  const Asked asked(queries, references, query_ptr, reference_ptr, index);
  if (values.rank < 1 || values.shape[0] != asked.references.count) {
    wrong_value("values", "shape [" + std::to_string(asked.references.count) + ", ...], a row a reference",
                shape_of(values));
  }
  if (values.dtype == DType::other || is_fp8(values.dtype)) throw Refused{"dtype"};
  if (!values.contiguous_from(1)) throw Refused{"unit_stride"};

  Tensor like = values;
  like.shape[0] = asked.queries.count;
  Buffer out = context.empty_like(like);
  ValueRows rows{values.as<const char>(),
                 out.as<char>(),
                 values.itemsize,
                 values.stride[0] * values.itemsize,
                 16,
                 values.dtype == DType::boolean ? 0 : 0xff};
  for (int dim = 1; dim < values.rank; ++dim) rows.row_bytes *= values.shape[dim];
  if (asked.queries.count == 0 || rows.row_bytes == 0) return out;

  const auto fits = [&](int64_t bytes) {
    return rows.row_bytes % bytes == 0 && rows.row_stride % bytes == 0 &&
           reinterpret_cast<uintptr_t>(rows.from) % bytes == 0;
  };
  while (!fits(rows.word)) rows.word /= 2;
  if (const auto call = asked.grid_call(context, 1, std::nullopt)) {
    grid_gather(context, *call, rows);
    return out;
  }
  asked.with_question(context, 1, std::nullopt, [&]<class T, bool Batched>(const Question<T>& question) {
    launch_search<gather_kernel<T, Batched>>(context, question, rows);
  });
  return out;
}

Buffer knn_interpolate(const Context& context, const Tensor& queries /*[N, D]*/, const Tensor& references /*[M, D]*/,
                       const Tensor& values /*[M, ...]*/, int64_t k, const std::optional<Tensor>& query_ptr /*[B + 1]*/,
                       const std::optional<Tensor>& reference_ptr /*[B + 1]*/,
                       const std::optional<Tensor>& index /*bytes*/) {
  const Asked asked(queries, references, query_ptr, reference_ptr, index);
  check_k("k", k);
  if (values.rank < 1 || values.shape[0] != asked.references.count) {
    wrong_value("values", "shape [" + std::to_string(asked.references.count) + ", ...], a row a reference",
                shape_of(values));
  }
  switch (values.dtype) {
    case DType::f16:
    case DType::bf16:
    case DType::f32:
    case DType::f64: break;
    default: wrong_type("values", "a floating dtype", name_of(values.dtype));
  }
  if (!values.contiguous_from(1)) throw Refused{"unit_stride"};

  Tensor like = values;
  like.shape[0] = asked.queries.count;
  Buffer out = context.empty_like(like);
  Blend blend{values.data, out.view().data, 1, values.stride[0], values.dtype};
  for (int dim = 1; dim < values.rank; ++dim) blend.width *= values.shape[dim];
  if (asked.queries.count == 0 || blend.width == 0) return out;
  asked.with_question(context, k, std::nullopt, [&]<class T, bool Batched>(const Question<T>& question) {
    if (k <= 32) return launch_search<interpolate_kernel<T, Sorted<T, 1>>>(context, question, blend);
    launch_search<interpolate_kernel<T, Sorted<T, 4>>>(context, question, blend);
  });
  return out;
}

}  // namespace prequal::ops
