"""The shipped JSON files have no problems."""

import pytest

from mm.config.data import read_data
from mm.config.model import read_model
from tests.files import EXAMPLES


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("model_*.json")), ids=lambda path: path.name)
def test_every_model_json_loads(path):
    assert read_model(path).value.vision.num_layers > 0


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("data_*.json")), ids=lambda path: path.name)
def test_every_data_json_loads(path):
    assert read_data(path).value.dataset
