from pagecore.index.radix._radix_core cimport Receipt
from pagecore.index.radix._radix_journal cimport RadixJournal
from pagecore.index.radix._radix_native cimport NativeMatch


cdef class RadixTree(RadixJournal):
    pass
