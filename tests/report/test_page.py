"""Pages of any report: words are no markup, parts may be missing, libraries too."""

from __future__ import annotations

import sys

import pytest
from html_page import HtmlPage, assert_stands_alone

from kvquant.errors import UnsupportedError
from kvquant.report.page import Page, Section, Table, Verdict, check_libraries, render, text
from kvquant.text import Column

BAD = "<b>{{7*7}}</b>\"onload='x\x1b"


@pytest.mark.extra("report")
def test_words_are_no_markup() -> None:
    table = Table(BAD, [[BAD, "b"], ["c", BAD]], BAD)
    section = Section(BAD, BAD, [(BAD, BAD)], "<svg></svg>", [table])
    page = render(Page(BAD, BAD, BAD, Verdict("bad", BAD, BAD, [BAD]), [BAD], [section]))
    assert_stands_alone(page)
    found = HtmlPage(page).text
    # title, 2 lines, 3 of the verdict, note, section 2, step 2, table 4
    assert found.count("<b>{{7*7}}</b>\"onload='x\N{REPLACEMENT CHARACTER}") == 15
    assert page.count("<b>") == 1 and page.count("<svg>") == 1


@pytest.mark.extra("report")
def test_a_page_may_have_little() -> None:
    page = render(Page("title", "heading", "sub"))
    assert_stands_alone(page)
    tags = {tag for tag, _ in HtmlPage(page).tags}
    assert "h1" in tags and not {"section", "ul", "dl", "table"} & tags
    (section,) = (render(Page("", "", "", sections=[Section("a title", "its words")])),)
    assert "<figure" not in section and "its words" in HtmlPage(section).text


def test_text_has_what_a_page_has_but_titles_and_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    table = Table("summary", [[Column("a\nb", left=True), "n"], ["x", "10.5"]], "How to read it:")
    line = f"kvquant calibrate {60 * 'm'} -o plan"
    section = Section("title", "words", [("do it", line)], "<svg>", [table])
    assert text([section, Verdict("bad", "No.", "It fails.", ["Why."]), "the end"]) == (
        "words\n\ndo it:\n"
        f"    kvquant calibrate {60 * 'm'} \\\n        -o plan\n\n"
        "How to read it:\na\nb     n\n───────\nx  10.5\n\n"
        "No. It fails.\nWhy.\n\n"
        "the end"
    )


@pytest.mark.parametrize("library", ["matplotlib", "jinja2"])
def test_a_missing_library_is_told(library: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(UnsupportedError, match=r"this needs .* install the extra 'report'"):
        check_libraries("this")
