// Rows of any width at any address, moved in 16-byte words: the arithmetic, which the CPU tests cover.
//
// A thread owns the columns [c, c + N) of a row whatever the row's address, so that sums over a column stay with it. It
// loads the one or two aligned words that hold them and shifts. It stores an aligned word made of its own last columns
// and the next lane's first ones; where a warp or the row ends, single elements.
#pragma once

#include <cstdint>

#include "prequal/host_device.h"

namespace prequal {

struct Word {
  uint32_t at[4];
};

PREQUAL_HD uint32_t funnel(uint32_t low, uint32_t high, unsigned bits /* 0 to 31 */) {
#ifdef __CUDA_ARCH__
  return __funnelshift_r(low, high, bits);
#else
  return bits ? low >> bits | high << (32 - bits) : low;
#endif
}

// The 16 bytes that begin `bytes` (0 to 15) into `low`. Selects, not an index: an array indexed at run time is memory.
PREQUAL_HD Word straddle(const Word& low, const Word& high, unsigned bytes) {
  uint32_t at[8] = {low.at[0], low.at[1], low.at[2], low.at[3], high.at[0], high.at[1], high.at[2], high.at[3]};
#pragma unroll
  for (int i = 0; i < 6; ++i) at[i] = bytes & 8 ? at[i + 2] : at[i];
#pragma unroll
  for (int i = 0; i < 5; ++i) at[i] = bytes & 4 ? at[i + 1] : at[i];
  Word out;
#pragma unroll
  for (int i = 0; i < 4; ++i) out.at[i] = funnel(at[i], at[i + 1], 8 * (bytes & 3));
  return out;
}

// Which elements a lane stores of its columns [column, column + vec), and whether it stores the word that begins
// `shift` columns into them. Every column of the row below `width` is stored by exactly one lane, exactly once.
struct RaggedStore {
  bool word;  // [column + shift, column + shift + vec), with the next lane's first `shift`
  bool low;   // its own first `shift` one by one: no lane before it has them in its word
  bool high;  // its own others one by one
};

PREQUAL_HD RaggedStore ragged_store(int lane, int column, int width, int vec, int shift) {
  const bool word = column + shift + vec <= width && (shift == 0 || lane < 31);
  return {word, lane == 0 || column + shift > width, !word};
}

// True where the words that hold [column, column + vec) end before the row does: else element by element, so that
// nothing behind the last row is touched. (The first word may begin before the row, never before its allocation.)
PREQUAL_HD bool words_inside(int column, int width, int vec, bool shifted) {
  return column + (shifted ? 2 * vec : vec) <= width;
}

}  // namespace prequal
