"""The soak in short: nothing wrong is served, nothing leaks, and it notices a wrong byte."""

import numpy as np
import pytest

from bench import soak as module
from bench.soaking import engine as engines


@pytest.mark.slow
def test_a_short_soak_serves_nothing_wrong_and_leaks_nothing(capsys):
    assert module.main(["--seconds", "3", "--seed", "1"]) == 0
    assert "nothing wrong was served and nothing leaked" in capsys.readouterr().out


@pytest.mark.slow
def test_the_soak_reuses_tokens_of_every_store():
    counts = module.soak(3, 3, use_redis=False)
    assert counts["wrong_bytes"] == counts["leaked_threads"] == counts["leaked_descriptors"] == 0
    assert counts["asked_tokens"] == counts["served_tokens"] + counts["computed_tokens"]
    assert set(counts["loaded_tokens"]) == {"DISK", "EXTERNAL"}
    assert counts["faults"]


def test_an_engine_reuses_prefixes_up_to_the_checkpoints_of_its_states():
    totals = engines.Totals()
    engine = engines.Engine([], totals, engines.HYBRID)
    tokens = np.arange(45, dtype=np.int32)
    for clear in (engine.cache.clear_prefix_cache, lambda: None, lambda: None):
        engine.serve(tokens, None)
        clear()
    engine.close()
    assert (totals.served_tokens, totals.wrong_bytes) == (80, 0)


@pytest.mark.parametrize(
    ("layers", "layer", "plane"), [("ATTENTION", 0, "key"), ("ATTENTION", 1, "value"), ("HYBRID", 2, "temporal")]
)
def test_the_soak_notices_a_wrong_byte(layers, layer, plane):
    totals = engines.Totals()
    engine = engines.Engine([], totals, getattr(engines, layers))
    tokens = np.arange(41, dtype=np.int32)
    engine.serve(tokens, None)
    held = engine.cache.plane(plane, layer).numpy()
    held[np.isfinite(held)] += 1
    engine.serve(tokens, None)
    engine.close()
    assert totals.wrong_bytes > 0
