"""Translation from files to batches: the layout of fairseq, plain and in archives."""

from __future__ import annotations

import tarfile
from collections import Counter
from itertools import islice
from pathlib import Path

import numpy as np
import pytest

from datamodules import ToyTranslation, Translation
from datamodules.text.segments import IGNORE
from datamodules.text.translation.dictionary import EOS, PAD, UNK
from datamodules.text.translation.files import CODES
from datamodules.text.translation.job import LineJob
from lit_probattn.base.errors import DataError
from tests.datamodules.text.translation import made


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return made.write(tmp_path / "text")


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> Path:
    """Parallel text that no test changes, with one cache for all of them."""
    return made.write(tmp_path_factory.mktemp("parallel") / "text")


@pytest.fixture(scope="module")
def words(text: Path) -> Translation:
    """The text in words."""
    return opened(text, tokens="words", cache_dir=str(text.parent / "cache"))


def opened(folder: Path, **options) -> Translation:
    module = Translation(path=str(folder), **{"merges": 60, "max_tokens": 128, **options})
    module.prepare_data()
    module.setup()
    return module


def lines(folder: Path, name: str) -> list[str]:
    return (folder / name).read_text("utf-8").splitlines()


@pytest.mark.parametrize("method", ["subwords", "moses_bpe", "words"])
def test_text_comes_back(folder: Path, method: str) -> None:
    module = opened(folder, tokens=method)
    for name, file in (("val", "valid"), ("test", "test")):
        targets = [pair.target for pair in map(module.split(name).__getitem__, range(7))]
        assert [module.detokenise(ids) for ids in targets] == lines(folder, f"{file}.en")[:7]
        assert module.references(name) == lines(folder, f"{file}.en")
        assert module.source_lines(name) == lines(folder, f"{file}.de")
        tokenised = [module.tokenised(ids) for ids in targets]
        assert tokenised == module.tokenised_references(name)[:7]
    sources = [pair.source.tolist() for pair in map(module.split("test").__getitem__, range(7))]
    assert module.encode(lines(folder, "test.de")) == sources
    if method == "moses_bpe":
        assert tokenised[0].endswith(" .")


@pytest.mark.parametrize("method", ["subwords", "moses_bpe", "words"])
def test_lower_lowers_what_is_read_generated_and_scored(folder: Path, method: str) -> None:
    for name in ("train", "valid", "test"):
        path = folder / f"{name}.en"
        path.write_text(path.read_text("utf-8").title(), "utf-8")
    module = opened(folder, tokens=method, lower=True)
    targets = [pair.target for pair in map(module.split("test").__getitem__, range(7))]
    given = lines(folder, "test.en")[:7]
    assert [module.detokenise(ids) for ids in targets] == [line.lower() for line in given]
    assert [module.tokenised(ids) for ids in targets] == module.tokenised_references("test")[:7]
    assert module.references("test")[:7] == given
    sources = lines(folder, "test.de")
    assert module.encode(sources) == module.encode([line.lower() for line in sources])


def test_ids_are_those_of_fairseq(text: Path, words: Translation) -> None:
    module, folder = words, text
    counts = Counter(word for line in lines(folder, "train.en") for word in line.split())
    by_count = sorted(counts, key=lambda word: (-counts[word], word))
    assert module.coder.target.pieces[: 4 + len(counts)] == [
        *("<s>", "<pad>", "</s>", "<unk>"),
        *by_count,
    ]
    assert len(module.coder.target) % 8 == 0
    first = module.split("train")[0]
    expected = [4 + by_count.index(word) for word in lines(folder, "train.en")[0].split()]
    assert first.target.tolist() == [*expected, EOS]
    assert module.encode(["der unbekannte Hund"])[0][1] == UNK


def test_one_dictionary_for_both(folder: Path) -> None:
    module = opened(folder, joint_dictionary=True, dictionary_limit=40, tokens="words")
    assert module.coder.source is module.coder.target
    assert module.vocab_size == module.source_vocab_size == 40


