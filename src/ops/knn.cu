// dist2[n, j], idx[n, j] = the k nearest of references [M, 3] to queries [N, 3], nearest first, ties to the lower index.
// The references are ranked along each axis by a sorted sample, ordered along a Morton curve of those ranks, cut into
// leaves of 8 and boxed; a warp takes 32 queries, neighbours on the same curve, through the boxes together (knn_tree.h
// says why that is exact). Nothing depends on the density of the cloud: the curve measures in points.
// Bytes: 12 (N + M) read, 12 N k written; some 46 M + 16 N of workspace. No host read: the launches can be captured.
// Numerics: fp32, direct differences, each operation rounded once; two runs and the reference agree bit for bit.
#include <cub/block/block_radix_sort.cuh>
#include <cub/device/device_radix_sort.cuh>
#include <tuple>

#include "ops.h"
#include "prequal/knn_tree.h"
#include "prequal/launch.h"

namespace prequal::ops {
namespace {

using tree::Point;

struct Cloud {  // [count, 3], any strides
  const float* data;
  int64_t count;
  int64_t row;     // elements
  int64_t column;  // elements

  __device__ __forceinline__ Point at(int64_t i) const {
    const float* p = data + i * row;
    return {p[0], p[column], p[2 * column]};
  }
};

struct Node {
  float4 lo;  // w: the lowest reference index below this node
  float4 hi;
};

struct Tree {
  float4* points;  // [8 * leaves] in curve order; w: reference index, or -1 for a point that is nobody's neighbour
  Node* nodes;     // [levels.total]
  tree::Levels levels;
};

// ---- build -------------------------------------------------------------------------------------------------------

constexpr int build_threads = 1024;
constexpr int small_items = 2;
// One block builds a tree this small in one launch. Eight items a thread were tried: 94 us for 8,000 references, 35 of
// them the keys and 24 the sort, where many blocks and CUB's sort take half.
constexpr int64_t small_cloud = build_threads * small_items;

// The sorted sample of each axis, by a bitonic network over all three at once: 55 barriers, against 96 of three radix
// sorts, and no scratch. Points that are no neighbours sort behind all others.
__device__ void make_knots(const Cloud& references, float* sorted /*[3, knots], shared*/) {
  static_assert(tree::knots == build_threads);
  const int me = threadIdx.x;
  const int64_t mine = references.count <= tree::knots ? me : me * references.count / tree::knots;
  Point p{INFINITY, INFINITY, INFINITY};
  if (mine < references.count) {
    const Point sample = references.at(mine);
    if (tree::finite(sample)) p = sample;
  }
  sorted[me] = p.x, sorted[tree::knots + me] = p.y, sorted[2 * tree::knots + me] = p.z;
  __syncthreads();

  for (int width = 2; width <= tree::knots; width *= 2) {
    for (int step = width / 2; step > 0; step /= 2) {
      const int partner = me ^ step;
      if (partner > me) {
        const bool ascending = (me & width) == 0;
#pragma unroll
        for (int axis = 0; axis < 3; ++axis) {
          float* values = sorted + axis * tree::knots;
          const float a = values[me], b = values[partner];
          if ((a > b) == ascending) values[me] = b, values[partner] = a;
        }
      }
      __syncthreads();
    }
  }
}

// What fills a leaf up, and stands for a reference that is not finite.
__device__ __forceinline__ float4 nobody() { return make_float4(0.0f, 0.0f, 0.0f, __int_as_float(-1)); }

__device__ __forceinline__ float4 labelled(const Point& p, int index) {
  return tree::finite(p) ? make_float4(p.x, p.y, p.z, __int_as_float(index)) : nobody();
}

__device__ __forceinline__ Node nothing() {
  return {make_float4(INFINITY, INFINITY, INFINITY, __int_as_float(tree::nobody)),
          make_float4(-INFINITY, -INFINITY, -INFINITY, 0.0f)};
}

__device__ __forceinline__ Node joined(const Node& a, const Node& b) {
  const int low = min(__float_as_int(a.lo.w), __float_as_int(b.lo.w));
  return {make_float4(fminf(a.lo.x, b.lo.x), fminf(a.lo.y, b.lo.y), fminf(a.lo.z, b.lo.z), __int_as_float(low)),
          make_float4(fmaxf(a.hi.x, b.hi.x), fmaxf(a.hi.y, b.hi.y), fmaxf(a.hi.z, b.hi.z), 0.0f)};
}

__device__ Node leaf_of(const float4* points /*[8]*/) {
  Node box = nothing();
#pragma unroll 4
  for (int i = 0; i < tree::fan; ++i) {
    const float4 p = points[i];
    if (__float_as_int(p.w) >= 0) box = joined(box, {p, p});
  }
  return box;
}

__device__ void make_node(const Tree& tree, int level, int node) {
  const Node* children = tree.nodes + tree.levels.first[level - 1];
  Node box = nothing();
#pragma unroll 4  // all eight at once spill under the 64 registers of a block of 1,024 (sm_86, sm_89)
  for (int child = node * tree::fan; child < (node + 1) * tree::fan; ++child) {
    if (child < tree.levels.nodes[level - 1]) box = joined(box, children[child]);
  }
  tree.nodes[tree.levels.first[level] + node] = box;
}

// The levels from `level` up, by one block.
__device__ void make_nodes(const Tree& tree, int level) {
  for (; level < tree.levels.count; ++level) {
    for (int node = threadIdx.x; node < tree.levels.nodes[level]; node += blockDim.x) make_node(tree, level, node);
    __syncthreads();
  }
}

__device__ __forceinline__ uint32_t key_at(const Cloud& points, int64_t i, const float* sorted /*[3, knots]*/) {
  const Point p = points.at(i);
  return tree::finite(p) ? tree::key_of(p, sorted) : tree::last_key;
}

// All of it in one block, for at most small_cloud references.
__global__ void __launch_bounds__(build_threads)
    build_small(Cloud references, Tree tree, float* sorted /*[3, knots]*/) {
  using PointSort = cub::BlockRadixSort<uint32_t, build_threads, small_items, int>;
  __shared__ union {
    float knots[3 * tree::knots];
    PointSort::TempStorage sort;
  } shared;  // apart they pass the 48 KB that every architecture gives without asking
  float* knots = shared.knots;
  make_knots(references, knots);
  for (int i = threadIdx.x; i < 3 * tree::knots; i += blockDim.x) sorted[i] = knots[i];

  uint32_t key[small_items];
  int index[small_items];
#pragma unroll
  for (int item = 0; item < small_items; ++item) {
    index[item] = threadIdx.x * small_items + item;
    key[item] = index[item] < references.count ? key_at(references, index[item], knots) : 0xffffffffu;
  }
  __syncthreads();
  PointSort(shared.sort).Sort(key, index);

  const int padded = tree.levels.nodes[0] * tree::fan;
#pragma unroll
  for (int item = 0; item < small_items; ++item) {
    const int place = threadIdx.x * small_items + item;
    if (place >= padded) continue;
    tree.points[place] = index[item] < references.count ? labelled(references.at(index[item]), index[item]) : nobody();
  }
  __syncthreads();

  if (static_cast<int>(threadIdx.x) < tree.levels.nodes[0]) {
    tree.nodes[threadIdx.x] = leaf_of(tree.points + threadIdx.x * tree::fan);
  }
  __syncthreads();
  make_nodes(tree, 1);
}

__global__ void __launch_bounds__(build_threads) knots_of(Cloud references, float* sorted /*[3, knots]*/) {
  __shared__ float made[3 * tree::knots];
  make_knots(references, made);
  for (int i = threadIdx.x; i < 3 * tree::knots; i += blockDim.x) sorted[i] = made[i];
}

__global__ void keys_of(Cloud points, const float* sorted /*[3, knots]*/, uint32_t* key /*[count]*/,
                        int* index /*[count]*/) {
  __shared__ float knots[3 * tree::knots];
  for (int i = threadIdx.x; i < 3 * tree::knots; i += blockDim.x) knots[i] = sorted[i];
  __syncthreads();

  for (int64_t i = blockIdx.x * static_cast<int64_t>(blockDim.x) + threadIdx.x; i < points.count;
       i += static_cast<int64_t>(gridDim.x) * blockDim.x) {
    key[i] = key_at(points, i, knots);
    index[i] = static_cast<int>(i);
  }
}

__global__ void leaves_of(Cloud references, const int* order /*[M]*/, Tree tree) {
  const int leaf = blockIdx.x * blockDim.x + threadIdx.x;
  if (leaf >= tree.levels.nodes[0]) return;
  const int64_t first = static_cast<int64_t>(leaf) * tree::fan;
  float4* points = tree.points + first;
#pragma unroll
  for (int i = 0; i < tree::fan; ++i) {
    points[i] = nobody();
    if (first + i < references.count) {
      const int index = order[first + i];
      points[i] = labelled(references.at(index), index);
    }
  }
  tree.nodes[leaf] = leaf_of(points);
}

__global__ void nodes_of(Tree tree, int level) {
  const int node = blockIdx.x * blockDim.x + threadIdx.x;
  if (node < tree.levels.nodes[level]) make_node(tree, level, node);
}

__global__ void __launch_bounds__(build_threads) nodes_above(Tree tree, int level) { make_nodes(tree, level); }

template <class T>
T* bytes_as(const Buffer& buffer) {
  return static_cast<T*>(buffer.view().data);
}

Buffer workspace(const Context& context, int64_t bytes) { return context.empty({bytes}, DType::u8); }

unsigned blocks_for(int64_t threads, int block) {
  return static_cast<unsigned>(std::min<int64_t>((threads + block - 1) / block, 0x7fffffff));
}

// The order of points along the curve of these knots. [count] ints
Buffer curve_order(const Context& context, const Cloud& points, const float* sorted /*[3, knots]*/) {
  const int64_t count = points.count;
  const Buffer key = workspace(context, count * 4), index = workspace(context, count * 4);
  const Buffer sorted_key = workspace(context, count * 4);
  Buffer order = workspace(context, count * 4);
  // 12 KB of knots a block: enough blocks to fill any GPU, not one for a few hundred points
  launch<keys_of>(context, std::min(blocks_for(count, 256), 1024u), 256, points, sorted, bytes_as<uint32_t>(key),
                  bytes_as<int>(index));

  size_t scratch_bytes = 0;
  const auto sort = [&](void* scratch) {
    check(cub::DeviceRadixSort::SortPairs(
              scratch, scratch_bytes, bytes_as<const uint32_t>(key), bytes_as<uint32_t>(sorted_key),
              bytes_as<const int>(index), bytes_as<int>(order), static_cast<int>(count),
              tree::key_bits - tree::sorted_bits(count), tree::key_bits, static_cast<cudaStream_t>(context.stream)),
          "radix sort");
  };
  sort(nullptr);
  const Buffer scratch = workspace(context, static_cast<int64_t>(std::max<size_t>(scratch_bytes, 1)));
  sort(scratch.view().data);
  return order;
}

struct Built {
  Buffer points, nodes, sorted;
  Tree tree;
};

Built build(const Context& context, const Cloud& references) {
  const tree::Levels levels = tree::levels_for(references.count);
  Built built{workspace(context, levels.nodes[0] * int64_t{tree::fan} * int64_t{sizeof(float4)}),
              workspace(context, levels.total * int64_t{sizeof(Node)}),
              workspace(context, 3 * tree::knots * int64_t{sizeof(float)}),
              {}};
  built.tree = {bytes_as<float4>(built.points), bytes_as<Node>(built.nodes), levels};
  auto* sorted = bytes_as<float>(built.sorted);

  if (references.count <= small_cloud) {
    launch<build_small>(context, 1, build_threads, references, built.tree, sorted);
    return built;
  }
  launch<knots_of>(context, 1, build_threads, references, sorted);
  const Buffer order = curve_order(context, references, sorted);
  launch<leaves_of>(context, blocks_for(levels.nodes[0], 128), 128, references, bytes_as<const int>(order), built.tree);
  int level = 1;
  for (; level < levels.count && levels.nodes[level] > 4 * build_threads; ++level) {
    launch<nodes_of>(context, blocks_for(levels.nodes[level], 128), 128, built.tree, level);
  }
  if (level < levels.count) launch<nodes_above>(context, 1, build_threads, built.tree, level);
  return built;
}

// ---- search ------------------------------------------------------------------------------------------------------

constexpr int search_threads = 128;
constexpr unsigned whole_warp = 0xffffffffu;

struct Waiting {  // one stack a warp
  uint32_t bound[search_threads / 32][tree::max_stack];
  uint32_t node[search_threads / 32][tree::max_stack];  // level in the top 4 bits
};

// A warp takes its 32 queries through the tree together: every lane looks at the same box, so a load is one line and no
// lane waits for another's branch. A box is entered if any lane wants it; each lane's list decides for itself.
// `active` is false for a lane that has no query, or one that is not finite.
template <int K>
__device__ void search(const Point& q, bool active, const Tree& tree, Waiting& shared, tree::Best<K>& best) {
  if (tree.levels.total == 0 || !__any_sync(whole_warp, active)) return;
  uint32_t* waiting_bound = shared.bound[threadIdx.x / 32];
  uint32_t* waiting_node = shared.node[threadIdx.x / 32];
  const bool writes = threadIdx.x % 32 == 0;

  // The nearest distance at which any lane wants this box, as bits (which order as the distances do).
  constexpr uint32_t unwanted = 0xffffffffu;
  const auto wanted_at = [&](const float4& lo, const float4& hi) {
    const float bound = tree::bound2(q, {lo.x, lo.y, lo.z}, {hi.x, hi.y, hi.z});
    return active && best.wants(bound, __float_as_int(lo.w)) ? __float_as_uint(bound) : unwanted;
  };

  int depth = 0;
  int level = tree.levels.count - 1;
  int group = 0;
  uint32_t furthest = __float_as_uint(INFINITY);  // the worst that any lane still holds
  while (true) {
    // On with the nearest of these boxes; the others wait. Four boxes are loaded before the first vote: a vote is a
    // barrier to the compiler, and one load at a time would be the whole cost.
    const Node* nodes = tree.nodes + tree.levels.first[level] + group * tree::fan;
    uint32_t bound[tree::fan];
    constexpr int together = 4;
#pragma unroll
    for (int i = 0; i < tree::fan; i += together) {
      Node box[together];
#pragma unroll
      for (int j = 0; j < together; ++j) box[j] = nodes[i + j];
#pragma unroll
      for (int j = 0; j < together; ++j) bound[i + j] = wanted_at(box[j].lo, box[j].hi);
    }
#pragma unroll
    for (int i = 0; i < tree::fan; ++i) bound[i] = __reduce_min_sync(whole_warp, bound[i]);

    uint32_t nearest = unwanted;
#pragma unroll
    for (int i = 0; i < tree::fan; ++i) nearest = min(nearest, bound[i]);
    int next = -1;
#pragma unroll
    for (int i = 0; i < tree::fan; ++i) {
      if (bound[i] == unwanted) continue;
      if (bound[i] == nearest && next < 0) {
        next = group * tree::fan + i;
        continue;
      }
      if (writes) {
        waiting_bound[depth] = bound[i];
        waiting_node[depth] = static_cast<uint32_t>(level) << 28 | static_cast<uint32_t>(group * tree::fan + i);
      }
      ++depth;
    }
    __syncwarp();

    while (true) {
      while (next < 0 && depth > 0) {
        --depth;
        if (waiting_bound[depth] > furthest) continue;
        level = static_cast<int>(waiting_node[depth] >> 28);
        const int node = static_cast<int>(waiting_node[depth] & 0x0fffffff);
        const Node box = tree.nodes[tree.levels.first[level] + node];
        if (__any_sync(whole_warp, wanted_at(box.lo, box.hi) != unwanted)) next = node;
      }
      if (next < 0) return;
      if (level > 0) break;

      float4 points[tree::fan];
#pragma unroll
      for (int i = 0; i < tree::fan; ++i) points[i] = tree.points[static_cast<int64_t>(next) * tree::fan + i];
#pragma unroll
      for (int i = 0; i < tree::fan; ++i) {
        const float4 p = points[i];
        const int index = __float_as_int(p.w);
        if (index >= 0 && active) best.offer(tree::distance2(q, {p.x, p.y, p.z}), index);
      }
      furthest = __reduce_max_sync(whole_warp, active ? __float_as_uint(best.worst()) : 0u);
      next = -1;
    }
    __syncwarp();
    --level;
    group = next;
  }
}

// Lane n of the grid answers query order[n]; without an order, query n.
struct Turn {
  int64_t query;
  Point q;
  bool has_query;
  bool active;
};

__device__ __forceinline__ Turn turn_of(const Cloud& queries, const int* order /*[N] or null*/) {
  const int64_t n = blockIdx.x * static_cast<int64_t>(blockDim.x) + threadIdx.x;
  Turn turn{n, {0.0f, 0.0f, 0.0f}, n < queries.count, false};
  if (!turn.has_query) return turn;
  if (order) turn.query = order[n];
  turn.q = queries.at(turn.query);
  turn.active = tree::finite(turn.q);
  return turn;
}

template <int K>
__global__ void __launch_bounds__(search_threads)
    search_kernel(Cloud queries, const int* order /*[N] or null*/, Tree tree, int k, float* dist2 /*[N, k]*/,
                  int64_t* idx /*[N, k]*/) {
  __shared__ Waiting waiting;
  const Turn turn = turn_of(queries, order);
  tree::Best<K> best;
  best.clear(k);
  search(turn.q, turn.active, tree, waiting, best);
  if (!turn.has_query) return;

#pragma unroll
  for (int place = 0; place < K; ++place) {
    const int out = place - (K - k);
    if (out < 0) continue;
    dist2[turn.query * k + out] = best.d[place];
    idx[turn.query * k + out] = best.i[place] == tree::nobody ? -1 : best.i[place];
  }
}

struct ValueRows {
  const char* from;  // [M, row_bytes], rows row_stride bytes apart
  char* to;          // [N, row_bytes]
  int64_t row_bytes;
  int64_t row_stride;
  int fill;  // byte of a row that has no neighbour
};

// Rows of one word are copied by their own thread; longer ones by the warp together, whole lines at a time.
template <class Word>
__global__ void __launch_bounds__(search_threads)
    gather_kernel(Cloud queries, const int* order /*[N] or null*/, Tree tree, ValueRows values) {
  __shared__ Waiting waiting;
  const Turn turn = turn_of(queries, order);
  tree::Best<1> best;
  best.clear(1);
  search(turn.q, turn.active, tree, waiting, best);

  Word fill;
  memset(&fill, values.fill, sizeof(Word));
  const auto row_from = [&](int64_t row) {
    return reinterpret_cast<const Word*>(values.from + row * values.row_stride);
  };
  const auto row_to = [&](int64_t row) { return reinterpret_cast<Word*>(values.to + row * values.row_bytes); };
  if (values.row_bytes == sizeof(Word)) {
    if (turn.has_query) *row_to(turn.query) = best.i[0] == tree::nobody ? fill : *row_from(best.i[0]);
    return;
  }
  const int64_t words = values.row_bytes / static_cast<int64_t>(sizeof(Word));
  const unsigned having = __ballot_sync(whole_warp, turn.has_query);
  for (int other = 0; other < 32; ++other) {
    const int from = __shfl_sync(whole_warp, best.i[0], other);
    const int64_t to = __shfl_sync(whole_warp, turn.query, other);
    if (!(having >> other & 1)) continue;
    for (int64_t w = threadIdx.x % 32; w < words; w += 32) {
      row_to(to)[w] = from == tree::nobody ? fill : row_from(from)[w];
    }
  }
}

// From here on a sort of the queries pays: below, the warps are few and the launches of the sort are not.
constexpr int64_t sorted_queries = 8192;

std::optional<Buffer> query_order(const Context& context, const Cloud& queries, const Built& built) {
  if (queries.count < sorted_queries || built.tree.levels.total == 0) return std::nullopt;
  return curve_order(context, queries, bytes_as<const float>(built.sorted));
}

const int* ints(const std::optional<Buffer>& order) { return order ? bytes_as<const int>(*order) : nullptr; }

// ---- the launchers -------------------------------------------------------------------------------------------------

Cloud cloud_of(const Tensor& points, const char* argument) {
  if (points.rank != 2 || points.shape[1] != 3) {
    wrong_value(argument, "shape [" + std::string(argument == std::string("queries") ? "N" : "M") + ", 3]",
                shape_of(points));
  }
  // leaves are counted in 28 bits, and references in a positive int
  if (points.shape[0] > 0x7ffffff0) throw Refused{"size"};
  return {points.as<const float>(), points.shape[0], points.stride[0], points.stride[1]};
}

void same_dtype(const Tensor& queries, const Tensor& references) {
  const auto floating = [](DType dtype) {
    return dtype == DType::f16 || dtype == DType::bf16 || dtype == DType::f32 || dtype == DType::f64;
  };
  if (!floating(queries.dtype)) wrong_type("queries", "a floating dtype", name_of(queries.dtype));
  if (references.dtype != queries.dtype) {
    wrong_type("references", std::string(name_of(queries.dtype)) + " like queries", name_of(references.dtype));
  }
}

template <class Body>
void for_k(int64_t k, Body&& body) {
  const bool found = [&]<int... K>(std::integer_sequence<int, K...>) {
    return ((k <= K && (body.template operator()<K>(), true)) || ...);
  }(std::integer_sequence<int, 1, 4, 8, 16, 32>{});
  if (!found) wrong_value("k", "1 to 32", std::to_string(k));
}

}  // namespace

std::tuple<Buffer, Buffer> knn(const Context& context, const Tensor& queries /*[N, 3]*/,
                               const Tensor& references /*[M, 3]*/, int64_t k) {
  same_dtype(queries, references);
  const Cloud from = cloud_of(queries, "queries"), among = cloud_of(references, "references");
  if (k < 1 || k > 32) wrong_value("k", "1 to 32", std::to_string(k));
  if (queries.dtype != DType::f32) throw Refused{"dtype"};

  Buffer dist2 = context.empty({from.count, k}, DType::f32);
  Buffer idx = context.empty({from.count, k}, DType::i64);
  if (from.count > 0) {
    const Built built = build(context, among);
    const std::optional<Buffer> order = query_order(context, from, built);
    for_k(k, [&]<int K>() {
      launch<search_kernel<K>>(context, blocks_for(from.count, search_threads), search_threads, from, ints(order),
                               built.tree, static_cast<int>(k), dist2.as<float>(), idx.as<int64_t>());
    });
  }
  return {std::move(dist2), std::move(idx)};
}

Buffer knn_gather(const Context& context, const Tensor& queries /*[N, 3]*/, const Tensor& references /*[M, 3]*/,
                  const Tensor& values /*[M, ...]*/) {
  same_dtype(queries, references);
  const Cloud from = cloud_of(queries, "queries"), among = cloud_of(references, "references");
  if (values.rank < 1 || values.shape[0] != among.count) {
    wrong_value("values", "shape [" + std::to_string(among.count) + ", ...], a row a reference", shape_of(values));
  }
  if (queries.dtype != DType::f32 || values.dtype == DType::other) throw Refused{"dtype"};
  if (!values.contiguous_from(1)) throw Refused{"unit_stride"};

  Tensor like = values;
  like.shape[0] = from.count;
  Buffer out = context.empty_like(like);
  ValueRows rows{values.as<const char>(), out.as<char>(), values.itemsize, values.stride[0] * values.itemsize,
                 values.dtype == DType::boolean ? 0 : 0xff};
  for (int dim = 1; dim < values.rank; ++dim) rows.row_bytes *= values.shape[dim];
  if (from.count == 0 || rows.row_bytes == 0) return out;

  const Built built = build(context, among);
  const std::optional<Buffer> order = query_order(context, from, built);
  const auto with_word = [&]<class Word>() {
    launch<gather_kernel<Word>>(context, blocks_for(from.count, search_threads), search_threads, from, ints(order),
                                built.tree, rows);
  };
  const auto fits = [&](int64_t bytes) {
    return rows.row_bytes % bytes == 0 && rows.row_stride % bytes == 0 &&
           reinterpret_cast<uintptr_t>(rows.from) % bytes == 0;
  };
  if (fits(16)) {
    with_word.operator()<uint4>();
  } else if (fits(8)) {
    with_word.operator()<uint64_t>();
  } else if (fits(4)) {
    with_word.operator()<uint32_t>();
  } else if (fits(2)) {
    with_word.operator()<uint16_t>();
  } else {
    with_word.operator()<uint8_t>();
  }
  return out;
}

}  // namespace prequal::ops
