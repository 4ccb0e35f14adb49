// From a Python call to a launcher, the same for every op: route, convert, gate, device, stream, launch, count.
//
// A call that this path does not answer returns NotImplemented and leaves the reason in `why`; the Python side then
// takes the other road (registry.py). Exceptions are for wrong calls and for CUDA's own failures.
#pragma once

#include <cuda_runtime_api.h>
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <array>
#include <atomic>
#include <mutex>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "device_guard.h"
#include "prequal/error.h"
#include "prequal/launch.h"
#include "prequal/tensor.h"
#include "tensor_caster.h"

namespace prequal {

inline constexpr int max_devices = 64;
inline constexpr int max_ops = 256;

enum class Gate : uint8_t { ask, open, failed };

// One row an op. `gate` is written by Python (runtime/gate.py) under the GIL and read on the hot path.
struct OpState {
  std::string name;
  std::array<std::atomic<Gate>, max_devices> gate{};
  std::array<std::atomic<uint64_t>, max_devices> fast_calls{};
  std::array<std::string, max_devices> failure;  // CUDA's own words, once
};

struct State {
  std::array<OpState, max_ops> ops;
  int count = 0;
  std::atomic<int> scoped_flags{0};  // > 0: some thread or task has a scoped flag, so every call asks Python
};

inline State& state() {
  static State all;
  return all;
}

inline thread_local const char* why = "";
inline thread_local bool admitted = false;  // one shot: the next call on this thread skips route and gate

struct Call {
  bool admitted;
  bool grad;
  const Tensor* first = nullptr;
  const char* first_name = "";

