// The arithmetic of the kNN tree: squared distance, its bound by a box, the order of candidates, the shape of the tree.
//
// Why a box may be skipped, with no epsilon: rounding to nearest is monotone. For every point p in the box and each axis,
// gap = max(lo - q, q - hi, 0) rounds to no more than |q - p| rounds to; squares and sums of non-negative numbers, taken in
// the same order, keep that. So bound(box) <= distance2(q, p) holds for the rounded numbers themselves, overflow included.
#pragma once

#include <climits>
#include <cmath>
#include <cstdint>

#include "prequal/host_device.h"

namespace prequal::tree {

struct Point {
  float x, y, z;
};

PREQUAL_HD bool finite(const Point& p) {
  // x - x is 0 for a finite x and NaN otherwise
  return sub(p.x, p.x) == 0.0f && sub(p.y, p.y) == 0.0f && sub(p.z, p.z) == 0.0f;
}

// ((dx^2 + dy^2) + dz^2), each operation rounded once: the bits of the PyTorch reference.
PREQUAL_HD float squared_length(float dx, float dy, float dz) {
  return add(add(mul(dx, dx), mul(dy, dy)), mul(dz, dz));
}

PREQUAL_HD float distance2(const Point& q, const Point& p) {
  return squared_length(sub(q.x, p.x), sub(q.y, p.y), sub(q.z, p.z));
}

PREQUAL_HD float gap(float q, float lo, float hi) {
  const float below = sub(lo, q), above = sub(q, hi);
  const float out = below > above ? below : above;
  return out > 0.0f ? out : 0.0f;
}

PREQUAL_HD float bound2(const Point& q, const Point& lo, const Point& hi) {
  return squared_length(gap(q.x, lo.x, hi.x), gap(q.y, lo.y, hi.y), gap(q.z, lo.z, hi.z));
}

// ---- candidates: nearer first, then the lower reference index ---------------------------------------------------

inline constexpr int nobody = INT_MAX;

PREQUAL_HD bool comes_before(float d, int i, float other_d, int other_i) {
  return d < other_d || (d == other_d && i < other_i);
}

// The k best of what was offered, sorted, in K >= k places. The first K - k are taken by sentinels that nothing beats, so
// that the last place is always the k-th best and every index is known at compile time (registers, not local memory).
template <int K>
struct Best {
  float d[K];
  int i[K];

  PREQUAL_HD void clear(int k) {
#pragma unroll
    for (int place = 0; place < K; ++place) {
      const bool sentinel = place < K - k;
      d[place] = sentinel ? -1.0f : INFINITY;
      i[place] = sentinel ? -1 : nobody;
    }
  }

  PREQUAL_HD float worst() const { return d[K - 1]; }

  PREQUAL_HD bool wants(float distance, int lowest_index) const {
    return comes_before(distance, lowest_index, d[K - 1], i[K - 1]);
  }

  PREQUAL_HD void offer(float distance, int index) {
    if (!wants(distance, index)) return;
    d[K - 1] = distance;
    i[K - 1] = index;
#pragma unroll
    for (int place = K - 1; place > 0; --place) {
      const bool swap = comes_before(d[place], i[place], d[place - 1], i[place - 1]);
      const float near_d = swap ? d[place] : d[place - 1], far_d = swap ? d[place - 1] : d[place];
      const int near_i = swap ? i[place] : i[place - 1], far_i = swap ? i[place - 1] : i[place];
      d[place - 1] = near_d, d[place] = far_d;
      i[place - 1] = near_i, i[place] = far_i;
    }
  }
};

// ---- the tree: leaves of `fan` consecutive sorted points, `fan` nodes under a node ---------------------------------

inline constexpr int fan = 8;
inline constexpr int max_levels = 10;  // 8^10 leaves of 8 points: more than 2^31 points

struct Levels {
  int count = 0;
  int nodes[max_levels] = {};      // on each level, made up to whole groups of `fan`; level 0 are the leaves
  int64_t first[max_levels] = {};  // of each level in one array
  int64_t total = 0;
};

// A group under one node is always `fan` wide (the rest are boxes of nothing), so a look at it has no bounds to check.
inline Levels levels_for(int64_t points) {
  Levels levels;
  if (points == 0) return levels;
  int64_t nodes = (points + fan - 1) / fan;
  while (true) {
    nodes = (nodes + fan - 1) / fan * fan;
    levels.nodes[levels.count] = static_cast<int>(nodes);
    levels.first[levels.count] = levels.total;
    levels.total += nodes;
    ++levels.count;
    if (nodes == fan) return levels;
    nodes /= fan;
  }
}

// What waits on a traversal's stack at most: all but one of each group on the way down.
inline constexpr int max_stack = (fan - 1) * max_levels;

// ---- the order of the points: 10 bits an axis, interleaved -----------------------------------------------------------

inline constexpr int knots = 1024;  // sorted sample coordinates an axis
inline constexpr int key_bits = 30;
inline constexpr uint32_t last_key = (1u << key_bits) - 1;

// How many leading bits of the key put this many points in order, in whole passes of a radix sort (8 bits): a cell holds a
// leaf or less. More bits order points inside a leaf, which nobody asks for.
constexpr int sorted_bits(int64_t points) {
  int bits = 8;
  while (bits < key_bits && (int64_t{1} << bits) < points) bits += 8;
  return bits < key_bits ? bits : key_bits;
}

PREQUAL_HD uint32_t spread(uint32_t bits) {  // ...dcba -> ..d..c..b..a
  bits &= 0x3ff;
  bits = (bits | (bits << 16)) & 0x030000ff;
  bits = (bits | (bits << 8)) & 0x0300f00f;
  bits = (bits | (bits << 4)) & 0x030c30c3;
  return (bits | (bits << 2)) & 0x09249249;
}

// How many of the sorted sample lie at or below: the coordinate measured in points, not in metres. Ten steps.
PREQUAL_HD uint32_t rank_of(float value, const float* sorted /*[knots]*/) {
  uint32_t rank = 0;
#pragma unroll
  for (uint32_t step = knots / 2; step > 0; step /= 2) {
    if (sorted[rank + step - 1] <= value) rank += step;
  }
  return rank;
}

PREQUAL_HD uint32_t key_of(const Point& p, const float* sorted /*[3, knots]*/) {
  return spread(rank_of(p.x, sorted)) | spread(rank_of(p.y, sorted + knots)) << 1 |
         spread(rank_of(p.z, sorted + 2 * knots)) << 2;
}

}  // namespace prequal::tree
