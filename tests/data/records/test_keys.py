"""Keys that other trainers learn from are refused; metadata are not, and other keys are named."""

import pytest

from mm.config.data import Attributes
from mm.data.records.formats import HARMLESS, read_sample, unread_keys
from mm.data.records.roots import MediaRoots
from mm.errors import UserError
from tests.files import ROOT

ATTR = Attributes(messages="messages")
ROOTS = MediaRoots("/")
USER, ANSWER = {"role": "user", "content": "Where is it?"}, {"role": "assistant", "content": "There: <bbox>"}
PAIR = {"from": "gpt", "value": "Here."}


def read(record, is_prompt=False, attr=ATTR):
    return read_sample(record, attr, ROOTS, "f:0", is_prompt)


def refusal(record, is_prompt=False):
    with pytest.raises(UserError) as error:
        read(record, is_prompt)
    (problem,) = error.value.problems
    return problem


REFUSED = {
    # ms-swift
    "objects": ({"ref": ["it"], "bbox": [[1, 2, 3, 4]]}, "ms-swift's grounding puts its boxes into the text"),
    "rejected_response": ("Nowhere.", "part of a preference pair (DPO)"),
    "rejected_messages": ([USER, ANSWER], "part of a preference pair (DPO)"),
    "rejected_images": (["a.png"], "part of a preference pair (DPO)"),
    "label": (False, "a good or bad answer (KTO)"),
    "positive_messages": ([[USER]], "training embeddings"),
    "negative_messages": ([[USER]], "training embeddings"),
    # LLaMA-Factory, TRL
    "chosen": (PAIR, "part of a preference pair (DPO)"),
    "rejected": (PAIR, "part of a preference pair (DPO)"),
    "kto_tag": (True, "a good or bad answer (KTO)"),
    "audios": (["a.wav"], "not on audio"),
    "audio": ("a.wav", "not on audio"),
    "tools": ('[{"name": "look"}]', "samples with tool turns are refused"),
    "functions": ([{"name": "look"}], "samples with tool turns are refused"),
    "system": ("Be brief.", "attr.system in the data JSON does not name it"),
    "history": ([["Hi", "Hello"]], "attr.history"),
}


@pytest.mark.parametrize("key", REFUSED)
def test_a_key_that_changes_what_is_learnt_is_refused(key):
    value, why = REFUSED[key]
    talks = ({"messages": [USER, ANSWER]}, {"conversations": [{"from": "human", "value": "?"}, PAIR]},
             {"instruction": "?", "output": "Here."}, {})
    for talk in talks:
        problem = refusal({**talk, key: value})
        assert problem.startswith(f"has {key!r}, which this version does not support: ") and why in problem
        assert len(problem) < 280
    empty = {"ref": [], "bbox": []} if key == "objects" else "[]" if key == "tools" else None
    for nothing in (empty, None, "", []):
        assert read({"messages": [USER, ANSWER], key: nothing}) == read({"messages": [USER, ANSWER]})
        assert unread_keys({"messages": [USER, ANSWER], key: nothing}, ATTR) == []


def test_the_page_names_the_refused_keys():
    assert [key for key in REFUSED if f"`{key}`" not in (ROOT / "docs" / "data.md").read_text()] == []


def test_keys_about_the_answer_do_not_matter_in_a_prompt():
    about_answers = ("chosen", "rejected", "rejected_response", "label", "kto_tag")
    for key, (value, _) in REFUSED.items():
        if key in about_answers:
            assert read({"messages": [USER], key: value}, is_prompt=True).turns[0].text == USER["content"]
    assert "'objects'" in refusal({"messages": [USER], "objects": {"bbox": [[1, 2]]}}, is_prompt=True)


