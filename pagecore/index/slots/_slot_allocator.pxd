from pagecore.index.pools._block_pool cimport BlockPool
from pagecore.index.slots._slot_methods cimport SlotMethods


cdef class SlotAllocator(SlotMethods):
    cdef readonly BlockPool pool
