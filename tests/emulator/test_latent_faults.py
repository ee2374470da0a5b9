"""Faults planted in the kernels of latent attention."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from pagecore.arrays.cuda.current import use_runtime
from tests.cuda.kit import Kit
from tests.cuda.matrix import cases
from tests.cuda.test_latent_attention import check
from tests.emulator.build import SOURCES
from tests.emulator.faults import Fault
from tests.emulator.runtime import EmulatedRuntime
from tests.ops.latent_cases import make_case

pytestmark = pytest.mark.slow

RACE = "races|in flight|uninitialised"
LENS = (300, 70, 0, 0, 33)
# By the cache that shows them: plain rows of 16 bits, quantised rows, and float32.
LATENT_FAULTS = {
    ("plain", "the first tile is read too early"): Fault("latent_barrier_before_first_round", "", RACE),
    ("plain", "a stage is refilled that is being read"): Fault(
        "latent_stage_of_this_round", "ring_.fill(round_ % Tile::kStages);", RACE
    ),
    ("plain", "parts of scores are read too early"): Fault("latent_barrier_before_weights", "", RACE),
    ("plain", "a stage is refilled too early"): Fault("latent_barrier_after_round", "", RACE),
    ("plain", "copies before their slots"): Fault("latent_barrier_before_copies", "", RACE),
    ("plain", "no wait for copies"): Fault("latent_wait", "", RACE),
    ("plain", "the other row's factor"): Fault(
        "latent_rescale", "for (int i = 0; i < 4; ++i) o_[n][i] *= rescale[1 - i / 2];"
    ),
    ("plain", "sinks in every split"): Fault("latent_sinks_in_every_split", "const float sink = load_sink(p, head);"),
    ("stored", "codes of other lanes are unpacked too early"): Fault("latent_barrier_before_unpacking", "", RACE),
    ("float32", "keys are replaced while they are read"): Fault("general_latent_barrier_before_keys", "", RACE),
    ("float32", "keys are multiplied too early"): Fault("general_latent_barrier_after_keys", "", RACE),
    ("float32", "half of a product is read too early"): Fault("general_latent_barrier_before_sum", "", RACE),
    ("float32", "scores are read too early"): Fault("general_latent_barrier_before_softmax", "", RACE),
    ("float32", "scores are replaced while they are read"): Fault("general_latent_barrier_before_weights", "", RACE),
    ("float32", "weights are read too early"): Fault("general_latent_barrier_before_values", "", RACE),
    ("float32", "sums are read too early"): Fault("general_latent_barrier_before_rows", "", RACE),
    ("float32", "sums are replaced while they are read"): Fault("general_latent_barrier_after_item", "", RACE),
}


def run_latent(kind: str, *where: Path, seed: int = 0) -> None:
    """Run three workers over long, short and empty sequences, so that items follow each other and keys are split."""
    runtime = EmulatedRuntime(*where, seed=seed)
    with use_runtime(runtime):
        for heads in (3, 20):
            stored = {"format": "fp8_ds_mla"} if kind == "stored" else {"dims": (256, 64)}
            case = make_case(LENS, heads=heads, dtype="float32" if kind == "float32" else "bfloat16", **stored)
            check(Kit(runtime), case, plan={"num_workers": 3}, sinks=np.linspace(-2, 3, heads))
        runtime.finish()


@pytest.mark.parametrize("kind", ["plain", "stored", "float32"])
def test_latent_attention_is_right_without_a_fault(kind):
    for seed in range(3):
        run_latent(kind, seed=seed)


@pytest.mark.parametrize("name", cases(list(LATENT_FAULTS)[::3], list(LATENT_FAULTS)), ids=" ".join)
def test_a_fault_planted_in_latent_attention_is_caught(planting, name):
    fault = LATENT_FAULTS[name]
    with (
        planting.planted(SOURCES, fault, LATENT_FAULTS.values()) as sources,
        pytest.raises(AssertionError, match=fault.message),  # EmulatorError is an AssertionError
    ):
        run_latent(name[0], sources)