@pytest.mark.parametrize("end", [".tar.gz", ".tgz", ".tar.xz"])
def test_archives_are_read(text: Path, words: Translation, tmp_path: Path, end: str) -> None:
    archive = tmp_path / f"text{end}"
    with tarfile.open(archive, "w:xz" if end == ".tar.xz" else "w:gz") as file:
        file.add(text, arcname="inner/folder")
    packed = opened(archive, tokens="words")
    assert packed.coder.text == words.coder.text
    assert packed.references("test") == words.references("test")
    assert packed.source_hashes.keys() == {archive.name}
    assert not list(packed.cache_dir.glob("*.partial"))


@pytest.mark.parametrize("name", CODES)
def test_codes_beside_the_text_are_read_in_a_folder_and_in_its_archive(
    folder: Path, tmp_path: Path, name: str
) -> None:
    (folder / name).write_text("#version: 0.2\nh o\n", "utf-8")
    archive = tmp_path / "text.tar.gz"
    with tarfile.open(archive, "w:gz") as file:
        file.add(folder, arcname="inner")
    found = [opened(place).coder.cutter for place in (folder, archive)]
    assert [cutter.method for cutter in found] == ["moses_bpe"] * 2
    assert found[0].codes == found[1].codes


def test_prepared_text_with_its_codes_and_dictionaries(folder: Path, tmp_path: Path) -> None:
    raw = opened(folder, tokens="moses_bpe", lower=True)
    prepared = tmp_path / "prepared"
    prepared.mkdir()
    cutter = raw.coder.cutter
    for name in ("train", "valid", "test"):
        for side, language in (("source", "de"), ("target", "en")):
            words = [cutter.words(line, side) for line in lines(folder, f"{name}.{language}")]
            text = "".join(f"{line}\n" for line in cutter.pieces(words))
            (prepared / f"{name}.{language}").write_text(text, "utf-8")
    assert "@@ " in (prepared / "train.de").read_text("utf-8")
    (prepared / "code").write_text(cutter.codes or "", "utf-8")
    (prepared / "dict.de.txt").write_text(raw.coder.source.text, "utf-8")
    (prepared / "dict.en.txt").write_text(raw.coder.target.text, "utf-8")
    module = opened(prepared, lower=True)
    assert module.coder.cutter.method == "prepared"
    assert module.coder.source == raw.coder.source
    for place in range(9):
        assert module.split("val")[place].source.tolist() == raw.split("val")[place].source.tolist()
    assert module.encode(lines(folder, "test.de")) == raw.encode(lines(folder, "test.de"))
    assert module.references("test") == [line.lower() for line in lines(folder, "test.en")]
    assert module.tokenised_references("test") == raw.tokenised_references("test")


def test_settings_that_the_text_leaves_no_use_for_are_named(folder: Path, logged) -> None:
    words = opened(folder, tokens="words", merges=40)
    (folder / "dict.de.txt").write_text(words.coder.source.text, "utf-8")
    (folder / "dict.en.txt").write_text(words.coder.target.text, "utf-8")
    opened(folder, tokens="words", merges=40, dictionary_limit=99, max_words=50)
    told = [line for line in logged.messages if "has no effect" in line]
    assert told == [
        "translation: merges=40 has no effect with tokens=words",
        "translation: merges=40 has no effect with tokens=words",
        "translation: dictionary_limit=99 has no effect with given dictionaries",
    ]


def test_a_batch(words: Translation) -> None:
    module = words
    batches = list(islice(module.train_dataloader(), module.steps_per_epoch))
    seen: list[int] = []
    for batch in batches:
        rows, width = batch["target"].shape
        assert batch["source"].shape == batch["source_mask"].shape
        assert batch["inputs"].shape == batch["key_mask"].shape == (rows, width)
        assert rows * max(width, batch["source"].shape[1]) <= module.max_tokens
        assert int(batch["global_tokens"]) == int(batch["key_mask"].sum())
        assert batch["global_tokens"].shape == ()
        for row, sample in enumerate(batch["sample_ids"].tolist()):
            pair = module.split("train")[sample]
            real = int(batch["key_mask"][row].sum())
            assert batch["source"][row][batch["source_mask"][row]].tolist() == pair.source.tolist()
            assert set(batch["source"][row][~batch["source_mask"][row]].tolist()) <= {PAD}
            assert batch["target"][row].tolist()[:real] == pair.target.tolist()
            assert set(batch["target"][row].tolist()[real:]) <= {IGNORE}
            assert batch["inputs"][row].tolist()[:real] == [EOS, *pair.target.tolist()[:-1]]
            assert set(batch["inputs"][row].tolist()[real:]) <= {PAD}
        seen += batch["sample_ids"].tolist()
    assert sorted(seen) == list(range(60))


