from pagecore.index.radix._radix_core cimport RadixCore, Receipt
from pagecore.index.radix._radix_native cimport NativeMatch


cdef class RadixTree(RadixCore):
    pass
