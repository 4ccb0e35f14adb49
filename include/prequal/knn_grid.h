// The kNN grid: which cell a coordinate lies in, how near a cell can be, and the search of one query by one thread.
//
// Cells of an axis are numbered upwards, and the number never falls as the coordinate rises. A search relies on this alone:
// every point in a cell >= c has a coordinate >= low(c), every point in a cell <= c one <= high(c). A cell may then be left
// out where the rounded square of that gap exceeds the rounded squared distance held (knn_tree.h: no epsilon).
//
// No grid tells all clouds apart: where scales span decades, or from the centre of a sphere, most points are in reach. A
// search therefore has patience; when it is at its end, all entries are walked instead, by several lanes together.
#pragma once

#include <cfloat>
#include <cmath>
#include <cstdint>
#include <type_traits>

#include "prequal/host_device.h"
#include "prequal/knn_tree.h"

namespace prequal::grid {

using tree::Point;

inline constexpr int most_along = 192;    // cells an axis
inline constexpr int most_crowded = 128;  // cells with a grid of their own

// Squared, from a coordinate to what lies from `low` up, and to what lies from `high` down.
PREQUAL_HD float gap2_up(float x, float low) {
  const float gap = fmaxf(sub(low, x), 0.0f);
  return mul(gap, gap);
}
PREQUAL_HD float gap2_down(float x, float high) {
  const float gap = fmaxf(sub(x, high), 0.0f);
  return mul(gap, gap);
}

PREQUAL_HD int lesser(int a, int b) { return a < b ? a : b; }
PREQUAL_HD int greater(int a, int b) { return a > b ? a : b; }

// Cells of equal width from `lo`; the outermost have no outer edge and take what lies beyond, too. Without an extent that
// floats divide well (equal coordinates, denormal or overflowing differences) everything is in cell 0.
struct Even {
  float lo, width, scale;  // scale: 1 / width, or 0
  int cells;

  static PREQUAL_HD bool divides(float extent) { return extent > 1e-30f && extent < 1e30f; }

  // `width` is that of all axes, `wanted` how many of it the extent takes.
  PREQUAL_HD static Even of(float lo, float hi, float width, int wanted) {
    if (!divides(sub(hi, lo)) || wanted <= 1) return {lo, 0.0f, 0.0f, 1};
    return {lo, width, reciprocal(width), wanted};
  }

  // Monotone: a rounded difference, a rounded product by a positive number and a truncation are.
  PREQUAL_HD int cell(float x) const { return whole(place(x)); }

  // The lower of the two cells that meet nearest x; 0 where there is one alone. No bound rests on this.
  PREQUAL_HD int pair(float x) const { return whole(fmaxf(sub(place(x), 0.5f), 0.0f)); }

  // cell(x) >= c means (x - lo)(1 + e) scale (1 + e) >= c with |e| <= 2^-24 and scale = (1 + e') / width, |e'| <= 2^-23, so
  // x - lo >= c width (1 - 2^-21); likewise above. 2^-20 covers the rounding of c width, too; the sum with lo is rounded
  // outwards.
  PREQUAL_HD float low(int c) const { return c <= 0 ? -INFINITY : inner_low(c); }
  PREQUAL_HD float high(int c) const { return c >= cells - 1 ? INFINITY : inner_high(c); }

  // Squared, from x to the cells from c up, to those from c down (infinite where there are none), and to c.
  PREQUAL_HD float above2(float x, int c /*not 0*/) const {
    const float gap2 = gap2_up(x, inner_low(c));
    return c < cells ? gap2 : INFINITY;
  }
  PREQUAL_HD float below2(float x, int c /*not the last*/) const {
    const float gap2 = gap2_down(x, inner_high(c));
    return c >= 0 ? gap2 : INFINITY;
  }
  PREQUAL_HD float gap2(float x, int c) const { return fmaxf(gap2_up(x, low(c)), gap2_down(x, high(c))); }

