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

// What every call pays for being watched: two loads before the launch, one increment after it.
inline bool serves(const OpState& op, int device) {
  return state().scoped_flags.load(std::memory_order_relaxed) == 0 &&
         op.gate[device].load(std::memory_order_relaxed) == Gate::open;
}

inline void count_served(OpState& op, int device) { op.fast_calls[device].fetch_add(1, std::memory_order_relaxed); }

inline thread_local const char* why = "";

// One shot: the next call on this thread skips route and gate. A trial (a qualification) is not counted as served.
enum class Admission : uint8_t { none, served, trial };
inline thread_local Admission admission = Admission::none;

struct Call {
  bool admitted;
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
    return tensor_from_python(object, argument, call.admitted);
  }
};

template <>
struct FromPython<std::optional<Tensor>> {
  static std::optional<Tensor> convert(nb::handle object, const char* argument, const Call& call) {
    if (object.is_none()) return std::nullopt;
    return tensor_from_python(object, argument, call.admitted);
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
    // a tensor has __index__ too, and on a GPU that would wait for the device
    if (PyBool_Check(object.ptr()) || !PyIndex_Check(object.ptr()) || is_torch_tensor(object)) {
      wrong_type(argument, "an int", python_type(object));
    }
    const Py_ssize_t value = PyNumber_AsSsize_t(object.ptr(), nullptr);  // clips, so that the range check answers
    if (value == -1 && PyErr_Occurred()) throw nb::python_error();
    return value;
  }
};

template <>
struct FromPython<std::optional<int64_t>> {
  static std::optional<int64_t> convert(nb::handle object, const char* argument, const Call& call) {
    if (object.is_none()) return std::nullopt;
    return FromPython<int64_t>::convert(object, argument, call);
  }
};

template <>
struct FromPython<std::string> {
  static std::string convert(nb::handle object, const char* argument, const Call&) {
    if (!PyUnicode_Check(object.ptr())) wrong_type(argument, "a str", python_type(object));
    return nb::cast<std::string>(object);
  }
};

template <>
struct FromPython<DType> {
  static DType convert(nb::handle object, const char* argument, const Call&) {
    if (Py_TYPE(object.ptr()) != Py_TYPE(torch().dtypes[0])) wrong_type(argument, "a torch.dtype", python_type(object));
    for (int code = 0; code < static_cast<int>(DType::other); ++code) {
      if (torch().dtypes[code] == object.ptr()) return static_cast<DType>(code);
    }
    return DType::other;
  }
};

template <>
struct FromPython<double> {
  static double convert(nb::handle object, const char* argument, const Call&) {
    if (PyBool_Check(object.ptr()) || is_torch_tensor(object)) wrong_type(argument, "a float", python_type(object));
    const double value = PyFloat_AsDouble(object.ptr());
    if (value == -1.0 && PyErr_Occurred()) {
      PyErr_Clear();
      wrong_type(argument, "a float", python_type(object));
    }
    return value;
  }
};

template <>
struct FromPython<std::optional<double>> {
  static std::optional<double> convert(nb::handle object, const char* argument, const Call& call) {
    if (object.is_none()) return std::nullopt;
    return FromPython<double>::convert(object, argument, call);
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
  const Admission admission = std::exchange(prequal::admission, Admission::none);
  Call call{admission != Admission::none};
  int device = Tensor::cpu;
  try {
    if (!torch().tensor_type) return not_here("not_attached");
    // functorch needs no question: its tensors have no memory, and are found out ("foreign") when they are looked at
    if (!call.admitted) {
      if (PyLong_AsLong(invoke(torch().dispatch_modes).ptr()) != 0) return not_here("mode");
      if (forward_level_open()) return not_here("forward");
    }
    std::tuple<Bare<A>...> arguments{FromPython<Bare<A>>::convert(objects[I], argument_names[I], call)...};
    device = device_of(arguments, call, argument_names.data(), each);
    if (device == Tensor::cpu) return not_here("cpu");
    if (device >= max_devices) return not_here("gate");
    if (!call.admitted && !serves(op, device)) return not_here("gate");

    DeviceGuard guard(device);
    const Context context{device, current_stream(device), allocator()};
    nb::object out;
    if constexpr (std::is_void_v<R>) {  // it writes into its arguments
      launcher(context, std::get<I>(arguments)...);
      out = nb::none();
    } else {
      out = to_python(launcher(context, std::get<I>(arguments)...));
    }
    if (admission != Admission::trial) count_served(op, device);
    return out;
  } catch (const Detour& detour) {
    return not_here(call.admitted ? "dense" : detour.why);
  } catch (const Refused& refused) {
    return not_here(refused.need);
  } catch (const CudaFailure& error) {
    const std::string text = op.name + " on cuda:" + std::to_string(device) + ": " + error.what();
    if (op.failure[device].empty()) op.failure[device] = text;
    op.gate[device].store(Gate::failed, std::memory_order_relaxed);
    throw std::runtime_error(
        text + " (the op is closed on this device; the CUDA context may be unusable: restart the process)");
  }
}

// METH_FASTCALL rather than nb::cpp_function: with arguments that may be None, nanobind's dispatch compares keywords and
// defaults that the generated Python function has already put in order.
template <auto launcher, class R, class... A, size_t... I>
void define(nb::module_& module, const char* name, const char* const* argument_names, Launcher<R, A...> typed,
            std::index_sequence<I...> each) {
  static OpState& op = state().ops.at(state().count++);
  static const std::array<const char*, sizeof...(A)> argument_list{argument_names[I]...};
  op.name = name;

  const auto call = [](PyObject*, PyObject* const* objects, Py_ssize_t count) -> PyObject* {
    if (count != static_cast<Py_ssize_t>(sizeof...(A))) {
      PyErr_Format(PyExc_TypeError, "%s: expected %zd arguments in order, got %zd", op.name.c_str(),
                   static_cast<Py_ssize_t>(sizeof...(A)), count);
      return nullptr;
    }
    try {
      return run<launcher>(op, argument_list, {nb::handle(objects[I])...}, Launcher<R, A...>{launcher},
                           std::index_sequence<I...>{})
          .release()
          .ptr();
    } catch (nb::python_error& error) {
      error.restore();
    } catch (const WrongValue& error) {
      PyErr_SetString(PyExc_ValueError, error.what());
    } catch (const WrongType& error) {
      PyErr_SetString(PyExc_TypeError, error.what());
    } catch (const std::exception& error) {
      PyErr_SetString(PyExc_RuntimeError, error.what());
    }
    return nullptr;
  };
  using FastCall = PyObject* (*)(PyObject*, PyObject* const*, Py_ssize_t);
  static const std::string signature = [] {
    std::string text = op.name + "(";
    for (const char* argument : argument_list) text += std::string(argument) + ", ";
    return text + "/)\n--\n\nNotImplemented where another road answers: why() says why.";
  }();
  static PyMethodDef method{name,
                            reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(static_cast<FastCall>(call))),
                            METH_FASTCALL, signature.c_str()};
  module.attr(name) = nb::steal(PyCFunction_NewEx(&method, nullptr, nullptr));
  (void)typed, (void)each;
}

// def<ops::name>(module, "name", {argument names}): the one line an op.
template <auto launcher, size_t N>
void def(nb::module_& module, const char* name, const char* const (&argument_names)[N]) {
  define<launcher>(module, name, argument_names, launcher, std::make_index_sequence<N>{});
}

}  // namespace prequal
