// Where the pieces of long rows of a CSR lie: pure functions, so the CPU tests cover them.
#pragma once

#include <cstdint>

#include "prequal/host_device.h"

namespace prequal {

inline constexpr int edges_a_piece = 128;

// A chunk of edges meets at most two rows that are longer than two chunks: the one that has its first edge, piece 0, and one
// that begins later, piece 1. Which is taken first: where the first row of all begins within the chunk, as that of a slice
// of a row_ptr may, no row has the chunk's first edge. row_of(place): the last row that begins there or before, else row 0.
struct FirstPiece {
  int64_t row;
  int piece;
};

template <class Place, class RowOf, class BeginOf>
PREQUAL_HD FirstPiece first_piece(Place low, Place high, RowOf&& row_of, BeginOf&& begin_of) {
  const int64_t row = row_of(low);
  if (begin_of(row) <= low) return {row, 0};
  return {row_of(static_cast<Place>(high - 1)), 1};
}

PREQUAL_HD constexpr int64_t piece_slot(int64_t chunk, int piece) { return 2 * chunk + piece; }

// As which piece of a chunk a row was taken whose first edge is `begin`, in the chunk `first`.
template <class Place>
PREQUAL_HD constexpr int piece_of(int64_t chunk, int64_t first, Place begin) {
  return chunk == first && begin % edges_a_piece != 0;
}

}  // namespace prequal
