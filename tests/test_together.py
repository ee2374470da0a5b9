"""Cases in one item: all run, and the error names those that failed."""

import pytest

from tests.together import together


def test_all_cases_run_and_the_error_names_those_that_failed():
    seen = []

    @together("number", [1, 2, 3])
    @together(("low", "high"), [(0, 2), (1, 3)])
    def check(number, low, high, offset):
        seen.append((number, low, high))
        assert low <= number + offset < high
        if number == 1 and low == 1:
            pytest.skip("no case")

    with pytest.raises(AssertionError) as caught:
        check(offset=0)
    assert len(seen) == 6
    assert caught.value.__notes__ == ["failed for 1 of 2 cases: 1, 3", "failed for 3 of 3 cases: 1; 2; 3"]


@pytest.mark.parametrize("first", [1, 2])
@together("second", [3, 4])
def test_other_arguments_are_those_of_the_item(first, second, tmp_path):
    assert first < second
    assert tmp_path.is_dir()


def test_a_test_without_cases_is_an_error():
    with pytest.raises(AssertionError, match="no cases of number"):
        together("number", [])
