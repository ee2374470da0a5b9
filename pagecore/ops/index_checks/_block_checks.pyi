# Everything in _block_checks is for cimport.
