// Viterbi decoding that keeps no origins on the way there (viterbi_decode_kept.cu), for the launcher in viterbi_decode.cu.
#pragma once

#include "prequal/tensor.h"
#include "viterbi_decode.cuh"

namespace prequal::ops::viterbi {

// Answers whether it did: not of a matrix a step, not where the workspace would be larger than it may, and not of more
// states than a block holds on a device without clusters.
bool decode_kept(const Context& context, Decode& a);

}  // namespace prequal::ops::viterbi
