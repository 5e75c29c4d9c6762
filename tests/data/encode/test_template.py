"""Chat templates of unknown origin: the same text as in this process, and what hostile ones cannot do."""

import copy
import json
import os
import pickle
import shutil
import time

import psutil
import pytest

from mm.data.encode.chat import ChatEncoder, load_tokenizer
from mm.data.encode.template import Template
from mm.data.sample import Image, Turn, Video
from mm.errors import UserError
from mm.families.qwen2_5_vl.family import QWEN2_5_VL
from tests.data.oracle import CHAT_TEMPLATE

CONVERSATION = [
    {"role": "system", "content": "Be brief. \ud800 é\0"},
    {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What? 你好"}, {"type": "video"}]},
    {"role": "assistant", "content": "Two cats."},
]


def with_template(tokenizer, text):
    other = copy.deepcopy(tokenizer)
    other.chat_template = text
    return Template(other, QWEN2_5_VL)


@pytest.fixture(scope="module")
def unknown(tokenizer):
    """A template that its process renders, for any text: a process for each would start a Python for every test."""
    template = with_template(tokenizer, "")
    yield template
    template.close()


@pytest.mark.parametrize("for_generation", [False, True])
def test_the_process_renders_what_transformers_renders(tokenizer, unknown, for_generation):
    """With all that templates may use: special tokens, filters, functions of transformers, break."""
    for text in (CHAT_TEMPLATE, CHAT_TEMPLATE + " ", "{{ pad_token }}{{ messages | tojson }}{% for m in messages %}"
                 "{% if loop.index > 2 %}{% break %}{% endif %}{{ m.role }}{% endfor %}{{ add_generation_prompt }}"):
        template = with_template(tokenizer, text)
        assert template.is_known == (text == CHAT_TEMPLATE)
        expected = template._tokenizer.apply_chat_template(
            CONVERSATION, tokenize=False, add_generation_prompt=for_generation)
        unknown._tokenizer.chat_template, unknown._limit_seconds = text, 5.0
        assert (template if template.is_known else unknown).render(CONVERSATION, for_generation) == expected


HOSTILE = {
    "loops": ("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
              "it takes more than 0.5 s of CPU time"),
    "fills the memory": ("{% set x = namespace(v='aaaaaaaa') %}{% for i in range(40) %}{% set x.v = x.v ~ x.v %}"
                         "{% endfor %}{{ x.v }}", "it needs more than 1024 MiB of memory"),
    "4 GB at once": ("{{ 'a' * 4000000000 }}", "it needs more than 1024 MiB of memory"),
    "power": ("{{ 9 ** (9 ** 9) }}", "it takes more than 0.5 s of CPU time"),
    "makes 100 MB": ("{{ 'a' * 100000000 }}", "it makes 100,000,000 characters, above the limit of 67,108,864"),
    "divides by zero": ("{{ 1 / 0 }}", "ZeroDivisionError: division by zero"),
    "includes": ("{% include '/etc/passwd' %}", "TypeError: no loader for this environment"),
    "recurses": ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "RecursionError: maximum recursion depth|SIGSEGV"),
    "nests": ("{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", "RecursionError: |MemoryError|above|SIGSEGV"),
    "escapes": ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "is unsafe|undefined|access to attribute"),
    "calls": ("{{ messages.__init__.__globals__['os'].system('touch %s') }}", "is unsafe|undefined|access to"),
    "is no template": ("{% if %}", "Expected an expression"),
    "raises": ("{{ raise_exception('x' * 100000) }}", "x{200}"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_template_gets_one_message(unknown, tmp_path, name):
    text, why = HOSTILE[name]
    unknown._tokenizer.chat_template = text.replace("%s", str(tmp_path / "executed"))
    unknown._limit_seconds = 0.5 if "0.5 s" in why else 20
    me, start = psutil.Process(), time.monotonic()
    before = me.memory_info().rss
    with pytest.raises(UserError, match=rf"^the chat template cannot be used: ({why}).*; use Qwen2.5-VL's template\.$"):
        unknown.render(CONVERSATION, False)
    assert time.monotonic() - start < 20 and me.memory_info().rss - before < 200 << 20
    assert not os.listdir(tmp_path)


def test_an_encoder_has_its_own_process_after_pickling(tokenizer):
    other = copy.deepcopy(tokenizer)
    other.chat_template = CHAT_TEMPLATE + " "
    turns = [Turn("user", (Image(""), "question", Video(""))), Turn("assistant", ("answer",))]
    encoder, grids = ChatEncoder(other, 100, 2, QWEN2_5_VL), [(1, 2, 2)] * 2
    first = encoder.encode(turns, grids)
    again = pickle.loads(pickle.dumps(encoder))
    assert again.template._process.pid is None
    assert again.encode(turns, grids).token_ids.tolist() == first.token_ids.tolist()
    again.template.close()
    encoder.template.close()


def test_no_code_of_a_checkpoint_runs(hf_directory, tmp_path):
    """What transformers would ask about, or run with trust_remote_code."""
    directory = shutil.copytree(hf_directory, tmp_path / "hf")
    config = json.loads((directory / "tokenizer_config.json").read_text())
    own = {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": ["own.Own", "own.Own"]}}
    (directory / "tokenizer_config.json").write_text(json.dumps(config | own))
    (directory / "own.py").write_text(f"open({str(tmp_path / 'executed')!r}, 'w')\n")
    with pytest.raises(UserError, match="cannot load its tokenizer: "):
        load_tokenizer(str(directory))
    assert not (tmp_path / "executed").exists()


def break_by_fifo(path):
    path.unlink()
    os.mkfifo(path)


@pytest.mark.parametrize(("spoil", "message"), [
    (break_by_fifo, "tokenizer.json: is not a regular file"),
    (lambda path: os.truncate(path, 1 << 40), r"tokenizer.json: has 1,099,511,627,776 bytes, above the limit of"),
    (lambda path: path.write_text("{" * 100_000), "tokenizer.json: is not the JSON of a tokenizer "),
    (lambda path: path.write_text(json.dumps(json.loads(path.read_text()) | {
        "normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}})),
     'tokenizer.json: its normalizer has {"type": "Precompiled", .*which can take any time or memory'),
])
def test_a_hostile_tokenizer_file_is_refused(hf_directory, tmp_path, spoil, message):
    directory = shutil.copytree(hf_directory, tmp_path / "hf")
    spoil(directory / "tokenizer.json")
    with pytest.raises(UserError, match=message):
        load_tokenizer(str(directory))
