"""Scores computed by hand, for answers that are hard for the rules."""

from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mm.scoring.rules import chosen_option, edit_distance, score

OPTIONS = {"A": "a red cat", "B": "a blue dog", "C": "None of these", "D": "both"}


@pytest.mark.parametrize(("answer", "right", "expected"), [
    ("B", "B", 1), ("B.", "B", 1), ("(B)", "B", 1), ("B. a blue dog", "B", 1), ("**B**", "B", 1), (" \nB\n", "B", 1),
    ("The answer is B", "B", 1), ("The correct answer is **B**, for the dog in it is blue, as one sees", "B", 1),
    ("I think it is the blue one, so B", "B", 1),
    ("b", "B", 0),  # a small letter is no option, and no option's text is in it
    ("It is a blue dog.", "B", 1),
    ("A BLUE DOG", "B", 0),  # the published rule takes the article for option A
    ("none of these", "C", 1),
    ("a red cat and a blue dog", "A", 0),  # two options' texts
    ("A or B", "A", 0),  # two letters
    ("A B C D", "D", 0),
    ("A cat that is red sits on the blue sofa", "A", 0),  # "A" is not among the last four words
    ("E", "A", 0), ("Z", "A", 0), ("", "A", 0), (" ", "A", 0),
    ("Cannot determine the answer, but B", "B", 0),  # a refusal
    ("both " * 30, "D", 0),  # 150 characters, and all options have 36
])  # fmt: skip
def test_option_letters_in_sentences(answer, right, expected):
    assert score("choice", answer, (right,), OPTIONS) == expected


def test_letters_that_are_not_options_are_words():
    assert chosen_option("The answer is C", {"A": "yes", "B": "no"}) is None
    assert chosen_option("no to C", {"A": "yes", "B": "no"}) == "B"


@pytest.mark.parametrize(("answer", "right", "expected"), [
    ("3.5", "3.5", 1), ("It is 3.5 V.", "3.5", 1), ("3.6", "3.5", 0), ("", "3.5", 0),
    ("A", "3.5", 1),  # VLMEvalKit shows the right answer as option A
    ("B", "3.5", 0),
    ("3.5, and not one of the Other Answers", "3.5", 0),  # the text of option B is in it too
    # A right answer that is itself a capital letter is the option of that letter, where there is one: VLMEvalKit's way.
    ("A", "A", 1), ("B", "A", 0), ("B", "B", 1), ("It is B.", "B", 1), ("The answer is B", "B", 1), ("A", "B", 0),
    ("C", "C", 0), ("Z", "Z", 1), ("Cannot determine the answer", "Z", 1), ("", "Z", 1), ("A", "Z", 0),
])  # fmt: skip
def test_open_questions_of_mmmu(answer, right, expected):
    assert score("choice", answer, (right,), {}) == expected


@pytest.mark.parametrize(("answer", "right", "expected"), [
    ("14", "14", 1), ("14.7", "14", 1), ("14.8", "14", 0), ("13.3", "14", 1), ("13.2", "14", 0), ("-14", "14", 0),
    ("25%", "25%", 1), ("26%", "25%", 1), ("27%", "25%", 0), ("0.25", "25%", 1), ("25", "25%", 0), ("25%", "25", 0),
    ("25 %", "25%", 1),  # the published code lets Python read "25 "
    ("5 kg", "5", 0), ("5", "5 kg", 0), ("5 KG", "5 kg", 1), ("$5", "5", 0),  # a unit makes a text of it
    ("1,000", "1000", 0), ("1e3", "1000", 1), ("14.", "14", 1),
    ("0", "0", 1), ("0.0", "0", 0),  # nothing is within 5 % of 0, so it is compared as text
    ("Yes", "yes", 1), ("Yes.", "yes", 0), (" yes ", "yes", 1), ("", "14", 0), ("", "yes", 0),
    ("nan", "14", 0), ("inf", "14", 0), ("inf", "inf", 1),
])  # fmt: skip
def test_relaxed_accuracy(answer, right, expected):
    assert score("relaxed", answer, (right,), {}) == expected


@pytest.mark.parametrize(("answer", "right", "expected"), [
    ("ITC Limited", ["itc limited", "ITC Limited"], 1),
    ("  itc   limited ", ["ITC Limited"], 1),
    ("ITC Limted", ["ITC Limited"], 10 / 11),  # one letter of eleven is missing
    ("abcd", ["abef"], 0.5),  # half: just enough
    ("abcd", ["aefg"], 0),  # a quarter is below the threshold
    ("", ["itc"], 0), ("itc", [""], 0), ("", [""], 1),
    ("12%", ["12 %"], 0.75),  # the space costs one of four
    ("stra\xdfe", ["strasse"], 1 - 2 / 7), ("stra\xdfe", ["stra\xdfen"], 1 - 1 / 8),  # lengths are those in capitals
    ("\xdf", ["s"], 0.5),  # one letter of the two in "SS"
    ("university of california", ["university of california, san diego"], 1 - 11 / 35),
])  # fmt: skip
def test_anls(answer, right, expected):
    assert score("anls", answer, right, {}) == pytest.approx(expected)


@pytest.mark.parametrize(("rule", "options", "answer", "right", "expected"), [
    ("exact", {}, "Two", ("2", "two"), 1), ("exact", {}, " two\n", ("two",), 1), ("exact", {}, "two.", ("two",), 0),
    ("exact", {}, "", ("two",), 0), ("exact", {}, "", ("",), 1), ("relaxed", {}, "1000", ("1,000", "1000"), 1),
    ("choice", OPTIONS, "B", ("A", "B"), 1), ("choice", OPTIONS, "C", ("A", "B"), 0),
    ("choice", {}, "about .5", ("1/2", ".5"), 1), ("choice", {}, "about 0.7", ("1/2", ".5"), 0),
])  # fmt: skip
def test_exact_match_and_several_right_answers(rule, options, answer, right, expected):
    assert score(rule, answer, right, options) == expected


@given(st.text("abc", max_size=8), st.text("abc", max_size=8))
def test_edit_distance_is_the_recursive_definition(one, other):
    @cache
    def distance(first: int, second: int) -> int:
        if not first or not second:
            return first + second
        exchanged = distance(first - 1, second - 1) + (one[first - 1] != other[second - 1])
        return min(exchanged, distance(first - 1, second) + 1, distance(first, second - 1) + 1)

    assert edit_distance(one, other) == distance(len(one), len(other))
