// dist2[n, j], idx[n, j] = the k nearest of references [M, 3] to queries [N, 3], nearest first, ties to the lower index.
// The references are ranked along each axis by a sorted sample, ordered along a Morton curve of those ranks, cut into
// leaves of 8, and boxed; a thread walks the boxes for its query, nearest first (knn_tree.h says why that is exact).
// Nothing here depends on the density of the cloud: the curve measures in points, and a box is as tight as its points.
// Bytes: 12 (N + M) read, 12 N k written; about 46 M of workspace. No host read, so the launches can be captured.
// Numerics: fp32, direct differences, each operation rounded once; two runs and the reference agree bit for bit.
#include <algorithm>
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
constexpr int small_items = 8;
constexpr int64_t small_cloud =
    build_threads * small_items;  // one block sorts this many: one launch instead of a dozen

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

__device__ __forceinline__ float4 labelled(const Point& p, int index) {
  return tree::finite(p) ? make_float4(p.x, p.y, p.z, __int_as_float(index))
                         : make_float4(0.0f, 0.0f, 0.0f, __int_as_float(-1));
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
#pragma unroll
  for (int i = 0; i < tree::fan; ++i) {
    const float4 p = points[i];
    if (__float_as_int(p.w) >= 0) box = joined(box, {p, p});
  }
  return box;
}

__device__ void make_node(const Tree& tree, int level, int node) {
  const int first = node * tree::fan;
  const int last = min(first + tree::fan, tree.levels.nodes[level - 1]);
  Node box = nothing();
  for (int child = first; child < last; ++child) box = joined(box, tree.nodes[tree.levels.first[level - 1] + child]);
  tree.nodes[tree.levels.first[level] + node] = box;
}

// All of it in one block, for at most small_cloud references.
__global__ void __launch_bounds__(build_threads) build_small(Cloud references, Tree tree) {
  using PointSort = cub::BlockRadixSort<uint32_t, build_threads, small_items, int>;
  __shared__ union {
    float sorted[3 * tree::knots];
    PointSort::TempStorage points;
  } shared;
  make_knots(references, shared.sorted);

  uint32_t key[small_items];
  int index[small_items];
#pragma unroll
  for (int item = 0; item < small_items; ++item) {
    index[item] = threadIdx.x * small_items + item;
    key[item] = 0xffffffffu;
    if (index[item] < references.count) {
      const Point p = references.at(index[item]);
      key[item] = tree::finite(p) ? tree::key_of(p, shared.sorted) : tree::last_key;
    }
  }
  __syncthreads();
  PointSort(shared.points).Sort(key, index, 0, 32);

  const int padded = tree.levels.nodes[0] * tree::fan;
#pragma unroll
  for (int item = 0; item < small_items; ++item) {
    const int place = threadIdx.x * small_items + item;
    if (place >= padded) continue;
    tree.points[place] = index[item] < references.count ? labelled(references.at(index[item]), index[item])
                                                        : make_float4(0.0f, 0.0f, 0.0f, __int_as_float(-1));
  }
  static_assert(small_items == tree::fan, "a thread's points are a leaf: it may box them without a barrier");
  if (static_cast<int>(threadIdx.x) < tree.levels.nodes[0]) {
    tree.nodes[threadIdx.x] = leaf_of(tree.points + threadIdx.x * tree::fan);
  }
  __syncthreads();

  for (int level = 1; level < tree.levels.count; ++level) {
    for (int node = threadIdx.x; node < tree.levels.nodes[level]; node += blockDim.x) make_node(tree, level, node);
    __syncthreads();
  }
}

__global__ void __launch_bounds__(build_threads) knots_of(Cloud references, float* sorted /*[3, knots]*/) {
  __shared__ float made[3 * tree::knots];
  make_knots(references, made);
  for (int i = threadIdx.x; i < 3 * tree::knots; i += blockDim.x) sorted[i] = made[i];
}

