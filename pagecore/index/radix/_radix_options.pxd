from pagecore.index.radix._radix_native cimport Options

# The arguments of RadixTree, checked and converted; the native tree checks the numbers.
cdef Options read_options(
    object block_size, object full, object windows, object chunks, object sinks, object states,
    object state_interval, object policy
)
