# Everything else in _numbers is for cimport.
SMALLEST_SOFTCAP: float
