"""Transports of a hand-over: sockets, and RDMA by NIXL or Mooncake."""
