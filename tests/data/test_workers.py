"""Work in other processes: no error is lost."""


import pytest

from mm.data.workers import Prepared


def stops(number: int) -> int:
    return next(iter(range(1 - number)))  # forgets that there may be none


@pytest.mark.parametrize("num_processes", [0, 1])
def test_a_stop_iteration_of_the_work_does_not_end_the_stream(num_processes):
    results = Prepared(stops, range(3), num_processes, 1)
    assert next(results) == 0
    with pytest.raises(RuntimeError, match="stops raised StopIteration for item 1"):
        next(results)
    results.close()
