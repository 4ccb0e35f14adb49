// What the kernels compute without a GPU, behind a C interface for test_host_logic.py. Built by the test with the host's
// own compiler and no CUDA: the headers must not need any.
#include <cstdint>
#include <cstring>

#include "prequal/head_plan.h"
#include "prequal/knn_grid.h"
#include "prequal/knn_tree.h"
#include "prequal/occupancy.h"
#include "prequal/overlap.h"
#include "prequal/ragged.h"
#include "prequal/rope_plan.h"
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

// A row moved as load_packet and store_packet move a ragged one, every warp and lane in turn. 0, or what went wrong: a word
// that is read past the row's end (1) or more than a word before its start (2).
template <class T>
int move_row(const uint8_t* from, uint8_t* to, uint8_t* writes, int width) {
  constexpr int vec = 16 / sizeof(T);
  const auto read_word = [](const uint8_t* at) {
    Word word;
    std::memcpy(&word, at, sizeof(word));
    return word;
  };
  const auto write = [&](int column, const void* value, int count) {
    std::memcpy(to + column * sizeof(T), value, count * sizeof(T));
    for (int i = 0; i < count; ++i) ++writes[column + i];
  };
  for (int first = 0; first < width; first += 32 * vec) {
    Word held[33] = {};
    for (int lane = 0; lane < 32; ++lane) {
      const int column = first + lane * vec;
      const uint8_t* address = from + static_cast<int64_t>(column) * sizeof(T);
      const unsigned shift = reinterpret_cast<uintptr_t>(address) % 16;
      if (words_inside(column, width, vec, shift != 0)) {
        const uint8_t* word = address - shift;
        if (word + (shift ? 32 : 16) > from + static_cast<int64_t>(width) * sizeof(T)) return 1;
        if (word + 16 <= from) return 2;
        held[lane] = straddle(read_word(word), shift ? read_word(word + 16) : Word{}, shift);
      } else {
        for (int i = 0; i < vec && column + i < width; ++i) {
          std::memcpy(reinterpret_cast<uint8_t*>(&held[lane]) + i * sizeof(T), address + i * sizeof(T), sizeof(T));
        }
      }
    }
    for (int lane = 0; lane < 32; ++lane) {
      const int column = first + lane * vec;
      const auto past = reinterpret_cast<uintptr_t>(to + static_cast<int64_t>(column) * sizeof(T)) % 16;
      const unsigned shift = (16 - past) % 16;
      const int ahead = static_cast<int>(shift / sizeof(T));
      const RaggedStore which = ragged_store(lane, column, width, vec, ahead);
      if (which.word) {
        const Word word = straddle(held[lane], held[lane + 1], shift);
        write(column + ahead, &word, vec);
      }
      for (int i = 0; i < vec; ++i) {
        if (column + i >= width || !(i < ahead ? which.low : which.high)) continue;
        write(column + i, reinterpret_cast<const uint8_t*>(&held[lane]) + i * sizeof(T), 1);
      }
    }
  }
  return 0;
}

void tell(const RowPlan& found, int* out /*[5]*/) {
  out[0] = static_cast<int>(found.kind), out[1] = found.items, out[2] = found.threads, out[3] = found.rows;
  out[4] = found.blocks;
}

Tensor tensor_at(int64_t first, int itemsize, int rank, const int64_t* shape, const int64_t* stride) {
  Tensor x;
  x.data = reinterpret_cast<void*>(static_cast<uintptr_t>(first));
  x.itemsize = itemsize;
  x.rank = rank;
  for (int dim = 0; dim < rank; ++dim) x.shape[dim] = shape[dim], x.stride[dim] = stride[dim];
  return x;
}

}  // namespace

extern "C" {

void plan(int64_t width, int vec, int clusters, int most, int* out /*[5]*/) {
  tell(row_plan(width, vec, clusters != 0, most), out);
}

void plan_gradient(int64_t width, int vec, int clusters, int* out /*[5]*/) {
  tell(gradient_plan(width, vec, clusters != 0), out);
}

int64_t teams(int64_t rows, int64_t resident) { return gradient_teams(rows, resident); }

int blocks_of(int registers, int threads) { return blocks_by_registers(registers, threads); }

void plan_rope(int heads, int rotary, int vec, int interleaved, int* out /*[3]*/) {
  const RopePlan found = rope_plan(heads, rotary, vec, interleaved != 0);
  out[0] = found.places, out[1] = found.heads, out[2] = found.threads;
}

void plan_heads(int dim, int vec, int items, int heads, int at_once, int* out /*[5]*/) {
  const HeadPlan found = head_plan(dim, vec, items, heads, at_once);
  out[0] = found.lanes, out[1] = found.groups, out[2] = found.all_groups, out[3] = found.tokens;
  out[4] = found.threads;
}

int move_row(const uint8_t* from, uint8_t* to, uint8_t* writes, int width, int itemsize) {
  return itemsize == 2 ? move_row<uint16_t>(from, to, writes, width) : move_row<uint32_t>(from, to, writes, width);
}

int apart_alone(int rank, const int64_t* shape, const int64_t* stride) {
  return is_apart(tensor_at(64, 2, rank, shape, stride));
}

int apart(int64_t a_first, int a_rank, const int64_t* a_shape, const int64_t* a_stride, int64_t b_first, int b_rank,
          const int64_t* b_shape, const int64_t* b_stride) {
  return are_apart(tensor_at(a_first, 2, a_rank, a_shape, a_stride), tensor_at(b_first, 2, b_rank, b_shape, b_stride));
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
