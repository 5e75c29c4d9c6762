import json
import shutil

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mm.batch import IGNORE_INDEX
from mm.data.chat import ChatEncoder, load_tokenizer
from mm.data.dataset import Dataset, Turn
from mm.errors import UserError
from tests.data.oracle import CHAT_TEMPLATE, RECORDS

GRIDS = {"wide.png": (1, 4, 6), "tall.jpg": (1, 8, 2)}


def encoder(tokenizer, seq_length=10_000, **options):
    return ChatEncoder(tokenizer, seq_length=seq_length, spatial_merge_size=2, **options)


def grids_of(record):
    images = record.get("images") or []
    return [GRIDS[path] for path in ([images] if isinstance(images, str) else images)]


def shifted(labels):
    return [*labels[1:], IGNORE_INDEX]


@pytest.mark.parametrize("index", range(len(RECORDS)))
@pytest.mark.parametrize("mask_history", [False, True])
def test_tokens_and_labels_equal_transformers(tokenizer, reference, write_dataset, index, mask_history):
    record, grids = RECORDS[index], grids_of(RECORDS[index])
    encoded = encoder(tokenizer, mask_history=mask_history).encode(Dataset(write_dataset())[index].turns, grids)
    messages = reference.messages(record)
    assert encoded.token_ids.tolist() == reference.token_ids(messages, grids)
    assert encoded.labels.tolist() == shifted(reference.labels(messages, grids, last_only=mask_history))
    assert encoded.num_images == len(grids)


def targets(tokenizer, encoded):
    """The text that is learnt."""
    return tokenizer.decode([label for label in encoded.labels.tolist() if label != IGNORE_INDEX])


def conversation(*turns):
    return [Turn(role, text) for role, text in turns]


TWO_TURNS = conversation(("user", "One?"), ("assistant", "First."), ("user", "Two?"), ("assistant", "Second."))


def test_what_is_learnt(tokenizer):
    assert targets(tokenizer, encoder(tokenizer).encode(TWO_TURNS, [])) == ("First.<|im_end|>\nSecond.<|im_end|>\n")
    assert targets(tokenizer, encoder(tokenizer, mask_history=True).encode(TWO_TURNS, [])) == "Second.<|im_end|>\n"


def test_train_on_prompt_learns_all_but_image_tokens(tokenizer):
    messages = [Turn("user", "See <image>"), Turn("assistant", "Yes.")]
    encoded = encoder(tokenizer, train_on_prompt=True).encode(messages, [(1, 4, 4)])
    text = encoder(tokenizer).render(messages)
    first = "<|im_start|>"
    assert first + targets(tokenizer, encoded) == text.replace("<|image_pad|>", "")
    assert encoded.labels[-1] == IGNORE_INDEX


def test_default_system_prompt_is_the_templates(tokenizer):
    assert (
        encoder(tokenizer)
        .render(TWO_TURNS)
        .startswith("<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>user\nOne?")
    )
    own = [Turn("system", "Be brief."), *TWO_TURNS]
    assert encoder(tokenizer).render(own).startswith("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n")


def test_a_token_that_begins_in_the_header_and_ends_in_the_answer_is_learnt(tokenizer):
    messages = conversation(("user", "Hi"), ("assistant", "\nHello"))
    encoded = encoder(tokenizer).encode(messages, [])
    newlines = tokenizer.convert_tokens_to_ids("\u010a\u010a")
    assert newlines in encoded.token_ids.tolist()
    assert targets(tokenizer, encoded) == "\n\nHello<|im_end|>\n"


texts = st.text("ab \n\t\u00e9e\u0301\u56fe\U0001f600.1'", min_size=1, max_size=12)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(texts, texts), min_size=1, max_size=3))
def test_targets_are_the_answers_for_any_text(tokenizer, turns):
    messages = [m for question, answer in turns for m in conversation(("user", question), ("assistant", answer))]
    encoded = encoder(tokenizer).encode(messages, [])
    assert encoded.token_ids.tolist() == tokenizer(encoder(tokenizer).render(messages))["input_ids"]
    # Compared as tokens written out: the newline of the header may be part of an answer's first token.
    learnt = targets(tokenizer, encoded).split("<|im_end|>\n")
    normal = tokenizer.backend_tokenizer.normalizer.normalize_str
    expected = [normal(answer) for _, answer in turns]
    assert learnt[-1] == "" and len(learnt) == len(expected) + 1
    for found, answer in zip(learnt[:-1], expected, strict=True):
        assert found in (answer, "\n" + answer)


