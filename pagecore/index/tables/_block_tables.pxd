from pagecore.index.tables._table_steps cimport TableSteps


cdef class BlockTables(TableSteps):
    pass
