"""Random workloads of the scheduler over caches with cross attention: each request sees its own encoder output.

The first bytes of each encoder token hold a number of the output, and the keys of the decoder depend on it.
"""

import numpy as np
import pytest

from pagecore import AttentionSpec, CrossSpec, Plane, StateSpec
from tests.faults import is_full
from tests.serving.any_specs import AnyEngine

CROSS = CrossSpec(1, 8, dtype="float32", num_query_heads=1, max_tokens=12)
# With the last four, requests abandon all of their tokens and others begin alike.
SEEDS = (*range(8), 48, 70, 77, 82)


class EncoderEngine(AnyEngine):
    """Writes the encoder outputs of a step, and checks those that its queries see."""

    def __init__(self, seed):
        super().__init__(seed)
        self.outputs = self.bytes_of(self.cross, CROSS)

    def draw_layers(self):
        """Return one or two layers, often one with states: `abandon` takes its sequences back to no tokens."""
        layers = [*super().draw_layers()[:1], AttentionSpec(1, 8, dtype="float32")]
        if self.draw.random() < 0.6 and not isinstance(layers[0], StateSpec):
            plane = Plane("hash", (1,), "int32", per="sequence")
            layers.append(StateSpec((plane,), chunk=4, interval=4, in_place=self.draw.random() < 0.8))
        self.cross = len(layers)
        return [*layers, CROSS]

    def attending(self):
        return [layer for layer in super().attending() if layer != self.cross]

    def encoder_options(self):
        count = self.draw.choice([0, 0, 3, 12])
        digest = self.draw.choice([None, None, b"a", b"b"]) if count else None
        return {"cross_tokens": count, "cross_digest": digest and digest * count}

    def origin(self, request):
        origin = super().origin(request)
        if request.cross_digest is not None:
            return origin + 100 + sum(request.cross_digest)
        return origin + 10_000 + request.id if request.cross_tokens else origin

    def launch(self, step):
        cross, group = step.batch.cross, step.batch.group(self.cross)
        new, seen, rows = (np.asarray(each) for each in (cross.new_lens, cross.seq_lens, cross.rows))
        slots, size, start = np.asarray(group.slot_mapping), self.cache.block_size, 0
        for row, run in enumerate(step.runs):
            for number, slot in enumerate(slots[start : start + new[row]].tolist()):
                if slot >= 0:  # the run is cancelled, and no other one has its output
                    self.outputs[slot // size, slot % size, :2] = self.output(run.request, number)
            start += new[row]
        table = np.asarray(group.block_table)
        for row, run in enumerate(step.runs):
            if run.held is None:
                continue
            assert seen[row] == run.request.cross_tokens
            for number in range(seen[row]):
                block = table[rows[row], number // size]
                assert block > 0
                assert self.outputs[block, number % size, :2].tolist() == self.output(run.request, number)
        return super().launch(step)

    def output(self, request, number):
        value = (self.origin(request) * 7 + number) % 65_536
        return [value & 255, value >> 8]


@pytest.mark.parametrize("seed", range(400) if is_full() else SEEDS)
def test_every_request_sees_its_encoder_output_and_keys_computed_from_it(seed):
    engine = EncoderEngine(seed)
    engine.serve(engine.draw.choice([4, 10, 25]))
