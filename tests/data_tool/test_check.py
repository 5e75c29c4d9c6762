"""``mm-data check``, ``show`` and ``mock`` on the demo's data with ten broken samples."""

import html
import json
import re
from pathlib import Path

import pytest

from demo import digits as demo_digits
from demo.tiny_checkpoint import build
from mm.data_tool.cli import main
from tests.data.oracle import photo
from tests.files import EXAMPLES
from tests.tiny_inputs import write_data


def sample(question: str, answer: str, *images: str) -> dict:
    return {"images": list(images), "messages": [{"role": "user", "content": question},
                                                 {"role": "assistant", "content": answer}]}


BROKEN = {
    # what is said of it; those in DEEP only when pictures are decoded
    "lost picture": (sample("<image>?", "1", "lost.png"), "lost.png"),
    "web page": (sample("<image>?", "1", "page.jpg"), "a web page"),
    "empty file": (sample("<image>?", "1", "empty.png"), "is empty"),
    "strip": (sample("<image>?", "1", "strip.png"), "more than 200 times"),
    "too few pictures": (sample("<image><image>?", "1", "good.png"), "2 <image>"),
    "two questions": ({"messages": [{"role": "user", "content": "1"}, {"role": "user", "content": "2"}]}, "turn 1"),
    "no answer": (sample("?", ""), "empty message 1"),
    "unknown role": ({"messages": [{"role": "usr", "content": "?"}]}, '"usr"'),
    "a list": (["?"], "is a list"),
    "cut short": (sample("<image>?", "1", "short.png"), "damaged or truncated"),
}
DEEP = ("cut short",)


