"""Reads an HTML page of ours: checks that it is well formed and self-contained, and collects its words."""

from html.parser import HTMLParser


class PageReader(HTMLParser):
    """Elements are closed in order, nothing is active, and nothing is fetched."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.words: list[str] = []
        self.tags: set[str] = set()
        self.feed(html)
        self.close()
        assert not self.open and not self.tags & {"script", "link", "iframe", "a", "form"}

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        for name, value in attrs:
            assert not name.startswith("on") and name != "href"
            assert name != "src" or (value or "").startswith("data:image/")
        if tag not in ("meta", "img", "line", "br", "hr"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)

    @property
    def text(self) -> str:
        """All words, with single spaces."""
        return " ".join(" ".join(self.words).split())
