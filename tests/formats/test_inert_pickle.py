"""No global of a pickle is imported or called."""

import argparse
import enum
import functools
import io
import pickle
import struct
import sys
from collections import OrderedDict, defaultdict
from pathlib import PurePosixPath

import numpy
import pytest
import torch

from mm.formats.inert_pickle import CodeInPickle, Opaque, global_name, load


class Backend(enum.Enum):
    FLASH = 1


class Color(enum.IntFlag):
    RED = 1


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_plain_values_come_back_equal(protocol: int):
    value = {"a": [1, 2.5, "x", None, True, (1, "")], "b": OrderedDict(c=2**70), 3: -1}
    assert load(pickle.dumps(value, protocol)) == value


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_objects_that_megatron_saves_beside_the_model_are_readable(protocol: int):
    """args with enums, dtypes and functions; random states of Python, numpy and torch."""
    args = argparse.Namespace(
        tp=2, backend=Backend.FLASH, flag=Color.RED, dtype=torch.bfloat16, function=torch.nn.functional.gelu,
        partial=functools.partial(int, base=2), path=PurePosixPath("a/b"), words={"x"},
        default=defaultdict(list, a=[1]), size=torch.Size([2, 3]), buffer=io.BytesIO(b"x"),
    )  # fmt: skip
    numpy_state = numpy.random.RandomState(1).get_state()
    found = load(pickle.dumps({"args": args, "rng_state": [{"np": numpy_state, "count": 7}], "iteration": 5}, protocol))
    assert found["iteration"] == 5 and found["rng_state"][0]["count"] == 7
    state = found["args"].state
    assert global_name(found["args"]) == "argparse.Namespace"
    assert state["tp"] == 2
    assert global_name(state["backend"]) == f"{__name__}.Backend" and state["backend"].args == (1,)
    assert global_name(state["dtype"]) == "torch.bfloat16"
    assert isinstance(found["rng_state"][0]["np"][1], Opaque)


def written(function: str, argument: str) -> bytes:
    """A pickle that calls ``module name`` with a string."""
    module, name = function.split()
    return f"c{module}\n{name}\n(V{argument}\ntR.".encode()


@pytest.mark.parametrize("module", ["pathlib", "pathlib._local"])
def test_a_path_has_two_names(module: str) -> None:
    """The second is Python 3.13's; a pickle may be read by another Python than the one that wrote it."""
    assert global_name(load(written(f"{module} PosixPath", "a"))) == f"{module}.PosixPath"


@pytest.mark.parametrize(
    "function, name",
    [
        ("posix system", "posix.system"), ("os system", "os.system"), ("nt system", "nt.system"),
        ("__builtin__ eval", "builtins.eval"), ("builtins exec", "builtins.exec"),
        ("builtins __import__", "builtins.__import__"), ("subprocess Popen", "subprocess.Popen"),
        ("commands getoutput", "subprocess.getoutput"), ("runpy run_path", "runpy.run_path"),
        ("importlib import_module", "importlib.import_module"), ("os.path join", "os.path.join"),
        ("argparse open", "argparse.open"),
    ],
)  # fmt: skip
def test_code_is_refused_by_name(function: str, name: str, tmp_path):
    marker = tmp_path / "marker"
    with pytest.raises(CodeInPickle, match=f"^{name}$"):
        load(written(function, f"touch {marker}"))
    assert not marker.exists()


def test_code_is_refused_in_protocol_4_with_dotted_names():
    stack_global = b"\x80\x04\x8c\x02os\x8c\x0bpath.system\x93."
    with pytest.raises(CodeInPickle, match=r"^os\.path\.system$"):
        load(stack_global)


def test_a_module_is_not_even_imported(tmp_path, monkeypatch):
    marker = tmp_path / "marker"
    source = f"open({str(marker)!r}, 'w').close()\ndef run(argument):\n    pass\n"
    (tmp_path / "innocent_looking.py").write_text(source)
    monkeypatch.syspath_prepend(str(tmp_path))
    found = load(written("innocent_looking run", "argument"))
    assert global_name(found) == "innocent_looking.run" and found.args == ("argument",)
    assert "innocent_looking" not in sys.modules and not marker.exists()
    pickle.loads(written("innocent_looking run", "argument"))
    assert marker.exists(), "the pickle must be one that does harm where it is loaded the usual way"


def test_a_state_cannot_change_our_classes():
    """BUILD with slot state sets attributes, but only on the placeholder of this pickle."""
    build = b"cargparse\nNamespace\n)\x81(N}(Vargs\nK\x01utb."
    assert load(build).args == ()
    assert load(b"cargparse\nNamespace\n.").global_name == "argparse.Namespace"
    assert not hasattr(Opaque, "args") and Opaque.state is None


def test_a_huge_memo_index_takes_no_memory():
    """The C unpickler would allocate gigabytes for this."""
    assert load(b"\x80\x02K\x07r" + struct.pack("<I", 0x7FFFFFF0) + b".") == 7