 private:
  PREQUAL_HD float inner_low(int c) const { return down(lo, mul(mul(in_float(c), width), 1.0f - 0x1p-20f)); }
  PREQUAL_HD float inner_high(int c) const { return up(lo, mul(mul(in_float(c + 1), width), 1.0f + 0x1p-20f)); }
  PREQUAL_HD float place(float x) const { return fminf(fmaxf(mul(sub(x, lo), scale), 0.0f), in_float(cells - 1)); }
  // 2^23 + place, rounded down, has the integer in its last bits; the conversions proper run at a quarter of the rate.
  PREQUAL_HD static float in_float(int c) {
#ifdef __CUDA_ARCH__
    return __fsub_rn(__int_as_float(c + 0x4b000000), 0x1p23f);
#else
    return static_cast<float>(c);
#endif
  }
  PREQUAL_HD static int whole(float place) {
#ifdef __CUDA_ARCH__
    return __float_as_int(__fadd_rd(place, 0x1p23f)) - 0x4b000000;
#else
    return static_cast<int>(place);
#endif
  }
  PREQUAL_HD static float reciprocal(float x) {
#ifdef __CUDA_ARCH__
    return __frcp_rn(x);
#else
    return 1.0f / x;
#endif
  }
  PREQUAL_HD static float down(float a, float b) {
#ifdef __CUDA_ARCH__
    return __fadd_rd(a, b);
#else
    return std::nextafterf(a + b, -INFINITY);
#endif
  }
  PREQUAL_HD static float up(float a, float b) {
#ifdef __CUDA_ARCH__
    return __fadd_ru(a, b);
#else
    return std::nextafterf(a + b, INFINITY);
#endif
  }
};

// ---- the size of a grid ----------------------------------------------------------------------------------------------

// The width of candidate `j` of 32 (finer as j grows), for a cloud whose longest extent is this: from 1 to 181 cells along it.
PREQUAL_HD float candidate_width(float longest, int j) {
  return longest * exp2f(static_cast<float>(j) * (-7.5f / 31.0f));
}

// How many cells of this width an extent takes. One more than the quotient: the last may be begun.
PREQUAL_HD int cells_along(float extent, float width) {
  if (!Even::divides(extent)) return 1;
#ifdef __CUDA_ARCH__
  const float quotient = __fdividef(extent, width);  // how many cells there are is a matter of taste
#else
  const float quotient = extent / width;
#endif
  return quotient < static_cast<float>(most_along - 1) ? static_cast<int>(quotient + 0.5f) + (quotient < 0.5f)
                                                       : most_along;
}

// Cells in all, by what measured best (8,000 points, k = 1: 1/3, 2/3, 4/3, 2 and 4 cells a point were tried).
constexpr int cells_for(int64_t points) {
  const int64_t wanted = points * 4 / 3;
  return static_cast<int>(wanted < 64 ? 64 : wanted > 32768 ? 32768 : wanted);
}

// Of so many in all, those of the whole cloud's grid where crowded cells have grids of their own, which share the rest.
constexpr int coarse_cells_for(int cells) { return cells / 4; }

// More points in a cell than volumes and surfaces come near: the cloud is uneven (an outlier, clusters, scales).
constexpr int crowded_for(int points, int cells) { return 16 + 16 * points / cells; }

// How many entries, and rows of cells beyond the nearest, one query looks at before it gives up. Lanes that walk alone are
// each at a place of its own, and wait for the longest walk: 6,779 entries, the mean over warps, took 1.8 ms (100,000 queries,
// 8,000 points over forty decades). A step of all lanes through all entries is some 13 instructions, with one read for all.
// Counted over 8,000 points: of volumes, surfaces, clusters, lines and a scan a query looks at 372 at most (k to 8), and nobody
// gives up.
constexpr int patience_for(int points) { return points / 8 < 512 ? 512 : points / 8; }

// ---- a grid, and the points in it ------------------------------------------------------------------------------------

struct Cell {
  int x, y, z;
};

// 13 words: lanes that read grids of neighbouring numbers are in different banks.
struct Grid {
  Even x, y, z;
  int first;  // number of its first cell in the table of starts

  // The grid of cubes of this width over a box.
  PREQUAL_HD static Grid of(const Point<float>& lo, const Point<float>& hi, float width) {
    return {Even::of(lo.x, hi.x, width, cells_along(sub(hi.x, lo.x), width)),
            Even::of(lo.y, hi.y, width, cells_along(sub(hi.y, lo.y), width)),
            Even::of(lo.z, hi.z, width, cells_along(sub(hi.z, lo.z), width)), 0};
  }

