"""Tokenisers of pre-trained encoders: the ids, offsets and types of transformers' own."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
from pathlib import Path

import pytest

from datamodules.text.choice import TokenChoice
from datamodules.text.token_files import read_encoder, read_subwords
from datamodules.text.translation.bpe import Codes
from lit_probattn.base.errors import ConfigError, DataError
from tests.datamodules.text.made import encoder
from tests.support.fresh import fresh_python

os.environ["HF_HUB_OFFLINE"] = "1"
tokenizers = pytest.importorskip("tokenizers")
transformers = pytest.importorskip("transformers")

TEXTS = [
    "The café naïve runs; the quick brown fox — 北京 is a city.",
    "the running dogs ran quickly, " * 3,
    "Emoji 😀 are here: don't stop, can't stop. İstanbul, Straße!",
] * 4
ODD = [
    *("", " ", "  leading and trailing  ", "Café NAÏVE cafe\u0301", "北京 is北京, a city"),
    *("😀😀 x👩\u200d👩\u200d👧", "quick" * 40, "don't\u200bstop\n\nnow\x00\ufffd\tran"),
    *("İstanbul STRASSE Straße", "the [MASK] dogs [SEP] x", "the <mask> dogs </s> x"),
    *("##s ran ##", "e\u0301\u0323 ﬁne ½ Ⅷ", "\u2028a\x85b"),
]


@pytest.fixture(scope="module", params=["wordpiece", "cased wordpiece", "bpe", "bpe, blank first"])
def folder(request, tmp_path_factory) -> Path:
    made = tmp_path_factory.mktemp("vocabulary")
    kind = "bpe" if "bpe" in request.param else "wordpiece"
    size = 300 if kind == "bpe" else 150
    case = "cased" not in request.param
    encoder(iter(TEXTS), made, size, kind, lower=case)
    if "blank" in request.param:
        path = made / "tokenizer_config.json"
        path.write_text(
            json.dumps(json.loads(path.read_text(encoding="utf-8")) | {"add_prefix_space": True})
        )
    return made


def theirs(folder: Path):
    words = (folder / "vocab.txt").is_file()
    kind = transformers.BertTokenizerFast if words else transformers.RobertaTokenizerFast
    return kind.from_pretrained(folder)


@pytest.mark.parametrize("whole", [False, True], ids=["own files", "tokenizer.json"])
def test_ids_offsets_and_types_are_those_of_transformers(folder, whole, tmp_path):
    other = theirs(folder)
    if whole:
        other.save_pretrained(tmp_path)
        assert (tmp_path / "tokenizer.json").is_file()
    ours = read_encoder(tmp_path if whole else folder)
    assert len(ours) == len(other)
    special = (ours.begin, ours.separator, ours.mask, ours.padding, ours.unknown)
    names = ("cls_token_id", "sep_token_id", "mask_token_id", "pad_token_id", "unk_token_id")
    assert special == tuple(getattr(other, name) for name in names)
    options = {"return_offsets_mapping": True, "return_token_type_ids": True}
    unknown = 0
    for text in ODD:
        for pair in (None, "the dogs ran", " Café 😀"):
            expected = other(text, pair, **options)
            found = ours.sequence(text, pair)
            assert found.ids == expected["input_ids"], (text, pair)
            assert found.offsets == expected["offset_mapping"], (text, pair)
            assert ours.decode_sequence(found.ids) == other.decode(
                found.ids, skip_special_tokens=True
            )
            types = expected["token_type_ids"]
            if not (folder / "vocab.txt").is_file():
                types = [0] * len(types)
            assert found.token_types == types
            unknown += found.ids.count(ours.unknown)
        ids, offsets = ours.encode_plain(text)
        assert ours.join(ids) == other(text)["input_ids"]
        assert len(ids) == len(offsets)
    assert unknown > 0 or ours.pairs == "roberta"


def test_a_copy_of_another_process_is_the_same(folder):
    ours = read_encoder(folder)
    again = pickle.loads(pickle.dumps(ours))
    assert again.sequence(TEXTS[0], TEXTS[1]) == ours.sequence(TEXTS[0], TEXTS[1])


def test_pairs_are_laid_out_in_the_manner_of_the_family(folder):
    ours = read_encoder(folder)
    begin, end = ours.begin, ours.separator
    found = ours.join([7, 8, 9], [17])
    if ours.pairs == "bert":
        assert found == [begin, 7, 8, 9, end, 17, end]
        assert ours.join([7], []) == [begin, 7, end, end]
    else:
        assert found == [begin, 7, 8, 9, end, end, 17, end]
        assert ours.join([7], []) == [begin, 7, end, end, end]
    assert ours.join([7]) == [begin, 7, end]
    assert [ours.num_special(pair) for pair in (False, True)] == [2, len(ours.join([], []))]


# ---- training ----------------------------------------------------------------------------------

VOCABULARIES = [("wordpiece", 150), ("bpe", 300)]
_TRAIN = f"""
import sys
from pathlib import Path
from datamodules.text.choice import TokenChoice
for kind, size in {VOCABULARIES}:
    TokenChoice(kind, size).make_from({{texts}}).save(Path(sys.argv[1]) / kind)
