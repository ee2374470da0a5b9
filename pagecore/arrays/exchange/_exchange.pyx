"""Arrays of others: DLPack, the buffer protocol, array interfaces, and frameworks."""

include "buffer.pxi"
include "export.pxi"
include "import.pxi"
