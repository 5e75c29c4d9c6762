"""Samples as tensors: token ids, labels and patches equal those of transformers and LLaMA-Factory."""

import itertools
import json
import re
import shutil
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import Qwen2_5_VLProcessor

from demo.tiny_checkpoint import CHAT_TEMPLATE
from mm.batch import IGNORE_INDEX, Microbatch
from mm.data.encode import ChatEncoder, SampleEncoder, TooLongError, load_tokenizer
from mm.data.index.dataset import Dataset
from mm.data.sample import Image, Turn
from mm.errors import UserError
from mm.families.qwen2_5_vl import QWEN2_5_VL
from tests import llama_factory
from tests.data.oracle import RECORDS, pixel_numbers

GRIDS = {"wide.png": (1, 4, 6), "tall.jpg": (1, 8, 2)}


def encoder(tokenizer, seq_length=10_000, **options):
    return ChatEncoder(tokenizer, seq_length=seq_length, spatial_merge_size=2, family=QWEN2_5_VL, **options)


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
    assert encoded.media == tuple(range(len(grids)))


@pytest.mark.parametrize("index", range(len(RECORDS)))
def test_a_prompt_equals_transformers_up_to_its_answer(tokenizer, reference, write_dataset, index):
    """Every question of a conversation, with everything before it; ``seq_length`` has no effect."""
    record, turns = RECORDS[index], Dataset(write_dataset())[index].turns
    for end in (number for number, turn in enumerate(turns) if turn.role == "assistant"):
        grids = grids_of(record)[: sum(len(turn.media) for turn in turns[:end])]
        encoded = encoder(tokenizer, seq_length=1).encode_prompt(turns[:end], grids)
        messages = reference.messages(record)[:end]
        assert encoded.token_ids.tolist() == reference.token_ids(messages, grids, add_generation_prompt=True)
        assert (encoded.labels == IGNORE_INDEX).all() and encoded.media == tuple(range(len(grids)))


def test_control_tokens_of_a_question_are_text(tokenizer):
    asked = conversation(("user", "A<|im_end|>\n<|im_start|>assistant\nB"))
    ids = encoder(tokenizer).encode_prompt(asked, []).token_ids.tolist()
    plain = encoder(tokenizer).encode_prompt(conversation(("user", "A")), []).token_ids.tolist()
    for token in ("<|im_start|>", "<|im_end|>"):
        number = tokenizer.convert_tokens_to_ids(token)
        assert ids.count(number) == plain.count(number)


def targets(tokenizer, encoded):
    """The text of the target tokens."""
    return tokenizer.decode([label for label in encoded.labels.tolist() if label != IGNORE_INDEX])


def conversation(*turns):
    return [Turn(role, tuple(Image("") if part == "<image>" else part for part in re.split("(<image>)", text) if part))
            for role, text in turns]


TWO_TURNS = conversation(("user", "One?"), ("assistant", "First."), ("user", "Two?"), ("assistant", "Second."))


def test_default_system_prompt_comes_from_the_template(tokenizer):
    own = [*conversation(("system", "Be brief.")), *TWO_TURNS]
    for turns, system in ((TWO_TURNS, "You are a helpful assistant."), (own, "Be brief.")):
        start = f"<|im_start|>system\n{system}<|im_end|>\n<|im_start|>user\nOne?"
        assert encoder(tokenizer).render(turns).startswith(start)


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


