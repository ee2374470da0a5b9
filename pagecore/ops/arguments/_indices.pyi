# Everything in _indices is for cimport.
