"""The table of tested versions in docs/install.md and its Chinese counterpart, written from the records.

    python -m tests.versions.render
"""

from pathlib import Path

from mm.files import write_whole
from tests.files import ROOT, json_lines, table
from tests.versions.combinations import COMBINATIONS, Combination

KEPT = Path(__file__).with_name("records.jsonl")
BEGIN = "<!-- tested versions: written by python -m tests.versions.render -->"
END = "<!-- end of the tested versions -->"
STEPS = ("quick", "parity", "training")

ENGLISH = {
    "head": ("combination", "Python", "torch", "megatron-core", "transformers", "other packages", "quick tests",
             "parity", "tiny training"),
    "passed": "passed", "failed": "failed", "not run": "not run yet", "comma": ", ",
    "locked": "locked", "oldest": "lower ends", "newest": "newest",
}  # fmt: skip
CHINESE = {
    "head": ("组合", "Python", "torch", "megatron-core", "transformers", "其他软件包", "快速测试",
             "数值一致性", "微型训练"),
    "passed": "通过", "failed": "失败", "not run": "尚未运行", "comma": "\uff0c",
    "locked": "锁定的版本", "oldest": "范围下限", "newest": "最新",
}  # fmt: skip
PAGES = {ROOT / "docs" / "install.md": ENGLISH, ROOT / "docs" / "zh" / "install.md": CHINESE}


def block(records: list[dict], words: dict) -> str:
    """The table between the marks, in one language."""
    latest = {(one["combination"], one["step"]): one for one in records}
    rows = [_row(one, [latest.get((one.name, step)) for step in STEPS], words) for one in COMBINATIONS]
    return "\n".join(table(words["head"], rows)) + "\n"


def _row(combination: Combination, steps: list[dict | None], words: dict) -> list[str]:
    asked = {"torch": combination.torch, "megatron-core": combination.megatron_core,
             "transformers": combination.transformers}  # fmt: skip
    ran = [one for one in steps if one is not None]
    for one in ran:
        found = {name: version.partition("+")[0] for name, version in one["versions"].items()}
        if not found["python"].startswith(f"{combination.python}.") or found | asked != found:
            raise SystemExit(f"{KEPT.name} has a record of {combination.name} with {found}; expected Python "
                             f"{combination.python} and {asked}. Run the combination again.")
    python = ran[-1]["versions"]["python"] if ran else combination.python
    return [combination.name, python, *asked.values(), words[combination.others.value],
            *(_cell(one, words) for one in steps)]


def _cell(record: dict | None, words: dict) -> str:
    if record is None:
        return words["not run"]
    return words["comma"].join((words["passed" if record["passed"] else "failed"], record["date"],
                                f"{record['seconds']} s"))  # fmt: skip


def main() -> None:
    records = json_lines(KEPT)
    for page, words in PAGES.items():
        before, _, rest = page.read_text(encoding="utf-8").partition(f"{BEGIN}\n")
        _, _, after = rest.partition(END)
        write_whole(page, f"{before}{BEGIN}\n\n{block(records, words)}\n{END}{after}".encode())


if __name__ == "__main__":
    main()
