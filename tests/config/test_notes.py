"""Notes at the start of a run: changes of results come first, settings without effect are counted."""

import pickle

from mm.errors import NoEffect, notes_at_start, sorted_notes

IDLE = [NoEffect(["--a", "--b"], "the device decides"), NoEffect(["x.y"], "not read", "m.json")]


def test_notes_about_results_come_first_and_once():
    assert sorted_notes([IDLE[0], "the loss differs", IDLE[1], "random weights", "the loss differs"]) == [
        "the loss differs", "random weights", *IDLE]


def test_several_settings_without_effect_are_one_line():
    assert notes_at_start([IDLE[0], "the loss differs", IDLE[1]]) == [
        "the loss differs",
        "3 settings have no effect here; the same command with --check lists them, with the reasons"]
    assert notes_at_start([IDLE[0], "the loss differs"]) == ["the loss differs", IDLE[0]]
    assert notes_at_start([]) == []


def test_notes_pickle_as_rank_0_sends_its_run_to_other_nodes() -> None:
    sent = pickle.loads(pickle.dumps(IDLE))
    assert sent == IDLE and [one.num_settings for one in sent] == [one.num_settings for one in IDLE]
