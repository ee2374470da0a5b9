# Sealed types: only pagecore makes their objects, because an object made by hand would have no native structure.
cdef extern from *:
    """
    static PyObject* pagecore_refuse_new(PyTypeObject* type, PyObject*, PyObject*) {
      PyErr_Format(PyExc_TypeError, "expected a %.200s made by pagecore; its type cannot be called", type->tp_name);
      return NULL;
    }
    static void pagecore_seal(PyObject* type) {
      ((PyTypeObject*)type)->tp_new = pagecore_refuse_new;
      ((PyTypeObject*)type)->tp_vectorcall = NULL;  // would bypass tp_new
      PyType_Modified((PyTypeObject*)type);
    }
    """
    # Makes calls of an extension type and of its subclasses raise TypeError; `T.__new__(T)` still works in the module
    # that defines T.
    void seal "pagecore_seal"(object type)
