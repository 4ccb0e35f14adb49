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

inline constexpr int axes = 3;
inline constexpr int most_cells = 192;   // an axis: a plane of 32,768 cells has 181
inline constexpr int ranked_cells = 32;  // an axis, between knots
inline constexpr int sample = 256;       // points that set the knots

// Cells of equal width from the lowest coordinate. Without an extent that floats divide well (equal coordinates, denormal or
// overflowing differences) everything is in cell 0.
struct Even {
  float lo, hi, width, scale;  // scale: 1 / width, or 0
  int cells;

  static PREQUAL_HD bool divides(float extent) { return extent > 1e-30f && extent < 1e30f; }

  // `width` is that of all axes, `wanted` how many of it the extent takes.
  PREQUAL_HD static Even of(float lo, float hi, float width, int wanted) {
    if (!divides(sub(hi, lo)) || wanted <= 1) return {lo, hi, 0.0f, 0.0f, 1};
    return {lo, hi, width, reciprocal(width), wanted};
  }

  // Monotone: a rounded difference, a rounded product by a positive number and a truncation are.
  PREQUAL_HD int cell(float x) const {
    const float place = fminf(fmaxf(mul(sub(x, lo), scale), 0.0f), static_cast<float>(cells - 1));
#ifdef __CUDA_ARCH__
    // 2^23 + place, rounded down, has the integer in its last bits; the conversion proper runs at a quarter of the rate
    return __float_as_int(__fadd_rd(place, 0x1p23f)) - 0x4b000000;
#else
    return static_cast<int>(place);
#endif
  }

  // cell(x) >= c means (x - lo)(1 + e) scale (1 + e) >= c with |e| <= 2^-24 and scale = (1 + e') / width, |e'| <= 2^-23, so
  // x - lo >= c width (1 - 2^-21); likewise above. 2^-20 covers the rounding of c width, too; the sum with lo is rounded
  // outwards.
  PREQUAL_HD float low(int c) const {
    if (c == 0) return lo;
    return down(lo, mul(mul(static_cast<float>(c), width), 1.0f - 0x1p-20f));
  }
  PREQUAL_HD float high(int c) const {
    if (c >= cells - 1) return hi;
    return up(lo, mul(mul(static_cast<float>(c + 1), width), 1.0f + 0x1p-20f));
  }

 private:
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

// The width of candidate `j` of 32 (finer as j grows), for a cloud whose longest extent is this: from 1 to 181 cells along it.
PREQUAL_HD float candidate_width(float longest, int j) {
  return longest / exp2f(static_cast<float>(j) * (7.5f / 31.0f));
}

// How many cells of this width an extent takes. One more than the quotient: the last may be begun.
PREQUAL_HD int cells_along(float extent, float width) {
  if (!Even::divides(extent)) return 1;
  const float quotient = extent / width;
  return quotient < static_cast<float>(most_cells - 1) ? static_cast<int>(quotient + 0.5f) + (quotient < 0.5f)
                                                       : most_cells;
}

// Cells between knots: the number of knots at or below, by halving; low[c] is the c-th knot.
PREQUAL_HD int ranked_cell(float x, const float* low /*[ranked_cells], infinite where there are fewer*/) {
  int cell = 0;
#pragma unroll
  for (int step = ranked_cells / 2; step > 0; step /= 2) {
    if (low[cell + step] <= x) cell += step;
  }
  return cell;
}

// Squared, from a coordinate to what lies from `low` up, and to what lies from `high` down.
PREQUAL_HD float gap2_up(float x, float low) {
  const float gap = sub(low, x);
  return gap > 0.0f ? mul(gap, gap) : 0.0f;
}
PREQUAL_HD float gap2_down(float x, float high) {
  const float gap = sub(x, high);
  return gap > 0.0f ? mul(gap, gap) : 0.0f;
}

// Cells in all, by what measured best (8,000 points, k = 1: 1/3, 2/3, 4/3, 2 and 4 cells a point were tried).
constexpr int cells_for(int64_t points, int k) {
  const int64_t wanted = k == 1 ? points * 4 / 3 : points / 3;
  return static_cast<int>(wanted < 64 ? 64 : wanted > 32768 ? 32768 : wanted);
}

// Cells an axis of a ranked grid of so many in all.
PREQUAL_HD int ranked_cells_for(int cells) {
  int along = 1;
  while (along < ranked_cells && (along + 1) * (along + 1) * (along + 1) <= cells) ++along;
  return along;
}

}  // namespace prequal::grid
