"""Tokenizers, processors and chat templates: loaded as before a training, and tried on conversations."""

import shutil
from dataclasses import replace
from pathlib import Path
from random import Random

from benchmarks.fuzz.kind import Kind, Reading
from benchmarks.fuzz.mutate import json_form, text
from benchmarks.fuzz.settings import inputs
from mm.config.data import read_data
from mm.config.model import read_model
from mm.data.encode.chat import load_tokenizer
from mm.data.encode.encoder import SampleEncoder
from mm.data.encode.template import Template
from mm.data.sample import Turn
from mm.families.known import FAMILIES

_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.json", "preprocessor_config.json", "config.json")
_TURNS = [Turn("user", ("How many are there? 1 2 33  \n\n word's",)), Turn("assistant", ("No \u00e9 \u732b <b>.",))]
_HOSTILE = (
    "{% for i in range(10**9) %}x{% endfor %}", "{{ 'x' * 10**10 }}", "{{ [0] * 10**10 }}", "{{ 10**10**8 }}",
    "{{ ''.__class__.__mro__[1].__subclasses__() }}", 
    "{{ cycler.__init__.__globals__.os.system('touch ../outside/a') }}",
    "{% include '/etc/passwd' %}", "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "{{ raise_exception('x') }}",
    "{{ 'x' | center(10**10) }}", "{{ messages | tojson(indent=10**9) }}", "{{ namespace().x.y }}", "{{ 1 / 0 }}",
    "{% for a in messages recursive %}{{ loop(messages) }}{% endfor %}", "{{ messages[0].pop('role') }}", "\ud800",
    "{{ '%c' % 55296 }}", "{{ strftime_now('%' * 10**6) }}", "{{ lipsum(n=10**6) }}", "{% set x = self %}{{ x }}",
)


def write_tokenizer(original: Path, beside: Path) -> Reading:
    inputs(beside)
    (original / "hf").mkdir()
    for name in _FILES:
        shutil.copy(beside / "hf" / name, original / "hf" / name)
    model = read_model(beside / "model_1.json").value
    data = read_data(beside / "data.json").value

    def read() -> None:
        encoder = SampleEncoder.from_config(replace(data, model_name_or_path="hf"), model, 512)
        encoder.chat.encode(_TURNS, [])

    return read


def write_template(original: Path, beside: Path) -> Reading:
    inputs(beside)
    tokenizer = load_tokenizer(str(beside / "hf"))
    (original / "template.jinja").write_text(tokenizer.get_chat_template() + "{# not the published one #}")
    templates: list[Template] = []

    def read() -> None:
        tokenizer.chat_template = Path("template.jinja").read_bytes().decode(errors="surrogateescape")
        if not templates:  # one process in each child, as in each worker
            templates.append(Template(tokenizer, FAMILIES[0], 1.0))
        messages = [{"role": turn.role, "content": turn.text} for turn in _TURNS]
        templates[0].render(messages, for_generation=False)

    return read


def _template(content: bytes, rng: Random) -> bytes:
    if rng.random() > 0.1:
        return text(content, rng)
    at = rng.randrange(len(content))
    at = content.find(b"{", at) if rng.random() < 0.5 else at
    return content[:at] + rng.choice(_HOSTILE).encode(errors="surrogatepass") + content[at:]


CHAT_KINDS = (
    Kind("tokenizer files", write_tokenizer, {"hf/*.json": json_form}, 0.5, words=("hf", "tokenizer", "processor")),
    Kind("chat templates", write_template, {"template.jinja": _template}, 0.7, damages_folder=False,
         words=("chat template",)),
)