  // How many cells that would be.
  PREQUAL_HD static int all_of(const Point<float>& lo, const Point<float>& hi, float width) {
    return cells_along(sub(hi.x, lo.x), width) * cells_along(sub(hi.y, lo.y), width) *
           cells_along(sub(hi.z, lo.z), width);
  }

  // What candidate widths divide.
  PREQUAL_HD static float longest(const Point<float>& lo, const Point<float>& hi) {
    const auto extent = [](float lo, float hi) { return Even::divides(sub(hi, lo)) ? sub(hi, lo) : 0.0f; };
    return fmaxf(fmaxf(extent(lo.x, hi.x), extent(lo.y, hi.y)), extent(lo.z, hi.z));
  }

  PREQUAL_HD int all() const { return x.cells * y.cells * z.cells; }
  PREQUAL_HD int row(int cell_y, int cell_z) const { return first + (cell_z * y.cells + cell_y) * x.cells; }
  PREQUAL_HD int number(const Cell& c) const { return row(c.y, c.z) + c.x; }
  PREQUAL_HD Cell of(const Point<float>& p) const { return {x.cell(p.x), y.cell(p.y), z.cell(p.z)}; }
  PREQUAL_HD Cell pair(const Point<float>& p) const { return {x.pair(p.x), y.pair(p.y), z.pair(p.z)}; }
  PREQUAL_HD Cell last() const { return {x.cells - 1, y.cells - 1, z.cells - 1}; }
};

// In the order of the cells. `index` is the reference's, or one of two complements: ~place of what lies behind this cell,
// whose other points are all one place and of higher index; or, where x is NaN, ~number of the grid that the cell has.
struct alignas(16) Entry {
  float x, y, z;
  int index;
};

struct Box {
  Point<float> lo, hi;
};

// What a search reads. Cell c holds the entries from starts[c] to starts[c + 1].
struct View {
  const Entry* entries;
  const uint16_t* starts;
  const Grid* grids;  // [0]: of all points; behind it those of crowded cells
  const Box* box;     // of all points
  const int* jumped;  // entries that walks jump over, in an uneven cloud
  bool uneven;        // whether crowded cells have grids, and those of one place may end early

  PREQUAL_HD int start(int cell) const { return starts[cell]; }
  PREQUAL_HD Entry entry(int place) const {
#ifdef __CUDA_ARCH__
    const float4 four = reinterpret_cast<const float4*>(entries)[place];
    return {four.x, four.y, four.z, __float_as_int(four.w)};
#else
    return entries[place];
#endif
  }
};

// Whether any lane that is here says so; a lane alone on the host.
PREQUAL_HD bool any_here(bool mine) {
#ifdef __CUDA_ARCH__
  return __any_sync(__activemask(), mine);
#else
  return mine;
#endif
}

// What was read before is read again behind it: kept in registers, it would be in the way of what comes first.
PREQUAL_HD void forget_memory() {
#ifdef __CUDA_ARCH__
  asm volatile("" ::: "memory");
#endif
}

PREQUAL_HD int lowest_bit(unsigned bits) {
#ifdef __CUDA_ARCH__
  return __ffs(bits) - 1;
#else
  return __builtin_ctz(bits);
#endif
}

// ---- the search ------------------------------------------------------------------------------------------------------

// Offers go through two places of waiting where insertion is dear: the lanes of a warp then insert together, not whenever
// one of them has something to insert.
template <int K>
struct Offers {
  tree::Best<K>& best;
  float d[2] = {INFINITY, INFINITY};
  int i[2] = {tree::nobody, tree::nobody};

  PREQUAL_HD void offer(float distance, int index) {
    if constexpr (K == 1) {
      best.offer(distance, index);
    } else {
      const bool wanted = tree::comes_before(distance, index, best.d[K - 1], best.i[K - 1]);
      if (any_here(wanted && i[1] != tree::nobody)) flush();
      if (wanted) d[1] = d[0], i[1] = i[0], d[0] = distance, i[0] = index;
    }
  }

