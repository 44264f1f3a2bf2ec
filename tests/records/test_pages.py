"""What a page may carry: pictures of its own folder; texts of others stay text."""

from __future__ import annotations

import base64
import io
import os
import re

import pytest
from PIL import Image

from lit_probattn.records.markdown import escaped, one_line
from lit_probattn.records.pages import markdown_body
from profiling.cli import main
from tests.support.pages import Page

SECRET = b"root:x:0:0\n"


def png(size=(3, 2)) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", size, "red").save(buffer, "PNG")
    return buffer.getvalue()


def carried(content: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(content).decode()}"


@pytest.fixture
def report(tmp_path):
    """A folder of reports with one, and the function that makes its page by the command."""
    folder = tmp_path / "reports" / "one"
    folder.mkdir(parents=True)
    (tmp_path / "secret").write_bytes(SECRET)
    (tmp_path / "outside.png").write_bytes(png())

    def index(address: str, text: str = "# One\n\n![x]({})\n") -> int:
        (folder / "report.md").write_text(text.format(address), encoding="utf-8")
        return main(["report", "--index", str(tmp_path / "reports"), "--out", str(tmp_path / "o")])

    index.folder, index.out = folder, tmp_path / "o"
    return index


def one_error(capsys) -> str:
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
    return line


@pytest.mark.parametrize("name", ["a.png", "a picture.png", "ä&b.png", "deep/a.png"])
def test_a_picture_of_the_reports_folder_is_carried(report, name):
    (report.folder / name).parent.mkdir(exist_ok=True)
    (report.folder / name).write_bytes(png())
    assert report(f"<{name}>") == 0
    page = Page((report.out / "one/index.html").read_text(encoding="utf-8"))
    assert page.attributes("img", "src") == [carried(png())]


def linked(report):
    (report.folder / "x.png").symlink_to(report.folder.parents[1] / "outside.png")


def a_link_of_folders(report):
    (report.folder / "x.png").symlink_to("x.png")


def a_pipe(report):
    os.mkfifo(report.folder / "x.png")


def text_only(report):
    (report.folder / "x.png").write_bytes(SECRET)


def too_large(report):
    (report.folder / "x.png").write_bytes(png() + bytes(11_000_000))


@pytest.mark.parametrize(
    ("address", "prepare"),
    [
        ("/etc/hostname", None),
        ("../../secret", None),
        ("../../outside.png", None),
        ("..%2F..%2Foutside.png", None),
        ("/dev/zero", None),
        ("http://127.0.0.1:1/a.png", None),
        ("//127.0.0.1:1/a.png", None),
        ("data:image/png;base64,AAAA", None),
        ("missing.png", None),
        (".", None),
        ("", None),
        ("a%00b.png", None),
        ("x.png", linked),
        ("x.png", a_link_of_folders),
        ("x.png", a_pipe),
        ("x.png", text_only),
        ("x.png", too_large),
    ],
)
def test_nothing_else_is_carried_and_one_line_names_it(report, address, prepare, capsys):
    if prepare is not None:
        prepare(report)
    assert report(address) == 2
    error = one_error(capsys)
    assert str(report.folder / "report.md") in error
    assert "picture" in error
    assert not report.out.exists()


@pytest.mark.parametrize("kind", ["pipe", "link", "device"])
def test_a_report_that_is_no_file_of_its_folder_is_one_line(report, kind, capsys, tmp_path):
    target = report.folder / "report.md"
    if kind == "pipe":
        os.mkfifo(target)
    else:
        target.symlink_to("/dev/zero" if kind == "device" else tmp_path / "secret")
    assert main(["report", "--index", str(tmp_path / "reports"), "--out", str(report.out)]) == 2
    assert str(target) in one_error(capsys)


def test_a_picture_that_cannot_be_drawn_small_is_one_line(report, capsys):
    (report.folder / "a.png").write_bytes(png()[:40])
    assert report("a.png") == 2
    assert "picture" in one_error(capsys)


@pytest.mark.parametrize("below", ["", "one"])
def test_a_target_that_is_a_file_is_one_line(report, capsys, below):
    target = report.out / below if below else report.out
    target.parent.mkdir(exist_ok=True)
    target.write_text("mine")
    assert report("", "# One\n") == 2
    assert str(target) in one_error(capsys)
    assert target.read_text() == "mine"


# ---- texts of others -----------------------------------------------------------------------------

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
        rendered = markdown_body(written)
        assert not set(re.findall(r"<(\w+)", rendered)) & {"img", "a", "script", "h1", "code"}


@pytest.mark.parametrize("text", ["a [0.9, 0.98] b", "x - [1]", "Xeon(R) @ 2.20GHz", "1 < 2", "a!"])
def test_what_is_no_markup_is_as_it_was(text):
    assert escaped(text) == one_line(text) == text


@pytest.mark.parametrize("text", MARKUP)
def test_one_line_of_one_line_is_the_same(text):
    """Reports are made again from what their own lines say."""
    assert one_line(one_line(text)) == one_line(text)
