"""Handing sequences over between processes: exports, imports and their transports.

Import each name from its module: `export_sequence` from ``exports``, `import_sequence` and `start_import` from
``imports``, and the transports from ``sockets``, ``nixl`` and ``mooncake``.
"""
