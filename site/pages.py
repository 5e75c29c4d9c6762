"""Hooks of mkdocs: pages of the site that do not lie in ``docs``, and links to files that are no pages.

The pages of ``docs`` link to each other and to the repository's files as GitHub shows them.  The site has the
repository's README as its first page, and a reference that is made from the code.
"""

import logging
import re
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from posixpath import normpath, relpath

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from mm.config.args import Arguments
from mm.config.command_line import flag_name
from mm.config.data import DataConfig
from mm.config.model import ModelConfig
from mm.config.parse import expected, fields_of, settings_of

ROOT = Path(__file__).resolve().parent.parent
OUTSIDE = {"index.md": "README.md", **{name: name for name in ("CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")}}
"""Pages of the site -> files of the repository, for those outside ``docs``."""
_WORDS = {
    "docs": ("Flags and keys", "Made from the code. `mm-train --help` prints the flags in a terminal.", "Flags",
             "Keys of the model JSON", "Keys of the data JSON", "meaning"),
    "docs/zh": ("命令行参数与 JSON 键", "由代码生成。说明为英文。`mm-train --help` 在终端里打印这些参数。",
                "命令行参数", "模型 JSON 的键", "数据 JSON 的键", "含义"),
}  # fmt: skip
"""By folder: the words of the reference."""
_WIDE = "[\u3000-\u303f\u4e00-\u9fff\uff00-\uffef]"
_WRAPPED = re.compile(rf"(?<={_WIDE})\n *(?={_WIDE})")
"""A line's end within a Chinese sentence, which would show as a space."""
_LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s]+)\)")


def slug(heading: str, separator: str = "-") -> str:
    """The anchor of a heading, as GitHub makes it."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", separator)


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    config.mdx_configs["toc"] = {"slugify": slug, "permalink": True}
    logging.getLogger("jieba").disabled = True  # it reports at every start that it has loaded its dictionary
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that do not lie in this language's folder, and the pictures beside the English pages.

    A page that is not translated appears in English.
    """
    folder = _folder(config)
    for page, path in OUTSIDE.items():
        own = ROOT / folder / path  # a translated README
        text = (own if own.exists() else ROOT / path).read_text(encoding="utf-8")
        if own.exists() and path != page:
            files.remove(files.src_uris[path])
        files.append(File.generated(config, page, content=text))
    files.append(File.generated(config, "reference.md", content=_reference(folder)))
    for untranslated in sorted((ROOT / "docs").glob("*.md")):
        if untranslated.name not in files.src_uris:
            files.append(File.generated(config, untranslated.name, abs_src_path=str(untranslated)))
    for picture in sorted(one for one in (ROOT / "docs").iterdir() if one.suffix in (".svg", ".png")):
        if picture.name not in files.src_uris:
            files.append(File.generated(config, picture.name, abs_src_path=str(picture)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Lead links to pages of the site, or to the repository if the configuration names its address; other links become
    their text."""
    folder = PurePosixPath(_folder(config))
    source = _source(page.file.src_uri, folder)

    def led(match: re.Match[str]) -> str:
        mark, label, target = match.groups()
        path, hash_, anchor = target.partition("#")
        if "://" in target or not path:
            return match[0]
        there = normpath(source.parent / path)
        uri = _uri(there, folder)
        if uri in files.src_uris:
            return f"{mark}[{label}]({relpath(uri, PurePosixPath(page.file.src_uri).parent)}{hash_}{anchor})"
        assert (ROOT / there).exists(), f"{source} links to {target}"
        return f"[{label}]({config.repo_url}/blob/main/{there})" if config.repo_url else label

    parts = re.split(r"(^```.*?^```$)", markdown, flags=re.MULTILINE | re.DOTALL)
    return "".join(part if number % 2 else _LINK.sub(led, _WRAPPED.sub("", part)) for number, part in enumerate(parts))


def _folder(config: MkDocsConfig) -> str:
    return Path(config.docs_dir).resolve().relative_to(ROOT).as_posix()


def _source(uri: str, folder: PurePosixPath) -> PurePosixPath:
    """The file of the repository that a page of the site shows."""
    if uri in OUTSIDE:
        own = folder / OUTSIDE[uri]
        return own if (ROOT / own).exists() else PurePosixPath(OUTSIDE[uri])
    return folder / uri if (ROOT / folder / uri).exists() else PurePosixPath("docs") / uri


def _uri(path: str, folder: PurePosixPath) -> str:
    """The page or picture of the site that shows a file of the repository."""
    for page, file in OUTSIDE.items():
        if path in (file, str(folder / file)):
            return page
    return PurePosixPath(path).name if PurePosixPath(path).parent in (folder, PurePosixPath("docs")) else path


def _reference(folder: str) -> str:
    """All flags and JSON keys, with what they accept."""
    title, source, flags_title, model_title, data_title, meaning = _WORDS[folder]
    flags = {f"`{flag_name(name)}`": field.description for name, field in fields_of(Arguments).items()}
    parts = [f"# {title}", source, f"## {flags_title}", _table(meaning, flags)]
    for heading, cls in ((model_title, ModelConfig), (data_title, DataConfig)):
        keys = {", ".join(f"`{path}`" for path in paths): expected(field) for _, paths, field in settings_of(cls)}
        parts += [f"## {heading}", _table(meaning, keys)]
    return "\n\n".join(parts) + "\n"


def _table(meaning: str, rows: Mapping[str, object]) -> str:
    lines = [f"| | {meaning} |", "| --- | --- |"]
    return "\n".join([*lines, *(f"| {key} | {str(what).replace('|', '/')} |" for key, what in rows.items())])