  PREQUAL_HD void flush() {
    if constexpr (K > 1) {
#pragma unroll
      for (int slot = 0; slot < 2; ++slot) {
        if (i[slot] != tree::nobody) best.offer(d[slot], i[slot]);
        d[slot] = INFINITY, i[slot] = tree::nobody;
      }
    }
  }
};

// Two bits each of twenty numbers from 0 to 3.
constexpr uint64_t packed(const int (&numbers)[20]) {
  uint64_t all = 0;
  for (int bit = 0; bit < 20; ++bit) all |= static_cast<uint64_t>(numbers[bit]) << 2 * bit;
  return all;
}

template <int K, class Seen = View>
struct Search {
  const Point<float>& q;
  const Seen& view;
  tree::Best<K>& best;
  int patience;  // entries and rows that may still be looked at; less than none once it gave up

  static constexpr int together = 4;
  struct Stretches {
    int begin[together], end[together];
  };

  // All of a cloud that is not uneven; or, of one that is, the crowded cell that has this grid.
  template <bool Crowded>
  PREQUAL_HD void inside(int number) {
    Cell from{}, to{};
    if (!around<Crowded>(view.grids[number], from, to)) return;
    forget_memory();
    beyond<true>(number, 0, from, to, true);
  }

  PREQUAL_HD bool gave_up() const { return patience < 0; }

  // The number of the grid that the query's cell in an uneven cloud has, or 0.
  PREQUAL_HD int own_grid(const Cell& c) const {
    const int cell = view.grids[0].number(c), place = view.start(cell);
    return view.start(cell + 1) == place + 1 ? own_grid(view.entry(place)) : 0;
  }

  // Whether cells of a grid may matter that are not between these.
  PREQUAL_HD bool leaves(const Grid& grid, const Cell& from, const Cell& to) const {
    const float w = worst();
    return (grid.x.below2(q.x, from.x - 1) <= w) | (grid.x.above2(q.x, to.x + 1) <= w) |
           (grid.y.below2(q.y, from.y - 1) <= w) | (grid.y.above2(q.y, to.y + 1) <= w) |
           (grid.z.below2(q.z, from.z - 1) <= w) | (grid.z.above2(q.z, to.z + 1) <= w);
  }

  // An uneven cloud, but for the crowded cell of this grid.
  PREQUAL_HD void outside(int own) {
    const Grid& top = view.grids[0];
    if (own > 0) {
      const Cell c = top.of(q);
      beyond<false>(0, own, c, c, true);
    } else {
      const Cell last = top.last(), from = top.pair(q);
      beyond<false>(0, 0, from, {lesser(from.x + 1, last.x), lesser(from.y + 1, last.y), lesser(from.z + 1, last.z)},
                    false);
    }
  }

 private:
  PREQUAL_HD static int own_grid(const Entry& at) { return at.index < 0 && at.x != at.x ? ~at.index : 0; }

  // What overflows is found by its index, afterwards.
  PREQUAL_HD float worst() const { return fminf(best.worst(), FLT_MAX); }

  // Stretches of entries walked as one: lanes then wait for the longest sum, not for every longest stretch. With patience,
  // not one that is too long for it; what is jumped over is not known before, so the walk may end halfway.
  template <bool Patient, class Enter>
  PREQUAL_HD void walk(const Stretches& stretches, Enter&& enter) {
    int ends[together], shift[together], total = 0;
#pragma unroll
    for (int slot = 0; slot < together; ++slot) {
      shift[slot] = stretches.begin[slot] - total;
      total += stretches.end[slot] - stretches.begin[slot];
      ends[slot] = total;
    }
    int end = total;
    if constexpr (Patient) {
      if (total - (view.uneven ? *view.jumped : 0) > patience) {
        patience = -1;
        return;
      }
      end = lesser(total, patience);
    }
    Offers<K> offers{best};
    for (int i = 0; i < end; ++i) {
      const int p = i + (i < ends[0] ? shift[0] : i < ends[1] ? shift[1] : i < ends[2] ? shift[2] : shift[3]);
      const Entry at = view.entry(p);
      if (view.uneven && at.index < 0) {
        const int number = own_grid(at);
        if (number == 0) {
          const int rest = ~at.index - p - 1;  // of this cell, and what was seen: on with what lies behind it
          i += rest;
          patience += rest;
        } else {
          offers.flush();
          enter(number);
        }
        if constexpr (Patient) end = lesser(total, patience);
        continue;
      }
      offers.offer(tree::distance2(q, {at.x, at.y, at.z}), at.index);
    }
    offers.flush();
    if constexpr (Patient) patience -= total;
  }

