"""The helpers of tests that run on every instruction set: failures are reported, and oracles are asked again."""

import numpy as np
import pytest

import pagecore
from tests.ops.instruction_sets import ISAS, on_every_isa
from tests.reference.repeated import repeated


@pytest.mark.parametrize("fails", [lambda: pytest.fail("planted"), lambda: np.testing.assert_equal(1, 2)])
def test_a_failure_on_the_first_set_is_reported_after_all_have_run(fails):
    seen = []

    @on_every_isa
    def run():
        seen.append(pagecore.isa())
        if len(seen) == 1:
            fails()
        elif len(seen) == len(ISAS):
            pytest.skip("cannot run here")

    before = pagecore.isa()
    with pytest.raises((AssertionError, pytest.fail.Exception)) as caught:
        run()
    assert seen == list(ISAS)
    assert caught.value.__notes__ == [f"on {ISAS[0]}", f"failed on {ISAS[0]}"]
    assert pagecore.isa() == before


def test_a_test_that_skips_itself_is_skipped():
    with pytest.raises(pytest.skip.Exception):
        on_every_isa(lambda: pytest.skip("cannot run here"))()


def test_an_oracle_is_asked_again_for_other_arguments_only():
    asked = []

    @repeated
    def oracle(array, window=None):
        asked.append(window)
        return (array * 2,)

    numbers = np.arange(3.0)
    oracle(numbers)[0][:] = -1
    assert oracle(numbers)[0].tolist() == [0, 2, 4]
    assert len(asked) == 1
    numbers[0] = 5
    assert oracle(numbers)[0].tolist() == [10, 2, 4]
    for window in ((3, None), (3, 4), 3):
        oracle(numbers, window=window)
    assert asked == [None, None, (3, None), (3, 4), 3]
