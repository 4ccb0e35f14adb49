// How a row operation is spread over threads: a pure function of the row, so the CPU tests cover every width.
#pragma once

#include <cstdint>

namespace prequal {

enum class RowKind {
  warp,   // a row a warp, several rows a block, the row in registers
  block,  // a row a block, the row in registers
  loop    // a row a block, read twice
};

struct RowPlan {
  RowKind kind;
  int items;    // accesses a thread holds in registers (1, 2, 4); 1 for loop
  int threads;  // a block
  int rows;     // a block
};

// width: elements a row; vec: elements an access. A leftover of idle threads costs a whole block's slot, so threads
// follow the row. 128 to 512 threads with 2 to 4 accesses each keeps enough loads in flight for the copy rate.
constexpr RowPlan row_plan(int64_t width, int vec) {
  const int64_t accesses = (width + vec - 1) / vec;
  const auto items_for = [&](int64_t threads) { return accesses <= threads ? 1 : accesses <= 2 * threads ? 2 : 4; };
  if (accesses <= 32 * 4) return {RowKind::warp, items_for(32), 128, 4};
  if (accesses <= 1024 * 4) {
    // 2 accesses a thread until the block would pass 512 threads
    const int items = accesses <= 2 * 512 ? 2 : 4;
    const int64_t threads = (accesses + items - 1) / items;
    return {RowKind::block, items, static_cast<int>((threads + 31) / 32 * 32), 1};
  }
  return {RowKind::loop, 1, 1024, 1};
}

}  // namespace prequal
