# Everything in _export is for cimport.
