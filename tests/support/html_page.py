"""An HTML page as a test reads it."""

from __future__ import annotations

import re
from html.parser import HTMLParser

VOID = {"meta", "br", "path", "use"}


class HtmlPage(HTMLParser):
    """Collects tags and text; every tag must be closed by its own kind."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "style" not in self.open:
            self.text += data


def assert_stands_alone(page: str) -> None:
    """A page loads nothing, runs nothing, and each of its references leads to one of its ids."""
    found = HtmlPage(page)
    assert not {"script", "link", "iframe"} & {tag for tag, _ in found.tags}
    for tag, attributes in found.tags:
        for key in ("src", "href", "xlink:href"):
            link = attributes.get(key) or "#"
            assert link.startswith(("#", "data:image/png;base64,")), (tag, link)
        assert not any(key.startswith("on") for key in attributes)
    assert "url(http" not in page and "@import" not in page
    ids = re.findall(r'\bid="([^"]+)"', page)
    assert len(ids) == len(set(ids))
    for target in re.findall(r'(?:url\(|href=")#([^")]+)', page):
        assert target in ids
