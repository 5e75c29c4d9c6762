import json
import shutil
from dataclasses import replace

import pytest
import torch

from mm.batch import IGNORE_INDEX, Microbatch
from mm.data.encode.encoder import SampleEncoder
from mm.data.index.dataset import Dataset
from mm.errors import UserError
from tests.data.oracle import RECORDS, photo, pixel_numbers


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
    segments = zip(
        microbatch.token_ids.split(microbatch.segment_lengths),
        microbatch.labels.split(microbatch.segment_lengths),
        microbatch.positions.split(microbatch.segment_lengths, dim=1),
        strict=True,
    )
    ordered = sorted(samples, key=lambda sample: sample.token_ids.numel())
    for sample, (token_ids, labels, positions) in zip(ordered, segments, strict=True):
        assert torch.equal(token_ids, sample.token_ids)
        assert torch.equal(labels, sample.labels)
        assert torch.equal(positions, sample.positions)
    assert microbatch.image_grids == tuple(grid for sample in ordered for grid in sample.image_grids)
    with_images = [sample.pixel_values for sample in ordered if sample.image_grids]
    assert torch.equal(microbatch.pixel_values, torch.cat(with_images))
    assert microbatch.num_patches == microbatch.pixel_values.shape[0]


def test_a_damaged_image_is_named_with_its_sample(write_dataset, model_config, tmp_path):
    path = tmp_path / "short.png"
    photo(300, 300).save(path)
    path.write_bytes(path.read_bytes()[:3000])
    data = write_dataset([{"messages": [("user", "<image>"), ("assistant", "x")], "images": [str(path)]}])
    with pytest.raises(UserError, match=r"data.json: record 0: .*short.png: the image is damaged"):
        SampleEncoder.from_config(data, model_config, 4096).encode(Dataset(data)[0])


def test_a_checkpoint_that_does_not_fit_the_model_json_is_refused(write_dataset, model_config):
    other = replace(
        model_config, image_token_id=151655, vision=replace(model_config.vision, patch_size=16, spatial_merge_size=4)
    )
    with pytest.raises(UserError) as error:
        SampleEncoder.from_config(write_dataset(), other, 4096)
    assert [problem.split(" is ")[0] for problem in error.value.problems] == [
        "the id of <|image_pad|>",
        "patch_size",
        "merge_size",
    ]


@pytest.mark.parametrize("template", ["{% if %}", "hello"])
def test_a_template_of_another_model_is_refused_before_any_sample(
    write_dataset, model_config, hf_directory, tmp_path, template
):
    directory = shutil.copytree(hf_directory, tmp_path / "hf")
    (directory / "chat_template.jinja").unlink(missing_ok=True)
    (directory / "chat_template.json").write_text(json.dumps({"chat_template": template}))
    with pytest.raises(UserError, match=f"{directory}: the chat template .* use Qwen2.5-VL's template"):
        SampleEncoder.from_config(replace(write_dataset(), model_name_or_path=str(directory)), model_config, 100)


def test_a_tokenizer_beyond_the_embedding_is_refused(write_dataset, model_config):
    language = replace(model_config.language, vocab_size=model_config.language.vocab_size - 1)
    with pytest.raises(UserError, match=r"has ids up to \d+, but text_decoder.vocab_size is"):
        SampleEncoder.from_config(write_dataset(), replace(model_config, language=language), 64)
