"""The messages of all stages pass under NCCL's rules, whenever a stage asks for them.

gloo would not show an order that hangs on a device; ``tests.parallel.replay`` says what the rules are.
"""

import pickle
from dataclasses import replace

import pytest

from tests.devices import platform_of
from tests.launch import run_ranks
from tests.parallel.messages import Mode
from tests.parallel.messages_worker import LAYOUTS, MODES
from tests.parallel.replay import Compute, Message, Program, Replay, Start, Wait, replay

AHEAD, WHEN_WANTED = Mode(starts_ahead=True), Mode(starts_ahead=False)


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[Mode, list[Program]]]:
    """What the worker wrote."""
    output = tmp_path_factory.mktemp("messages") / "programs"
    run_ranks(0, "tests.parallel.messages_worker", str(output))
    return pickle.loads(output.read_bytes())


@pytest.mark.parametrize("mode", MODES, ids=str)
@pytest.mark.parametrize("name", LAYOUTS)
def test_no_order_of_messages_hangs(name: str, mode: Mode, programs: dict) -> None:
    """And both halves of every message are of the same boundary, microbatch and shape."""
    of_stages = programs[name][mode]
    assert len(of_stages) == LAYOUTS[name].num_stages
    assert all(any(isinstance(event, Start) for event in one) for one in of_stages[-2:]), "nothing was recorded"
    assert replay(of_stages).stuck == ()


def in_one_group(program: Program) -> Program:
    return [replace(event, group="one") if isinstance(event, Start) else event for event in program]


@pytest.mark.parametrize("name", ["PP2", "PP4", "PP8, ViT on four"])
def test_activations_and_gradients_in_one_group_would_hang(name: str, programs: dict) -> None:
    """Which is why gradients have a group of their own."""
    assert replay(list(map(in_one_group, programs[name][AHEAD]))).stuck


def number_of_start(program: Program, is_sent: bool, is_gradient: bool) -> int:
    """Where the first batch of one message of that kind is started."""
    return next(at for at, event in enumerate(program) if isinstance(event, Start) and len(event.messages) == 1
                and event.messages[0].is_sent == is_sent and event.messages[0].content[0] == is_gradient)


def waiting_for_a_gradient_first(program: Program) -> Program:
    """Before the stage has sent the activation that the gradient is of."""
    start = number_of_start(program, is_sent=False, is_gradient=True)
    wait = next(at for at, event in enumerate(program) if event == Wait(program[start].batch))
    return [program[start], program[wait], *(event for at, event in enumerate(program) if at not in (start, wait))]


def sending_in_another_order(program: Program) -> Program:
    """The first activation in the place of the first gradient."""
    places = [number_of_start(program, is_sent=True, is_gradient=is_gradient) for is_gradient in (False, True)]
    first, second = (program[at] for at in places)
    exchanged = {places[0]: replace(second, group=first.group), places[1]: replace(first, group=second.group)}
    return [exchanged.get(at, event) for at, event in enumerate(program)]


@pytest.mark.parametrize("mode", [AHEAD, WHEN_WANTED], ids=str)
def test_a_broken_order_is_found(mode: Mode, programs: dict) -> None:
    """One stage in the middle has a wrong order."""
    first, second, *others = programs["PP4"][mode]
    assert replay([first, waiting_for_a_gradient_first(second), *others]).stuck
    with pytest.raises(ValueError, match="meet"):
        replay([first, sending_in_another_order(second), *others])


def test_kernels_occupy_devices_when_messages_begin_ahead(programs: dict) -> None:
    """What decides that CUDA asks for messages when they are wanted; docs/performance.md has figures."""
    for name in ("PP4", "PP8, ViT on four"):
        ahead, wanted = (replay(programs[name][mode], message_seconds=0.01) for mode in (AHEAD, WHEN_WANTED))
        assert max(ahead.occupied) > 0.5 and max(wanted.occupied) < 0.1, name
        assert ahead.seconds < wanted.seconds < 1.05 * ahead.seconds, name
    # what a frozen prefix sends waits for the next stage either way, which is why its channels are limited
    assert replay(programs["PP8, ViT frozen"][WHEN_WANTED], message_seconds=0.01).occupied[0] > 0.5


@pytest.mark.parametrize("kind", ["cpu", "npu", "cuda"])
def test_what_a_device_chooses_passes_everywhere(kind: str, programs: dict) -> None:
    """And occupies a device by messages only where they do not take its processors."""
    chosen = Mode(platform_of(kind).starts_messages_ahead)
    assert not any(replay(of_modes[chosen]).stuck for of_modes in programs.values())
    assert (max(replay(programs["PP4"][chosen], 0.01).occupied) > 0.5) is (kind != "cuda")


# The replay itself, on programs by hand


def send(batch: int, what: str, peer: int = 1, group: str = "group") -> Start:
    return Start(batch, group, (Message(True, peer, (what,)),))


def receive(batch: int, what: str, peer: int = 0, group: str = "group") -> Start:
    return Start(batch, group, (Message(False, peer, (what,)),))


def test_a_message_passes() -> None:
    found = replay([[Compute(2.0), send(0, "x"), Compute(1.0)], [receive(0, "x"), Wait(0), Compute(3.0)]], 0.5)
    assert found == Replay((), 5.5, (pytest.approx(0.5 / 3), 0.0))


def test_a_receive_holds_up_the_send_behind_it() -> None:
    there, back = [send(0, "there"), receive(1, "back", peer=1), Wait(1)], [receive(0, "there"), Wait(0)]
    answer = send(1, "back", peer=0)
    assert replay([there, [*back, answer]]).stuck == ()
    turned = [receive(1, "back", peer=1), send(0, "there"), Wait(1)]
    stuck = replay([turned, [*back, answer]]).stuck
    assert [one.partition("(")[0] for one in stuck] == ["stage 0 at Start", "stage 1 at Start"]
    assert replay([[Wait(0)], []]).stuck == ("stage 0 at Wait(batch=0)",)


@pytest.mark.parametrize(
    ("second", "what"), [([receive(0, "y")], r"\('x',\) meets \('y',\)"), ([], "1 halves from stage 0 to 1 meet 0")])
def test_halves_that_do_not_match_are_refused(second: Program, what: str) -> None:
    with pytest.raises(ValueError, match=what):
        replay([[send(0, "x")], second])
