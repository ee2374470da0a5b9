"""Arrays of others: DLPack, the buffer protocol, array interfaces, and frameworks."""
