"""Questions in the JSON of SQuAD, MultiNLI and tables of GLUE, tokenisers, text for made sets."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from datamodules import QuestionAnswering, TextPairs
from tests.bad_inputs.cases import Case, command_error, data_error, data_main, in_code
from tests.datamodules.text.fine_tuning import made

_SIZES = {"vocab_limit": 200, "max_length": 20, "stride": 4, "max_query_length": 8}


@in_code
def questions(folder: Path, change: Callable[[Any], object], **options: Any) -> None:
    """Questions whose training file is changed before it is read."""
    made.write_squad(folder / "squad", options.get("version", "1.1"))
    path = folder / "squad/train.json"
    content = json.loads(path.read_text("utf-8"))
    changed = change(content)
    text = changed if isinstance(changed, str) else json.dumps(content)
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    _open(QuestionAnswering(path=str(folder / "squad"), **{**_SIZES, **options}))


def _open(data: Any) -> None:
    data.prepare_data()
    data.setup()
    _ = data.vocab_size


def _first(content: Any) -> Any:
    return content["data"][0]["paragraphs"][0]


def _set(name: str, value: object) -> Callable[[Any], object]:
    return lambda content: _first(content)["qas"][0].update({name: value})


def _answer(**values: object) -> Callable[[Any], object]:
    return lambda content: _first(content)["qas"][0]["answers"][0].update(values)


def _without_context(content: Any) -> None:
    del _first(content)["context"]


def _without_id(content: Any) -> None:
    del _first(content)["qas"][0]["id"]


def _same_id(content: Any) -> None:
    content["data"][1]["paragraphs"][0]["qas"][0]["id"] = _first(content)["qas"][0]["id"]


def _squad_cases() -> Iterator[Case]:
    case = partial(Case, "Questions (the JSON of SQuAD)")
    nothing: Callable[[Any], object] = lambda content: None  # noqa: E731
    yield case("no files", data_error(lambda f: _open(QuestionAnswering(path=str(f)))))
    yield case("no dev file", data_error(_without_dev))
    yield case("not JSON", questions(lambda c: "{"))
    yield case("another JSON", questions(lambda c: '{"questions": []}'))
    yield case("no questions", questions(lambda c: c.update(data=[])))
    yield case("a paragraph without a context", questions(_without_context))
    yield case("an empty context", questions(lambda c: _first(c).update(context=" ")))
    yield case("a question without an id", questions(_without_id))
    yield case("an id twice", questions(_same_id))
    yield case("an id that is a number", questions(_set("id", 7)))
    yield case("a question without answers in version 1.1", questions(_set("answers", [])))
    two: dict[str, Any] = {"version": "2.0"}
    yield case("a question without answers in version 2.0", questions(_set("answers", []), **two))
    yield case("an answer that cannot be", questions(_set("is_impossible", True), **two))
    yield case("answers at another place", questions(_answer(answer_start=0)))
    yield case("an offset that is text", questions(_answer(answer_start="5")))
    yield case("an empty answer", questions(_answer(text="")))
    yield case("half a character", questions(_set("question", "\ud83d")))
    yield case("another encoding than UTF-8", data_error(_latin))
    yield case("an unknown version", questions(nothing, version="1.2"))
    yield case("no room for the text", questions(nothing, max_length=10))
    yield case("a stride of 0", questions(nothing, stride=0))
    yield case("fewer positions than tokens", questions(nothing, max_positions=8))
    yield case("fewer rows than the vocabulary", questions(nothing, vocab_size=8))
    yield case("a vocabulary below the characters", questions(nothing, vocab_limit=9))
    yield case("a tokeniser that is not there", questions(nothing, **_given("nowhere/vocab.txt")))


def _given(path: str) -> dict[str, Any]:
    return {"tokenizer": path, "vocab_limit": 8000}


def _without_dev(folder: Path) -> None:
    (made.write_squad(folder / "squad") / "dev.json").unlink()
    _open(QuestionAnswering(path=str(folder / "squad"), **_SIZES))


def _latin(folder: Path) -> None:
    path = made.write_squad(folder / "squad") / "dev.json"
    path.write_bytes("größer".encode("latin1"))
    _open(QuestionAnswering(path=str(folder / "squad"), **_SIZES))


# ---- pairs -------------------------------------------------------------------------------------


@in_code
def _row(folder: Path, **values: Any) -> None:
    """MultiNLI, of which a row is changed."""
    path = made.write_mnli(folder / "mnli") / "multinli_1.0_train.jsonl"
    lines = path.read_text("utf-8").splitlines()
    lines[4] = json.dumps({**json.loads(lines[4]), **values})
    path.write_text("\n".join(lines), "utf-8")
    _open(TextPairs(path=str(folder / "mnli"), corpus="mnli", vocab_limit=200))


@in_code
def _glue(folder: Path, name: Any, text: str) -> None:
    """A table of GLUE with another text."""
    place = (made.write_sst2 if name == "sst2" else made.write_qnli)(folder / name)
    (place / "dev.tsv").write_text(text, "utf-8")
    _open(TextPairs(path=str(place), corpus=name, vocab_limit=200))


@in_code
def _own(folder: Path, text: str, **options: Any) -> None:
    (folder / "x.csv").write_text(text, "utf-8")
    _open(TextPairs(path=str(folder / "x.csv"), vocab_limit=200, **options))


def _pair_cases() -> Iterator[Case]:
    case = partial(Case, "Pairs of texts (MultiNLI, GLUE, tables)")
    rows = "text1,text2,label\n" + "".join(f"one {n},two {n},{'ab'[n % 2]}\n" for n in range(20))
    yield case("no path", data_error(lambda f: TextPairs()))
    yield case(
        "a corpus that is not there",
        data_error(lambda f: _open(TextPairs(path=str(f), corpus="mnli"))),
    )
    yield case("a file of a corpus missing", data_error(_without_mismatched))
    yield case("a label that is not of the corpus", _row(gold_label="contradicts"))
    yield case("a row without its second sentence", _row(sentence2=None))
    yield case("a sentence that is a number", _row(sentence1=3))
    yield case("a table without labels", _glue("sst2", "index\tsentence\n0\tfine\n"))
    yield case("a table without its column", _glue("qnli", "question\ttext\tlabel\na\tb\tc\n"))
    yield case("a row of other columns", _glue("sst2", "sentence\tlabel\nfine\n"))
    yield case("a table without rows", _glue("sst2", "sentence\tlabel\n"))
    yield case("no such column", _own(rows, first_column="text3"))
    yield case("one column twice", _own(rows, first_column="text1", second_column="text1"))
    yield case("no column of a usual name", _own(rows.replace("text", "part")))
    yield case("an empty text", _own(rows.replace("two 5,", ",")))
    yield case("no room for a text", _own(rows, max_length=3))
    yield case("a split of a corpus", data_error(_split_of_corpus))
    made_and_given = {"tokenizer": "DIR", "tokens": "bpe"}
    yield case("a tokeniser given and made", _own(rows, **made_and_given))
    unknown = ["check", "text_pairs", "--path", ".", "--corpus", "mnly"]
    yield case("an unknown corpus", lambda _: command_error(unknown, data_main))


def _without_mismatched(folder: Path) -> None:
    (made.write_mnli(folder / "mnli") / "multinli_1.0_dev_mismatched.jsonl").unlink()
    _open(TextPairs(path=str(folder / "mnli"), corpus="mnli"))


def _split_of_corpus(folder: Path) -> None:
    TextPairs(path=str(made.write_mnli(folder / "mnli")), corpus="mnli", val_fraction=0.3)


def cases() -> Iterator[Case]:
    """All of them."""
    yield from _squad_cases()
    yield from _pair_cases()
