// Which states of a sequence a block of a cluster owns: pure functions, so the CPU tests cover them.
#pragma once

#include "prequal/host_device.h"

namespace prequal {

// The states of `blocks` blocks, in groups of `columns` that a thread has, as evenly as that goes: the first state of block
// `rank`; of `blocks` itself the end, which may lie past the last state. From `columns * (blocks - 1) + 1` states on every
// block has one: one that had none would send nothing, so nobody would wait for it, and be left behind its barriers' phases.
PREQUAL_HD constexpr int first_state(int states, int columns, int blocks, int rank) {
  return rank * ((states + columns - 1) / columns) / blocks * columns;
}

// Of the block that has the most.
PREQUAL_HD constexpr int most_states(int states, int columns, int blocks) {
  return ((states + columns - 1) / columns + blocks - 1) / blocks * columns;
}

}  // namespace prequal