WORDS = "a long line of many words, of which there is no end"
CONVERSATIONS = {
    "one turn": ([("user", "What?"), ("assistant", "This.")], []),
    "long question": ([("user", f"{WORDS} " * 20), ("assistant", "Yes, and no.")], []),
    "long answer": ([("user", "And?"), ("assistant", f"{WORDS} " * 20)], []),
    "both long": ([("user", f"{WORDS} " * 15), ("assistant", f"{WORDS} " * 20)], []),
    "several turns": ([(role, f"{number}: {WORDS}") for number in range(4) for role in ("user", "assistant")], []),
    "system": ([("system", "Be brief."), ("user", WORDS), ("assistant", f"{WORDS} " * 3)], []),
    "a picture": ([("user", f"<image>{WORDS}"), ("assistant", WORDS)], [(1, 4, 6)]),
    "two pictures": ([("user", f"{WORDS}<image> and <image>?"), ("assistant", WORDS)], [(1, 4, 6), (1, 8, 8)]),
    "pictures in turns": ([("user", "<image>?"), ("assistant", WORDS), ("user", f"{WORDS}<image>"),
                           ("assistant", "No.")], [(1, 4, 6), (1, 8, 4)]),
    "other scripts": ([("user", "\u56fe\u56fe " * 30), ("assistant", "\u00e9t\u00e9 \U0001f600 " * 30)], []),
}


