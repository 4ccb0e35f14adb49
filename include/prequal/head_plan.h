// How the heads of tokens are spread over blocks, and which angle a pair of a head has: pure functions, so the CPU tests
// cover them.
#pragma once

#include <cstdint>

#include "prequal/occupancy.h"

namespace prequal {

inline constexpr int widest_head = 256;

struct HeadPlan {
  int lanes;       // that share a head: a power of two, at most a warp
  int lane_bits;   // of them
  int groups;      // of heads that a thread takes several of, in a block
  int all_groups;  // of a token
  int tokens;      // a block
  int threads;     // a block, in whole warps
};

// dim: elements of a head; vec: of an access; items: accesses of a head that a thread holds; at_once: heads that a
// thread takes. About 256 threads.
constexpr HeadPlan head_plan(int dim, int vec, int items, int heads, int at_once) {
  const int places = (dim / items + vec - 1) / vec;
  int bits = 0;
  while ((1 << bits) < places) ++bits;
  const int lanes = 1 << bits, all = (heads + at_once - 1) / at_once;
  const int most = lanes < 256 ? 256 / lanes : 1;
  const int groups = all < most ? all : most;
  const int tokens = groups > 0 ? most / groups : 1;
  return {lanes, bits, groups, all, tokens, whole_warps(int64_t{1} * lanes * groups * tokens)};
}

// Voxel coordinates turn a head's pairs by bands: the first D/2/3 by x, as many by y, by z; what is left is not turned.
constexpr int pairs_an_axis(int dim) { return dim / 2 / 3; }

inline constexpr int most_pairs_an_axis = widest_head / 2 / 3;

}  // namespace prequal