def test_rows_that_fill_up_score_nothing(words: Translation) -> None:
    batch = words.collate()([words.split("train")[place] for place in ((-1, 9), (3, 9))])
    assert batch["sample_ids"].tolist() == [-1, 3]
    assert (batch["target"][0] == IGNORE).all()
    assert batch["source_mask"].any(1).all()
    assert batch["key_mask"].any(1).all()
    assert int(batch["global_tokens"]) == 9


def test_long_sentences_are_cut(text: Path, words: Translation) -> None:
    module = opened(text, tokens="words", max_length=8, too_long="cut")
    whole = words.split("train")[0].target.tolist()
    assert module.split("train").num_cut > 0
    assert len(whole) > 8
    assert module.split("train")[0].target.tolist() == [*whole[:7], EOS]


def test_cleaning_leaves_pairs_out(folder: Path) -> None:
    german, english = (lines(folder, f"train.{language}") for language in ("de", "en"))
    counts = [(len(a.split()), len(b.split())) for a, b in zip(german, english, strict=True)]
    kept = [max(a, b) <= 10 and max(a / b, b / a) <= 1.3 for a, b in counts]
    module = opened(folder, tokens="words", max_words=10, max_ratio=1.3)
    assert 0 < sum(kept) < 60
    train = [module.detokenise(module.split("train")[i].target) for i in range(sum(kept))]
    assert train == [line for line, stays in zip(english, kept, strict=True) if stays]
    assert len(module.split("train")) == sum(kept)
    assert f"{60 - sum(kept)} of 60 pairs of train dropped" in module.notes[0]


def test_empty_lines_are_dropped(folder: Path) -> None:
    made.strange_line(folder, "train.en", 4, b"  ")
    assert len(opened(folder, empty_lines="drop", tokens="words").split("train")) == 59


def test_an_interrupted_preparation_goes_on(folder: Path, monkeypatch) -> None:
    whole = opened(folder, tokens="moses_bpe", cache_dir=str(folder.parent / "whole"))
    monkeypatch.setattr("datamodules.text.translation.job._LINES_PER_STATE", 7)
    converted: list[str] = []
    original = LineJob.lines

    def interrupted(self, name, source, total, convert, title):
        def stop(block):
            converted.extend([name] * len(block))
            if len(converted) == 74:
                raise KeyboardInterrupt
            return convert(block)

        return original(self, name, source, total, stop, title)

    monkeypatch.setattr(LineJob, "lines", interrupted)
    module = Translation(path=str(folder), tokens="moses_bpe", merges=60, max_tokens=128)
    with pytest.raises(KeyboardInterrupt):
        module.prepare_data()
    (partial,) = module.cache_dir.glob("*.partial")
    with (partial / "train.source.words.txt").open("a", encoding="utf-8") as file:
        file.write("half a li")  # beyond what the state claims
    module.prepare_data()
    assert Counter(converted)["train.source.words"] == 60  # not once more
    assert module.coder.text == whole.coder.text
    for array in whole.cache.meta["files"]:
        name = array.removesuffix(".npy")
        assert np.array_equal(module.cache.array(name), whole.cache.array(name)), name
    assert not partial.exists()


def test_another_dictionary_does_not_fit_a_checkpoint(text, words: Translation) -> None:
    other = opened(text, tokens="words", dictionary_limit=16)
    words.load_state_dict(words.state_dict())
    with pytest.raises(DataError, match="a different one of 16"):
        other.load_state_dict(words.state_dict())


def test_a_toy_pair_follows_its_rules() -> None:
    module = ToyTranslation(num_train=40, max_clauses=1, num_words=20, tokens="words")
    module.prepare_data()
    module.setup()
    for source, target in zip(module.source_lines("test"), module.references("test"), strict=True):
        words = source.removesuffix(" p").split()
        particle = ["pi"] if source.endswith(" p") else []
        subject, verb, adjective, thing = (word[1:] for word in words)
        assert target.split() == [
            *particle,
            f"{subject}o",
            f"{thing}o",
            f"{adjective}i",
            f"{verb}u",
        ]
    assert len({line for line in module.source_lines("test")}) > 50
    again = ToyTranslation(num_train=40, max_clauses=1, num_words=20, data_seed=1)
    assert again.references("test") != module.references("test")


