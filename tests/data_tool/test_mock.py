"""Generated data are read like other data, and have the requested size."""

import pytest

from mm.data.encode.encoder import SampleEncoder
from mm.data.index.dataset import Dataset
from mm.data_tool.commands import write_mock
from mm.data_tool.flags import MockFlags
from mm.errors import UserError
from tests.data.oracle import data_config


def test_every_sample_has_the_requested_size(tmp_path, hf_directory, model_config, tokenizer) -> None:
    def write(output):
        return write_mock(MockFlags(num_samples=5, num_images=2, width=56, height=84, text_length=40, num_pictures=3,
                                    output=output, tokenizer=str(hf_directory)))

    path = write(tmp_path / "made")
    config = data_config(hf_directory, tmp_path / "made", path)
    dataset, encoder = Dataset(config), SampleEncoder.from_config(config, model_config, 4096)
    assert len(dataset) == 5
    answers = [dataset[number].turns[-1].text for number in range(5)]
    assert len(set(answers)) == 5
    assert {len(tokenizer(answer, add_special_tokens=False)["input_ids"]) for answer in answers} == {40}
    assert {encoder.encode(dataset[number]).image_grids for number in range(5)} == {((1, 6, 4),) * 2}
    assert len(list((tmp_path / "made" / "images").iterdir())) == 3
    assert write(tmp_path / "again").read_text() == path.read_text(), "a function of the seed"


def test_nothing_is_overwritten(tmp_path) -> None:
    write_mock(MockFlags(num_samples=1, num_images=0, output=tmp_path))
    with pytest.raises(UserError, match=r"data.jsonl already exists"):
        write_mock(MockFlags(output=tmp_path))
