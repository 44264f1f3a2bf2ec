"""HTML pages of Markdown: pictures inside, texts of others stay text."""

from __future__ import annotations

import base64
import re
import sys

import pytest

from lit_probattn.base.errors import ConfigError
from lit_probattn.records.html import body_of, page
from lit_probattn.records.markdown import escaped, one_line
from tests.support.pages import Page


def test_a_page_carries_its_pictures_and_nothing_else():
    text = "# One\n\n![x](figures/a.png)\n\n![y](figures/b.png) ![z](http://127.0.0.1/a.png)\n"
    shown = Page(page("One", body_of(text, {"figures/a.png": b"a picture"})))
    carried = f"data:image/png;base64,{base64.b64encode(b'a picture').decode()}"
    assert shown.attributes("img", "src") == [
        *(carried, "figures/b.png", "http://127.0.0.1/a.png"),
    ]
    assert shown.texts["title"] == ["One"]


def test_without_markdown_it_one_line_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "markdown_it", None)
    with pytest.raises(ConfigError, match=r"pip install 'lit-probattn\[html\]'"):
        body_of("# One")


MARKUP = (
    "![x](/etc/hostname)",
    "[x](javascript:alert(1))",
    "[x]: http://127.0.0.1",
    "![x][y]",
    "<script>alert(1)</script>",
    "<http://127.0.0.1>",
    "a\n# Heading\n\n![x](y)",
    "a\r\n\r\n- item\u2028\x85b",
    r"\![x](y) \[x](y) [x\](y)",
    "a | b |",
)


@pytest.mark.parametrize("text", MARKUP)
@pytest.mark.parametrize("function", [escaped, one_line])
def test_a_text_stays_text(text, function):
    line = function(text)
    assert len(line.splitlines()) == 1
    for written in (
        line,
        f"- {line}",
        f"**{line}**",
        f"- Hardware: {line}\n\n[y]",
        f"{line}\n\n[x]",
    ):
        rendered = body_of(written)
        assert not set(re.findall(r"<(\w+)", rendered)) & {"img", "a", "script", "h1", "code"}


@pytest.mark.parametrize("text", ["a [0.9, 0.98] b", "x - [1]", "Xeon(R) @ 2.20GHz", "1 < 2", "a!"])
def test_what_is_no_markup_is_as_it_was(text):
    assert escaped(text) == one_line(text) == text


@pytest.mark.parametrize("text", MARKUP)
def test_one_line_of_one_line_is_the_same(text):
    """Reports are made again from what their own lines say."""
    assert one_line(one_line(text)) == one_line(text)
