// What the kernels compute without a GPU, behind a C interface for test_host_logic.py. Built by the test with the host's
// own compiler and no CUDA: the headers must not need any.
#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "prequal/edge_pieces.h"
#include "prequal/float_order.h"
#include "prequal/fp8.h"
#include "prequal/head_plan.h"
#include "prequal/knn_grid.h"
#include "prequal/knn_tree.h"
#include "prequal/occupancy.h"
#include "prequal/overlap.h"
#include "prequal/ragged.h"
#include "prequal/rope_plan.h"
#include "prequal/row_plan.h"
#include "prequal/search_plan.h"
#include "prequal/state_shares.h"
#include "prequal/tensor.h"

using namespace prequal;

namespace {

template <class Body>
void by_format(int e5m2, Body&& body) {
  if (e5m2) {
    body.template operator()<Fp8::e5m2>();
  } else {
    body.template operator()<Fp8::e4m3>();
  }
}

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

Tensor tensor_at(int64_t first, int itemsize, int rank, const int64_t* shape, const int64_t* stride) {
  Tensor x;
  x.data = reinterpret_cast<void*>(static_cast<uintptr_t>(first));
  x.itemsize = itemsize;
  x.rank = rank;
  for (int dim = 0; dim < rank; ++dim) x.shape[dim] = shape[dim], x.stride[dim] = stride[dim];
  return x;
}

// A search's structure as a block builds it (knn_grid.cu), by one thread.
struct Gridded {
  std::vector<grid::Entry> entries;
  std::vector<uint16_t> starts;
  std::vector<grid::Grid> grids;
  grid::Box box;
  bool uneven = false;
  int crowded = 0;
  int jumped = 0;
  mutable int64_t looked = 0, asked = 0;  // entries read, starts read

  static constexpr int threads = 1024, items = 8;

  static grid::Grid finest(const tree::Point<float>& lo, const tree::Point<float>& hi, int most) {
    for (int j = 31; j > 0; --j) {
      const float width = grid::candidate_width(grid::Grid::longest(lo, hi), j);
      if (grid::Grid::all_of(lo, hi, width) <= most) return grid::Grid::of(lo, hi, width);
    }
    return grid::Grid::of(lo, hi, grid::Grid::longest(lo, hi));
  }

  Gridded(const tree::Point<float>* points, int count, int k) {
    const auto is = [&](int i) { return tree::finite(points[i]); };
    const auto widen = [](grid::Box& box, const tree::Point<float>& p) {
      box.lo = {fminf(box.lo.x, p.x), fminf(box.lo.y, p.y), fminf(box.lo.z, p.z)};
      box.hi = {fmaxf(box.hi.x, p.x), fmaxf(box.hi.y, p.y), fmaxf(box.hi.z, p.z)};
    };
    const grid::Box nothing{{INFINITY, INFINITY, INFINITY}, {-INFINITY, -INFINITY, -INFINITY}};
    box = nothing;
    for (int i = 0; i < count; ++i) {
      if (is(i)) widen(box, points[i]);
    }
    const int cells = grid::cells_for(count);
    const int threshold = grid::crowded_for(count, cells);
    grids = {finest(box.lo, box.hi, cells)};

    std::vector<int> place(count, -1), held(cells, 0);
    const auto count_all = [&] {
      int most = 0;
      held.assign(cells, 0);
      for (int i = 0; i < count; ++i) {
        if (!is(i)) continue;
        place[i] = grids[0].number(grids[0].of(points[i]));
        most = std::max(most, ++held[place[i]]);
      }
      return most;
    };
    uneven = count_all() > threshold;
    std::vector<int> of_cell;  // cell of each crowded one
    if (uneven) {
      grids = {finest(box.lo, box.hi, grid::coarse_cells_for(cells))};
      count_all();
      std::vector<int> number(grids[0].all(), 0);
      for (const int least : {8 * threshold, threshold}) {
        for (int c = 0; c < grids[0].all(); ++c) {
          if (number[c] != 0 || held[c] <= least || of_cell.size() == grid::most_crowded) continue;
          of_cell.push_back(c);
          number[c] = static_cast<int>(of_cell.size());
        }
      }
      crowded = static_cast<int>(of_cell.size());
      std::vector<grid::Box> boxes(of_cell.size(), nothing);
      for (int t = 0; t < threads; ++t) {
        const int i = t % items * threads + t;
        if (i < count && is(i) && number[place[i]] != 0) widen(boxes[number[place[i]] - 1], points[i]);
      }
      int next = (grids[0].all() + 1) / 2 * 2;
      const int rest = cells - next;
      for (size_t n = 0; n < of_cell.size(); ++n) {
        auto mine = finest(boxes[n].lo, boxes[n].hi, std::max(1, held[of_cell[n]] * rest / count));
        mine.first = next;
        next += mine.all();
        grids.push_back(mine);
        held[of_cell[n]] = 1;
      }
      if (next > cells) std::abort();
      for (int i = 0; i < count; ++i) {
        if (!is(i) || number[place[i]] == 0) continue;
        const grid::Grid& mine = grids[number[place[i]]];
        place[i] = mine.number(mine.of(points[i]));
        ++held[place[i]];
      }
    }
    int total = 0;
    for (int c = 0; c <= cells; ++c) {
      starts.push_back(static_cast<uint16_t>(total));
      if (c < cells) total += held[c];
    }
    entries.resize(total);
    std::vector<int> filled(starts.begin(), starts.end());
    for (size_t n = 0; n < of_cell.size(); ++n) {
      entries[filled[of_cell[n]]++] = {NAN, 0.0f, 0.0f, ~static_cast<int>(n + 1)};
    }
    for (int j = 0; j < count; ++j) {
      const int i = count - 1 - j;  // the order in a cell is nobody's promise
      if (is(i)) entries[filled[place[i]]++] = {points[i].x, points[i].y, points[i].z, i};
    }
    for (int c = 0; uneven && c < cells; ++c) trim(c, std::max(2 * threshold, k), k);
  }

