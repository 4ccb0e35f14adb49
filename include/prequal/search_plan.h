// How an exhaustive search is spread over blocks, and how large its sample is: pure functions, so the CPU tests cover them.
#pragma once

#include <algorithm>
#include <cstdint>

namespace prequal {

inline constexpr int search_rows = 16;      // of the corpus, that a warp multiplies at a time
inline constexpr int search_groups = 1024;  // of rows, the best of each of which is known before the search begins

constexpr int search_tiles(int64_t rows) { return static_cast<int>((rows + search_rows - 1) / search_rows); }

struct SearchPlan {
  int threads, blocks;
  int tiles_a_group;  // of the sample; 0: there is none
};

// A sample of 1,024 groups of rows from 16,384 rows on: of a corpus in no order, about k rows for every sample that it has
// room for pass the bound. More queries take more of it, an eighth of the corpus at most, since what passes costs each of
// them. One block a multiprocessor; fewer where the lists of all, k keys of 8 bytes a block, took more than the 6.5th part
// of a byte a score, but half as many at least; in a small corpus one for every 16 rows.
constexpr SearchPlan search_plan(int64_t rows, int64_t k, int64_t queries, int64_t multiprocessors, int threads) {
  const int64_t tiles = search_tiles(rows);
  if (tiles < search_groups) {
    return {256, static_cast<int>(std::max<int64_t>(1, std::min(tiles, multiprocessors))), 0};
  }
  const int64_t wanted = queries <= 8 ? 1 : queries <= 32 ? 2 : 4;
  const int64_t a_group = std::max<int64_t>(1, std::min(wanted, tiles / (8 * search_groups)));
  const int64_t by_memory = std::max<int64_t>(rows / (52 * k), (multiprocessors + 1) / 2);
  return {threads, static_cast<int>(std::min(multiprocessors, by_memory)), static_cast<int>(a_group)};
}

}  // namespace prequal
