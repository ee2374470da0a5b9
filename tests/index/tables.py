"""Small block tables for tests, and their observable state."""

from pagecore.errors import InvalidSequence
from pagecore.index import BlockPool, BlockTables


def make(num_blocks=17, block_size=4, max_sequences=4, max_blocks=8, **options):
    pool = BlockPool(num_blocks, **options)
    tables = BlockTables(pool, block_sizes=block_size, max_sequences=max_sequences, max_blocks_per_sequence=max_blocks)
    return pool, tables


def snapshot(tables):
    """Return the observable state of the tables and their pools."""
    groups = range(tables.num_groups)
    live = [row for row in range(tables.max_sequences) if is_live(tables, row)]
    pools = [(pool.ref_counts().tolist(), pool.num_free) for pool in tables.pools]
    rows = [(row, tables.length(row), tables.capacity(row)) for row in live]
    return [tables.table(group).tolist() for group in groups], pools, rows, tables.num_pending_copies


def is_live(tables, row):
    try:
        tables.length(row)
    except InvalidSequence:
        return False
    return True


def make_two_groups():
    """Rows 0 (7 tokens) and 1 (its fork), 4 free blocks in group 0 and 5 in group 1."""
    pools = [BlockPool(7), BlockPool(10)]
    tables = BlockTables(pools, block_sizes=[4, 2], max_sequences=3, max_blocks_per_sequence=8)
    tables.extend([tables.add()], [7])
    tables.fork(0)
    return tables
