// Launching a kernel: errors are caught at the launch, and every kernel that can be launched is known beforehand, with the
// op it serves, so that an op's are loaded before it opens (a first launch that loads a module breaks a graph capture).
#pragma once

#include <cuda_runtime_api.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <string>
#include <vector>

#include "prequal/error.h"
#include "prequal/occupancy.h"
#include "prequal/tensor.h"

namespace prequal {

struct Kernel {
  const void* function;
  const char* basename;  // of the op whose files launch it
};

// Every kernel of the module, filled before main().
inline std::vector<Kernel>& kernels() {
  static std::vector<Kernel> all;
  return all;
}

template <size_t N>
struct Text {
  char at[N];
  consteval Text(const char (&text)[N]) { std::copy_n(text, N, at); }
};

template <Text text>
struct FileOf {
  static constexpr const char* basename = text.at;
};

// The file that is compiled. Each .cu that launches says whose it is, `struct Unit : FileOf<"rms_norm"> {};`: in an unnamed
// namespace, so that every file has its own, and one that says nothing does not compile.
namespace ops {
namespace {
struct Unit;
}
}  // namespace ops

inline void check(cudaError_t status, const char* what) {
  if (status == cudaSuccess) return;
  cudaGetLastError();  // else the next library call that looks at the last error fails for this one's sake
  throw CudaFailure(std::string(what) + ": " + cudaGetErrorName(status) + ": " + cudaGetErrorString(status));
}

// Instantiating launch<kernel> is what registers the kernel, for the file that does so: there is no list to keep.
template <auto kernel, class File = ops::Unit>
struct Registered {
  static inline const bool done = [] {
    kernels().push_back({reinterpret_cast<const void*>(kernel), File::basename});
    return true;
  }();
};

inline int attribute_of(int device, cudaDeviceAttr attribute) {
  int value = 0;
  check(cudaDeviceGetAttribute(&value, attribute, device), "device attribute");
  return value;
}

// With more dynamic shared memory than the 48 KB that need no asking: the most that the device gives is asked for, once.
template <auto kernel>
void allow_shared(const Context& context) {
  static std::array<std::atomic<bool>, 64> asked{};  // by device
  auto& done = asked.at(static_cast<size_t>(context.device));
  if (done.load(std::memory_order_relaxed)) return;
  const auto* function = reinterpret_cast<const void*>(kernel);
  cudaFuncAttributes attributes;
  check(cudaFuncGetAttributes(&attributes, function), "function attributes");
  const int most = attribute_of(context.device, cudaDevAttrMaxSharedMemoryPerBlockOptin);
  const int fixed = static_cast<int>(attributes.sharedSizeBytes);
  check(cudaFuncSetAttribute(function, cudaFuncAttributeMaxDynamicSharedMemorySize, most - fixed), "shared memory");
  done.store(true, std::memory_order_relaxed);
}

template <auto kernel, class... Args>
void launch_with_shared(const Context& context, dim3 grid, dim3 block, int shared_bytes, Args... args) {
  (void)Registered<kernel>::done;
  allow_shared<kernel>(context);
  void* pointers[] = {const_cast<void*>(static_cast<const void*>(&args))...};
  const auto stream = static_cast<cudaStream_t>(context.stream);
  const auto bytes = static_cast<size_t>(shared_bytes);
  check(cudaLaunchKernel(reinterpret_cast<const void*>(kernel), grid, block, pointers, bytes, stream), "launch");
}

template <auto kernel, class... Args>
void launch(const Context& context, dim3 grid, dim3 block, Args... args) {
  (void)Registered<kernel>::done;
  void* pointers[] = {const_cast<void*>(static_cast<const void*>(&args))...};
  const auto stream = static_cast<cudaStream_t>(context.stream);
  check(cudaLaunchKernel(reinterpret_cast<const void*>(kernel), grid, block, pointers, 0, stream), "launch");
}

// `blocks` neighbours of the grid at a time on one GPC, so that they reach each other's shared memory.
inline cudaLaunchConfig_t in_clusters(const Context& context, cudaLaunchAttribute& together, int blocks, dim3 grid,
                                      dim3 block, int shared_bytes) {
  together.id = cudaLaunchAttributeClusterDimension;
  together.val.clusterDim = {static_cast<unsigned>(blocks), 1, 1};
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = block;
  config.dynamicSmemBytes = static_cast<size_t>(shared_bytes);
  config.stream = static_cast<cudaStream_t>(context.stream);
  config.attrs = &together;
  config.numAttrs = 1;
  return config;
}

template <auto kernel, class... Args>
void launch_clusters(const Context& context, int blocks, dim3 grid, dim3 block, int shared_bytes, Args... args) {
  (void)Registered<kernel>::done;
  if (shared_bytes > 0) allow_shared<kernel>(context);
  void* pointers[] = {const_cast<void*>(static_cast<const void*>(&args))...};
  cudaLaunchAttribute together{};
  const auto config = in_clusters(context, together, blocks, grid, block, shared_bytes);
  check(cudaLaunchKernelExC(&config, reinterpret_cast<const void*>(kernel), pointers), "launch");
}

// A figure that does not change while the process lives, asked for once a device. `Key` tells the figures apart.
template <class Key, class Ask>
int remembered(int device, Ask&& ask) {
  static std::array<std::atomic<int>, 64> known{};  // 0: not asked yet; else one more than the answer
  auto& place = known.at(static_cast<size_t>(device));
  if (const int found = place.load(std::memory_order_relaxed)) return found - 1;
  const int answer = ask();
  place.store(answer + 1, std::memory_order_relaxed);
  return answer;
}

inline int multiprocessors(const Context& context) {
  struct Key;
  return remembered<Key>(context.device, [&] {
    int count = 0;
    check(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, context.device), "device attribute");
    return count;
  });
}

