"""Sentences are found where they are, and pages show only habits that are accepted."""

from __future__ import annotations

import pytest

from tests.support.paths import ROOT
from tests.voice.__main__ import accepted
from tests.voice.patterns import PATTERNS, habits
from tests.voice.sentences import of_module, of_page, of_pages

PAGE = """# A heading of many words here

The first sentence has `code` and words. The second
sentence goes over a line.

```bash
no sentence is found inside of a block
```

| a | b |
| --- | --- |
| A cell with enough words | short |

- An item with enough words [and a link](page.md)

![a picture of something here](x.png)
"""

MODULE = '''"""A module with enough words.

    an_equation = not a sentence of words
"""

def function(parser, x):
    """Return one thing or another.

    Args:
        x: a value with enough words.
    """
    parser.add_argument("--x", help="a flag with enough words")
    if not x:
        raise ValueError(f"{x}: expected a value above zero")
'''


def test_sentences_of_a_page_are_paragraphs_cells_and_items():
    assert [(s.line, s.text) for s in of_page(PAGE, "page.md")] == [
        (3, "The first sentence has `code` and words."),
        (3, "The second sentence goes over a line."),
        (12, "A cell with enough words"),
        (14, "An item with enough words and a link"),
    ]


def test_sentences_of_a_module_are_docstrings_help_texts_and_messages():
    found = {(s.kind, s.text) for s in of_module(MODULE, "module.py")}
    assert found == {
        ("docstring", "A module with enough words."),
        ("docstring", "Return one thing or another."),
        ("docstring", "x: a value with enough words."),
        ("help", "a flag with enough words"),
        ("message", "{x}: expected a value above zero"),
    }


@pytest.mark.parametrize(
    ("sentence", "name"),
    [
        ("The same command goes on after that.", "continuation"),
        ("The report says so.", "speaking things"),
        ("Every backend serves.", "service"),
        ("No value is taken from it.", "universal verb"),
        ("The time is that of softmax.", "headless comparison"),
        ("It has a folder of its own.", "possession"),
        ("A file lies beside it.", "position for relation"),
        ("Where there is none, it stops.", "where for if"),
        ("It prints what is missing.", "clause for noun"),
        ("Nothing is trained.", "negated noun"),
        ("The tests are slow, too.", "no subject or verb"),
        ("The picture shows it.", "everyday noun"),
    ],
)
def test_each_habit_is_found(sentence, name):
    assert name in habits(sentence)
    assert name in {pattern.name for pattern in PATTERNS}


def test_code_is_no_habit():
    assert habits("Set `own_images: what is` in the file.") == []
    assert habits("Backends support the call; see the page.") == []


def test_pages_have_only_accepted_habits():
    """Rewrite the sentence, or add it to `accepted.txt` if it is right as it stands.

    There, each sentence is one of a page, and has a hit.
    """
    hits = [s for s in of_pages(ROOT) if habits(s.text)]
    known = accepted()
    assert [f"{s.file}:{s.line}: {s.text}" for s in hits if s.text not in known] == []
    assert known - {s.text for s in hits} == set()