print(hash("the order of sets"))
"""


def test_another_process_learns_the_same_vocabulary(tmp_path):
    """Where strings have other hashes, so that sets have another order."""
    digests = {kind: set() for kind, _ in VOCABULARIES}
    for kind, size in VOCABULARIES:
        TokenChoice(kind, size).make_from(TEXTS).save(tmp_path / "ours" / kind)
    seed = "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1"
    code = _TRAIN.format(texts=ascii(TEXTS))
    done = fresh_python("-c", code, tmp_path / "theirs", PYTHONHASHSEED=seed)
    assert int(done.stdout) != hash("the order of sets")
    for kind, found in digests.items():
        for place in tmp_path.glob(f"*/{kind}"):
            files = sorted(path for path in place.iterdir() if path.suffix in (".txt", ".json"))
            assert files
            found.add(hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest())
        assert len(list(tmp_path.glob(f"*/{kind}"))) == 2
        assert len(found) == 1, kind


def test_a_learned_vocabulary_has_frequent_words_and_is_no_larger(tmp_path):
    ours = encoder(TEXTS, tmp_path / "a", 150)
    words = (tmp_path / "a/vocab.txt").read_text(encoding="utf-8").splitlines()
    assert words[:5] == ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    assert len(words) == len(ours) <= 150
    assert {"the", "dogs", "b", "##s", "北"} <= set(words)
    assert len(set(words)) == len(words)
    ids = ours.encode_plain("The DOGS")[0]
    assert ids == [words.index("the"), words.index("dogs")]
    assert ours.decode_sequence(ids) == "the dogs"


def test_refusals(tmp_path):
    message = "at least 261, the number of special tokens plus the bytes"
    with pytest.raises(DataError, match=message):
        encoder(TEXTS, tmp_path, 260, "bpe")
    with pytest.raises(ConfigError, match="tokens must be one of"):
        encoder(TEXTS, tmp_path, 200, "unigram")


# ---- files of other programs ---------------------------------------------------------------------

WORDPIECE = "[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\ncafe\ncafé\nCafé\n"


@pytest.mark.parametrize("lower", [True, False])
@pytest.mark.parametrize("strip", [True, False, None])
def test_accents_are_kept_or_dropped_as_the_settings_say(tmp_path, lower, strip):
    settings = {"tokenizer_class": "BertTokenizer", "do_lower_case": lower, "strip_accents": strip}
    (tmp_path / "vocab.txt").write_text(WORDPIECE, encoding="utf-8")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    (word,) = read_encoder(tmp_path).encode_plain("café")[0]
    assert WORDPIECE.split("\n")[word] == ("cafe" if strip or (strip is None and lower) else "café")
    expected = transformers.BertTokenizerFast.from_pretrained(tmp_path)
    for text in ("café", "Café", "CAFÉ cafe\u0301"):
        ids = read_encoder(tmp_path).encode_plain(text)[0]
        assert ids == expected(text, add_special_tokens=False)["input_ids"]


def test_a_byte_order_mark_is_no_part_of_the_first_token(tmp_path):
    (tmp_path / "vocab.txt").write_text(f"\ufeff{WORDPIECE}", encoding="utf-8")
    assert read_encoder(tmp_path).padding == 0


@pytest.mark.parametrize(
    ("number", "message"), [(6, "'b' and 'c'.*id 6"), (10**9, "'c'.*1000000000.*8 tokens")]
)
def test_ids_that_two_tokens_share_or_that_lie_far_out_are_refused(tmp_path, number, message):
    tokens = ["<s>", "<pad>", "</s>", "<unk>", "<mask>", "a", "b", "c"]
    ids = {token: place for place, token in enumerate(tokens)} | {"c": number}
    (tmp_path / "vocab.json").write_text(json.dumps(ids))
    (tmp_path / "merges.txt").write_text("#version: 0.2\n")
    with pytest.raises(DataError, match=rf"vocab\.json.*{message}"):
        read_encoder(tmp_path)


@pytest.mark.parametrize(
    "read", [["vocab.txt"], ["vocab.json", "merges.txt"], ["tokenizer.json"]], ids="".join
)
def test_sources_are_the_files_of_a_tokeniser_that_are_read(tmp_path, read):
    """Not others of their folder, such as weights, a README or a cache."""
    tokens = encoder(TEXTS, tmp_path, 300, "bpe" if len(read) == 2 else "wordpiece")
    if read == ["tokenizer.json"]:
        tokens.tokenizer.save(str(tmp_path / read[0]))
    (tmp_path / "README.md").touch()
    for place in (tmp_path, tmp_path / read[0]):
        found = TokenChoice("wordpiece", file=str(place)).files()
        assert sorted(found) == sorted(tmp_path / name for name in (*read, "tokenizer_config.json"))
    (tmp_path / "tokenizer_config.json").unlink()
    assert TokenChoice("wordpiece", file=str(tmp_path)).files() == [tmp_path / x for x in read]


CORPUS = ["The cat sat, on the mat.", "a dog ran; The DOG sat"] * 9


@pytest.mark.parametrize("model", ["WordLevel", "BPE", "WordPiece", "Unigram"])
@pytest.mark.parametrize("case", ["kept", "lowered"])
def test_text_is_encoded_as_by_the_tokeniser_of_a_file(tmp_path, model, case):
    """Whatever its model, number of tokens, normalisation and splitting."""
    made = tokenizers.Tokenizer(getattr(tokenizers.models, model)())
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    if case == "lowered":
        made.normalizer = tokenizers.normalizers.Lowercase()
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "<eos>"]
    unknown = {"unk_token": "[UNK]"} if model == "Unigram" else {}
    trainer = getattr(tokenizers.trainers, f"{model.replace('BPE', 'Bpe')}Trainer")
    made.train_from_iterator(
        CORPUS, trainer(special_tokens=special, show_progress=False, **unknown)
    )
    if model != "Unigram":
        made.model.unk_token = "[UNK]"
    made.add_tokens([f"further{n}" for n in range(256 - made.get_vocab_size())])
    assert made.get_vocab_size() == 256
    made.save(str(tmp_path / "tokenizer.json"))
    line = "The cat ran, on a zebra"
    ids = made.encode(line, add_special_tokens=False).ids
    for read in (read_subwords, read_encoder):
        tokens = read(tmp_path / "tokenizer.json")
        found, unknown = tokens.encode(f"{line}\n{line}")
        assert found.tolist() == [*ids, tokens.end_of_line, *ids]
        assert unknown == 2 * ids.count(made.token_to_id("[UNK]")) > 0


@pytest.mark.parametrize("model", ["WordLevel", "WordPiece"])
def test_unknown_text_without_a_token_for_it_is_one_line(tmp_path, model):
    made = tokenizers.Tokenizer(getattr(tokenizers.models, model)({"<eos>": 0, "a": 1}))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.save(str(tmp_path / "tokenizer.json"))
    tokens = read_subwords(tmp_path / "tokenizer.json")
    assert tokens.encode("a\na")[0].tolist() == [1, 0, 1]
    for encode in (tokens.encode, tokens.encode_plain):
        with pytest.raises(DataError, match="UNK"):
            encode("a zebra")


def test_words_of_thousands_of_letters_are_left_out_of_what_is_learned():
    """Base64, sequences, code without blanks: BERT reads such a word as unknown in any case."""
    text = "the dogs ran and the dogs sat\n" * 20
    long = [letter * 700 for letter in ("x", "é", "%")]
    for unit in ("wordpiece", "bpe", "subwords"):

        def learn(text, unit=unit):
            return TokenChoice(unit, 300).make_from([text]).text

        assert learn(text + "\n".join(long)) == learn(text + "\n".join(" " for _ in long))
        assert learn(text + "xxxx " * 9) != learn(text)
    merges = Codes.learn(lambda: [text + "\n".join(long)], 100).text
    assert not {"x", "é", "%"} & set(merges.removeprefix("#version: 0.2"))
