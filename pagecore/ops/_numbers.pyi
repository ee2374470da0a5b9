# Everything in _numbers is for cimport.
