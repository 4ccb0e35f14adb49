// best, idx [Q, k] = the k best of what they were and of the scores made of products [Q, n]; in the order of the scores.
// score = z (dot); z column[c] row[q] (cosine); -max(0, column[c] + row[q] - 2 z) (l2). column [n], row [Q].
// A block owns a row, or a segment of it (its k best are merged by a second launch), and sorts what passes the k-th best.
// Bytes: Q n sizeof(T) and Q n 4 of columns (these from the cache: every row reads them), 2 Q k 12 of best and idx.
// Numerics: fp32, each step rounded on its own. Candidates are totally ordered, so the order of arrival does not matter.
#include <algorithm>
#include <cmath>
#include <optional>
#include <string>

#include "ops.h"
#include "prequal/dispatch.h"
#include "prequal/float_order.h"
#include "prequal/launch.h"
#include "prequal/must_be.h"
#include "prequal/overlap.h"
#include "prequal/topk.cuh"
#include "prequal/vec.cuh"

namespace prequal::ops {
namespace {

struct Unit : FileOf<"topk_rows"> {};

using topk::Key;
using topk::key_of;
using topk::Metric;
using topk::most_kept;
using topk::order_of;
using topk::place_of;
using topk::Selection;
using topk::Shared;
using topk::threads;

constexpr int held_values = 16;  // of a thread, on their way between two barriers
constexpr int least_segment = 8192;
constexpr int blocks_an_sm = 3;  // with a fourth, 64 registers a thread, one of the kernels spills on sm_90

struct Best {
  float* score;  // [Q, k]
  int64_t* idx;  // [Q, k]
  int64_t score_stride, idx_stride;
  int k;
  int64_t first_index;
  bool fresh;  // nothing was put there yet: not read

