# Everything in _sparse is for cimport.