  // The eight cells that meet nearest the query, then what is near enough of the layer of cells around them. Whether cells
  // further out may matter; those from `from` to `to` were seen. In a grid without crowded cells; where no cell has many
  // points, without patience.
  template <bool Patient>
  PREQUAL_HD bool around(const Grid& grid, Cell& from, Cell& to) {
    from = grid.pair(q);
    const Cell last = grid.last();
    const bool two_x = last.x > 0, two_y = last.y > 0, two_z = last.z > 0;
    const int row_up = grid.x.cells, level_up = grid.x.cells * grid.y.cells;
    const int corner = grid.number(from);

    Stretches stretches;
#pragma unroll
    for (int slot = 0; slot < together; ++slot) {
      const bool there = (slot % 2 == 0 || two_y) && (slot / 2 == 0 || two_z);
      const int cell = corner + (slot % 2 && there ? row_up : 0) + (slot / 2 && there ? level_up : 0);
      stretches.begin[slot] = view.start(cell);
      stretches.end[slot] = there ? view.start(cell + 1 + two_x) : stretches.begin[slot];
    }

    const float x_below = grid.x.below2(q.x, from.x - 1), x_above = grid.x.above2(q.x, from.x + 2);
    const float y_below = grid.y.below2(q.y, from.y - 1), y_above = grid.y.above2(q.y, from.y + 2);
    const float z_below = grid.z.below2(q.z, from.z - 1), z_above = grid.z.above2(q.z, from.z + 2);
    // Twenty stretches of the layer, a bit each: left and right of the four rows, two rows each below and above in y, below
    // and above in z, and four edges. Rows count 0 to 3 in y and z, of which 1 and 2 are the eight cells'.
    constexpr uint64_t rows_y = packed({1, 2, 1, 2, 1, 2, 1, 2, 0, 0, 3, 3, 1, 2, 1, 2, 0, 3, 0, 3});
    constexpr uint64_t rows_z = packed({1, 1, 2, 2, 1, 1, 2, 2, 1, 2, 1, 2, 0, 0, 3, 3, 0, 0, 3, 3});
    const unsigned in_y = two_y ? 3 : 1, in_z = two_z ? 3 : 1, inside = in_y | (two_z ? in_y << 2 : 0);
    // From far outside, that layer looks near and is not: beyond() knows how far the whole cloud is.
    const Box& box = *view.box;
    const bool outside =
        (q.x < box.lo.x) | (q.x > box.hi.x) | (q.y < box.lo.y) | (q.y > box.hi.y) | (q.z < box.lo.z) | (q.z > box.hi.z);
    unsigned left = outside ? 0 : 0xfffff, near = 0;
    while (true) {
      walk<Patient>(stretches, [](int) {});
      if constexpr (Patient) {
        if (gave_up()) return false;
      }
      const float w = worst();
      const bool x_low = x_below <= w, x_high = x_above <= w;
      near = (x_low ? inside : 0) | (x_high ? inside << 4 : 0) | (y_below <= w ? in_z << 8 : 0) |
             (y_above <= w ? in_z << 10 : 0) | (z_below <= w ? in_y << 12 : 0) | (z_above <= w ? in_y << 14 : 0) |
             (add(y_below, z_below) <= w ? 1u << 16 : 0) | (add(y_above, z_below) <= w ? 1u << 17 : 0) |
             (add(y_below, z_above) <= w ? 1u << 18 : 0) | (add(y_above, z_above) <= w ? 1u << 19 : 0);
      unsigned now = left & near;
      if (now == 0) break;
#pragma unroll
      for (int slot = 0; slot < together; ++slot) {
        stretches.begin[slot] = stretches.end[slot] = 0;
        if (now == 0) continue;
        const int bit = lowest_bit(now);
        now &= now - 1;
        left ^= 1u << bit;
        const int up = static_cast<int>(rows_y >> 2 * bit & 3) - 1, over = static_cast<int>(rows_z >> 2 * bit & 3) - 1;
        const int cell = corner + up * row_up + over * level_up;
        // left of the eight, right of them, or over their whole width and what is near beside it
        const int begin = bit < 4 ? -1 : bit < 8 ? 2 : x_low ? -1 : 0;
        const int end = bit < 4 ? 0 : bit < 8 || x_high ? 3 : 1 + two_x;
        stretches.begin[slot] = view.start(cell + begin);
        stretches.end[slot] = view.start(cell + end);
      }
    }
    const int layer = outside ? 0 : 1;
    to = {lesser(from.x + 1 + layer, last.x), lesser(from.y + 1 + layer, last.y), lesser(from.z + 1 + layer, last.z)};
    from = {greater(from.x - layer, 0), greater(from.y - layer, 0), greater(from.z - layer, 0)};
    return near != 0 && leaves(grid, from, to);
  }

