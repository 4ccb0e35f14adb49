// The Euclidean norms of the rows of x [n, D], one over them, or their squares, [n].
// A team of 4 to 32 lanes takes two rows at a time, 16 bytes a lane and access; one launch for all rows.
// Bytes: n D sizeof(T) read, n 4 written.
// Numerics: fp32 sums of squares, a lane's in the order of its columns, then halves of the team; roots and quotients are
// rounded once. The order of additions depends on D alone: two runs agree bit for bit.
#include <optional>
#include <string>
#include <utility>

#include "ops.h"
#include "prequal/dispatch.h"
#include "prequal/launch.h"
#include "prequal/must_be.h"
#include "prequal/norms.cuh"
#include "prequal/vec.cuh"

namespace prequal::ops {
namespace {

struct Unit : FileOf<"row_norms"> {};

// Measured on an H200, a million rows of bfloat16, 8 lanes and 2 rows: 33, 118 and 452 us for D of 64, 256 and 1,024, which is
// 3.9 to 4.5 TB/s. With 32 lanes 113, 124 and 449; a single row a team of 8 takes 40, 118 and 449.
constexpr int threads = 256;
constexpr int rows_a_team = 2;
constexpr int64_t most_rows = int64_t{1} << 31, most_width = 1 << 30;

struct Call {
  const void* x;  // [n, D]
  int64_t stride, rows;
  int width;
  float* out;  // [n]
};

template <NormForm F, bool Ragged, int Lanes, class T>
__global__ void __launch_bounds__(threads) norms_kernel(Call a) {
  constexpr int N = widest<T>, R = rows_a_team;
  const int lane = threadIdx.x % Lanes;
  const int64_t first = (static_cast<int64_t>(blockIdx.x) * threads + threadIdx.x) / Lanes * R;
  const T* row[R];
#pragma unroll
  for (int r = 0; r < R; ++r) row[r] = static_cast<const T*>(a.x) + min(first + r, a.rows - 1) * a.stride;

  float sum[R] = {};
  for (int column = lane * N; column < a.width; column += Lanes * N) {
    Packet<T> packet[R];
#pragma unroll
    for (int r = 0; r < R; ++r) packet[r] = load_packet<Ragged, true>(row[r], column, a.width);
#pragma unroll
    for (int r = 0; r < R; ++r) add_squares(sum[r], packet[r]);
  }

#pragma unroll
  for (int r = 0; r < R; ++r) {
#pragma unroll
    for (int step = Lanes / 2; step > 0; step /= 2) sum[r] += __shfl_xor_sync(0xffffffffu, sum[r], step);
    if (lane == 0 && first + r < a.rows) a.out[first + r] = norm_of_squares<F>(sum[r]);
  }
}

template <NormForm F, class T>
void run(const Context& context, const Call& a) {
  const bool whole = aligned(a.x, a.stride * static_cast<int64_t>(sizeof(T)), 16) && a.width % widest<T> == 0;
  const auto start = [&]<bool Ragged, int Lanes>() {
    constexpr int64_t rows_a_block = threads / Lanes * rows_a_team;
    const dim3 grid(static_cast<unsigned>((a.rows + rows_a_block - 1) / rows_a_block));
    launch<norms_kernel<F, Ragged, Lanes, T>>(context, grid, dim3(threads), a);
  };
  const auto with_lanes = [&]<bool Ragged>() {
    if (a.width <= 32 * widest<T>) {
      start.template operator()<Ragged, 8>();
    } else {
      start.template operator()<Ragged, 32>();
    }
  };
  if (whole) {
    with_lanes.template operator()<false>();
  } else {
    with_lanes.template operator()<true>();
  }
}

}  // namespace

Buffer row_norms(const Context& context, const Tensor& x /*[n, D]*/, const std::string& form) {
  must_be_floating(x, "x");
  if (x.rank != 2) wrong_value("x", "shape [n, D]", shape_of(x));
  const bool plain = form == "norm", inverse = form == "inverse";
  if (!plain && !inverse && form != "square") wrong_value("form", "'norm', 'inverse' or 'square'", "'" + form + "'");

  std::optional<Buffer> out;
  dispatch(x.dtype, Floats{}, [&]<class T>() {
    if (x.shape[0] > most_rows || x.shape[1] > most_width) throw Refused{"size"};
    if (x.shape[1] > 1 && x.stride[1] != 1) throw Refused{"unit_stride"};
    out.emplace(context.empty({x.shape[0]}, DType::f32));
    if (x.shape[0] == 0) return;
    const Call a{x.data, x.stride[0], x.shape[0], static_cast<int>(x.shape[1]), out->template as<float>()};
    if (plain) {
      run<NormForm::norm, T>(context, a);
    } else if (inverse) {
      run<NormForm::inverse, T>(context, a);
    } else {
      run<NormForm::square, T>(context, a);
    }
  });
  return std::move(*out);
}

}  // namespace prequal::ops