  void trim(int cell, int least, int k) {
    grid::Entry* first = entries.data() + starts[cell];
    grid::Entry* last = entries.data() + starts[cell + 1];
    if (last - first <= least) return;
    for (const auto* p = first; p < last; ++p) {
      if (p->x != first->x || p->y != first->y || p->z != first->z) return;
    }
    std::partial_sort(first, first + k, last, [](const auto& a, const auto& b) { return a.index < b.index; });
    first[k].index = ~static_cast<int>(last - entries.data());
    jumped += static_cast<int>(last - first) - k - 1;
  }

  int start(int cell) const {
    if (cell < 0 || cell >= static_cast<int>(starts.size())) std::abort();
    return ++asked, starts[cell];
  }
  grid::Entry entry(int place) const {
    if (place < 0 || place >= static_cast<int>(entries.size())) std::abort();
    return ++looked, entries[place];
  }
};

// What a search reads of it, and counts.
struct Counted {
  const Gridded& of;
  const grid::Grid* grids;
  const grid::Box* box;
  const int* jumped;
  bool uneven;
  int start(int cell) const { return of.start(cell); }
  grid::Entry entry(int place) const { return of.entry(place); }
};

// As a warp does it: all entries, by so many lanes.
template <int K>
tree::Best<K> walked_by(int lanes, const tree::Point<float>& q, const Counted& view, tree::Best<K> best, int k) {
  tree::Best<K> found[32];
  for (int lane = 0; lane < lanes; ++lane) {
    found[lane].clear(k, best.worst());
    grid::walk_all(q, view, lane, lanes, static_cast<int>(view.of.entries.size()), found[lane]);
  }
  for (int step = lanes / 2; step > 0; step /= 2) {
    tree::Best<K> before[32];
    std::copy(found, found + lanes, before);
    for (int lane = 0; lane < lanes; ++lane) grid::join(found[lane], before[lane ^ step]);
  }
  return found[lanes - 1];
}

template <int K>
void search_all(const Gridded& built, const tree::Point<float>* queries, int count, int k, float limit, int patience,
                float* d, int* i, int* looked, int* asked, int* gave_up) {
  const Counted view{built, built.grids.data(), &built.box, &built.jumped, built.uneven};
  for (int n = 0; n < count; ++n) {
    tree::Best<K> best;
    best.clear(k, limit);
    built.looked = built.asked = 0;
    gave_up[n] = 0;
    if (tree::finite(queries[n])) {
      grid::Search<K, Counted> search{queries[n], view, best, patience};
      const grid::Cell c = built.grids[0].of(queries[n]);
      const int own = built.uneven ? search.own_grid(c) : 0;
      if (!built.uneven) search.template inside<false>(0);
      if (own > 0) search.template inside<true>(own);
      const bool on = built.uneven && !search.gave_up();
      if (on && (own == 0 || search.leaves(built.grids[0], c, c))) search.outside(own);
      gave_up[n] = search.gave_up();
      looked[n] = static_cast<int>(built.looked), asked[n] = static_cast<int>(built.asked);
      if (gave_up[n] || (best.worst() == INFINITY && limit == INFINITY)) {
        best = walked_by<K>(1 << n % 6, queries[n], view, best, k);
      }
    } else {
      looked[n] = asked[n] = 0;
    }
    for (int place = K - k; place < K; ++place) {
      d[n * k + place - (K - k)] = best.d[place], i[n * k + place - (K - k)] = best.i[place];
    }
  }
}

}  // namespace

