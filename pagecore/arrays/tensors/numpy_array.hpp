// The head of NumPy's array object, declared without NumPy's headers.
//
// NumPy's macros (PyArray_DATA, PyArray_STRIDES ...) read these fields in place. Every extension built against NumPy 2
// depends on their offsets, so they are fixed within a major version.
#pragma once

#include <Python.h>

namespace pagecore {

struct NumPyArray {
  PyObject_HEAD char* data;
  int ndim;
  Py_ssize_t* shape;
  Py_ssize_t* strides;
  PyObject* base;
  PyObject* descr;
  int flags;
};

inline constexpr int kNumPyWriteable = 0x0400;

}  // namespace pagecore
