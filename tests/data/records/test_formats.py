"""Records of every format become the same sample; keys that other trainers learn from are refused, others are named."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from mm.config.data import Attributes
from mm.data.records.formats import HARMLESS, read_sample, unread_keys
from mm.data.records.roots import MediaRoots
from mm.data.sample import Image, Sample, Turn, Video
from mm.errors import UserError
from tests.data.oracle import ATTRIBUTES
from tests.files import ROOT

MINDSPEED = replace(ATTRIBUTES, videos="videos")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("a.png", "b.png", "c.mp4", "d e.mp4"):
        (tmp_path / name).touch()
    return tmp_path


@pytest.fixture
def read(folder):
    def sample(record: dict, attr: Attributes = MINDSPEED) -> Sample:
        return read_sample(record, attr, MediaRoots(str(folder)), "f:0")

    return sample


def test_every_format_gives_the_same_sample(read, folder):
    a, b, c = (str(folder / name) for name in ("a.png", "b.png", "c.mp4"))
    expected = (Turn("user", (Image(a), "Look at ", Video(c), " and ", Image(b), ".")), Turn("assistant", ("Yes.",)))
    text = "<image>Look at <video> and <image>."
    messages = [{"role": "user", "content": text}, {"role": "assistant", "content": "Yes."}]
    llava = [{"from": "human", "value": text}, {"from": "gpt", "value": "Yes."}]
    parts = [{"type": "image", "image": "a.png"}, {"type": "text", "text": "Look at "},
             {"type": "video", "video": f"file://{c}"}, {"type": "text", "text": " and "},
             {"type": "image", "image": f"file://{b}"}, {"type": "text", "text": "."}]
    openai = [{"type": "image_url", "image_url": {"url": "a.png", "detail": "high"}}, {"text": "Look at "},
              {"type": "video_url", "video_url": {"url": c}}, {"type": "text", "text": " and "},
              {"type": "image_url", "image_url": b}, "."]
    marked = [{"type": "image"}, "Look at ", {"type": "video"}, " and ", {"type": "image"}, "."]
    media = {"images": ["a.png", "b.png"], "videos": "c.mp4"}
    records = [
        {"messages": messages, **media},
        {"conversations": llava, "image": ["a.png", "b.png"], "video": "c.mp4"},
        *({"messages": [{"role": "user", "content": content}, messages[1]]} for content in (parts, openai)),
        {"messages": [{"role": "user", "content": marked}, messages[1]], **media},
        {"instruction": text, "output": "Yes.", **media},
    ]
    for record in records:
        for attr in (MINDSPEED, Attributes()):
            assert read(record, attr).turns == expected, record


def test_settings_of_one_picture_or_video(read, folder):
    sample = read({"messages": [
        {"role": "user", "content": [
            {"type": "image", "image": "a.png", "min_pixels": 0, "max_pixels": 1000.0},
            {"type": "video", "video": "c.mp4", "fps": 2, "total_pixels": 9000, "video_start": 0, "video_end": 1.5,
             "min_frames": 4, "max_frames": 8, "max_pixels": None},
            {"type": "video", "video": "c.mp4", "nframes": 6}]},
        {"role": "assistant", "content": [{"type": "text", "text": "A"}, {"type": "text", "text": "B"}]}]})
    c = str(folder / "c.mp4")
    assert sample.media == (Image(str(folder / "a.png"), 0, 1000), Video(
        c, fps=2.0, total_pixels=9000, video_start=0.0, video_end=1.5, min_frames=4, max_frames=8), Video(c, nframes=6))
    assert sample.turns[1].content == ("AB",)


@pytest.mark.parametrize(("part", "what"), [
    ({"type": "imag", "imag": "a.png"}, "did you mean 'image'"),
    ({"type": "text"}, "expected a string"),
    ({"type": "image", "image": "a.png", "max_pixel": 5}, "did you mean 'max_pixels'"),
    ({"type": "image", "image": "a.png", "fps": 5}, "'fps', which is not a setting for images"),
    ({"type": "image", "image": "a.png", "resized_height": 5}, "give min_pixels and max_pixels instead"),
    ({"type": "image", "image": "a.png", "max_pixels": "5"}, "expected a whole number above 0"),
    ({"type": "image", "image": "a.png", "max_pixels": 1.5}, "expected a whole number above 0"),
    ({"type": "image", "image": "a.png", "min_pixels": 9, "max_pixels": 4}, "'min_pixels' = 9 above 'max_pixels' = 4"),
    ({"type": "video", "video": "c.mp4", "fps": True}, "expected a number above 0"),
    ({"type": "video", "video": "c.mp4", "fps": 10**400}, "expected a number above 0"),
    ({"type": "video", "video": "c.mp4", "fps": 1, "nframes": 4}, "both 'fps' and 'nframes'"),
    ({"type": "video", "video": "c.mp4", "video_start": 3, "video_end": 2}, "'video_start' = 3 above 'video_end' = 2"),
    ({"type": "video", "video": ["a.png", 3]}, "expected the paths of its frames, each an image"),
    ({"type": "video", "video": ["a.png"], "nframes": 4}, "a list of frames, which are all used; list fewer"),
    ({"type": "video", "video": ["a.png"], "fps": 1, "sample_fps": 1}, "both 'fps' and 'sample_fps'"),
    ({"type": "video", "video": "a.mp4", "sample_fps": 1}, "not a list of frames; give fps, the number of frames to"),
    ({"type": "image_url", "image_url": {}}, "has no 'url'"),
    ({"type": "image"}, "has 1 <image> in its messages but 0 images"),
    ({"type": "video"}, "has 1 <video> in its messages but 0 videos"),
    (3, "is 3; expected an object"),
])
def test_bad_parts(read, part, what):
    with pytest.raises(UserError, match=re.escape(what)):
        read({"messages": [{"role": "user", "content": ["Hi ", part]}, {"role": "assistant", "content": "x"}]})


@pytest.mark.parametrize(("record", "what"), [
    ({"imag": "a.png"}, "'imag', which nothing reads (did you mean 'image'?)"),
    ({"Images": ["a.png"]}, "did you mean 'images'"),
    ({"video_1": "c.mp4"}, "did you mean 'video'"),
])
def test_a_misspelt_column_of_media_is_refused(read, record, what):
    """Otherwise the sample would be one of text alone."""
    talk = [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "x"}]
    with pytest.raises(UserError, match=re.escape(what)):
        read({"conversations": talk} | record)
    for other in ({"image_id": "a"}, {"image_dir": "d"}, {"image_width": "5"}, {"image_1": None}):
        assert read({"conversations": talk} | other).media == ()


def test_a_misspelt_column_of_messages_is_named(read):
    what = ("has no 'messages' (did you mean 'conversation'?); attr.messages in the data JSON must name that column, "
            "unless it is 'messages' or 'conversations'.")
    with pytest.raises(UserError, match=re.escape(what)):
        read({"conversation": [], "image": "a.png"})
    with pytest.raises(UserError, match="expected an object with 'from' and 'value'"):
        read({"conversations": [{"from": "human", "valu": "Hi"}]})


def test_only_user_turns_contain_media(read):
    shown = [{"type": "image", "image": "a.png"}]
    for role, messages in (("system", [{"role": "system", "content": shown}, USER, ANSWER]),
                           ("assistant", [USER, {"role": "assistant", "content": shown}])):
        with pytest.raises(UserError, match=f"{role}. contains an image or a video"):
            read({"messages": messages})


def test_placeholders_in_the_texts_of_lists_are_text(read):
    sample = read({"messages": [{"role": "user", "content": [{"type": "text", "text": "What is <image>?"}]},
                                {"role": "assistant", "content": "A word."}]})
    assert sample.turns[0].content == ("What is <image>?",) and sample.media == ()


ALPACA = Attributes(formatting="alpaca", history="history", system="system")


def test_alpaca(read, folder):
    record = {"instruction": "Add.", "input": "1 and 2", "output": "3", "history": [["Hi", "Hello"]], "system": "Be."}
    assert read(record, ALPACA).turns == (
        Turn("system", ("Be.",)), Turn("user", ("Hi",)), Turn("assistant", ("Hello",)),
        Turn("user", ("Add.\n1 and 2",)), Turn("assistant", ("3",)))
    assert read({"instruction": "Add.", "input": "", "output": "3"}, ALPACA).turns[0].content == ("Add.",)
    assert read({"instruction": "Add.", "output": "3", "history": None}, ALPACA).turns[0].content == ("Add.",)
    attr = Attributes(formatting="alpaca", prompt="q", response="a")
    assert read({"q": "<image>", "a": "b", "images": "a.png"}, attr).media == (Image(str(folder / "a.png")),)


@pytest.mark.parametrize(("record", "what"), [
    ({"instruction": "a"}, "has no 'output'"),
    ({"instructions": "a", "output": "b"}, "has no 'instruction' (did you mean 'instructions'?)"),
    ({"instruction": "", "input": " ", "output": "b"}, "has an empty 'instruction' (user)"),
    ({"instruction": "a", "output": ""}, "has an empty 'output' (assistant)"),
    ({"instruction": "a", "output": None}, "'output' is null; expected a string"),
    ({"instruction": 1, "output": "b"}, "'instruction' is 1; expected a string"),
    ({"instruction": "a", "output": "b", "history": [["x"]]}, "expected a list of pairs"),
    ({"instruction": "a", "output": "b", "history": [["", "y"]]}, "has an empty pair 0 of 'history' (user)"),
    ({"instruction": "<image>", "output": "b"}, "has 1 <image> in its messages but 0 images"),
])
def test_bad_alpaca(read, record, what):
    with pytest.raises(UserError, match=re.escape(what)):
        read(record, ALPACA)


def test_the_names_in_attr_take_precedence_over_the_usual_ones(read):
    attr = Attributes(messages="messages", role_tag="from", content_tag="value", user_tag="gpt", assistant_tag="human")
    said = [{"from": "gpt", "value": "Q"}, {"from": "human", "value": "A"}]
    assert [turn.role for turn in read({"messages": said}, attr).turns] == ["user", "assistant"]
    with pytest.raises(UserError, match='unknown role "user"'):
        read({"messages": [{"from": "user", "value": "Q"}, said[1]]}, attr)


ATTR = Attributes(messages="messages")
USER, ANSWER = {"role": "user", "content": "Where is it?"}, {"role": "assistant", "content": "There: <bbox>"}
PAIR = {"from": "gpt", "value": "Here."}


def read_record(record, is_prompt=False, attr=ATTR):
    return read_sample(record, attr, MediaRoots("/"), "f:0", is_prompt)


def refusal(record, is_prompt=False):
    with pytest.raises(UserError) as error:
        read_record(record, is_prompt)
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
        assert read_record({"messages": [USER, ANSWER], key: nothing}) == read_record({"messages": [USER, ANSWER]})
        assert unread_keys({"messages": [USER, ANSWER], key: nothing}, ATTR) == []


def test_the_page_names_the_refused_keys():
    assert [key for key in REFUSED if f"`{key}`" not in (ROOT / "docs" / "data.md").read_text()] == []


def test_keys_about_the_answer_do_not_matter_in_a_prompt():
    about_answers = ("chosen", "rejected", "rejected_response", "label", "kto_tag")
    for key, (value, _) in REFUSED.items():
        if key in about_answers:
            assert read_record({"messages": [USER], key: value}, is_prompt=True).turns[0].text == USER["content"]
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
    assert read_record({"messages": messages}) == read_record({"messages": [USER, ANSWER]})
    assert unread_keys({"messages": messages}, ATTR) == []


def test_metadata_are_ignored_and_other_keys_are_named():
    plain = {"messages": [USER, ANSWER]}
    many = {**plain, **dict.fromkeys(HARMLESS, "x")}
    assert read_record(many) == read_record(plain) and unread_keys(many, ATTR) == []
    text = {"type": "text", "text": "Where is it?", "cache_control": "x"}
    other = {"messages": [{**USER, "content": [text], "name": "Eve", "id": 3}, {**ANSWER, "reasoning_content": "Hm."}],
             "solution": "There", "conversations": [PAIR], "label": "cat", "nothing": None, "x" * 100: 1}
    assert read_record(other) == read_record(plain)
    assert unread_keys(other, ATTR) == [
        "'solution'", "'conversations'", "'label'", repr("x" * 80), "'name' of a message", "'cache_control' of a text",
        "'reasoning_content' of a message"]
    alpaca = {"instruction": "?", "input": "", "output": "!", "messages": []}
    assert unread_keys(alpaca, Attributes(formatting="alpaca")) == []
    assert unread_keys({**plain, "output": "!"}, ATTR) == ["'output'"]


def test_a_key_that_attr_names_is_read():
    attr = Attributes(messages="messages", system="system", prompt="prompt", response="chosen", history="history")
    assert read_record({"messages": [USER, ANSWER], "system": "Be."}, attr=attr).turns[0].text == "Be."
    assert read_record({"prompt": "?", "chosen": "!", "history": [["a", "b"]]}, attr=attr).turns[-1].text == "!"


@pytest.mark.parametrize(("question", "answer"), [("query", "response"), ("prompt", "completion")])
def test_a_question_and_an_answer_in_two_columns_are_read_where_attr_names_them(question, answer):
    record = {question: "Where?", answer: "There."}
    assert refusal(record).startswith(f"has no 'messages', but {question!r} and {answer!r}: a question and an answer "
                                      f"in two columns, as in ms-swift's query and response, are read only if attr.")
    turns = read_record(record, attr=Attributes(prompt=question, response=answer)).turns
    assert [turn.text for turn in turns] == ["Where?", "There."]