extern "C" {

void plan(int64_t width, int vec, int two, int four, int* out /*[4]*/) {
  const RowPlan found = row_plan(width, vec, two, four);
  out[0] = static_cast<int>(found.kind), out[1] = found.items, out[2] = found.threads, out[3] = found.rows;
}

void plan_part(int64_t width, int vec, int* out /*[4]*/) {
  const RowPlan found = part_plan(width, vec);
  out[0] = static_cast<int>(found.kind), out[1] = found.items, out[2] = found.threads, out[3] = found.rows;
}

int widest_of_parts() { return widest_part; }

void plan_stream(int64_t width, int vec, int ragged, int items, int inputs, int most, int largest, int shared_sm,
                 int shared_block, int registers, int* out /*[5]*/) {
  const auto resident = [&](int threads) { return blocks_by_registers(registers, threads); };
  const StreamPlan found =
      stream_plan(width, vec, ragged != 0, items, inputs, most, largest, shared_sm, shared_block, resident);
  out[0] = found.blocks, out[1] = found.threads, out[2] = found.stages, out[3] = found.shared, out[4] = found.per_sm;
}

int64_t streams(int64_t rows, int64_t resident, int vec) { return streamed_teams(rows, resident, vec); }

int64_t teams(int64_t rows, int64_t resident, int vec) { return gradient_teams(rows, resident, vec); }

int blocks_of(int registers, int threads) { return blocks_by_registers(registers, threads); }

void plan_rope(int heads, int rotary, int vec, int interleaved, int* out /*[3]*/) {
  const RopePlan found = rope_plan(heads, rotary, vec, interleaved != 0);
  out[0] = found.places, out[1] = found.heads, out[2] = found.threads;
}

void plan_heads(int dim, int vec, int items, int heads, int* out /*[5]*/) {
  const HeadPlan found = head_plan(dim, vec, items, heads);
  out[0] = found.lanes, out[1] = found.heads, out[2] = found.chunks, out[3] = found.tokens, out[4] = found.threads;
}

void plan_search(int64_t rows, int64_t k, int64_t queries, int multiprocessors, int threads, int* out /*[3]*/) {
  const SearchPlan found = search_plan(rows, k, queries, multiprocessors, threads);
  out[0] = found.threads, out[1] = found.blocks, out[2] = found.tiles_a_group;
}

// Pieces as the warps and blocks of message_passing.cu take them: by slot the row that writes there, and the row that is
// read from there; -1 where nobody does. 0, or 1 where a slot is written twice.
int pieces_of(const int64_t* ends /*[rows + 1]*/, int64_t rows, int64_t edges, int64_t longest_whole,
              int64_t* written /*[2 chunks]*/, int64_t* read /*[2 chunks]*/) {
  const auto begin_of = [&](int64_t row) { return std::min(ends[row], edges); };
  const auto row_of = [&](int64_t place) {
    int64_t row = 0;
    while (row + 1 < rows && begin_of(row + 1) <= place) ++row;
    return row;
  };
  const int64_t chunks = (edges + edges_a_piece - 1) / edges_a_piece;
  std::fill(written, written + 2 * chunks, -1), std::fill(read, read + 2 * chunks, -1);
  for (int64_t own = 0; own < chunks; ++own) {
    const int64_t low = own * edges_a_piece, high = std::min(low + edges_a_piece, edges);
    int64_t started = -1;
    auto [row, piece] = first_piece(low, high, row_of, begin_of);
    for (; piece < 2; ++piece) {
      const int64_t begin = begin_of(row), end = begin_of(row + 1);
      if (end - begin > longest_whole && begin < high && end > low) {
        if (begin >= low) started = row;
        if (written[piece_slot(own, piece)] >= 0) return 1;
        written[piece_slot(own, piece)] = row;
      }
      if (end >= high) break;
      const int64_t last = row_of(high - 1);
      if (last == row) break;
      row = last;
    }
    if (started < 0) continue;
    const int64_t begin = begin_of(started), last = (begin_of(started + 1) - 1) / edges_a_piece;
    for (int64_t q = begin / edges_a_piece; q <= last; ++q) {
      read[piece_slot(q, piece_of(q, begin / edges_a_piece, begin))] = started;
    }
  }
  return 0;
}

int first_state_of(int states, int columns, int blocks, int rank) { return first_state(states, columns, blocks, rank); }

int most_states_of(int states, int columns, int blocks) { return most_states(states, columns, blocks); }

// The first n, divided by `divisor` in the way of a kernel, that comes out wrong; -1 where none does.
int wrong_quotient(int divisor) {
  for (int n = 0; n < 4096; ++n) {
    if (quotient(n, inverse_of(divisor)) != n / divisor) return n;
  }
  return -1;
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
int even(float lo, float hi, int wanted, float x, float* low /*[most_along]*/, float* high /*[most_along]*/,
         int* cells) {
  const float width = (hi - lo) / static_cast<float>(wanted);
  const grid::Even axis = grid::Even::of(lo, hi, width, wanted);
  for (int c = 0; c < axis.cells; ++c) low[c] = axis.low(c), high[c] = axis.high(c);
  *cells = axis.cells;
  return axis.cell(x);
}

int cells_along(float extent, float width) { return grid::cells_along(extent, width); }

int cells_for(int64_t points) { return grid::cells_for(points); }

// The k nearest as the kernel finds them, by searches of this patience (of the kernel's where it is negative); entries and
// starts that each search read, and whether it gave up. Returns the number of crowded cells, or -1 where the cloud is even.
int grid_search(const float* references /*[count, 3]*/, int count, const float* queries /*[asked, 3]*/, int asked,
                int k, float limit, int patience, float* d /*[asked, k]*/, int* i /*[asked, k]*/,
                int* looked /*[asked]*/, int* starts /*[asked]*/, int* gave_up /*[asked]*/) {
  const auto* points = reinterpret_cast<const tree::Point<float>*>(references);
  const auto* from = reinterpret_cast<const tree::Point<float>*>(queries);
  const Gridded built(points, count, k);
  if (patience < 0) patience = grid::patience_for(count);
  if (k == 1) {
    search_all<1>(built, from, asked, k, limit, patience, d, i, looked, starts, gave_up);
  } else if (k <= 4) {
    search_all<4>(built, from, asked, k, limit, patience, d, i, looked, starts, gave_up);
  } else {
    search_all<8>(built, from, asked, k, limit, patience, d, i, looked, starts, gave_up);
  }
  return built.uneven ? built.crowded : -1;
}

int lanes_for(int queries) { return grid::lanes_for(queries); }

int patience_for(int points) { return grid::patience_for(points); }

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

void orders(const float* x, int64_t count, uint32_t* order, float* back) {
  for (int64_t i = 0; i < count; ++i) order[i] = in_order(x[i]), back[i] = from_order(order[i]);
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

// value / by in FP8, as a kernel that has no instruction for it makes it of fp32, or of halves.
void quantize(int e5m2, int halves, const float* value, const float* by, int64_t count, uint8_t* out) {
  by_format(e5m2, [&]<Fp8 F>() {
    for (int64_t i = 0; i < count; ++i) {
      const float size = std::fabs(value[i]);
      const Divisor divisor = halves ? short_divisor_for(by[i], size) : divisor_for(by[i], size);
      const float fast = halves ? short_quotient(value[i], divisor) : quotient(value[i], divisor);
      out[i] = static_cast<uint8_t>(to_fp8<F>(divisor.inverse != 0.0f ? fast : div(value[i], by[i])));
    }
  });
}

// How many quotients of 11 bits by 24 that lie closest to an edge, where the FP8 number of a division changes, become
// another number by short_quotient(). For every significand and every edge the divisors on both sides of it, and every
// reciprocal that an instruction may give. Of other divisors the quotient is at least 2^-25 of itself away from the edge.
int64_t wrong_short_quotients(int e5m2, int64_t* tested) {
  int64_t wrong = 0;
  *tested = 0;
  by_format(e5m2, [&]<Fp8 F>() {
    for (uint32_t code = 0; code < Fp8Format<F>::largest_code; ++code) {
      const float middle = (from_fp8<F>(code) + from_fp8<F>(code + 1)) / 2;
      for (const float side : {0.0f, INFINITY}) {
        const double edge = (static_cast<double>(middle) + std::nextafter(middle, side)) / 2;
        for (int value = 1024; value < 2048; ++value) {
          const auto x = static_cast<float>(value), closest = static_cast<float>(value / edge);
          for (const float by : {std::nextafter(closest, 0.0f), closest, std::nextafter(closest, INFINITY)}) {
            const uint32_t want = to_fp8<F>(x / by);
            float near = 1.0f / by;
            for (int i = 0; i < 3; ++i) near = std::nextafter(near, 0.0f);
            for (int i = 0; i < 7; ++i, near = std::nextafter(near, INFINITY)) {
              if (std::fabs(static_cast<double>(near) * by - 1) > 0x1p-23) continue;
              const Divisor divisor = short_divisor_from(by, near, x);
              ++*tested;
              wrong += divisor.inverse == 0.0f || to_fp8<F>(short_quotient(x, divisor)) != want ||
                       to_fp8<F>(short_quotient(-x, divisor)) != (want | 0x80u);
            }
          }
        }
      }
    }
  });
  return wrong;
}

void convert(int e5m2, const float* value, int64_t count, uint8_t* out) {
  by_format(e5m2, [&]<Fp8 F>() {
    for (int64_t i = 0; i < count; ++i) out[i] = static_cast<uint8_t>(to_fp8<F>(value[i]));
  });
}

void convert_back(int e5m2, const uint8_t* code, int64_t count, float* out) {
  by_format(e5m2, [&]<Fp8 F>() {
    for (int64_t i = 0; i < count; ++i) out[i] = from_fp8<F>(code[i]);
  });
}

void scales(int e5m2, const float* amax, int64_t count, float bound, int ue8m0, float* out) {
  by_format(e5m2, [&]<Fp8 F>() {
    for (int64_t i = 0; i < count; ++i) out[i] = scale_for(amax[i], Fp8Format<F>::largest, bound, ue8m0);
  });
}

// How many of the quotients that lie closest to the middle of two numbers quotient() gives otherwise than a division. For
// every odd b of 24 bits and small c the a that makes a * 2^k = M * b + c, with M odd and of 25 bits. tested: how many.
int64_t wrong_quotients(int step, int64_t* tested) {
  int64_t wrong = 0;
  *tested = 0;
  for (uint32_t b = (1u << 23) | 1; b < 1u << 24; b += 2 * static_cast<uint32_t>(step)) {
    uint32_t inverse = b;  // modulo 2^32, by Newton
    for (int i = 0; i < 5; ++i) inverse *= 2 - b * inverse;
    for (const int k : {24, 25}) {
      for (int c = -7; c <= 7; c += 2) {
        const uint64_t low = static_cast<uint32_t>(inverse * static_cast<uint32_t>(-c)) & ((1u << k) - 1);
        for (uint64_t middle = low; middle < 1u << 25; middle += uint64_t{1} << k) {
          if (middle < 1u << 24 || middle % 2 == 0) continue;
          const auto a = static_cast<int64_t>(middle * b + static_cast<uint64_t>(static_cast<int64_t>(c))) >> k;
          if (a < 1 << 23 || a >= 1 << 24) continue;
          const auto value = static_cast<float>(a), by = static_cast<float>(b);
          ++*tested;
          wrong += quotient(value, divisor_for(by, value)) != value / by;
        }
      }
    }
  }
  return wrong;
}
}
