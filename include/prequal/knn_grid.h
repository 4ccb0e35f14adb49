// The arithmetic of the kNN grid: which cell a coordinate lies in, and how near a cell can be.
//
// Cells of an axis are numbered upwards, and the number never falls as the coordinate rises. All a search relies on are two
// tables: every point in a cell >= c has a coordinate >= low[c], every point in a cell <= c one <= high[c]. A cell may then
// be left out where the rounded square of that gap exceeds the rounded squared distance held (knn_tree.h: no epsilon).
#pragma once

#include <cmath>
#include <cstdint>

#include "prequal/host_device.h"

namespace prequal::grid {

inline constexpr int most_cells = 32;  // an axis
inline constexpr int sample = 256;     // points that set the knots of a ranked axis

// Cells of equal width between the lowest and the highest coordinate. Without an extent that floats divide well (equal
// coordinates, denormal or overflowing differences) everything is in cell 0.
struct Even {
  float lo, hi, width, scale;  // scale: 1 / width, or 0

  PREQUAL_HD static Even of(float lo, float hi, int cells) {
    const float extent = sub(hi, lo);
    const bool divides = extent > 1e-30f && extent < 1e30f;
    const float width = extent / static_cast<float>(cells);
    return {lo, hi, divides ? width : 0.0f, divides ? 1.0f / width : 0.0f};
  }

  // Monotone: a rounded difference, a rounded product by a positive number and a truncation are.
  PREQUAL_HD int cell(float x, int cells) const {
    const float place = mul(sub(x, lo), scale);
    return place < static_cast<float>(cells - 1) ? (place > 0.0f ? static_cast<int>(place) : 0) : cells - 1;
  }

  // cell(x) >= c means (x - lo)(1 + e)(1 + e) / width (1 + e) >= c for some |e| <= 2^-24, so x - lo >= c width (1 - 2^-22);
  // likewise above. 2^-20 covers the rounding of c width, too; the sum with lo is rounded outwards.
  PREQUAL_HD float low(int c) const {
    if (c == 0) return lo;
    if (scale == 0.0f) return INFINITY;  // nothing is there
    return down(lo, mul(mul(static_cast<float>(c), width), 1.0f - 0x1p-20f));
  }
  PREQUAL_HD float high(int c, int cells) const {
    if (c == cells - 1 || scale == 0.0f) return hi;
    return up(lo, mul(mul(static_cast<float>(c + 1), width), 1.0f + 0x1p-20f));
  }

 private:
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

// Cells between knots: the number of knots at or below, by halving; low[c] is the c-th knot.
PREQUAL_HD int ranked_cell(float x, const float* low /*[cells]*/, int cells) {
  int cell = 0;
#pragma unroll
  for (int step = most_cells / 2; step > 0; step /= 2) {
    if (cell + step < cells && low[cell + step] <= x) cell += step;
  }
  return cell;
}

// Squared, from a coordinate to the points of cell c.
PREQUAL_HD float gap2(float x, float low, float high) {
  const float below = sub(low, x), above = sub(x, high);
  const float gap = below > above ? below : above;
  return gap > 0.0f ? mul(gap, gap) : 0.0f;
}

// Cells an axis, by what measured best: a quarter of a point a cell for the nearest alone, more for more neighbours.
constexpr int cells_for(int64_t points, int k) {
  const double wanted = static_cast<double>(points) * (k == 1 ? 4.0 : k <= 8 ? 0.5 : 0.125);
  int cells = 1;
  while (cells < most_cells && static_cast<double>(cells + 1) * (cells + 1) * (cells + 1) <= wanted) ++cells;
  return cells;
}

}  // namespace prequal::grid
