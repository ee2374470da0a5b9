"""A state table, and steps of its rows."""

from pagecore.index import BlockPool, BlockTables, StateBuffers, StateTable, StepBuffers


class Made:
    """A state table over one group of blocks, with the buffers of its steps."""

    def __init__(self, num_slots=17, block_size=16, num_blocks=257, max_sequences=8, drafts=0, **options):
        self.tables = BlockTables(
            BlockPool(num_blocks), block_sizes=block_size, max_sequences=max_sequences, max_blocks_per_sequence=64
        )
        self.states = StateTable(self.tables, num_slots, draft_tokens=drafts, **options)
        self.step = StepBuffers(max_sequences, 2048)
        self.slots = StateBuffers(max_sequences, drafts)

    def prepare(self, rows, counts, **options):
        self.states.prepare(rows, counts, self.step, self.slots, **options)
        n = self.slots.num_sequences
        return self.slots.state_read[:n].tolist(), self.slots.state_write[:n].tolist()

    def compute(self, row, count):
        """Run a step of one row."""
        found = self.prepare([row], [count])
        self.states.commit([row])
        return found

    def row_of(self, *counts, **add):
        row = self.states.add(**add)
        for count in counts:
            self.compute(row, count)
        return row

    @property
    def work(self):
        return self.slots.zeros.tolist(), self.slots.copies.tolist()
