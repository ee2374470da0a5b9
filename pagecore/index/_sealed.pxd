# Types whose objects only pagecore makes: an object made by hand would refer to no native structure.
cdef extern from *:
    """
    static PyObject* pagecore_refuse_new(PyTypeObject* type, PyObject*, PyObject*) {
      PyErr_Format(PyExc_TypeError, "expected a %.200s made by pagecore; its type cannot be called", type->tp_name);
      return NULL;
    }
    static void pagecore_seal(PyObject* type) {
      ((PyTypeObject*)type)->tp_new = pagecore_refuse_new;
      ((PyTypeObject*)type)->tp_vectorcall = NULL;  // a call of the type would go past tp_new
      PyType_Modified((PyTypeObject*)type);
    }
    """
    # Refuses to make objects of an extension type and of its subclasses; `T.__new__(T)` in the module that defines T
    # still makes them.
    void seal "pagecore_seal"(object type)
