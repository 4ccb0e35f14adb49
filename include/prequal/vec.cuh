// Packed loads and stores, and the casts between storage and fp32.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace prequal {

__device__ __forceinline__ float to_float(float value) { return value; }
__device__ __forceinline__ float to_float(__half value) { return __half2float(value); }
__device__ __forceinline__ float to_float(__nv_bfloat16 value) { return __bfloat162float(value); }

template <class T>
__device__ __forceinline__ T from_float(float value);
template <>
__device__ __forceinline__ float from_float<float>(float value) {
  return value;
}
template <>
__device__ __forceinline__ __half from_float<__half>(float value) {
  return __float2half_rn(value);
}
template <>
__device__ __forceinline__ __nv_bfloat16 from_float<__nv_bfloat16>(float value) {
  return __float2bfloat16_rn(value);
}

// N values moved as one access.
template <class T, int N>
struct alignas(sizeof(T) * N) Vec {
  T at[N];
};

// 16 bytes: the widest access of one thread on sm_80 to sm_90.
template <class T>
inline constexpr int widest = 16 / static_cast<int>(sizeof(T));

template <int N, class T>
__device__ __forceinline__ Vec<T, N> load(const T* from) {
  return *reinterpret_cast<const Vec<T, N>*>(from);
}

template <class T, int N>
__device__ __forceinline__ void store(T* to, const Vec<T, N>& value) {
  *reinterpret_cast<Vec<T, N>*>(to) = value;
}

inline bool aligned(const void* pointer, int64_t stride_bytes, int bytes) {
  return reinterpret_cast<uintptr_t>(pointer) % bytes == 0 && stride_bytes % bytes == 0;
}

}  // namespace prequal
