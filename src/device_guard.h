// Makes a device current for one call and puts back exactly what was there before, which cudaSetDevice cannot: setting
// device 0 back would create a context on a GPU that this process may never have touched.
#pragma once

#include <cuda_runtime_api.h>

#include "prequal/launch.h"

namespace prequal {

class DeviceGuard {
 public:
  explicit DeviceGuard(int device) {
    int current = -1;
    check(cudaGetDevice(&current), "cudaGetDevice");
    if (current == device) return;

    check(driver().get_current(&previous_), "cuCtxGetCurrent");
    check(cudaSetDevice(device), "cudaSetDevice");
    changed_ = true;
  }

  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;

  ~DeviceGuard() {
    if (changed_) driver().set_current(previous_);
  }

 private:
  struct Driver {  // found through the runtime: libcuda is never needed to load this module
    int (*get)(void**) = nullptr;
    int (*set)(void*) = nullptr;

    cudaError_t get_current(void** context) const {
      return get && get(context) == 0 ? cudaSuccess : cudaErrorSymbolNotFound;
    }
    void set_current(void* context) const {
      if (set) set(context);
    }
  };

  static const Driver& driver() {
    static const Driver found = [] {
      Driver functions;
      cudaDriverEntryPointQueryResult result;
      constexpr unsigned version = 12000;  // both are far older
      cudaGetDriverEntryPointByVersion("cuCtxGetCurrent", reinterpret_cast<void**>(&functions.get), version,
                                       cudaEnableDefault, &result);
      cudaGetDriverEntryPointByVersion("cuCtxSetCurrent", reinterpret_cast<void**>(&functions.set), version,
                                       cudaEnableDefault, &result);
      return functions;
    }();
    return found;
  }

  bool changed_ = false;
  void* previous_ = nullptr;
};

}  // namespace prequal
