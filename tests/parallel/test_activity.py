"""What a rank says it is doing, as a listener hears it."""

import pytest
import torch

from mm.parallel.activity import Activity, Journal, Work


class Recorder:
    def __init__(self) -> None:
        self.heard: list[tuple[str, Activity]] = []

    def begin(self, activity: Activity) -> None:
        self.heard.append(("begin", activity))

    def end(self, activity: Activity) -> None:
        self.heard.append(("end", activity))


def test_work_inside_other_work_is_about_the_same_microbatch() -> None:
    journal = Journal()
    journal.listeners.append(recorder := Recorder())
    forward, vision = Activity(Work.FORWARD, 1, 5), Activity(Work.VISION_FORWARD, 1, 5)
    with journal.during(Work.FORWARD, 1, 5):
        with journal.during(Work.VISION_FORWARD):
            assert journal.now == vision
        assert journal.now == forward
    assert journal.now is None
    assert recorder.heard == [("begin", forward), ("begin", vision), ("end", vision), ("end", forward)]


def test_what_fails_is_over() -> None:
    journal = Journal()
    with pytest.raises(ZeroDivisionError), journal.during(Work.FORWARD, 0, 2), journal.during(Work.VISION_FORWARD):
        raise ZeroDivisionError
    assert journal.now is None and journal.failed == Activity(Work.VISION_FORWARD, 0, 2)


def test_a_backward_pass_is_heard_from_its_first_gradient_to_its_last() -> None:
    journal = Journal()
    journal.listeners.append(recorder := Recorder())
    weight, during = torch.ones(3, requires_grad=True), []
    weight.register_hook(lambda _: during.append(journal.now))
    output = (weight * 2).sum()
    journal.follow_backward(output, 0, 2)
    assert not recorder.heard
    output.backward()
    backward = Activity(Work.BACKWARD, 0, 2)
    assert during == [backward] and journal.now is None
    assert recorder.heard == [("begin", backward), ("end", backward)]


def test_what_has_no_gradient_has_no_backward_pass() -> None:
    Journal().follow_backward(torch.ones(1), 0, 0)
