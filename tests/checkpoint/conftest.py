"""The small model as transformers saves it, untied and tied."""

from pathlib import Path

import pytest

from tests.saved_hf import save


@pytest.fixture(scope="module", params=[False, True], ids=["untied", "tied"])
def saved(request, tmp_path_factory) -> Path:
    return save(tmp_path_factory.mktemp("saved"), tied=request.param)
