"""Stores that many machines share: Redis and Valkey, S3, GCS and Azure.

Import each store from its module; none of their optional libraries is imported before it is used.
"""
