// What the kernels compute without a GPU, behind a C interface for test_host_logic.py. Built by the test with the host's
// own compiler and no CUDA: the headers must not need any.
#include <cstdint>
#include <cstring>

#include "prequal/knn_grid.h"
#include "prequal/knn_tree.h"
#include "prequal/row_plan.h"
#include "prequal/tensor.h"

using namespace prequal;

namespace {

template <int K>
void best_of(const float* distance, const int* index, int count, int k, float* best_d, int* best_i) {
  tree::Best<K> best;
  best.clear(k, INFINITY);
  for (int i = 0; i < count; ++i) best.offer(distance[i], index[i]);
  for (int place = K - k; place < K; ++place) {
    best_d[place - (K - k)] = best.d[place];
    best_i[place - (K - k)] = best.i[place];
  }
}

}  // namespace

extern "C" {

void plan(int64_t width, int vec, int* out /*[4]*/) {
  const RowPlan found = row_plan(width, vec);
  out[0] = static_cast<int>(found.kind), out[1] = found.items, out[2] = found.threads, out[3] = found.rows;
}

float distance2(const float* q, const float* p) {
  return tree::distance2<float>({q[0], q[1], q[2]}, {p[0], p[1], p[2]});
}

float bound2(const float* q, const float* lo, const float* hi) {
  return tree::bound2<float>({q[0], q[1], q[2]}, {lo[0], lo[1], lo[2]}, {hi[0], hi[1], hi[2]});
}

int all_finite(const float* p) { return tree::finite<float>({p[0], p[1], p[2]}); }

uint32_t rank_of(float value, const float* sorted /*[knots]*/) { return tree::rank_of(value, sorted); }

uint32_t key_of(const float* p, int dims, const float* sorted /*[3, knots]*/) {
  return tree::key_of<float>({p[0], p[1], p[2]}, dims, sorted);
}

// The cell of x, and the edges of all cells, between lo and hi in about `wanted` cells.
int even(float lo, float hi, int wanted, float x, float* low /*[most_cells]*/, float* high /*[most_cells]*/,
         int* cells) {
  const float width = (hi - lo) / static_cast<float>(wanted);
  const grid::Even axis = grid::Even::of(lo, hi, width, wanted);
  for (int c = 0; c < axis.cells; ++c) low[c] = axis.low(c), high[c] = axis.high(c);
  *cells = axis.cells;
  return axis.cell(x);
}

int ranked_cell(float x, const float* low /*[ranked_cells]*/) { return grid::ranked_cell(x, low); }

int cells_along(float extent, float width) { return grid::cells_along(extent, width); }

int cells_for(int64_t points, int k) { return grid::cells_for(points, k); }

int ranked_cells_for(int cells) { return grid::ranked_cells_for(cells); }

int knots() { return tree::knots; }

void best(int capacity, const float* distance, const int* index, int count, int k, float* best_d, int* best_i) {
  switch (capacity) {
    case 1: return best_of<1>(distance, index, count, k, best_d, best_i);
    case 4: return best_of<4>(distance, index, count, k, best_d, best_i);
    case 8: return best_of<8>(distance, index, count, k, best_d, best_i);
    case 32: return best_of<32>(distance, index, count, k, best_d, best_i);
  }
}

int levels(int64_t points, int* boxes /*[max_levels]*/, int* groups /*[max_levels]*/, int* first /*[max_levels]*/,
           int* total) {
  const tree::Levels found = tree::levels_for(points);
  std::memcpy(boxes, found.boxes, sizeof(found.boxes));
  std::memcpy(groups, found.groups, sizeof(found.groups));
  std::memcpy(first, found.first, sizeof(found.first));
  *total = found.total;
  return found.count;
}

int sorted_bits(int64_t points) { return tree::sorted_bits(points); }

// 0 and (rows, stride); 1: refused for the unit stride; 2: refused for the rows
int rows(int rank, const int64_t* shape, const int64_t* stride, int64_t* out /*[2]*/) {
  Tensor x;
  x.rank = rank;
  for (int dim = 0; dim < rank; ++dim) x.shape[dim] = shape[dim], x.stride[dim] = stride[dim];
  try {
    const Rows found = rows_of(x);
    out[0] = found.count, out[1] = found.stride;
    return 0;
  } catch (const Refused& refused) {
    return std::strcmp(refused.need, "unit_stride") == 0 ? 1 : 2;
  }
}
}
