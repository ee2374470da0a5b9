// Calls of the DLPack C exchange functions of another library.
//
// By their contract these functions set a Python error and do not throw. Those of torch throw C++ exceptions.
#pragma once

#include <Python.h>

#include <exception>

#include "third_party/dlpack.h"

namespace pagecore {

template <typename Call>
int guarded(Call call) noexcept {
  try {
    if (call() == 0) return 0;
    if (PyErr_Occurred() == nullptr) PyErr_SetString(PyExc_RuntimeError, "the exchange function gave no reason");
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
  } catch (...) {
    PyErr_SetString(PyExc_RuntimeError, "the exchange function threw something unknown");
  }
  return -1;
}

inline int read_array(const DLPackExchangeAPI* api, PyObject* array, DLTensor* out) noexcept {
  return guarded([&] { return api->dltensor_from_py_object_no_sync(array, out); });
}

// Return a new reference, or null with a Python error set. The callee owns `managed` in both cases.
inline PyObject* make_array(const DLPackExchangeAPI* api, DLManagedTensorVersioned* managed) noexcept {
  void* made = nullptr;
  if (guarded([&] { return api->managed_tensor_to_py_object_no_sync(managed, &made); }) != 0) return nullptr;
  return static_cast<PyObject*>(made);
}

}  // namespace pagecore
