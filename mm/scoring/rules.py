"""Scores of answers: pure functions of texts, each of which follows a published rule that it names.

VLMEvalKit is open-compass/VLMEvalKit at commit e8e78f0 of August 2026, without a judge model (its ``exact_matching``).
``mm.scoring.benchmarks`` has the rule of each benchmark.
"""

import math
import re
import string
from collections.abc import Mapping, Sequence

from mm.config.evaluate import Rule

REFERENCES: Mapping[Rule, str] = {
    "choice": "the option that the answer names, as VLMEvalKit's can_infer finds it (vlmeval/utils/matching_util.py)",
    "exact": "equal except for case and outer spaces, VLMEvalKit's 'accuracy' (vlmeval/dataset/utils/vqa_eval.py)",
    "anls": "average normalised Levenshtein similarity, 0 below 0.5 (arXiv:1905.13648; computed as VLMEvalKit does)",
    "relaxed": "numbers within 5%, other texts equal except for case (arXiv:2203.10244, section 5.1, pix2struct)",
}
"""Description of each rule, and where it is published."""

_ANLS_THRESHOLD = 0.5
_RELATIVE_CHANGE = 0.05
_LAST_WORDS = 4
"""A letter counts as the chosen option only among this many last words: elsewhere it may be the article "A"."""
_MARKS = str.maketrans(dict.fromkeys(".()[],:;!*#{}", " "))
_REFUSALS = (
    "Sorry, I can't help with images of people yet.", "I can't process this file.",
    "I'm sorry, but without the image provided", "Cannot determine the answer",
)  # fmt: skip
"""VLMEvalKit's list of sentences that mean that no option was chosen."""
_ANSWER_IS = re.compile(r"answer\s+is\s+\**([ABCD])", re.IGNORECASE)
OTHER_ANSWERS = "Other Answers"
"""The second option that VLMEvalKit gives to an open question of MMMU; the first one is the right answer."""


def score(rule: Rule, answer: str, right: Sequence[str], options: Mapping[str, str]) -> float:
    """Score of ``answer``, from 0 to 1; any of the ``right`` answers counts.

    ``options`` are for the rule "choice", with their letters in ``right``; without options the question is open.
    """
    match rule:
        case "choice" if options:
            return float(chosen_option(answer, options) in right)
        case "choice":
            return float(any(answers_openly(answer, one) for one in right))
        case "exact":
            return float(answer.strip().lower() in (one.strip().lower() for one in right))
        case "anls":
            return anls(answer, right)
        case "relaxed":
            return float(any(is_about(answer, one) for one in right))


def is_about(answer: str, right: str) -> bool:
    """Relaxed accuracy: a number within 5% of the right one, or the same text ignoring case.

    As in the published code, a number with a unit or thousands separators is a text, and 0 is compared as text.
    """
    answer, right = answer.strip(), right.strip()
    found, wanted = _number(answer), _number(right)
    if found is not None and wanted:
        return abs(found - wanted) / abs(wanted) <= _RELATIVE_CHANGE
    return answer.lower() == right.lower()


def _number(text: str) -> float | None:
    try:
        value = float(text.rstrip("%")) / 100 if text.endswith("%") else float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def anls(answer: str, right: Sequence[str]) -> float:
    """The similarity to the most similar right answer, from 0 to 1, or 0 below the threshold.

    The distance ignores case and repeated spaces.  As in VLMEvalKit's ``anls_compute``, it is divided by the length of
    the longer original text in capitals: "ß" counts as the two letters "SS".
    """
    def share(one: str) -> float:
        length = max(len(answer.upper()), len(one.upper()))
        plain, other = (" ".join(text.lower().split()) for text in (answer, one))
        return edit_distance(plain, other) / length if length else 0.0

    best = 1 - min(map(share, right))
    return best if best >= _ANLS_THRESHOLD else 0.0


def edit_distance(one: str, other: str) -> int:
    """Levenshtein distance: the fewest characters to insert, delete or replace."""
    if len(one) > len(other):
        one, other = other, one
    row = list(range(len(one) + 1))
    for number, character in enumerate(other, 1):
        before, row[0] = row[0], number
        for place, mine in enumerate(one, 1):
            before, row[place] = row[place], min(before + (mine != character), row[place] + 1, row[place - 1] + 1)
    return row[-1]


def chosen_option(answer: str, options: Mapping[str, str]) -> str | None:
    """The letter of the one option that ``answer`` names, by its letter or by its text; None if there is none.

    The letter must be the only one that stands alone and be among the last four words, or it must follow "answer is".
    Otherwise the only option whose text is in the answer counts, unless the answer is more than twice as long as all
    options together.
    """
    if any(sentence in answer for sentence in _REFUSALS):
        return None
    words = answer.translate(_MARKS).split()
    named = [letter for letter in options if letter in words]
    if len(named) == 1 and words.index(named[0]) >= len(words) - _LAST_WORDS:
        return named[0]
    if not named and "Z" in words:
        return None
    stated = _ANSWER_IS.search(answer)
    if stated and stated[1].upper() in options:
        return stated[1].upper()
    if len(answer) > 2 * sum(map(len, options.values())):
        return None
    named = [letter for letter, text in options.items() if text.lower() in answer.lower()]
    return named[0] if len(named) == 1 else None


def answers_openly(answer: str, right: str) -> bool:
    """Whether VLMEvalKit counts ``answer`` to an open question of MMMU as ``right``.

    It makes two options of the question, the right answer and "Other Answers", and "Z" means that neither is chosen.
    The right one is then A, unless the right answer is itself a capital letter: then the option of that letter counts
    (``mcq_vanilla_eval`` in vlmeval/dataset/utils/multiple_choice.py).
    """
    is_letter = len(right) == 1 and right in string.ascii_uppercase
    return (chosen_option(answer, {"A": right, "B": OTHER_ANSWERS}) or "Z") == (right if is_letter else "A")