struct SharedMemory {
  int multiprocessor, block;  // bytes: what a multiprocessor has, and what a block may ask for
};

inline SharedMemory shared_memory(const Context& context) {
  struct Whole;
  struct Block;
  return {remembered<Whole>(context.device,
                            [&] { return attribute_of(context.device, cudaDevAttrMaxSharedMemoryPerMultiprocessor); }),
          remembered<Block>(context.device,
                            [&] { return attribute_of(context.device, cudaDevAttrMaxSharedMemoryPerBlockOptin); })};
}

// Clusters need sm_90 and code made for it: code of an older architecture on a newer GPU, as test builds have it, has
// none.
template <auto kernel>
bool has_clusters(const Context& context) {
  struct Key;
  (void)Registered<kernel>::done;
  return remembered<Key>(context.device, [] {
           cudaFuncAttributes attributes;
           check(cudaFuncGetAttributes(&attributes, reinterpret_cast<const void*>(kernel)), "function attributes");
           return std::min(attributes.ptxVersion, attributes.binaryVersion) >= 90 ? 1 : 0;
         }) != 0;
}

template <auto kernel>
int registers_of(const Context& context) {
  struct Key;
  (void)Registered<kernel>::done;
  return remembered<Key>(context.device, [] {
    cudaFuncAttributes attributes;
    check(cudaFuncGetAttributes(&attributes, reinterpret_cast<const void*>(kernel)), "function attributes");
    return attributes.numRegs;
  });
}

// May begin before the kernel that was launched before it has ended, and waits for that one where it says so (early.cuh).
// What it reads or writes before must be settled when that one begins: that one is launched the usual way, or waits before
// it lets this one begin.
template <auto kernel, class... Args>
void launch_early(const Context& context, dim3 grid, dim3 block, Args... args) {
  if (!has_clusters<kernel>(context)) return launch<kernel>(context, grid, block, args...);  // as old as clusters are
  void* pointers[] = {const_cast<void*>(static_cast<const void*>(&args))...};
  cudaLaunchAttribute early{};
  early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  early.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = block;
  config.stream = static_cast<cudaStream_t>(context.stream);
  config.attrs = &early;
  config.numAttrs = 1;
  check(cudaLaunchKernelExC(&config, reinterpret_cast<const void*>(kernel), pointers), "launch");
}

// How many blocks of this kernel the device holds at a time.
template <auto kernel>
int64_t resident_blocks(const Context& context, int threads) {
  return static_cast<int64_t>(multiprocessors(context)) * blocks_by_registers(registers_of<kernel>(context), threads);
}

// How many clusters of this kernel the device holds at a time: fewer than its multiprocessors have room for, since a
// cluster lies within one GPC. 0 where it holds none. One answer for each kernel, `blocks` and `Class` of launch.
template <auto kernel, int blocks, class Class>
int64_t resident_clusters(const Context& context, int threads, int shared_bytes) {
  struct Key;
  (void)Registered<kernel>::done;
  return remembered<Key>(context.device, [&] {
    const auto* function = reinterpret_cast<const void*>(kernel);
    allow_shared<kernel>(context);
    if (blocks > 8) {
      check(cudaFuncSetAttribute(function, cudaFuncAttributeNonPortableClusterSizeAllowed, 1), "cluster size");
    }
    cudaLaunchAttribute together{};
    const auto config = in_clusters(context, together, blocks, dim3(blocks), dim3(threads), shared_bytes);
    int found = 0;
    check(cudaOccupancyMaxActiveClusters(&found, function, &config), "resident clusters");
    return found;
  });
}

}  // namespace prequal
