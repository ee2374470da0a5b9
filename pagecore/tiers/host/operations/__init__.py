"""Operations on the host tree and the pools of a host tier: leases, backups, promotions, spills."""
