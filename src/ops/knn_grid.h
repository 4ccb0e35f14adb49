// The search of a cloud that fits shared memory (knn_grid.cu), for the launchers in knn.cu.
#pragma once

#include "knn_cloud.cuh"
#include "prequal/tensor.h"

namespace prequal::ops::spatial {

struct GridCall {
  Cloud queries, references;
  int k;
  float limit;  // squared: what is further, or infinitely far without an index, does not count
};

// Whether the points fit this device's shared memory, with their cells, and the neighbours the registers.
bool grid_serves(int device, const GridCall& call);

void grid_search(const Context& context, const GridCall& call, float* dist2 /*[N, k]*/, int64_t* idx /*[N, k]*/,
                 int64_t* counts /*[N] or null*/);
void grid_gather(const Context& context, const GridCall& call, const ValueRows& values);

}  // namespace prequal::ops::spatial
