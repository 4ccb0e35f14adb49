// How the heads of a token are spread over a block: a pure function, so the CPU tests cover it.
#pragma once

#include <cstdint>

#include "prequal/occupancy.h"

namespace prequal {

struct RopePlan {
  int places;   // of a head: accesses (half layout: pairs of accesses) that a thread each takes
  int heads;    // that a block works on at a time
  int threads;  // a block; 0 where no block has enough
};

// About 256 threads, and as many heads at a time in every round as in the first: 40 heads of 8 places are 2 rounds of
// 20, not 32 and 8.
constexpr RopePlan rope_plan(int heads, int rotary, int vec, bool interleaved) {
  int places = (interleaved ? rotary : rotary / 2) / vec;
  if (places == 0) places = 1;  // nothing to rotate: only what is copied
  if (places > 1024) return {places, 0, 0};
  if (rotary == 0) return {1, 0, 256};
  const int most = places >= 256 ? 1 : 256 / places;
  const int rounds = (heads + most - 1) / most;
  const int at_once = (heads + rounds - 1) / rounds;
  return {places, at_once, whole_warps(static_cast<int64_t>(places) * at_once)};
}

}  // namespace prequal
