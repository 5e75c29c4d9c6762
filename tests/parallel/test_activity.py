"""What a rank says it is doing, as a listener hears it."""

import pytest

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