  // An empty place is below every score.
  __device__ __forceinline__ Key key(int64_t row, int j) const {
    const bool empty = fresh || idx[row * idx_stride + j] < 0;
    return key_of(empty ? below_all : in_order(score[row * score_stride + j]), static_cast<uint32_t>(j));
  }
};

struct Tile {
  const void* products;  // [Q, n]
  int64_t stride;
  int columns;             // n, at most 2^30
  const float* of_row;     // [Q] or null
  const float* of_column;  // [n] or null
  Best best;
  int segment;  // columns of a block
  Key* found;   // [Q, segments, k], where a row has several; else null
};

// Thread j puts the j-th best in its place; its own or another's old value may stand there until all have read.
template <class Score>
__device__ __forceinline__ void write_best(const Selection& selection, const Best& best, int64_t row,
                                           Score&& score_at) {
  const int j = threadIdx.x;
  float score = -INFINITY;
  int64_t idx = -1;
  if (j < best.k) {
    const Key key = selection.key(j);
    const auto place = static_cast<int64_t>(place_of(key));
    if (place < best.k) {
      if (!best.fresh) score = best.score[row * best.score_stride + place];
      if (!best.fresh) idx = best.idx[row * best.idx_stride + place];
    } else {
      score = score_at(key);
      idx = best.first_index + place - best.k;
    }
  }
  __syncthreads();
  if (j < best.k) {
    best.score[row * best.score_stride + j] = score;
    best.idx[row * best.idx_stride + j] = idx;
  }
}

template <Metric M, bool Ragged, class T>
__global__ void __launch_bounds__(threads, blocks_an_sm) topk_kernel(Tile a /*products [Q, n]*/) {
  constexpr int N = widest<T>, items = held_values / N;
  __shared__ Shared shared;
  const int64_t row = blockIdx.x;
  const T* products = static_cast<const T*>(a.products) + row * a.stride;
  const int begin = static_cast<int>(blockIdx.y) * a.segment, end = min(a.columns, begin + a.segment);
  const float of_row = M == Metric::dot ? 0.0f : a.of_row[row];

  Selection selection(shared, a.best.k);
  selection.begin(true, [&](int j) { return a.best.key(row, j); });
  if (a.found != nullptr) {  // what the second launch takes over itself stays out
    const Key bound = selection.bound();
    __syncthreads();
    selection.begin(false, [](int) { return Key{0}; });
    selection.raise(bound);
  }

  for (int from = begin; from < end; from += threads * held_values) {
    Packet<T> packets[items];
    const auto column_of = [&](int item) { return from + (item * threads + static_cast<int>(threadIdx.x)) * N; };
#pragma unroll
    for (int item = 0; item < items; ++item) packets[item] = load_packet<Ragged>(products, column_of(item), end);

    uint32_t order[held_values], mask = 0;
    const Key bound = selection.bound();
#pragma unroll
    for (int item = 0; item < items; ++item) {
      const int first = column_of(item);
      float of_column[N] = {};
      if constexpr (M != Metric::dot) {
#pragma unroll
        for (int half = 0; half < N; half += widest<float>) {
          const auto four = load_packet<Ragged, true>(a.of_column, first + half, end);
#pragma unroll
          for (int i = 0; i < widest<float>; ++i) of_column[half + i] = four[i];
        }
      }
#pragma unroll
      for (int i = 0; i < N; ++i) {
        const int j = item * N + i;
        order[j] = in_order(topk::score_of<M>(packets[item][i], of_column[i], of_row));
        const Key key = key_of(order[j], static_cast<uint32_t>(a.best.k + first + i));
        if (first + i < end && key > bound) mask |= 1u << j;
      }
    }
    selection.take<held_values>(
        mask, [&](int j) { return key_of(order[j], static_cast<uint32_t>(a.best.k + column_of(j / N) + j % N)); });
  }

  __syncthreads();
  if (selection.changed()) selection.settle();
  __syncthreads();
  if (a.found != nullptr) {
    Key* found = a.found + (row * gridDim.y + blockIdx.y) * a.best.k;
    if (static_cast<int>(threadIdx.x) < a.best.k) found[threadIdx.x] = selection.key(threadIdx.x);
  } else {
    write_best(selection, a.best, row, [](Key key) { return from_order(order_of(key)); });
  }
}

__global__ void __launch_bounds__(threads)
    merge_kernel(Best best, const Key* found /*[Q, segments, k]*/, int count /*segments k*/) {
  constexpr int N = 4;
  __shared__ Shared shared;
  const int64_t row = blockIdx.x;
  Selection selection(shared, best.k);
  selection.begin(true, [&](int j) { return best.key(row, j); });
  for (int from = 0; from < count; from += threads * N) {
    Key key[N];
    uint32_t mask = 0;
#pragma unroll
    for (int j = 0; j < N; ++j) {
      const int at = from + j * threads + static_cast<int>(threadIdx.x);
      key[j] = at < count ? found[row * count + at] : 0;
      if (key[j] > selection.bound()) mask |= 1u << j;
    }
    selection.take<N>(mask, [&](int j) { return key[j]; });
  }
  __syncthreads();
  if (selection.changed()) selection.settle();
  __syncthreads();
  write_best(selection, best, row, [](Key key) { return from_order(order_of(key)); });
}

// ---- right calls ---------------------------------------------------------------------------------------------------

void must_be_terms(const std::optional<Tensor>& x, const char* argument, const Tensor& products, int dim,
                   Metric metric) {
  if (metric == Metric::dot) {
    if (x) wrong_value(argument, "None for the metric 'dot'", "a tensor");
    return;
  }
  if (!x) wrong_value(argument, "a tensor for the metrics 'cosine' and 'l2'", "None");
  const bool fits = x->rank == 1 && x->shape[0] == products.shape[dim];
  must_be_wide(*x, argument, std::to_string(products.shape[dim]), fits, products, "products");
}

// Of a row, so that the second launch reads about as much as a block of the first.
int segments_of(const Context& context, int64_t rows, int64_t columns, int64_t k) {
  const int64_t wanted = std::max<int64_t>(1, int64_t{blocks_an_sm} * multiprocessors(context) / rows);
  const auto even = static_cast<int64_t>(std::sqrt(static_cast<double>(columns) / static_cast<double>(k)));
  return static_cast<int>(std::max<int64_t>(1, std::min({wanted, even, columns / least_segment})));
}

template <Metric M, class T>
void run(const Context& context, Tile a, int64_t rows, int segments) {
  constexpr int N = widest<T>;
  const dim3 grid(static_cast<unsigned>(rows), static_cast<unsigned>(segments)), block(threads);
  const bool whole = aligned(a.products, a.stride * static_cast<int64_t>(sizeof(T)), 16) && a.columns % N == 0 &&
                     (M == Metric::dot || aligned(a.of_column, 0, 16));
  if (whole) {
    launch<topk_kernel<M, false, T>>(context, grid, block, a);
  } else {
    launch<topk_kernel<M, true, T>>(context, grid, block, a);
  }
}

}  // namespace

void topk_rows_(const Context& context, const Tensor& best /*[Q, k], written*/, const Tensor& idx /*[Q, k], written*/,
                const Tensor& products /*[Q, n]*/, const std::optional<Tensor>& row_terms /*[Q]*/,
                const std::optional<Tensor>& column_terms /*[n]*/, const std::string& metric, int64_t first_index,
                bool fresh) {
  must_be_floating(products, "products");
  if (products.rank != 2) wrong_value("products", "shape [Q, n]", shape_of(products));
  const int64_t rows = products.shape[0], columns = products.shape[1];
  const bool fits = best.rank == 2 && best.shape[0] == rows;
  must_be_wide(best, "best", std::to_string(rows) + ", k", fits, products, "products");
  const int64_t k = best.shape[1];
  if (k == 0) wrong_value("best", "k from 1", "shape " + shape_of(best));
  if (idx.dtype != DType::i64) wrong_type("idx", "int64", name_of(idx.dtype));
  if (idx.rank != 2 || idx.shape[0] != rows || idx.shape[1] != k) {
    wrong_value("idx", "shape [" + std::to_string(rows) + ", " + std::to_string(k) + "]", shape_of(idx));
  }
  const Metric of = topk::metric_of(metric);
  must_be_terms(row_terms, "row_terms", products, 0, of);
  must_be_terms(column_terms, "column_terms", products, 1, of);
  constexpr int64_t most_index = int64_t{1} << 62;
  if (first_index < 0 || first_index > most_index) {
    wrong_value("first_index", "0 to " + std::to_string(most_index), std::to_string(first_index));
  }
  must_be_apart(best, "best");
  must_be_apart(idx, "idx");
  must_be_apart(idx, "idx", best, "best");
  const auto must_be_read = [&](const Tensor& x, const char* argument) {
    must_be_apart(x, argument, best, "best");
    must_be_apart(x, argument, idx, "idx");
  };
  must_be_read(products, "products");
  if (row_terms) must_be_read(*row_terms, "row_terms");
  if (column_terms) must_be_read(*column_terms, "column_terms");

  dispatch(products.dtype, Floats{}, [&]<class T>() {
    if (k > most_kept || columns > 1 << 30 || rows >= int64_t{1} << 31) throw Refused{"size"};
    const auto strided = [](const Tensor& x) {
      const int last = x.rank - 1;
      return x.shape[last] > 1 && x.stride[last] != 1;
    };
    if (strided(best) || strided(idx) || strided(products) || (row_terms && strided(*row_terms)) ||
        (column_terms && strided(*column_terms))) {
      throw Refused{"unit_stride"};
    }
    if (rows == 0) return;
    Tile a{};
    a.products = products.data, a.stride = products.stride[0], a.columns = static_cast<int>(columns);
    a.of_row = row_terms ? row_terms->as<const float>() : nullptr;
    a.of_column = column_terms ? column_terms->as<const float>() : nullptr;
    a.best = {best.as<float>(),    idx.as<int64_t>(), best.stride[0], idx.stride[0],
              static_cast<int>(k), first_index,       fresh};
    constexpr int step = threads * held_values;
    int segments = segments_of(context, rows, columns, k);
    a.segment = static_cast<int>(std::max<int64_t>(1, ((columns + segments - 1) / segments + step - 1) / step) * step);
    segments = static_cast<int>(std::max<int64_t>(1, (columns + a.segment - 1) / a.segment));
    std::optional<Buffer> found;
    if (segments > 1) {
      found.emplace(context.empty({rows, segments, k}, DType::i64));
      a.found = found->template as<Key>();
    }
    switch (of) {
      case Metric::dot: run<Metric::dot, T>(context, a, rows, segments); break;
      case Metric::cosine: run<Metric::cosine, T>(context, a, rows, segments); break;
      case Metric::l2: run<Metric::l2, T>(context, a, rows, segments); break;
    }
    if (segments > 1) {
      launch<merge_kernel>(context, dim3(static_cast<unsigned>(rows)), dim3(threads), a.best,
                           static_cast<const Key*>(a.found), segments * static_cast<int>(k));
    }
  });
}

}  // namespace prequal::ops
