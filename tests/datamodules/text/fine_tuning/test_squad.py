"""The JSON of SQuAD as it is released, and what is wrong with others."""

from __future__ import annotations

import json

import pytest

from datamodules import QuestionAnswering
from datamodules.text.fine_tuning.squad import read_squad
from lit_probattn.base.errors import DataError
from tests.datamodules.text.fine_tuning import made

SIZES = {"max_length": 20, "stride": 4, "max_query_length": 8, "vocab_limit": 200, "batch_size": 4}


def write(folder, content) -> object:
    path = folder / "x.json"
    path.write_text(json.dumps(content), encoding="utf-8")
    return path


def data_of(folder, **options) -> QuestionAnswering:
    options = {"cache_dir": str(folder / "cache"), **SIZES, **options}
    data = QuestionAnswering(path=str(folder), **options)
    data.setup()
    return data


def test_a_file_of_version_1_is_read(tmp_path):
    found = read_squad(write(tmp_path, made.squad(0, 6, per_paragraph=2)), "1.1")
    assert len(found.contexts) == 6
    assert len(found.questions) == 12
    for asked in found.questions:
        (text, start), context = asked.answers[0], found.contexts[asked.paragraph]
        assert context[start : start + len(text)] == text
    assert [q.paragraph for q in found.questions] == [i // 2 for i in range(12)]
    assert found.notes == []


def test_questions_without_an_answer_are_of_version_2(tmp_path):
    found = read_squad(write(tmp_path, made.squad(0, 8, "2.0")), "2.0")
    assert [not q.answers for q in found.questions] == [n % 4 == 1 for n in range(8)]


def test_wrong_offsets_are_counted_and_the_first_three_shown(tmp_path):
    content = made.squad(0, 10)
    for place in (1, 2, 3, 4):
        content["data"][0]["paragraphs"][place]["qas"][0]["answers"][0]["answer_start"] += 1
    path = write(tmp_path, content)
    with pytest.raises(DataError) as told:
        read_squad(path, "1.1")
    text = str(told.value)
    assert "4 answers are not at their answer_start" in text
    assert "and 1 more" in text
    assert "paragraphs[3]" in text
    assert "paragraphs[4]" not in text
    assert "set wrong_offsets to leave_out" in text
    found = read_squad(path, "1.1", "leave_out")
    assert len(found.questions) == 6
    assert "skipped, with 4 questions" in found.notes[0]


def test_another_answer_keeps_a_question(tmp_path):
    content = made.squad(0, 2)
    answers = content["data"][0]["paragraphs"][0]["qas"][0]["answers"]
    answers.insert(0, {"text": "nowhere", "answer_start": 0})
    found = read_squad(write(tmp_path, content), "1.1", "leave_out")
    assert len(found.questions) == 2
    assert len(found.questions[0].answers) == 1


def test_texts_and_sizes_of_a_split(tmp_path):
    data = data_of(made.write_squad(tmp_path / "x"))
    questions = data.questions("val")
    assert len(questions) == data.split("val").num_questions == 9
    assert questions[0].context == made.context(50)
    assert questions[0].answers == ["seven lamps"]
    assert data.select_on_test
    assert data.questions("test") == questions
    assert data.split("train").num_questions == 24 < len(data.split("train"))


def test_a_test_file_of_its_own(tmp_path):
    folder = made.write_squad(tmp_path / "x")
    (folder / "test.json").write_text(json.dumps(made.squad(80, 3)), encoding="utf-8")
    data = data_of(folder)
    assert not data.select_on_test
    assert [q.id for q in data.questions("test")] == ["q80-0", "q81-0", "q82-0"]


@pytest.mark.parametrize("own", [False, True], ids=["dev", "test"])
def test_a_cache_says_whether_it_has_a_test_split_without_the_files(tmp_path, own):
    folder = made.write_squad(tmp_path / "x")
    if own:
        (folder / "test.json").write_text(json.dumps(made.squad(80, 3)), encoding="utf-8")
    data_of(folder, cache_dir=str(tmp_path / "cache"))
    for path in folder.iterdir():
        path.unlink()
    again = data_of(folder, cache_dir=str(tmp_path / "cache"))
    assert again.select_on_test is not own


def test_a_batch(tmp_path):
    data = data_of(made.write_squad(tmp_path / "x"), pad_multiple=1)
    batch = next(iter(data.val_dataloader()))
    lengths = batch["key_mask"].sum(1).tolist()
    assert batch["inputs"].shape[1] == max(lengths)
    for row in range(4):
        sample = data.split("val")[row]
        end = sample.second + sample.size
        assert batch["inputs"][row, : lengths[row]].tolist() == sample.values.tolist()
        assert batch["answerable"][row].nonzero().flatten().tolist() == [*range(sample.second, end)]
        types = [int(sample.second <= i <= end) for i in range(max(lengths))]
        assert batch["token_types"][row].tolist() == types
        assert batch["inputs"][row, end] == data.tokeniser.separator
    assert (batch["inputs"][~batch["key_mask"]] == data.tokeniser.padding).all()


def test_a_tokeniser_of_another_cache_is_taken(tmp_path):
    one = data_of(made.write_squad(tmp_path / "x"))
    place = str(one.cache.folder)
    plain = {"vocab_limit": 8000}
    two = data_of(made.write_squad(tmp_path / "y", train=12), tokenizer=place, **plain)
    assert two.tokeniser_digest == one.tokeniser_digest
    with pytest.raises(DataError, match="vocab_limit applies to learned tokenisers"):
        data_of(tmp_path / "y", tokenizer=place)


def test_another_tokeniser_is_refused_by_a_checkpoint(tmp_path):
    one, two = (data_of(made.write_squad(tmp_path / n, train=k)) for n, k in (("x", 24), ("y", 12)))
    one.load_state_dict(one.state_dict())
    with pytest.raises(DataError, match="trained with another tokeniser"):
        two.load_state_dict(one.state_dict())


def test_sizes_of_the_model_may_be_larger(tmp_path):
    folder = made.write_squad(tmp_path / "x")
    data = data_of(folder, max_positions=32, vocab_size=300)
    assert (data.max_seq_len, data.vocab_size, data.max_length) == (32, 300, 20)
    assert next(iter(data.val_dataloader()))["inputs"].shape[1] <= 20
