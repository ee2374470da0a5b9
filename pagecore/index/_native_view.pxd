# A NumPy view of native memory, int32 or int64, whose base keeps `owner` alive; ndim is 1 or 2.
cdef object view_of(object owner, void* data, int ndim, Py_ssize_t* shape, bint is_wide, bint is_readonly)