__global__ void keys_of(Cloud references, const float* sorted /*[3, knots]*/, uint32_t* key /*[M]*/,
                        int* index /*[M]*/) {
  __shared__ float knots[3 * tree::knots];
  for (int i = threadIdx.x; i < 3 * tree::knots; i += blockDim.x) knots[i] = sorted[i];
  __syncthreads();

  for (int64_t i = blockIdx.x * static_cast<int64_t>(blockDim.x) + threadIdx.x; i < references.count;
       i += static_cast<int64_t>(gridDim.x) * blockDim.x) {
    const Point p = references.at(i);
    key[i] = tree::finite(p) ? tree::key_of(p, knots) : tree::last_key;
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
    points[i] = make_float4(0.0f, 0.0f, 0.0f, __int_as_float(-1));
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

struct Built {
  Buffer points, nodes;
  Tree tree;
};

template <class T>
T* bytes_as(const Buffer& buffer) {
  return static_cast<T*>(buffer.view().data);
}

unsigned blocks_for(int64_t threads, int block) {
  return static_cast<unsigned>(std::min<int64_t>((threads + block - 1) / block, 0x7fffffff));
}

void build_large(const Context& context, const Cloud& references, const Tree& tree) {
  const int64_t count = references.count;
  const auto workspace = [&](int64_t bytes) { return context.empty({bytes}, DType::u8); };
  const Buffer sorted = workspace(3 * tree::knots * sizeof(float));
  const Buffer key = workspace(count * 4), index = workspace(count * 4);
  const Buffer sorted_key = workspace(count * 4), order = workspace(count * 4);

  launch<knots_of>(context, 1, build_threads, references, bytes_as<float>(sorted));
  // 12 KB of knots a block: enough blocks to fill any GPU, not one a few hundred points
  launch<keys_of>(context, std::min(blocks_for(count, 256), 1024u), 256, references, bytes_as<const float>(sorted),
                  bytes_as<uint32_t>(key), bytes_as<int>(index));

  size_t scratch_bytes = 0;
  const auto sort = [&](void* scratch) {
    check(cub::DeviceRadixSort::SortPairs(scratch, scratch_bytes, bytes_as<const uint32_t>(key),
                                          bytes_as<uint32_t>(sorted_key), bytes_as<const int>(index),
                                          bytes_as<int>(order), static_cast<int>(count), 0, 31,
                                          static_cast<cudaStream_t>(context.stream)),
          "radix sort");
  };
  sort(nullptr);
  const Buffer scratch = workspace(static_cast<int64_t>(std::max<size_t>(scratch_bytes, 1)));
  sort(scratch.view().data);

  launch<leaves_of>(context, blocks_for(tree.levels.nodes[0], 128), 128, references, bytes_as<const int>(order), tree);
  for (int level = 1; level < tree.levels.count; ++level) {
    launch<nodes_of>(context, blocks_for(tree.levels.nodes[level], 128), 128, tree, level);
  }
}

Built build(const Context& context, const Cloud& references) {
  const tree::Levels levels = tree::levels_for(references.count);
  Built built{context.empty({levels.nodes[0] * int64_t{tree::fan} * int64_t{sizeof(float4)}}, DType::u8),
              context.empty({levels.total * int64_t{sizeof(Node)}}, DType::u8),
              {}};
  built.tree = {bytes_as<float4>(built.points), bytes_as<Node>(built.nodes), levels};

  if (references.count <= small_cloud) {
    launch<build_small>(context, 1, build_threads, references, built.tree);
  } else {
    build_large(context, references, built.tree);
  }
  return built;
}

// ---- search ------------------------------------------------------------------------------------------------------

template <int K>
__device__ void search(const Point& q, const Tree& tree, tree::Best<K>& best) {
  float waiting_bound[tree::max_stack];
  uint32_t waiting[tree::max_stack];  // level in the top 4 bits, node below
  int depth = 0;

  int level = tree.levels.count - 1;
  int first = 0, count = tree.levels.nodes[level];
  while (true) {
    // go on with the nearest of these nodes, put the others by
    const Node* nodes = tree.nodes + tree.levels.first[level];
    float nearest = INFINITY;
    int next = -1;
    for (int node = first; node < first + count; ++node) {
      const float4 lo = nodes[node].lo, hi = nodes[node].hi;
      float bound = tree::bound2(q, {lo.x, lo.y, lo.z}, {hi.x, hi.y, hi.z});
      if (!best.wants(bound, __float_as_int(lo.w))) continue;
      int other = node;
      if (next < 0 || bound < nearest) {
        const float swap_bound = nearest;
        const int swap_node = next;
        nearest = bound, next = node;
        bound = swap_bound, other = swap_node;
      }
      if (other < 0) continue;
      waiting_bound[depth] = bound;
      waiting[depth++] = static_cast<uint32_t>(level) << 28 | static_cast<uint32_t>(other);
    }

    while (next < 0 && depth > 0) {
      --depth;
      const float bound = waiting_bound[depth];
      if (bound > best.worst()) continue;
      level = static_cast<int>(waiting[depth] >> 28);
      const int node = static_cast<int>(waiting[depth] & 0x0fffffff);
      const int lowest = __float_as_int(tree.nodes[tree.levels.first[level] + node].lo.w);
      if (best.wants(bound, lowest)) next = node;
    }
    if (next < 0) return;

    if (level == 0) {
      const float4* points = tree.points + static_cast<int64_t>(next) * tree::fan;
#pragma unroll
      for (int i = 0; i < tree::fan; ++i) {
        const float4 p = points[i];
        const int index = __float_as_int(p.w);
        if (index >= 0) best.offer(tree::distance2(q, {p.x, p.y, p.z}), index);
      }
      count = 0;  // nothing to look at: take the next from the stack
    } else {
      --level;
      first = next * tree::fan;
      count = min(tree::fan, tree.levels.nodes[level] - first);
    }
  }
}

constexpr int search_threads = 128;

template <int K>
__global__ void __launch_bounds__(search_threads)
    search_kernel(Cloud queries, Tree tree, int k, float* dist2 /*[N, k]*/, int64_t* idx /*[N, k]*/) {
  const int64_t n = blockIdx.x * static_cast<int64_t>(blockDim.x) + threadIdx.x;
  if (n >= queries.count) return;
  const Point q = queries.at(n);

  tree::Best<K> best;
  best.clear(k);
  if (tree.levels.total > 0 && tree::finite(q)) search(q, tree, best);

#pragma unroll
  for (int place = 0; place < K; ++place) {
    const int out = place - (K - k);
    if (out < 0) continue;
    dist2[n * k + out] = best.d[place];
    idx[n * k + out] = best.i[place] == tree::nobody ? -1 : best.i[place];
  }
}

struct ValueRows {
  const char* from;  // [M, row_bytes], rows row_stride bytes apart
  char* to;          // [N, row_bytes]
  int64_t row_bytes;
  int64_t row_stride;
  int fill;  // byte of a row that has no neighbour
};

template <class Word>
__device__ void copy_rows(const ValueRows& values, int64_t first_row, int64_t rows, int nearest) {
  const int lane = threadIdx.x % 32;
  const int64_t words = values.row_bytes / sizeof(Word);
  Word fill;
  memset(&fill, values.fill, sizeof(Word));
  for (int r = 0; r < 32; ++r) {
    const int from = __shfl_sync(0xffffffffu, nearest, r);
    if (r >= rows) return;
    auto* to = reinterpret_cast<Word*>(values.to + (first_row + r) * values.row_bytes);
    const auto* source = reinterpret_cast<const Word*>(values.from + from * values.row_stride);
    for (int64_t w = lane; w < words; w += 32) to[w] = from == tree::nobody ? fill : source[w];
  }
}

// A warp searches 32 queries, then copies their 32 rows together: whole lines, whatever the width of a row. Rows of one
// word are copied by their own thread.
template <class Word>
__global__ void __launch_bounds__(search_threads) gather_kernel(Cloud queries, Tree tree, ValueRows values) {
  const int64_t n = blockIdx.x * static_cast<int64_t>(blockDim.x) + threadIdx.x;
  tree::Best<1> best;
  best.clear(1);
  if (n < queries.count && tree.levels.total > 0) {
    const Point q = queries.at(n);
    if (tree::finite(q)) search(q, tree, best);
  }

  if (values.row_bytes == sizeof(Word)) {
    if (n >= queries.count) return;
    Word word;
    memset(&word, values.fill, sizeof(Word));
    if (best.i[0] != tree::nobody) {
      word = *reinterpret_cast<const Word*>(values.from + best.i[0] * values.row_stride);
    }
    reinterpret_cast<Word*>(values.to)[n] = word;
    return;
  }
  const int64_t first_row = n - threadIdx.x % 32;
  copy_rows<Word>(values, first_row, queries.count - first_row, best.i[0]);
}

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
    for_k(k, [&]<int K>() {
      launch<search_kernel<K>>(context, blocks_for(from.count, search_threads), search_threads, from, built.tree,
                               static_cast<int>(k), dist2.as<float>(), idx.as<int64_t>());
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
  const auto with_word = [&]<class Word>() {
    launch<gather_kernel<Word>>(context, blocks_for(from.count, search_threads), search_threads, from, built.tree,
                                rows);
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