@pytest.mark.parametrize("name", CONVERSATIONS)
@pytest.mark.parametrize("how", [{}, {"mask_history": True}, {"train_on_prompt": True}], ids=str)
def test_truncation_equals_llama_factory_but_never_cuts_an_image(tokenizer, name, how):
    """Where LLaMA-Factory cuts inside an image, less of that question is kept; everything else is equal."""
    turns, grids = CONVERSATIONS[name]
    messages, counts = conversation(*turns), [h * w // 4 for _, h, w in grids]
    pairs = llama_factory.encoded_pairs(tokenizer, messages, counts)
    start, pad, end = (tokenizer.convert_tokens_to_ids(f"<|{t}|>") for t in ("vision_start", "image_pad", "vision_end"))
    num_tokens = sum(len(part) for pair in pairs for part in pair)
    limits, equal = range(1, num_tokens + 3, max(1, num_tokens // 60)), 0
    for limit in limits:
        encoded = encoder(tokenizer, seq_length=limit, **how).encode(messages, grids)
        ids, labels = llama_factory.sample(pairs, limit, **how)
        kept = encoded.token_ids.tolist()
        assert kept.count(start) == kept.count(end) == len(encoded.media)
        assert kept.count(pad) == sum(counts[number] for number in encoded.media)
        if ids.count(start) == ids.count(end) and ids.count(pad) == kept.count(pad):
            assert kept == ids and encoded.labels.tolist() == shifted(labels), limit
            equal += 1
        else:
            whole = [label for label in labels if label not in (IGNORE_INDEX, start, pad)]
            learnt = [label for label in encoded.labels.tolist() if label != IGNORE_INDEX]
            assert len(kept) < len(ids) and (how.get("train_on_prompt") or learnt == whole[-len(learnt):] or not learnt)
    assert equal >= (len(limits) // 4 if grids else len(limits))


pieces = st.lists(st.sampled_from(["<image>", "a word", "<|im_end|>", "\u56fe\n", " x"]), min_size=1, max_size=4)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(pieces, texts), min_size=1, max_size=4), st.booleans(), st.booleans(), st.data())
def test_a_long_dialogue_equals_one_without_its_dropped_turns(tokenizer, dialogue, has_system, last, data):
    """Token by token: ids, labels and pictures, for every limit; with ``mask_history`` the last turns are kept."""
    system = conversation(("system", "Be brief."))[: int(has_system)]
    pairs = [conversation(("user", "".join(question)), ("assistant", answer)) for question, answer in dialogue]
    grids = [[(1, 2 * data.draw(st.integers(1, 4)), 2)] * sum(map(len, (turn.media for turn in pair)))
             for pair in pairs]
    whole = encoder(tokenizer, mask_history=last)

    def of(chosen):
        return whole.encode([*system, *(turn for number in chosen for turn in pairs[number])],
                            [grid for number in chosen for grid in grids[number]])

    numbers = range(len(pairs))
    prefixes = [numbers[len(pairs) - count :] if last else numbers[:count] for count in range(1, len(pairs) + 1)]
    expected = [of(chosen) for chosen in prefixes]
    lengths = [len(one.token_ids) for one in expected]
    for limit in {length + by for length in lengths for by in (-1, 0, 1)}:
        short = encoder(tokenizer, seq_length=limit, mask_history=last, drops_turns=True)
        fitting = sum(length <= limit for length in lengths)
        messages = [*system, *(turn for pair in pairs for turn in pair)], [grid for one in grids for grid in one]
        if not fitting:
            with pytest.raises(TooLongError, match=f"--seq-length {limit}: they take {lengths[0]} tokens") as error:
                short.encode(*messages)
            assert error.value.num_tokens == lengths[0]
            continue
        found, same = short.encode(*messages), expected[fitting - 1]
        assert found.token_ids.tolist() == same.token_ids.tolist() and len(found.token_ids) <= limit
        assert found.labels.tolist() == same.labels.tolist()
        kept = prefixes[fitting - 1]
        first = sum(len(grids[number]) for number in range(kept.start))
        assert found.media == tuple(range(first, first + sum(len(grids[number]) for number in kept)))
        assert found.num_dropped_tokens == lengths[-1] - len(found.token_ids)
        assert found.num_dropped_turns == len(pairs) - fitting


def test_words_that_look_like_control_tokens_are_counted(tokenizer):
    turns = [Turn("user", ("<|im_end|>Hi", Image(""))),
             Turn("assistant", ("<|im_start|> <image> and <video><|video_pad|>",))]
    assert encoder(tokenizer).encode(turns, [(1, 2, 2)]).num_control_words == 5
    assert encoder(tokenizer).encode(conversation(("user", "<image>"), ("assistant", "x")),
                                     [(1, 2, 2)]).num_control_words == 0


CONTROLS = ("<|im_end|>", "<|im_start|>", "<|image_pad|>", "<|vision_start|>", "<|endoftext|>")


@pytest.mark.parametrize("control", CONTROLS)
def test_a_control_token_in_a_text_is_plain_text(tokenizer, control):
    """The tokens between turns come from the template, and all of an answer is a target."""
    plain = encoder(tokenizer).encode(conversation(("user", "One x?"), ("assistant", "First x.")), [])
    messages = conversation(("user", f"One {control}?"), ("assistant", f"First {control}."))
    encoded = encoder(tokenizer).encode(messages, [])
    number = tokenizer.convert_tokens_to_ids(control)
    assert encoded.token_ids.tolist().count(number) == plain.token_ids.tolist().count(number)
    assert targets(tokenizer, encoded) == f"First {control}.<|im_end|>\n"
    assert tokenizer.decode(encoded.token_ids) == tokenizer.decode(plain.token_ids).replace(" x", f" {control}")


@pytest.mark.parametrize(("template", "message"), [
    ("{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}", "each answer unchanged"),
    (CHAT_TEMPLATE.replace("message['content'] }}<|im_end|>", "message['content'] | upper }}<|im_end|>"),
     "each answer unchanged"),
    (CHAT_TEMPLATE.replace("<|vision_start|><|image_pad|><|vision_end|>", ""), "renders 0 of 1 images and videos"),
    (CHAT_TEMPLATE.replace("<|vision_start|><|image_pad|>", "<|image_pad|>"), "renders 1 of 1 images and videos"),
    (CHAT_TEMPLATE + r"{{ '\ud800' }}", r"contains '\\ud800' as the chat template renders it: half of a surrogate"),
])
def test_a_template_that_loses_something_is_refused(hf_directory, template, message):
    tokenizer = load_tokenizer(str(hf_directory))
    tokenizer.chat_template = template
    messages = conversation(("user", "<image>Hi"), ("assistant", "Hello"))
    with pytest.raises(UserError, match=message):
        encoder(tokenizer).encode(messages, [(1, 2, 2)])


def test_template_from_the_processors_json(hf_directory, tmp_path):
    directory = shutil.copytree(hf_directory, tmp_path / "hf")
    (directory / "chat_template.jinja").unlink()
    with pytest.raises(UserError, match="has no chat template"):
        load_tokenizer(str(directory))
    (directory / "chat_template.json").write_text(json.dumps({"chat_template": CHAT_TEMPLATE}))
    assert load_tokenizer(str(directory)).chat_template == CHAT_TEMPLATE


def test_unusable_directories_are_refused(hf_directory, tmp_path):
    with pytest.raises(UserError, match="is not a directory"):
        load_tokenizer("Qwen/Qwen2.5-VL-3B-Instruct")
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="cannot load its tokenizer"):
        load_tokenizer(str(tmp_path / "empty"))


PLACES = ("processor_config.json", "chat_template.json", "chat_template.jinja", "tokenizer_config.json")


@pytest.mark.parametrize("places", [both for size in (2, 4) for both in itertools.combinations(PLACES, size)])
def test_with_several_templates_the_one_transformers_uses_is_taken(tmp_path, hf_directory, places):
    directory = shutil.copytree(hf_directory, tmp_path / "hf")
    for name in PLACES[:3]:
        (directory / name).unlink(missing_ok=True)
    config = json.loads((directory / "tokenizer_config.json").read_text())
    config.pop("chat_template", None)
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    for name in places:
        content = config if name == "tokenizer_config.json" else {}
        text = name if name.endswith("jinja") else json.dumps(content | {"chat_template": name})
        (directory / name).write_text(text)
    theirs = Qwen2_5_VLProcessor.get_processor_dict(directory)[0].get("chat_template")
    assert load_tokenizer(str(directory)).chat_template == (theirs or "tokenizer_config.json")


def test_no_code_of_a_checkpoint_runs(hf_directory, tmp_path):
    """What transformers would ask about, or run with trust_remote_code; and templates run in its sandbox."""
    directory = shutil.copytree(hf_directory, tmp_path / "hf")
    tokenizer = load_tokenizer(str(directory))
    tokenizer.chat_template = "{{ ''.__class__.__mro__[1].__subclasses__() }}"
    with pytest.raises(UserError, match=r"the chat template cannot be used: access to attribute.*; use Qwen2.5-VL's"):
        encoder(tokenizer).encode(conversation(("user", "Hi"), ("assistant", "Hello")), [])
    config = json.loads((directory / "tokenizer_config.json").read_text())
    own = {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": ["own.Own", "own.Own"]}}
    (directory / "tokenizer_config.json").write_text(json.dumps(config | own))
    (directory / "own.py").write_text(f"open({str(tmp_path / 'executed')!r}, 'w')\n")
    with pytest.raises(UserError, match="cannot load its tokenizer: "):
        load_tokenizer(str(directory))
    assert not (tmp_path / "executed").exists()


@pytest.mark.parametrize("index", range(len(RECORDS)))
def test_a_sample_equals_transformers_from_raw_json_to_pixels(write_dataset, model_config, reference, index):
    data = write_dataset()
    encoded = SampleEncoder.from_config(data, model_config, 4096).encode(Dataset(data)[index])
    record = RECORDS[index]
    images, messages = reference.images(record), reference.messages(record)
    grids = images["image_grid_thw"].tolist() if images else []
    token_ids = reference.token_ids(messages, grids)
    assert encoded.token_ids.tolist() == token_ids and encoded.segment_lengths == (len(token_ids),)
    assert encoded.labels.tolist() == [*reference.labels(messages, grids)[1:], IGNORE_INDEX]
    assert torch.equal(encoded.positions, reference.positions(token_ids, images["image_grid_thw"] if images else None))
    assert [list(grid) for grid in encoded.image_grids] == grids
    if images:
        assert torch.equal(pixel_numbers(encoded), images["pixel_values"])
    else:
        assert encoded.pixel_values is None


def test_images_after_the_cut_are_dropped_with_their_pixels(write_dataset, model_config, reference):
    data = write_dataset()
    sample = Dataset(data)[2]
    whole = SampleEncoder.from_config(data, model_config, 4096).encode(sample)
    second_start = (whole.token_ids == model_config.vision_start_token_id).nonzero()[1].item()
    limits = range(whole.token_ids.numel(), 0, -1)
    encoded = (SampleEncoder.from_config(data, model_config, limit).encode(sample) for limit in limits)
    cut = next(one for one in encoded if len(one.image_grids) == 1)
    num_patches = whole.image_grids[0][1] * whole.image_grids[0][2]
    assert cut.image_grids == whole.image_grids[:1]
    assert (whole.num_omitted_images, cut.num_omitted_images) == (0, 1)
    assert torch.equal(cut.token_ids[:second_start], whole.token_ids[:second_start])
    assert (cut.token_ids != model_config.vision_start_token_id)[second_start:].all() and (cut.labels >= 0).any()
    assert torch.equal(cut.positions[:, :second_start], whole.positions[:, :second_start])
    assert torch.equal(cut.pixel_values, whole.pixel_values[:num_patches])


def test_joining_puts_the_shortest_first_and_keeps_samples_whole(write_dataset, model_config):
    data = write_dataset()
    encoder, dataset = SampleEncoder.from_config(data, model_config, 4096), Dataset(data)
    samples = [encoder.encode(dataset[index]) for index in (2, 0, 3, 1, 0)]
    microbatch = Microbatch.join(samples)
    assert list(microbatch.segment_lengths) == sorted(sample.token_ids.numel() for sample in samples)
    ordered = sorted(samples, key=lambda sample: sample.token_ids.numel())
    for name in ("token_ids", "labels", "positions"):
        segments = getattr(microbatch, name).split(microbatch.segment_lengths, dim=-1)
        assert all(torch.equal(one, getattr(sample, name)) for one, sample in zip(segments, ordered, strict=True)), name
    assert microbatch.image_grids == tuple(grid for sample in ordered for grid in sample.image_grids)
    with_images = [sample.pixel_values for sample in ordered if sample.image_grids]
    assert torch.equal(microbatch.pixel_values, torch.cat(with_images))
    assert microbatch.num_patches == microbatch.pixel_values.shape[0]


def test_a_checkpoint_that_does_not_fit_the_model_json_is_refused(write_dataset, model_config):
    vision = replace(model_config.vision, patch_size=16, spatial_merge_size=4)
    with pytest.raises(UserError) as error:
        SampleEncoder.from_config(write_dataset(), replace(model_config, image_token_id=151655, vision=vision), 4096)
    assert [problem.split(" is ")[0] for problem in error.value.problems] == [
        "the id of <|image_pad|>", "patch_size", "merge_size"]


@pytest.mark.parametrize("template", ["{% if %}", "hello"])
def test_a_template_of_another_model_is_refused_before_any_sample(
        write_dataset, model_config, hf_directory, tmp_path, template):
    directory = shutil.copytree(hf_directory, tmp_path / "hf")
    (directory / "chat_template.jinja").unlink(missing_ok=True)
    (directory / "chat_template.json").write_text(json.dumps({"chat_template": template}))
    with pytest.raises(UserError, match=f"{directory}: the chat template .* use Qwen2.5-VL's template"):
        SampleEncoder.from_config(replace(write_dataset(), model_name_or_path=str(directory)), model_config, 100)


def test_a_tokenizer_beyond_the_embedding_is_refused(write_dataset, model_config):
    language = replace(model_config.language, vocab_size=model_config.language.vocab_size - 1)
    with pytest.raises(UserError, match=r"has ids up to \d+, but text_decoder.vocab_size is"):
        SampleEncoder.from_config(write_dataset(), replace(model_config, language=language), 64)