def test_every_cut_is_a_prefix_and_never_inside_an_image(tokenizer):
    messages = [
        Turn("user", "<image> and <image>?"),
        Turn("assistant", "Yes."),
        Turn("user", "<image>"),
        Turn("assistant", "No."),
    ]
    grids = [(1, 4, 6), (1, 2, 2), (1, 8, 4)]
    whole = encoder(tokenizer).encode(messages, grids)
    ids = whole.token_ids.tolist()
    start, pad, end = (tokenizer.convert_tokens_to_ids(f"<|{t}|>") for t in ("vision_start", "image_pad", "vision_end"))
    for limit in range(1, len(ids) + 3):
        encoded = encoder(tokenizer, seq_length=limit).encode(messages, grids)
        kept = encoded.token_ids.tolist()
        assert kept == ids[: len(kept)] and len(kept) <= limit
        assert encoded.labels.tolist() == [*whole.labels[: len(kept) - 1].tolist(), IGNORE_INDEX]
        assert kept.count(start) == kept.count(end) == encoded.num_images
        assert kept.count(pad) == sum(h * w // 4 for _, h, w in grids[: encoded.num_images])
        if len(kept) < min(limit, len(ids)):  # only an image that does not fit is reason to keep less
            assert ids[len(kept)] == start and end not in ids[len(kept) : limit]


def test_a_sample_cut_before_its_answer_has_no_target(tokenizer):
    encoded = encoder(tokenizer, seq_length=12).encode(TWO_TURNS, [])
    assert encoded.token_ids.numel() == 12
    assert (encoded.labels == IGNORE_INDEX).all()


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}", "each answer unchanged"),
        (CHAT_TEMPLATE.replace("message['content'] }}<|im_end|>", "message['content'] | upper }}<|im_end|>"),
         "each answer unchanged"),
        (CHAT_TEMPLATE.replace("<|vision_start|><|image_pad|><|vision_end|>", ""), "shows 0 images of 1"),
        (CHAT_TEMPLATE.replace("<|vision_start|><|image_pad|>", "<|image_pad|>"), "shows 1 images of 1"),
    ],
)  # fmt: skip
def test_a_template_that_loses_something_is_refused(hf_directory, template, message):
    tokenizer = load_tokenizer(str(hf_directory))
    tokenizer.chat_template = template
    messages = [Turn("user", "<image>Hi"), Turn("assistant", "Hello")]
    with pytest.raises(UserError, match=message):
        encoder(tokenizer).encode(messages, [(1, 2, 2)])


def copy_without_template(hf_directory, tmp_path):
    shutil.copytree(hf_directory, tmp_path / "hf")
    (tmp_path / "hf" / "chat_template.jinja").unlink()
    return tmp_path / "hf"


def test_template_from_the_processors_json(hf_directory, tmp_path):
    directory = copy_without_template(hf_directory, tmp_path)
    with pytest.raises(UserError, match="has no chat template"):
        load_tokenizer(str(directory))
    (directory / "chat_template.json").write_text(json.dumps({"chat_template": CHAT_TEMPLATE}))
    assert load_tokenizer(str(directory)).chat_template == CHAT_TEMPLATE


def test_unusable_directories_are_refused(hf_directory, tmp_path):
    with pytest.raises(UserError, match="is no directory"):
        load_tokenizer("Qwen/Qwen2.5-VL-3B-Instruct")
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="tokenizer does not load"):
        load_tokenizer(str(tmp_path / "empty"))


@pytest.mark.parametrize(("content", "message"), [
    ("{", "chat_template.json:1:2: the file ends before"),
    ("[1]", "chat_template.json: has no text 'chat_template'"),
    ('{"chat_template": 5}', "chat_template.json: has no text 'chat_template'"),
])
def test_a_broken_template_file_is_named(tmp_path, hf_directory, content, message):
    directory = shutil.copytree(hf_directory, tmp_path / "hf")
    (directory / "chat_template.jinja").unlink(missing_ok=True)
    (directory / "chat_template.json").write_text(content)
    with pytest.raises(UserError, match=message):
        load_tokenizer(str(directory))


def test_a_broken_tokenizer_file_is_named(tmp_path, hf_directory):
    directory = shutil.copytree(hf_directory, tmp_path / "hf")
    (directory / "tokenizer_config.json").write_text("[1]")
    with pytest.raises(UserError, match="its tokenizer does not load"):
        load_tokenizer(str(directory))
