# Everything in _place is for cimport.
