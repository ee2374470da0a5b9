// Translation of C++ exceptions to Python exceptions.
//
// Cython calls raise_python_error() in the catch block of every `except +raise_python_error` function, with the GIL
// held.
#pragma once

#include <Python.h>

#include <exception>
#include <new>
#include <stdexcept>
#include <vector>

#include "pagecore/native/checks.hpp"

namespace pagecore {

[[nodiscard]] inline const char* python_name(ErrorKind kind) {
  switch (kind) {
    case ErrorKind::OutOfBlocks: return "OutOfBlocks";
    case ErrorKind::OutOfRows: return "OutOfRows";
    case ErrorKind::NotEnoughMemory: return "NotEnoughMemory";
    case ErrorKind::InvalidBlock: return "InvalidBlock";
    case ErrorKind::DoubleFree: return "DoubleFree";
    case ErrorKind::InvalidSequence: return "InvalidSequence";
    case ErrorKind::ShapeError: return "ShapeError";
    case ErrorKind::UnsupportedDtype: return "UnsupportedDtype";
    case ErrorKind::UnsupportedOption: return "UnsupportedOption";
    case ErrorKind::DeviceError: return "DeviceError";
    case ErrorKind::Internal: return "PagecoreError";
  }
  return "PagecoreError";
}

// Return an int for one group, a tuple of ints for several, or NULL with a Python error set.
[[nodiscard]] inline PyObject* python_per_group(const std::vector<int64_t>& values) {
  if (values.size() == 1) return PyLong_FromLongLong(values[0]);
  PyObject* tuple = PyTuple_New(static_cast<Py_ssize_t>(values.size()));
  if (tuple == nullptr) return nullptr;
  for (size_t i = 0; i < values.size(); ++i) {
    PyObject* value = PyLong_FromLongLong(values[i]);
    if (value == nullptr) {
      Py_DECREF(tuple);
      return nullptr;
    }
    PyTuple_SET_ITEM(tuple, static_cast<Py_ssize_t>(i), value);
  }
  return tuple;
}

inline void set_python_error(const Error& error) {
  PyObject* module = PyImport_ImportModule("pagecore.errors");
  if (module == nullptr) return;
  PyObject* type = PyObject_GetAttrString(module, python_name(error.kind()));
  Py_DECREF(module);
  if (type == nullptr) return;
  PyObject* raised = nullptr;
  if (error.kind() == ErrorKind::OutOfBlocks) {
    PyObject* requested = python_per_group(error.requested());
    PyObject* available = requested != nullptr ? python_per_group(error.available()) : nullptr;
    if (available != nullptr) raised = PyObject_CallFunction(type, "sOO", error.what(), requested, available);
    Py_XDECREF(requested);
    Py_XDECREF(available);
  } else {
    raised = PyObject_CallFunction(type, "s", error.what());
  }
  if (raised != nullptr) {
    PyErr_SetObject(type, raised);
    Py_DECREF(raised);
  }
  Py_DECREF(type);
}

inline void raise_python_error() {
  try {
    throw;
  } catch (const Error& error) {
    set_python_error(error);
  } catch (const std::bad_alloc&) {
    PyErr_NoMemory();
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
  } catch (...) {
    PyErr_SetString(PyExc_RuntimeError, "an unknown C++ exception reached Python");
  }
}

}  // namespace pagecore
