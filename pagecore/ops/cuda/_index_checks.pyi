# Everything in _index_checks is for cimport.
