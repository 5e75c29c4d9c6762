"""How commands end: one line after Ctrl-C, status 130, a version, no control characters in messages; and free ports."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from demo.tiny_checkpoint import build
from mm import process
from mm.data.sample import record_place
from mm.errors import UserError, printable
from mm.process import free_port, print_notes, run_command
from tests.files import EXAMPLES, ROOT
from tests.tiny_inputs import write_data

_LOADS = re.compile(r"^(loading the libraries|reading tokenizer and processor|checking \S+): .*\n", re.MULTILINE)
"""Progress that a busy machine prints."""


def test_control_characters_are_escaped(capsys) -> None:
    odd = "a\x1b[2Jb\rc\x00\x9b\u202e\ud83d\u2028d"
    escaped = r"a\x1b[2Jb\rc\x00\x9b\u202e\ud83d\u2028d"
    assert printable(odd) == escaped == printable(escaped)
    assert printable("tab\tand\nlines of 猫, é and 😀") == "tab\tand\nlines of 猫, é and 😀"
    assert UserError([odd]).problems == (escaped,)
    print_notes([odd])
    assert capsys.readouterr().out == f"note: {escaped}\n"
    assert record_place("a.json", 3, odd) == f"a.json: record 3 (id '{escaped}')"


def test_a_process_that_leaves_at_once_leaves_no_temporary_folder(tmp_path: Path) -> None:
    program = ("from multiprocessing.util import get_temp_dir; from mm.process import leave\n"
               "print(get_temp_dir(), flush=True); leave(3)")  # fmt: skip
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, env=os.environ | {"TMPDIR": str(tmp_path)},
                          capture_output=True, text=True, check=False)  # fmt: skip
    assert (done.returncode, done.stderr) == (3, "")
    assert str(tmp_path) in done.stdout
    assert list(tmp_path.iterdir()) == []


def test_a_signal_while_torch_is_imported_ends_a_run_with_one_line(tmp_path: Path) -> None:
    """After an import that was interrupted, torch cannot be imported again: a stand-in that signals each time."""
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text(
        "import os, signal, time\nos.kill(os.getpid(), signal.SIGTERM)\ntime.sleep(10)\n")
    (tmp_path / "hf").mkdir()
    (tmp_path / "samples.json").write_text("[]")
    write_data(tmp_path, tmp_path / "samples.json")
    model = json.loads((EXAMPLES / "model_tiny.json").read_text())
    for tower in (model["image_encoder"]["vision_encoder"], model["text_decoder"]):
        tower["pipeline_num_layers"] = [sum(tower["pipeline_num_layers"])]
    (tmp_path / "model.json").write_text(json.dumps(model))
    words = ["--mm-model", str(tmp_path / "model.json"), "--mm-data", str(tmp_path / "data.json"), "--save",
             str(tmp_path / "save"), "--lr", "1e-5", "--train-iters", "1", "--seq-length", "64",
             "--micro-batch-size", "1"]  # fmt: skip
    done = subprocess.run([sys.executable, "-m", "mm.train", *words], cwd=ROOT, capture_output=True, text=True,
                          env=os.environ | {"PYTHONPATH": f"{tmp_path}:{ROOT}"}, check=False)  # fmt: skip
    said = _LOADS.sub("", done.stderr)
    assert said == f"Stopped by SIGTERM: training had not begun; {tmp_path / 'save'} is as it was.\n"
    assert done.returncode == 143


def test_an_interruption_is_reported_with_what_is_kept(capsys) -> None:
    def interrupted() -> int:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(10)
        return 0

    before = signal.getsignal(signal.SIGINT)
    try:
        assert run_command(interrupted, lambda: "two files are kept") == 130
    finally:
        signal.signal(signal.SIGINT, before)
    assert capsys.readouterr() == ("", "Interrupted: two files are kept.\n")
    assert run_command(lambda: 7, lambda: "") == 7 and signal.getsignal(signal.SIGINT) is before


def test_a_file_that_cannot_be_read_is_named_without_a_traceback(tmp_path: Path, capsys) -> None:
    for name, why in (("missing", "No such file or directory"), ("long" * 100, "File name too long")):
        assert run_command(lambda path=tmp_path / name: len(path.read_bytes()), lambda: "") == 2
        assert capsys.readouterr().err == (
            f"error: {tmp_path / name}: cannot be read or written: {why}; repair or replace it, or give another path\n")
    with pytest.raises(BrokenPipeError):  # not about a file

        def fail() -> int:
            raise BrokenPipeError

        run_command(fail, lambda: "")


def test_output_that_nobody_reads_any_more_ends_the_command_in_silence() -> None:
    """As in ``mm-data check | head -1``."""
    program = ("import sys; from mm.process import run_command\n"
               "sys.exit(run_command(lambda: print('line\\n' * 99999), str))")
    command = [sys.executable, "-c", program]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.readline() == b"line\n"
        process.stdout.close()
        assert process.stderr.read() == b"" and process.wait(timeout=120) == 128 + signal.SIGPIPE


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """More records than can be checked before the signal arrives, with odd ids."""
    directory = tmp_path_factory.mktemp("interrupted")
    record = {"id": "\x1b[31m\ud83d", "messages": [{"role": "user", "content": "1? " * 50},
                                                   {"role": "assistant", "content": "2 " * 50}]}
    (directory / "train.json").write_text("[" + ",\n".join([json.dumps(record)] * 100_000) + "]")
    build(directory / "hf", ["One? 1", "Two and three and four? They are of no use here."], seed=0)
    write_data(directory, directory / "train.json", preprocessing_num_workers=2)
    return directory


def test_ctrl_c_in_mm_data_is_one_line(inputs: Path) -> None:
    """As a terminal sends it, to the command and all of its workers, while they check records."""
    command = [sys.executable, "-m", "mm.data_tool.cli", "check", "--mm-data", str(inputs / "data.json"), "--mm-model",
               str(EXAMPLES / "model_tiny.json"), "--seq-length", "256"]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                               start_new_session=True)
    tool, until = psutil.Process(process.pid), time.monotonic() + 120
    # The fork server, the resource tracker, and two workers.
    while len(tool.children(recursive=True)) < 4 and time.monotonic() < until:
        time.sleep(0.02)
    os.killpg(process.pid, signal.SIGINT)
    out, err = process.communicate(timeout=120)
    assert (process.returncode, out) == (130, ""), err
    assert re.fullmatch("Interrupted: finished indexes and pages are kept; [^\n]*\n", _LOADS.sub("", err))
    assert not list(inputs.rglob("*.rows"))


@pytest.mark.parametrize("words", [["pretrain_vlm.py"], ["inference_vlm.py"], ["evaluate_vlm.py"], ["-m", "mm.launch"]],
                         ids=lambda words: words[-1])
def test_a_python_without_the_packages_explains_how_to_install_them(words: list[str]):
    """-S -E: without site-packages, as outside the environment."""
    command = [sys.executable, "-S", "-E", *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and done.stdout == ""
    missing = "'(pydantic|annotated_types|psutil|torch)"  # whichever is imported first
    assert re.match(re.escape(f"error: {sys.executable} has no package ") + missing, done.stderr)
    assert "source .venv/bin/activate" in done.stderr and "Traceback" not in done.stderr


def test_the_doctor_starts_without_any_package():
    done = subprocess.run([sys.executable, "-S", "-E", "-m", "mm.doctor.cli"], cwd=ROOT, capture_output=True, text=True,
                          check=False)
    assert (done.returncode, done.stderr) == (1, "")
    assert re.search("^fault    package: .*is not installed in this Python", done.stdout, re.MULTILINE)


def test_a_port_is_free_and_none_that_the_system_gives_away(monkeypatch) -> None:
    first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    assert free_port() < first
    with socket.socket() as taken, socket.socket() as other:
        taken.bind(("localhost", 0))
        other.bind(("", 0))
        number, free = taken.getsockname()[1], other.getsockname()[1]
        other.close()
        monkeypatch.setattr(process, "_PORTS", [number, free])
        assert {free_port() for _ in range(20)} == {free}
