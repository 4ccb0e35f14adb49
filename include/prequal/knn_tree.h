// The arithmetic of the kNN search: squared distance, its bound by a box, the order of candidates, the shape of the tree.
//
// Why a box may be skipped, with no epsilon: rounding to nearest is monotone. For every point p in the box and each axis,
// gap = max(lo - q, q - hi, 0) rounds to no more than |q - p| rounds to; squares and sums of non-negative numbers, taken in
// the same order, keep that. So bound(box) <= distance2(q, p) holds for the rounded numbers themselves, overflow included.
#pragma once

#include <climits>
#include <cmath>
#include <cstdint>
#include <type_traits>

#include "prequal/host_device.h"

namespace prequal::tree {

// A point of a plane has z = 0, which adds +0 to every sum: its distances have the bits of the two-term form.
template <class T>
struct Point {
  T x, y, z;
};

template <class T>
PREQUAL_HD bool finite(const Point<T>& p) {
  // x - x is 0 for a finite x and NaN otherwise
  return sub(p.x, p.x) == T(0) && sub(p.y, p.y) == T(0) && sub(p.z, p.z) == T(0);
}

// ((dx^2 + dy^2) + dz^2), each operation rounded once: the bits of the PyTorch reference.
template <class T>
PREQUAL_HD T squared_length(T dx, T dy, T dz) {
  return add(add(mul(dx, dx), mul(dy, dy)), mul(dz, dz));
}

template <class T>
PREQUAL_HD T distance2(const Point<T>& q, const Point<T>& p) {
  return squared_length(sub(q.x, p.x), sub(q.y, p.y), sub(q.z, p.z));
}

template <class T>
PREQUAL_HD T gap(T q, T lo, T hi) {
  const T below = sub(lo, q), above = sub(q, hi);
  const T out = below > above ? below : above;
  return out > T(0) ? out : T(0);
}

template <class T>
PREQUAL_HD T bound2(const Point<T>& q, const Point<T>& lo, const Point<T>& hi) {
  return squared_length(gap(q.x, lo.x, hi.x), gap(q.y, lo.y, hi.y), gap(q.z, lo.z, hi.z));
}

// ---- candidates: nearer first, then the lower reference index ---------------------------------------------------

inline constexpr int nobody = INT_MAX;

template <class T>
PREQUAL_HD bool comes_before(T d, int i, T other_d, int other_i) {
  return d < other_d || (d == other_d && i < other_i);
}

// The k best of what was offered, sorted, in K >= k places. The first K - k are taken by sentinels that nothing beats, so
// that the last place is always the k-th best and every index is known at compile time (registers, not local memory).
template <int K>
struct Best {
  float d[K];
  int i[K];

  // `limit`: only what comes before (limit, nobody) is ever held.
  PREQUAL_HD void clear(int k, float limit) {
#pragma unroll
    for (int place = 0; place < K; ++place) {
      const bool sentinel = place < K - k;
      d[place] = sentinel ? -1.0f : limit;
      i[place] = sentinel ? -1 : nobody;
    }
  }

  PREQUAL_HD float worst() const { return d[K - 1]; }
  PREQUAL_HD bool full() const { return i[K - 1] != nobody; }

  PREQUAL_HD void offer(float distance, int index) {
    if (!comes_before(distance, index, d[K - 1], i[K - 1])) return;
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

// ---- the tree: leaves of `fan` consecutive sorted points, boxes in groups of `fan`, a box over each group ------------

inline constexpr int fan = 32;        // a warp looks at a leaf, or at a group, in one step
inline constexpr int max_levels = 6;  // 32^6 leaves of 32 points: more than 2^31 points

// Reference `index`, or -1 for what fills a leaf up and for a point that is nobody's neighbour.
template <class T>
struct alignas(16) Labelled {
  T x, y, z;
  std::conditional_t<sizeof(T) == 8, int64_t, int32_t> index;
};

template <class T>
struct Group {
  T lo[3][fan];
  T hi[3][fan];
  int lowest[fan];   // reference index below this box
  int highest[fan];  // likewise; -1 for a box of nothing
};

struct Levels {
  int count = 0;
  int boxes[max_levels] = {};   // on each level; level 0 are the leaves', the last fits one group
  int groups[max_levels] = {};  // whole ones: the rest of the last are boxes of nothing
  int first[max_levels] = {};   // group of each level in one array
  int total = 0;                // groups
};

constexpr int64_t in_groups(int64_t boxes) { return (boxes + fan - 1) / fan; }

constexpr Levels levels_for(int64_t points) {
  Levels levels;
  int64_t boxes = in_groups(points);
  while (boxes > 0) {
    const int level = levels.count++;
    levels.boxes[level] = static_cast<int>(boxes);
    levels.groups[level] = static_cast<int>(in_groups(boxes));
    levels.first[level] = levels.total;
    levels.total += levels.groups[level];
    if (boxes <= fan) break;
    boxes = levels.groups[level];
  }
  return levels;
}

// ---- the order of the points: ranks on the axes, interleaved ---------------------------------------------------------

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

PREQUAL_HD uint32_t spread_by_two(uint32_t bits) {  // dcba -> d.c.b.a
  bits &= 0x3ff;
  bits = (bits | (bits << 8)) & 0x00ff00ff;
  bits = (bits | (bits << 4)) & 0x0f0f0f0f;
  bits = (bits | (bits << 2)) & 0x33333333;
  return (bits | (bits << 1)) & 0x55555555;
}

// How many of the sorted sample lie at or below, 1023 at most: the coordinate measured in points, not in metres. Ten steps.
template <class T>
PREQUAL_HD uint32_t rank_of(T value, const T* sorted /*[knots]*/) {
  uint32_t rank = 0;
#pragma unroll
  for (uint32_t step = knots / 2; step > 0; step /= 2) {
    if (sorted[rank + step - 1] <= value) rank += step;
  }
  return rank;
}

// The leading bits decide, so points of a plane leave the last ten unused, not every third.
template <class T>
PREQUAL_HD uint32_t key_of(const Point<T>& p, int dims, const T* sorted /*[3, knots]*/) {
  const uint32_t x = rank_of(p.x, sorted), y = rank_of(p.y, sorted + knots);
  if (dims == 2) return (spread_by_two(x) | spread_by_two(y) << 1) << 10;
  return spread(x) | spread(y) << 1 | spread(rank_of(p.z, sorted + 2 * knots)) << 2;
}

}  // namespace prequal::tree
