# Everything in _checks is for cimport.
