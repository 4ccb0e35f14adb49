// The three ways an op can say no. No Python, no torch: the binding turns each into its Python form.
#pragma once

#include <stdexcept>
#include <string>

#if defined(__CUDACC__) || defined(__cplusplus)
static_assert(__cplusplus > 201703L, "prequal needs C++20 to be really on");  // gcc 10 calls its C++20 201709L
#endif

namespace prequal {

// The caller's mistake: ValueError. Names the argument, what was expected, what came.
struct WrongValue : std::invalid_argument {
  using std::invalid_argument::invalid_argument;
};

// The caller's mistake: TypeError.
struct WrongType : std::invalid_argument {
  using std::invalid_argument::invalid_argument;
};

// A right call that this kernel does not cover. Not an error: the reference answers, and the reason is counted.
// The reason is the name of a need that the op declares in Python.
struct Refused {
  const char* need;
};

// CUDA itself failed. The context may be gone: RuntimeError, and the op is closed on this device.
struct CudaFailure : std::runtime_error {
  using std::runtime_error::runtime_error;
};

[[noreturn]] inline void wrong_value(const char* argument, const std::string& expected, const std::string& got) {
  throw WrongValue(std::string(argument) + ": expected " + expected + ", got " + got);
}

[[noreturn]] inline void wrong_type(const char* argument, const std::string& expected, const std::string& got) {
  throw WrongType(std::string(argument) + ": expected " + expected + ", got " + got);
}

}  // namespace prequal
