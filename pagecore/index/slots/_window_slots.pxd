from pagecore.index.pools._block_pool cimport BlockPool
from pagecore.index.slots._slot_methods cimport SlotMethods


cdef class WindowSlotAllocator(SlotMethods):
    cdef readonly BlockPool full
    cdef readonly BlockPool window