def test_sub_words_that_one_language_lacks_are_spelled(folder: Path) -> None:
    """Merges are learned from both languages; `quickly` is not in the German training text."""
    module = opened(folder, tokens="subwords", merges=200)
    quickly = module.coder.cutter.pieces(["quickly"])[0].split()
    assert len(quickly) == 1
    assert quickly[0] not in module.coder.source.pieces
    assert quickly[0] in module.coder.target.pieces
    (ids,) = module.encode(["der Hund quickly 💡"])
    assert UNK not in ids
    spelled = "".join(module.coder.source.words(ids))
    assert module.coder.cutter.line([spelled]) == "der Hund quickly 💡"


def test_limited_sub_words_are_spelled_and_none_is_unknown(folder: Path) -> None:
    module = opened(folder, tokens="subwords", merges=200, dictionary_limit=270)
    assert module.vocab_size == module.source_vocab_size == 270
    assert set(module.coder.cutter.alphabet) <= set(module.coder.target.pieces)
    for pair in map(module.split("train").__getitem__, range(60)):
        assert UNK not in pair.source
        assert UNK not in pair.target
    with pytest.raises(DataError, match=r"dictionary_limit.* 260"):
        opened(folder, tokens="subwords", dictionary_limit=259)


def test_a_translation_is_one_line(folder: Path) -> None:
    """Sub-words contain every byte, so a model can generate a newline."""
    module = opened(folder, tokens="subwords")
    newline = module.coder.target.pieces.index("Ċ")
    ids = [*module.split("test")[0].target[:-1], newline, *module.split("test")[1].target]
    first, second = lines(folder, "test.en")[:2]
    assert module.detokenise(ids) == f"{first}  {second}"


def test_text_about_patches_is_not_taken_for_pieces(folder: Path) -> None:
    made.strange_line(folder, "train.de", 2, b"@@ -1,3 +1,4 @@ der Hund")
    assert opened(folder).coder.cutter.method == "subwords"


def test_a_line_without_words_is_its_end(folder: Path) -> None:
    """The tokeniser of Moses leaves control characters out."""
    made.strange_line(folder, "train.de", 2, b"\x01")
    module = opened(folder, tokens="moses_bpe")
    assert module.split("train")[1].source.tolist() == [EOS]
    assert module.encode(["", "\x01"]) == [[EOS], [EOS]]


def test_pairs_of_training_in_another_split_are_counted(folder: Path, words) -> None:
    assert not words.notes
    for language in ("de", "en"):
        first = lines(folder, f"train.{language}")[:5]
        with (folder / f"valid.{language}").open("a", encoding="utf-8") as file:
            file.write("".join(f"{line}\n" for line in first))
    (note,) = opened(folder, tokens="words").notes
    assert "5 of 14 pairs of val are also in train" in note


def test_one_text_on_both_sides_is_refused(folder: Path) -> None:
    (folder / "valid.en").write_bytes((folder / "valid.de").read_bytes())
    with pytest.raises(DataError, match=r"valid\.de.*valid\.en.*identical"):
        opened(folder)


def test_two_files_of_one_split_are_refused(folder: Path) -> None:
    for language in ("de", "en"):
        (folder / f"val.{language}").write_bytes((folder / f"test.{language}").read_bytes())
    with pytest.raises(DataError, match=r"valid\.de.*val\.de.*remove"):
        opened(folder)


def test_padding_ends_at_the_longest_sentence_that_a_model_takes(text, words) -> None:
    longest = int(words.split("train").lengths.max())
    sizes = {"max_length": longest, "max_tokens": 4 * longest}
    module = opened(text, tokens="words", pad_multiple=longest - 1, **sizes)
    widths = {
        batch[side].shape[1]
        for batch in islice(module.train_dataloader(), 20)
        for side in ("source", "inputs", "target")
    }
    assert widths <= {longest - 1, longest}
    assert longest in widths
