"""Steps planned by another process equal the sampler's; each owner gets its own share, and notices its end."""

import multiprocessing
import os
import signal
import time
from dataclasses import replace
from functools import partial
from itertools import islice
from multiprocessing.connection import Connection

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mm.data.feed.planner import NUM_AHEAD, PlannedSteps, Seat, from_bytes, start_planner, to_bytes
from mm.data.order.sampler import order_of
from mm.data.order.stream import SampleOrder, StepSamples, in_turn, shuffled
from mm.errors import UserError
from tests.data.feed.planning import Deal, order
from tests.data.order import test_sampler
from tests.data.order.test_sampler import lengths

run_of = test_sampler.run_of  # the fixture


@pytest.fixture
def planned():
    """Starts a process that plans for owners, and returns what each of them sees, and the process."""
    opened: list[PlannedSteps] = []

    def start(make_order, dp_ranks):
        seat = Seat.here(0)
        process = start_planner(make_order, seat, len(dp_ranks))
        opened.extend(own := [PlannedSteps(seat, dp_rank) for dp_rank in dp_ranks])
        return own, process

    yield start
    for one in opened:
        one.close()


@given(st.lists(st.lists(st.integers(0, 2**32 - 1)), min_size=1))
def test_a_step_round_trips(step: StepSamples) -> None:
    assert from_bytes(to_bytes(step)) == step
    assert len(to_bytes(step)) == 4 * (1 + len(step) + sum(map(len, step)))


@pytest.mark.parametrize("kind", ["random", "packed evenly", "bucketing"])
def test_steps_equal_the_samplers(run_of, planned, kind) -> None:
    """For replicas at different paces, resuming mid-epoch, and across its end."""
    run = replace(run_of(kind, 3), notes=())
    (first, last), _ = planned(partial(order_of, run, lengths(), 0, 72), (0, 2))
    found = [next(last) for _ in range(7)]
    assert found == [order_of(run, lengths(), 2, 72).step(number) for number in range(7)]
    assert [next(first) for _ in range(7)] == [order_of(run, lengths(), 0, 72).step(number) for number in range(7)]


def test_one_other_process_plans_for_all_owners_and_only_what_is_needed_soon(planned) -> None:
    owners, process = planned(order, (0, 1))
    assert process.pid != os.getpid()
    assert [next(one) for one in owners] == [[[dp_rank, process.pid, 0], []] for dp_rank in (0, 1)]
    used = psutil.Process(process.pid)
    time.sleep(0.2)
    before = used.cpu_times()
    time.sleep(0.2)
    assert used.cpu_times() == before, f"it waits when {NUM_AHEAD} steps are planned"


def evenly(dp_size: int) -> SampleOrder:
    return SampleOrder(shuffled(10**5, 5), partial(in_turn, micro_batch_size=4, dp_size=dp_size), 24 * dp_size, 0)


def test_an_owner_is_sent_its_own_share(planned, monkeypatch) -> None:
    """24 samples in microbatches of 4, independent of the global batch size."""
    received, receive = [], Connection.recv_bytes

    def noted(connection, *arguments):
        received.append(receive(connection, *arguments))
        return received[-1]

    for dp_size in (2, 1024):
        (owner,), _ = planned(partial(evenly, dp_size), (1,))
        monkeypatch.setattr(Connection, "recv_bytes", noted)
        assert [next(owner) for _ in range(3)] == [evenly(dp_size).of_ranks(number)[1] for number in range(3)]
        monkeypatch.undo()
    assert [len(message) for message in received] == [1 + 4 * (1 + 6 + 24)] * 6


@pytest.mark.parametrize(("error", "reported"), [(UserError("the index is gone."), r"^the index is gone\.$"),
                                             (ZeroDivisionError("a defect"), "has failed:\nTraceback.*a defect")])
def test_every_owner_sees_why_a_step_cannot_be_planned(planned, error, reported) -> None:
    deal = Deal(error=error, failing_sample=9)
    owners, process = planned(partial(order, deal), (0, 1))
    for one in owners:
        with pytest.raises(UserError, match=f"(?s){reported}"):  # perhaps before what was planned ahead of it
            list(islice(one, 3))
    process.join()
    assert process.exitcode == 0


def failing() -> SampleOrder:
    raise UserError("there is no order.")


def test_an_order_that_fails_is_reported(planned) -> None:
    owners, _ = planned(failing, (0, 1))
    for one in owners:
        with pytest.raises(UserError, match="there is no order"):
            next(one)


def test_a_process_that_is_killed_ends_the_run(planned) -> None:
    owners, process = planned(order, (0, 1))
    next(owners[0])
    os.kill(process.pid, signal.SIGKILL)
    problems = set()
    for one in owners:
        with pytest.raises(UserError, match=r"plans the samples of each step has ended.*dmesg") as error:
            next(one)
        problems |= {error.value.problems}
    assert len(problems) == 1, "or the run would say it once for each owner"


def test_it_ends_when_no_owner_is_left(planned) -> None:
    owners, process = planned(order, (0, 1))
    next(owners[0])
    for one in owners:
        assert process.is_alive()
        one.close()
    process.join()
    assert process.exitcode == 0


def start_and_die(answer: Connection) -> None:
    process = start_planner(order, Seat.here(0), 2)  # one of its owners never comes
    answer.send(process.pid)
    answer.close()
    os.kill(os.getpid(), signal.SIGKILL)


def test_it_ends_with_an_owner_that_is_killed() -> None:
    context = multiprocessing.get_context("forkserver")
    receiver, sender = context.Pipe(duplex=False)
    owner = context.Process(target=start_and_die, args=(sender,))
    owner.start()
    sender.close()
    planner = psutil.Process(receiver.recv())
    owner.join()
    planner.wait(60)
    assert not planner.is_running()