  // The cells from `from` to `to` (unless `seen`), more around them until k were seen, then whatever else is near enough.
  // Rows run upwards, the same for every lane: from the middle outwards, lanes of different halves took turns (20k cycles,
  // not 15). Crowded cells on the way are searched, too, but not `own`, which was before.
  template <bool Inside>
  PREQUAL_HD void beyond(int number, int own, Cell from, Cell to, bool seen) {
    const Grid& grid = view.grids[number];
    const Cell last = grid.last();
    // to all points, for a query outside; only of the whole cloud is that known
    const auto outside2 = [&](float x, float lo, float hi) {
      return number == 0 ? fmaxf(gap2_up(x, lo), gap2_down(x, hi)) : 0.0f;
    };
    const float out_x = outside2(q.x, view.box->lo.x, view.box->hi.x);
    const float out_y = outside2(q.y, view.box->lo.y, view.box->hi.y);
    const float out_z = outside2(q.z, view.box->lo.z, view.box->hi.z);
    const float xy = add(out_x, out_y);

    Cell seen_from = from, seen_to = to;  // the cells that were looked at
    if (!seen) seen_to = {-1, -1, -1};
    int reach = 1;
    while (true) {
      if (!seen) {
        int y = from.y, z = from.z;
        bool behind = false;  // of a row of which the middle was seen: on to the part behind that
        while (z <= to.z) {
          Stretches stretches;
#pragma unroll
          for (int slot = 0; slot < together; ++slot) {
            stretches.begin[slot] = stretches.end[slot] = 0;
            if (z > to.z) continue;
            --patience;
            const float y2 = fmaxf(grid.y.gap2(q.y, y), out_y), z2 = fmaxf(grid.z.gap2(q.z, z), out_z);
            const bool again = y >= seen_from.y && y <= seen_to.y && z >= seen_from.z && z <= seen_to.z;
            int x = behind ? seen_to.x + 1 : from.x;
            int x_end = again && !behind ? seen_from.x - 1 : to.x;
            if (x <= x_end && add(add(out_x, y2), z2) <= worst()) {
              if (x_end - x > 4) {  // a long one, cut to what is near enough
                while (x < x_end && add(add(grid.x.below2(q.x, x), y2), z2) > worst()) ++x;
                while (x_end > x && add(add(grid.x.above2(q.x, x_end), y2), z2) > worst()) --x_end;
              }
              const int row = grid.row(y, z);
              stretches.begin[slot] = view.start(row + x);
              stretches.end[slot] = view.start(row + x_end + 1);
            }
            behind = again && !behind;
            if (!behind && ++y > to.y) y = from.y, ++z;
          }
          walk<true>(stretches, [&](int crowded) {
            if constexpr (!Inside) {
              if (crowded == own) return;
              const Cell nearest = view.grids[crowded].of(q);
              Search in{q, view, best, patience};
              in.template beyond<true>(crowded, 0, nearest, nearest, false);
              patience = in.patience;
            }
          });
          if (gave_up()) return;
        }
      }
      seen = false;
      seen_from = from, seen_to = to;
      const bool all = from.x == 0 && from.y == 0 && from.z == 0 && to.x == last.x && to.y == last.y && to.z == last.z;
      if (all || reach < 0) return;
      if (!best.full() && best.worst() == INFINITY) {
        from = {greater(from.x - reach, 0), greater(from.y - reach, 0), greater(from.z - reach, 0)};
        to = {lesser(to.x + reach, last.x), lesser(to.y + reach, last.y), lesser(to.z + reach, last.z)};
        reach *= 2;
        continue;
      }
      const float w = worst();
      while (from.x > 0 && fmaxf(grid.x.below2(q.x, from.x - 1), out_x) <= w) --from.x;
      while (to.x < last.x && fmaxf(grid.x.above2(q.x, to.x + 1), out_x) <= w) ++to.x;
      while (from.y > 0 && add(out_x, fmaxf(grid.y.below2(q.y, from.y - 1), out_y)) <= w) --from.y;
      while (to.y < last.y && add(out_x, fmaxf(grid.y.above2(q.y, to.y + 1), out_y)) <= w) ++to.y;
      while (from.z > 0 && add(xy, fmaxf(grid.z.below2(q.z, from.z - 1), out_z)) <= w) --from.z;
      while (to.z < last.z && add(xy, fmaxf(grid.z.above2(q.z, to.z + 1), out_z)) <= w) ++to.z;
      if (from.x == seen_from.x && from.y == seen_from.y && from.z == seen_from.z && to.x == seen_to.x &&
          to.y == seen_to.y && to.z == seen_to.z) {
        return;
      }
      reach = -1;
    }
  }
};

// ---- all entries, by lanes that work together ------------------------------------------------------------------------

// Offers every `step`-th of `count` entries from `first` on, in the order of the table: where lanes have one step, one read
// serves all of them. What stands for a grid has no distance; of a cell that is one place the rest is offered, too, to no
// effect, but for the one whose index is the cell's end: k before it are as near and come first.
template <int K, class Seen>
PREQUAL_HD void walk_all(const Point<float>& q, const Seen& view, int first, int step, int count, tree::Best<K>& best) {
  Offers<K> offers{best};
  const auto look = [&](auto several, int i) {
    constexpr int reads = decltype(several)::value;
    float d[reads], least = INFINITY;
    int index[reads];
    unsigned lowest = ~0u;
#pragma unroll
    for (int read = 0; read < reads; ++read) {
      const Entry at = view.entry(i + read * step);
      d[read] = tree::distance2(q, {at.x, at.y, at.z}), index[read] = at.index;
      least = fminf(least, d[read]);
      lowest = static_cast<unsigned>(at.index) < lowest ? static_cast<unsigned>(at.index) : lowest;
    }
    // Over all scales most points are equally far once it is rounded: without the index every four were offered, to no
    // effect (830 us where 8,000 points and 100,000 queries were walked, 2,117 for k = 8).
    const float w = best.worst();
    if (least > w || (least == w && lowest > static_cast<unsigned>(best.i[K - 1]))) return;
#pragma unroll
    for (int read = 0; read < reads; ++read) {
      if (index[read] >= 0) offers.offer(d[read], index[read]);
    }
  };
  constexpr int reads = 4;  // so many are on their way at once
  int i = first;
  for (; i + (reads - 1) * step < count; i += reads * step) look(std::integral_constant<int, reads>{}, i);
#pragma unroll 1
  for (; i < count; i += step) look(std::integral_constant<int, 1>{}, i);
  offers.flush();
}

// Adds what another lane found among other entries.
template <int K>
PREQUAL_HD void join(tree::Best<K>& best, const tree::Best<K>& other) {
#pragma unroll
  for (int place = 0; place < K; ++place) {
    const bool somebody = other.i[place] >= 0 && other.i[place] != tree::nobody;
    if (somebody) best.offer(other.d[place], other.i[place]);
  }
}

// Of a warp's 32 lanes, how many each of so many queries gets: a power of two.
PREQUAL_HD int lanes_for(int queries) {
  int lanes = 32;
  while (lanes * queries > 32) lanes /= 2;
  return lanes;
}

}  // namespace prequal::grid
