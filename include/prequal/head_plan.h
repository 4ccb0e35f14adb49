// How the heads of tokens are spread over blocks, and which angle a pair of a head has: pure functions, so the CPU tests
// cover them.
#pragma once

#include <cstdint>

#include "prequal/occupancy.h"

namespace prequal {

inline constexpr int widest_head = 256;

// n / divisor by a multiplication: n below 4096, the divisor at most 256. What inverse_of() is too large by, less than 1,
// makes an error of n / 2^20, less than 1 / 256, in a quotient that is at least 1 / divisor below the next whole number.
constexpr uint32_t inverse_of(int divisor) { return ((1u << 20) + divisor - 1) / divisor; }
constexpr int quotient(int n, uint32_t inverse) { return static_cast<int>((n * inverse) >> 20); }

struct HeadPlan {
  int lanes;         // that share a head: a power of two, at most a warp
  int lane_bits;     // of them
  int heads;         // of a token, in a block
  int chunks;        // blocks that share a token's heads
  int tokens;        // that a block works on at a time
  int threads;       // a block, in whole warps
  uint32_t inverse;  // of heads
};

// dim: elements of a head; vec: of an access; items: accesses of a head that a thread holds. About 256 threads, the heads
// evenly over the blocks that share a token.
constexpr HeadPlan head_plan(int dim, int vec, int items, int heads) {
  const int places = (dim / items + vec - 1) / vec;
  int bits = 0;
  while ((1 << bits) < places) ++bits;
  const int lanes = 1 << bits, most = lanes < 256 ? 256 / lanes : 1;
  const int chunks = heads > most ? (heads + most - 1) / most : 1;
  const int in_block = heads > chunks ? (heads + chunks - 1) / chunks : 1;
  const int tokens = most / in_block;
  return {
      lanes, bits, in_block, chunks, tokens, whole_warps(int64_t{1} * lanes * in_block * tokens), inverse_of(in_block)};
}

// Voxel coordinates turn a head's pairs by bands: the first D/2/3 by x, as many by y, by z; what is left is not turned.
constexpr int pairs_an_axis(int dim) { return dim / 2 / 3; }

inline constexpr int most_pairs_an_axis = widest_head / 2 / 3;

}  // namespace prequal
