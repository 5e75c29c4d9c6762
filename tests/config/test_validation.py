"""When validations and questions are due, and the problems of settings that need them where there are none."""

import pytest

from mm.config.flag_rules import asks, is_due, validates
from tests.config.test_run import load, problems

VAL_RATE = {"dataset_param.basic_parameters.val_rate": 0.25}
DATA = "data_7b.json"


def test_validations_are_due_at_the_interval_and_after_the_last_step(tmp_path):
    args = load(tmp_path, "--eval-interval", "30", data=VAL_RATE).args
    assert [step for step in range(1, 101) if is_due(args, step)] == [30, 60, 90, 100]
    args = load(tmp_path).args
    assert [step for step in range(1, 101) if is_due(args, step)] == [100]  # every 1000, as in Megatron


def test_questions_are_asked_at_the_interval_and_after_the_last_step(tmp_path):
    asked = ("--eval-generate-questions", "q.json", "--eval-generate-rule", "exact", "--eval-generate-interval", "40")
    run = load(tmp_path, *asked)
    assert [step for step in range(1, 101) if asks(run.args, step)] == [40, 80, 100]
    args = load(tmp_path).args
    assert not any(asks(args, step) for step in range(1, 101))
    assert "--eval-generate-questions is 'q.json', which is not a file" in run.missing  # a problem without --dry-run


def test_validation_needs_samples_and_may_be_switched_off(tmp_path):
    for flags, data, expected in (((), VAL_RATE, True), ((), {}, False), (("--eval-iters", "0"), VAL_RATE, False),
                                  (("--eval-iters", "5"), VAL_RATE, True),
                                  ((), {"dataset_param.basic_parameters.val_rate": 0.0}, False)):
        run = load(tmp_path, *flags, data=data)
        assert validates(run.args, run.data) is expected


def test_the_peers_flags_without_samples_give_a_note(tmp_path):
    notes = load(tmp_path, "--eval-interval", "10000", "--eval-iters", "5000").notes
    (note,) = [note for note in notes if "validation" in note]
    assert note == (f"--eval-interval, --eval-iters: no effect: without val_dataset or val_rate in {tmp_path / DATA} "
                    f"there is no validation")
    assert not [note for note in load(tmp_path, "--eval-interval", "7", data=VAL_RATE).notes if "validation" in note]


@pytest.mark.parametrize(("flags", "data", "expected"), [
    (("--save", "s", "--save-best"), {}, "--save-best: there is no validation: {data} has neither val_dataset "
                                         "nor val_rate; add one of them to its basic_parameters"),
    (("--save", "s", "--save-best", "--early-stopping-patience", "2", "--eval-iters", "0"), VAL_RATE,
     "--save-best and --early-stopping-patience: there is no validation: --eval-iters is 0; raise or "
     "remove it"),
    (("--save-best",), VAL_RATE, "--save-best is given, but --save is missing: add --save, or remove --save-best"),
    (("--early-stopping-patience", "0"), VAL_RATE,
     "--early-stopping-patience is 0; expected an integer of at least 1"),
    (("--eval-interval", "0"), VAL_RATE, "--eval-interval is 0; expected an integer of at least 1"),
    (("--eval-generate-interval", "5"), {},
     "--eval-generate-interval is given, but --eval-generate-questions is missing: add "
     "--eval-generate-questions, or remove --eval-generate-interval"),
    (("--eval-generate-interval", "5", "--eval-generate-questions", "q.json"), {},
     "--eval-generate-questions needs --eval-generate-benchmark if it is a benchmark's file, or "
     "--eval-generate-rule to score your own questions"),
    (("--eval-generate-interval", "5", "--eval-generate-questions", "q.tsv", "--eval-generate-rule", "anls",
      "--eval-generate-benchmark", "docvqa"), {},
     "--eval-generate-rule and --eval-generate-benchmark are both given; keep one"),
    (("--eval-iters", "-1"), VAL_RATE, "--eval-iters is -1; expected an integer of at least 0"),
])
def test_impossible_settings_are_refused(tmp_path, flags, data, expected):
    assert problems(tmp_path, *flags, data=data) == [expected.format(data=tmp_path / DATA)]