  void same_device(const Tensor& tensor, const char* argument) {
    if (!first) {
      first = &tensor;
      first_name = argument;
      return;
    }
    if (tensor.device == first->device) return;
    const auto text = [](int device) {
      return device == Tensor::cpu ? std::string("cpu") : "cuda:" + std::to_string(device);
    };
    wrong_value(argument, "a tensor on " + text(first->device) + " like " + first_name, text(tensor.device));
  }
};

// ---- one argument -----------------------------------------------------------------------------------------------

template <class T>
struct FromPython;

template <>
struct FromPython<Tensor> {
  static Tensor convert(nb::handle object, const char* argument, const Call& call) {
    return tensor_from_python(object, argument, call.admitted, call.grad);
  }
};

template <>
struct FromPython<std::optional<Tensor>> {
  static std::optional<Tensor> convert(nb::handle object, const char* argument, const Call& call) {
    if (object.is_none()) return std::nullopt;
    return tensor_from_python(object, argument, call.admitted, call.grad);
  }
};

template <>
struct FromPython<bool> {
  static bool convert(nb::handle object, const char* argument, const Call&) {
    if (!PyBool_Check(object.ptr())) wrong_type(argument, "a bool", python_type(object));
    return object.ptr() == Py_True;
  }
};

template <>
struct FromPython<int64_t> {
  static int64_t convert(nb::handle object, const char* argument, const Call&) {
    if (PyBool_Check(object.ptr()) || !PyIndex_Check(object.ptr())) wrong_type(argument, "an int", python_type(object));
    const Py_ssize_t value = PyNumber_AsSsize_t(object.ptr(), nullptr);  // clips, so that the range check answers
    if (value == -1 && PyErr_Occurred()) throw nb::python_error();
    return value;
  }
};

template <>
struct FromPython<double> {
  static double convert(nb::handle object, const char* argument, const Call&) {
    if (PyBool_Check(object.ptr())) wrong_type(argument, "a float", "bool");
    const double value = PyFloat_AsDouble(object.ptr());
    if (value == -1.0 && PyErr_Occurred()) {
      PyErr_Clear();
      wrong_type(argument, "a float", python_type(object));
    }
    return value;
  }
};

// ---- one op -----------------------------------------------------------------------------------------------------

template <class R, class... A>
using Launcher = R (*)(const Context&, A...);

template <class T>
using Bare = std::remove_cvref_t<T>;

inline nb::object not_here(const char* reason) {
  why = reason;
  return nb::borrow(Py_NotImplemented);
}

template <class... T, size_t... I>
int device_of(std::tuple<T...>& arguments, Call& call, const char* const* argument_names, std::index_sequence<I...>) {
  const auto look = [&](const auto& argument, const char* name) {
    using Argument = Bare<decltype(argument)>;
    if constexpr (std::is_same_v<Argument, Tensor>) {
      call.same_device(argument, name);
    } else if constexpr (std::is_same_v<Argument, std::optional<Tensor>>) {
      if (argument) call.same_device(*argument, name);
    }
  };
  (look(std::get<I>(arguments), argument_names[I]), ...);
  return call.first ? call.first->device : Tensor::cpu;
}

template <auto launcher, class R, class... A, size_t... I>
nb::object run(OpState& op, const std::array<const char*, sizeof...(A)>& argument_names,
               const std::array<nb::handle, sizeof...(A)>& objects, Launcher<R, A...>, std::index_sequence<I...> each) {
  Call call{std::exchange(admitted, false), false};
  int device = Tensor::cpu;
  try {
    if (!torch().tensor_type) return not_here("not_attached");
    if (!call.admitted) {
      if (nb::cast<int>(invoke(torch().dispatch_modes)) != 0) return not_here("mode");
      if (!invoke(torch().functorch_level).is_none()) return not_here("functorch");
      call.grad = invoke(torch().grad_enabled).ptr() == Py_True;
    }
    std::tuple<Bare<A>...> arguments{FromPython<Bare<A>>::convert(objects[I], argument_names[I], call)...};
    device = device_of(arguments, call, argument_names.data(), each);
    if (device == Tensor::cpu) return not_here("cpu");
    if (device >= max_devices) return not_here("gate");
    if (!call.admitted && (state().scoped_flags.load(std::memory_order_relaxed) != 0 ||
                           op.gate[device].load(std::memory_order_relaxed) != Gate::open)) {
      return not_here("gate");
    }

    DeviceGuard guard(device);
    const Context context{device, current_stream(device), allocator()};
    nb::object out = to_python(launcher(context, std::get<I>(arguments)...));
    op.fast_calls[device].fetch_add(1, std::memory_order_relaxed);
    return out;
  } catch (const Detour& detour) {
    return not_here(call.admitted ? "dense" : detour.why);
  } catch (const Refused& refused) {
    return not_here(refused.need);
  } catch (const WrongValue& error) {
    throw nb::value_error(error.what());
  } catch (const WrongType& error) {
    throw nb::type_error(error.what());
  } catch (const CudaFailure& error) {
    const std::string text = op.name + " on cuda:" + std::to_string(device) + ": " + error.what();
    if (op.failure[device].empty()) op.failure[device] = text;
    op.gate[device].store(Gate::failed, std::memory_order_relaxed);
    throw std::runtime_error(text + " (the op is closed on this device; the CUDA context may be unusable: restart the process)");
  }
}

// def<ops::name>(module, "name", {argument names}): the one line an op.
template <auto launcher, class R, class... A, size_t... I>
void define(nb::module_& module, const char* name, std::array<const char*, sizeof...(A)> argument_names,
            Launcher<R, A...> typed, std::index_sequence<I...> each) {
  OpState& op = state().ops.at(state().count++);
  op.name = name;
  const auto call = [&op, argument_names, typed, each](std::conditional_t<true, nb::handle, A>... objects) {
    return run<launcher>(op, argument_names, {objects...}, typed, each);
  };
  module.def(name, call, nb::arg(argument_names[I]).none()...);
}

template <auto launcher, size_t N>
void def(nb::module_& module, const char* name, const char* const (&argument_names)[N]) {
  std::array<const char*, N> list;
  for (size_t i = 0; i < N; ++i) list[i] = argument_names[i];
  define<launcher>(module, name, list, launcher, std::make_index_sequence<N>{});
}

}  // namespace prequal