@pytest.fixture(scope="module")
def flags(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    directory = tmp_path_factory.mktemp("check")
    digits = directory / "digits"
    demo_digits.write(digits, seed=0, num_held_out_samples=1)
    records = json.loads((digits / "train.json").read_text())[:60]
    for number, (record, _) in enumerate(BROKEN.values()):
        records.insert(5 * number + 3, record)
    (digits / "train.json").write_text(json.dumps(records, indent=0))
    photo(40, 40).save(digits / "good.png")
    photo(2000, 5).save(digits / "strip.png")
    photo(80, 80).save(digits / "short.png")
    (digits / "short.png").write_bytes((digits / "short.png").read_bytes()[:500])
    (digits / "page.jpg").write_text("<html>not found</html>")
    (digits / "empty.png").touch()
    texts = [turn["content"] for record in records if isinstance(record, dict) for turn in record["messages"]]
    build(directory / "hf", texts, seed=0)
    write_data(directory, digits / "train.json")
    return ["--mm-data", str(directory / "data.json"), "--mm-model", str(EXAMPLES / "model_tiny.json"),
            "--seq-length", "256"]


def test_check_finds_them_all_and_writes_a_page(flags: list[str], tmp_path: Path, capsys) -> None:
    page = tmp_path / "report.html"
    assert main(["check", *flags, "--deep", "--html", str(page)]) == 2
    reported = capsys.readouterr()
    assert reported.err == "error: 10 problems; repair or remove these samples, or train with --bad-sample skip\n"
    for text in (reported.out, html.unescape(page.read_text())):
        for _, what in BROKEN.values():
            assert what in text, what
    assert re.findall(r"<h3>(\d+) x ", page.read_text()) == ["1"] * 10
    assert re.search(r"samples for training +61\n", reported.out)
    assert re.search(r"unusable +9\ntoo long +0 \(0.0%\)\n", reported.out)
    assert "% full" in reported.out
    lines = (Path(flags[1]).parent / "digits" / "train.json").read_text().splitlines()
    places = {int(line) for line in re.findall(r"train\.json:(\d+): record", reported.out)}
    assert len(places) == 10 and max(places) <= len(lines)
    assert main(["check", *flags]) == 2
    reported = capsys.readouterr()
    assert reported.err.startswith("error: 9 problems") and not any(BROKEN[name][1] in reported.out for name in DEEP)


def test_losses_of_long_samples_are_counted(flags: list[str], tmp_path: Path, capsys) -> None:
    """With packing: one sample loses a turn and one is left out; words like control tokens are counted too."""
    shortened = {"id": "a", "messages": [
        turn for text in ("<|im_end|> hi " * 2, "word " * 300) for turn in sample(text, "<image>")["messages"]]}
    records = [shortened, sample("word " * 300, "1"), *[sample("1?", str(number)) for number in range(4)]]
    (tmp_path / "train.json").write_text(json.dumps(records))
    own = with_validation(flags, tmp_path, dataset=str(tmp_path / "train.json"), packing=True)
    assert main(["check", *own]) == 0
    reported = capsys.readouterr().out
    assert "note: 1 of 5 samples are longer than --seq-length 256 and lose " in reported
    assert f"keep more.  The first: {tmp_path}/train.json: record 0 (id 'a')" in reported
    assert "note: 1 sample left out, because not even one question and answer of each fit" in reported
    assert "record 0 (id 'a'): words that look like control tokens" in reported
    assert re.search(r"unusable +0\ntoo long +1 \(16.7%\)\n", reported)
    assert re.search(r"samples truncated to --seq-length +1 \(20.0%\); tokens dropped: \d+", reported)


PEER_KEYS = {
    "preprocess_parameters": {"use_fast_tokenizer": True, "split_special_tokens": False},
    "basic_parameters": {"preprocessing_batch_size": 1000, "tool_format": None},
    "attr": {"observation_tag": None, "function_tag": None},
    "dataloader_param": {"drop_last": True, "pin_memory": True},
}
"""Keys of MindSpeed-MM's file for the 7B that have no effect."""


def test_check_says_which_keys_of_the_data_json_have_no_effect(flags: list[str], tmp_path: Path, capsys) -> None:
    """Those of MindSpeed-MM's file for the 7B are no errors: each has its reason in one line, also on the page."""
    theirs = json.loads((EXAMPLES / "data_7b.json").read_text())
    ours = json.loads(Path(flags[1]).read_text())["dataset_param"]
    parts = theirs["dataset_param"]
    for part, keys in PEER_KEYS.items():
        (parts if part in parts else theirs)[part] |= keys
    theirs["dataloader_param"]["collate_param"]["ignore_pad_token_for_loss"] = True
    parts["preprocess_parameters"]["model_name_or_path"] = ours["preprocess_parameters"]["model_name_or_path"]
    (tmp_path / "train.json").write_text(json.dumps([sample("1?", "1")] * 8))
    parts["basic_parameters"] |= {"dataset_dir": str(tmp_path), "dataset": str(tmp_path / "train.json"),
                                  "cache_dir": str(tmp_path / "cache")}
    path, page = tmp_path / "data.json", tmp_path / "page.html"
    path.write_text(json.dumps(theirs))
    assert main(["check", "--mm-data", str(path), *flags[2:], "--html", str(page)]) == 0
    reported = capsys.readouterr()
    lines = re.findall(rf"^note: (\S.*) of {path}: no effect: (.+)$", reported.out, re.MULTILINE)
    named = {key: why for keys, why in lines for key in keys.split(", ")}
    assert {key.rpartition(".")[2] for key in named} == {
        "use_fast_tokenizer", "split_special_tokens", "preprocessing_batch_size", "tool_format", "observation_tag",
        "function_tag", "drop_last", "pin_memory", "ignore_pad_token_for_loss"}
    assert f"note: all other keys of {path} are used" in reported.out and "error" not in reported.err
    assert all(why in html.unescape(page.read_text()) for why in named.values())
    assert main(["check", *flags]) == 2
    assert "no effect" not in capsys.readouterr().out, "our own file has no such keys"


def with_validation(flags: list[str], directory: Path, **basic) -> list[str]:
    """``flags`` with other ``basic_parameters`` in the data JSON, and an index of their own."""
    data = json.loads(Path(flags[1]).read_text())
    data["dataset_param"]["basic_parameters"] |= {"cache_dir": str(directory / "cache"), **basic}
    (directory / "data.json").write_text(json.dumps(data))
    return ["--mm-data", str(directory / "data.json"), *flags[2:]]


def test_a_broken_val_dataset_is_reported(flags: list[str], tmp_path: Path, capsys) -> None:
    """Two good samples and a bad one; then no usable one, which does not hide problems elsewhere."""
    good, bad = sample("1?", "2"), sample("<image>?", "1", "lost for validation.png")
    twice = sample("<image>?", "1", "good.png")
    (tmp_path / "train.json").write_text(json.dumps([sample("1?", str(number)) for number in range(9)] + [twice]))
    (tmp_path / "val.json").write_text(json.dumps([good, bad, twice]))
    own = with_validation(flags, tmp_path, dataset=str(tmp_path / "train.json"), val_dataset=str(tmp_path / "val.json"))
    page = tmp_path / "page.html"
    assert main(["check", *own, "--html", str(page)]) == 2
    reported = capsys.readouterr()
    for text in (reported.out, html.unescape(page.read_text())):
        assert "lost for validation.png" in text and "Training samples" in text and "Validation samples" in text
    assert reported.out.count("image 'lost for validation.png'") == 1 and reported.err.startswith("error: 1 problem;")
    for part, counts in (("training", (10, 0, 10)), ("validation", (3, 1, 2))):
        block = reported.out.split(f"{part.capitalize()} samples\n")[1]
        found = re.search(
            rf"records in the files +(\d+)\nunusable +(\d+)\ntoo long .*\nsamples for {part} +(\d+)\n", block)
        assert found and tuple(map(int, found.groups())) == counts
    assert main(["show", *own, "--split", "validation", "--sample", "1"]) == 0
    assert capsys.readouterr().out.startswith(f"{tmp_path}/val.json")
    assert main(["show", *own, "--split", "validation", "--sample", "2"]) == 2
    assert "there are 2 samples for validation" in capsys.readouterr().err
    (tmp_path / "val.json").write_text(json.dumps([bad]))
    assert main(["check", *own]) == 2
    reported = capsys.readouterr()
    assert "lost for validation.png" in reported.err and re.search(r"samples for training +10\n", reported.out)


def test_counts_add_up_with_val_rate(flags: list[str], tmp_path: Path, capsys) -> None:
    """70 records, 9 of which are bad: 61 samples, a tenth of them for validation; each problem is reported once."""
    own = with_validation(flags, tmp_path, val_rate=0.1)
    assert main(["check", *own]) == 2
    reported = capsys.readouterr()
    taken = [int(number) for number in re.findall(r"samples for \w+ +(\d+), of 61 usable ones", reported.out)]
    assert len(taken) == 2 and sum(taken) == 61 and min(taken) == 6
    assert re.findall(r"records in the files +(\d+)\nunusable +9\ntoo long +0", reported.out) == ["70", "70"]
    assert reported.out.count("image 'lost.png'") == 1
    drawn = set()
    for seed in ("1", "2"):  # as --seed of the training draws them
        assert main(["show", *own, "--split", "validation", "--seed", seed]) == 0
        drawn.add(capsys.readouterr().out)
    assert len(drawn) == 2
    assert main(["show", *flags, "--split", "validation"]) == 2
    assert "has neither val_dataset nor val_rate" in capsys.readouterr().err


def test_show(flags: list[str], tmp_path: Path, capsys) -> None:
    page = tmp_path / "sample.html"
    assert main(["show", *flags, "--sample", "1", "--html", str(page)]) == 0
    out = capsys.readouterr().out
    assert "<|im_start|>user" in out and re.search(r"\[\[.+\]\]", out, re.DOTALL) and "visual tokens]" in out
    assert "data:image/png;base64," in page.read_text() and "84 x 84 pixels" in page.read_text()
    assert main(["show", *flags, "--sample", "99"]) == 2
    assert capsys.readouterr().err == "error: --sample is 99; there are 61 samples for training, counted from 0\n"


def test_ids_cannot_move_the_cursor_and_all_problems_can_be_seen(flags: list[str], tmp_path: Path, capsys) -> None:
    bad = [{"id": f"\x1b[2J{number}\ud83d", "messages": []} for number in range(25)]
    good = [{"id": "\x1b]0;x\x07", **sample("\x1b[31m?", "2")}] * 2
    (tmp_path / "odd.json").write_text(json.dumps(bad + good))
    own = with_validation(flags, tmp_path, dataset=str(tmp_path / "odd.json"))
    assert main(["check", *own]) == 2
    reported = capsys.readouterr()
    assert r"id '\x1b[2J19\ud83d'" in reported.out and "2J20" not in reported.out
    assert reported.out.endswith("... and 5 more problems; --html PAGE lists them all\n")
    assert reported.err == ("error: 25 problems, of which 20 are shown (--html PAGE lists all); repair or remove these "
                        "samples, or train with --bad-sample skip\n")
    page = tmp_path / "page.html"
    assert main(["check", *own, "--html", str(page)]) == 2
    assert "<h3>25 x " in page.read_text() and "<summary>All 25</summary>" in page.read_text()
    assert r"\x1b[2J24\ud83d" in html.unescape(page.read_text()) and "of which" not in capsys.readouterr().err
    assert main(["show", *own]) == 0
    out = capsys.readouterr().out
    assert "\x1b" not in out and r"\x1b[31m?" in out
