"""Stores that many machines share: Redis and Valkey, S3, GCS and Azure, and Mooncake.

`pagecore.tiers` exports the stores; none of their optional libraries is imported before it is used.
"""