OF_MESSAGES = {
    "an answer that is not learnt": ([USER, {**ANSWER, "loss": False}], "message 1 (assistant) has 'loss' = false"),
    "a question that is learnt": ([{**USER, "loss": True}, ANSWER], "message 0 (user) has 'loss' = true"),
    "a share": ([USER, {**ANSWER, "loss_scale": 0.5}], "'loss_scale' = 0.5, but which turns are trained on is set for"),
    "weight of OpenAI": ([USER, {**ANSWER, "weight": 0}], "'weight' = 0"),
    "axolotl": ([USER, {**ANSWER, "train": False}], "'train' = false"),
    "calls": ([USER, {**ANSWER, "tool_calls": [{"id": "1"}]}], "'tool_calls', but samples with tool turns are refused"),
    "call": ([USER, {**ANSWER, "function_call": {"name": "a"}}], "'function_call', but samples with tool turns"),
    "files": ([{**USER, "images": ["a.png"]}, ANSWER], "'images', which nothing reads there; give files in a column"),
    "tool": ([USER, {"role": "tool", "content": "{}"}, ANSWER], "has the role 'tool', but samples with tool turns are"),
    "observation": ([USER, {"role": "observation", "content": "{}"}], "has the role 'observation', but samples with"),
    "a text with a picture": ([{"role": "user", "content": [{"type": "text", "text": "a", "image": "a.png"}]}, ANSWER],
                              "has 'text' and 'image'; make it two items"),
}


@pytest.mark.parametrize("name", OF_MESSAGES)
def test_a_key_of_a_message_that_changes_what_is_learnt_is_refused(name):
    messages, what = OF_MESSAGES[name]
    assert what in refusal({"messages": messages})


def test_weights_that_are_the_default_are_accepted():
    messages = [{**USER, "loss": False, "weight": 0, "train": False}, {**ANSWER, "loss": True, "weight": 1.0,
                                                                       "loss_scale": 1, "tool_calls": []}]
    assert read({"messages": messages}) == read({"messages": [USER, ANSWER]})
    assert unread_keys({"messages": messages}, ATTR) == []


def test_metadata_are_ignored_and_other_keys_are_named():
    plain = {"messages": [USER, ANSWER]}
    many = {**plain, **dict.fromkeys(HARMLESS, "x")}
    assert read(many) == read(plain) and unread_keys(many, ATTR) == []
    text = {"type": "text", "text": "Where is it?", "cache_control": "x"}
    other = {"messages": [{**USER, "content": [text], "name": "Eve", "id": 3}, {**ANSWER, "reasoning_content": "Hm."}],
             "solution": "There", "conversations": [PAIR], "label": "cat", "nothing": None, "x" * 100: 1}
    assert read(other) == read(plain)
    assert unread_keys(other, ATTR) == [
        "'solution'", "'conversations'", "'label'", repr("x" * 80), "'name' of a message", "'cache_control' of a text",
        "'reasoning_content' of a message"]
    alpaca = {"instruction": "?", "input": "", "output": "!", "messages": []}
    assert unread_keys(alpaca, Attributes(formatting="alpaca")) == []
    assert unread_keys({**plain, "output": "!"}, ATTR) == ["'output'"]


def test_a_key_that_attr_names_is_read():
    attr = Attributes(messages="messages", system="system", prompt="prompt", response="chosen", history="history")
    assert read({"messages": [USER, ANSWER], "system": "Be."}, attr=attr).turns[0].text == "Be."
    assert read({"prompt": "?", "chosen": "!", "history": [["a", "b"]]}, attr=attr).turns[-1].text == "!"


@pytest.mark.parametrize(("question", "answer"), [("query", "response"), ("prompt", "completion")])
def test_a_question_and_an_answer_in_two_columns_are_read_where_attr_names_them(question, answer):
    record = {question: "Where?", answer: "There."}
    assert refusal(record).startswith(f"has no 'messages', but {question!r} and {answer!r}: a question and an answer "
                                      f"in two columns, as in ms-swift's query and response, are read only if attr.")
    turns = read(record, attr=Attributes(prompt=question, response=answer)).turns
    assert [turn.text for turn in turns] == ["Where?", "There."]
