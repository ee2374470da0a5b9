# `except +raise_python_error` on an extern function turns its C++ exceptions into those of pagecore.errors.
cdef extern from "pagecore/native/translate.hpp" namespace "pagecore" nogil:
    void raise_python_error()
