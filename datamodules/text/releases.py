"""The text releases: file names, folders, published sizes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from datamodules.core.files import Form, Release


def _splits(pattern: str, *names: str) -> dict[str, tuple[str, ...]]:
    """Return the file of each split, given its name in the release."""
    splits = ("train", "val", "test")
    return {s: (pattern.format(name),) for s, name in zip(splits, names, strict=False)}


def _wikitext(corpus: str, **counts: int) -> Release:
    names = {"train": ("train",), "val": ("valid", "validation"), "test": ("test",)}
    shards = ("{0}-*.parquet", "*-{0}-*.parquet", "{0}/*.parquet")
    release = "wikitext-103" if corpus == "other" else corpus
    origin = (
        "It is WikiText (Merity et al., 2016), the word-level release; as the data set "
        f"Salesforce/wikitext, folder {release}-v1, on the Hugging Face hub"
    )
    return Release(
        "text" if corpus == "other" else corpus,
        f"wikitext103 --corpus {corpus}",
        "wiki.train.tokens, wiki.valid.tokens and wiki.test.tokens; train.txt, valid.txt and "
        f"test.txt; {release}-v1.zip; or Parquet shards train-*.parquet, validation-*.parquet and "
        "test-*.parquet",
        "Any text in this layout will do" if corpus == "other" else origin,
        (
            _splits("wiki.{}.tokens", "train", "valid", "test"),
            _splits("{}.txt", "train", "valid", "test"),
            {"archive": (f"{corpus}-v1.zip",)},
            {s: [p.format(n) for n in some for p in shards] for s, some in names.items()},
        ),
        ("",) if corpus == "other" else ("", corpus, f"{corpus}-v1", f"wikitext/{corpus}-v1"),
        counts=counts,
    )


# Words, and tokens with `<eos>`.
WIKITEXT = {
    "wikitext-103": _wikitext(
        "wikitext-103", words=267_735, train=103_227_021, val=217_646, test=245_569
    ),
    "wikitext-2": _wikitext("wikitext-2", words=33_278, train=2_088_628, val=217_646, test=245_569),
    "other": _wikitext("other"),
}

HELD_OUT_SHARDS = 50
_LM1B = "1-billion-word-language-modeling-benchmark-r13output"


def lm1b(num_held_out: int = HELD_OUT_SHARDS) -> Release:
    """Return the one-billion-word benchmark with its first `num_held_out` held-out shards."""
    folders = "{}-monolingual.tokenized.shuffled"
    train = [f"{folders.format('training')}/news.en-{n:05d}-of-00100" for n in range(1, 100)]
    held_out = [
        f"{folders.format('heldout')}/news.en.heldout-{n:05d}-of-00050" for n in range(num_held_out)
    ]
    return Release(
        "LM1B",
        "lm1b",
        f"the folders {folders.format('training')} and {folders.format('heldout')}",
        f"It is {_LM1B}.tar.gz of https://www.statmt.org/lm-benchmark, unpacked",
        ({name: (name,) for name in (*train, *held_out)},),
        (_LM1B, "", f"lm1b/{_LM1B}", "lm1b"),
        counts={"train": 30_301_028, "held out": 306_688},
        otherwise="; --corpus other accepts any text with a sentence per line",
    )


_GLUE = _splits("{}.tsv", "train", "dev")
_MNLI = ("train", "dev_matched", "dev_mismatched")
PAIRS = {
    "mnli": Release(
        "MultiNLI",
        "text_pairs --corpus mnli",
        ", ".join(f"multinli_1.0_{name}.jsonl" for name in _MNLI),
        "It is multinli_1.0.zip of cims.nyu.edu/~sbowman/multinli, or MNLI of GLUE",
        (
            _splits("multinli_1.0_{}.jsonl", *_MNLI),
            _splits("multinli_1.0_{}.txt", *_MNLI),
            _splits("{}.tsv", *_MNLI),
        ),
        ("mnli",),
        counts={"train": 392_702, "val": 9_815, "test": 9_832},
    ),
    "sst2": Release(
        "SST-2",
        "text_pairs --corpus sst2",
        "train.tsv and dev.tsv",
        "It is SST-2 of GLUE (gluebenchmark.com)",
        (_GLUE,),
        ("sst2",),
        counts={"train": 67_349, "val": 872},
    ),
    "qnli": Release(
        "QNLI",
        "text_pairs --corpus qnli",
        "train.tsv and dev.tsv",
        "It is QNLI (v2) of GLUE (gluebenchmark.com)",
        (_GLUE,),
        ("qnli",),
        counts={"train": 104_743, "val": 5_463},
    ),
}


def _squad(version: str, **counts: int) -> Release:
    forms = (
        {"train": (f"train{end}",), "val": (f"dev{end}", f"val{end}"), "test": (f"test{end}",)}
        for end in (f"-v{version}.json", ".json")
    )
    return Release(
        f"SQuAD {version}",
        f"question_answering --version {version}",
        f"train-v{version}.json and dev-v{version}.json, or train.json and dev.json",
        "The files are published at rajpurkar.github.io/SQuAD-explorer",
        tuple(forms),
        ("squad",),
        optional=("test",),
        counts=counts,
    )


SQUAD = {
    "1.1": _squad("1.1", train=87_599, val=10_570),
    "2.0": _squad("2.0", train=130_319, val=11_873),
}


def _both(pattern: str, folder: str = "") -> dict[str, tuple[str, ...]]:
    """Return the files of both languages of a part."""
    name = pattern.removesuffix(".{}").removesuffix(".{}.xml")
    return {f"{name}.{language}": (folder + pattern.format(language),) for language in ("de", "en")}


IWSLT14_TRAIN = "train.tags.de-en"
IWSLT14_TESTS = tuple(
    f"IWSLT14.{name}.de-en"
    for name in ("TED.dev2010", "TEDX.dev2012", "TED.tst2010", "TED.tst2011", "TED.tst2012")
)
_PREPARED = "iwslt14.tokenized.de-en"


def _iwslt14(folder: str) -> Iterator[Form]:
    raw = [_both(f"{IWSLT14_TRAIN}.{{}}", folder)]
    raw += [_both(f"{name}.{{}}.xml", folder) for name in IWSLT14_TESTS]
    yield {part: names for pair in raw for part, names in pair.items()}
    yield _both("train.{}", folder)


IWSLT14 = Release(
    "IWSLT'14",
    "iwslt14",
    f"de-en.tgz, its folder de-en/, or {_PREPARED}/, which fairseq's script makes,",
    "Source: IWSLT 2014, the German–English archive of WIT3 (texts 2014-01)",
    (
        {"archive": ("de-en.tgz",)},
        *(form for folder in ("de-en/", f"{_PREPARED}/", "") for form in _iwslt14(folder)),
    ),
    ("", "iwslt14"),
    counts={"train": 160_239, "val": 7_283, "test": 6_750},  # as reported by users of the script
)

WMT14_PIECES = {
    "train": "train.tok.clean.bpe.32000",
    "val": "newstest2013.tok.bpe.32000",
    "test": "newstest2014.tok.bpe.32000",
}
# Raw text: the first existing name of each corpus is used.
WMT14_CORPORA = ("europarl-v7.de-en", "commoncrawl.de-en", "news-commentary-v12.de-en")
_OTHER_NAMES = {"news-commentary-v12.de-en": "news-commentary-v9.de-en"}


def wmt14(source_language: str = "en") -> Release:
    """Return WMT'14 English–German; the SGML files that it uses depend on the direction."""

    def form(stems: Iterable[str]) -> dict[str, list[str]]:
        return {
            f"{stem}.{x}": _wmt14_names(stem, x, source_language)
            for stem in stems
            for x in ("en", "de")
        }

    news = ("newstest2013", "newstest2014")
    return Release(
        "WMT'14",
        "wmt14",
        "wmt16_en_de.tar.gz, its files train.tok.clean.bpe.32000.{en,de}, or raw text,",
        "Source: the prepared WMT'16 English–German data of fairseq's example scaling_nmt, or "
        "statmt.org/wmt14",
        (
            {"archive": ("wmt16_en_de.tar.gz",)},
            {**form(WMT14_PIECES.values()), "codes": ("bpe.32000", "*/bpe.32000")},
            form(("train", *news)),
            form((*WMT14_CORPORA, *news)),
        ),
        ("", "wmt14", "wmt14_en_de", "wmt16_en_de", "wmt16_en_de_bpe32k"),
        ("codes",),
        counts={"val": 3_000, "test": 3_003},
    )


def _wmt14_names(stem: str, language: str, source_language: str) -> list[str]:
    """Return the possible file names of one language of a part: plain text, or SGML of the news."""
    names = [f"{stem}.{language}"]
    if stem in _OTHER_NAMES:
        names.append(f"{_OTHER_NAMES[stem]}.{language}")
    if stem.startswith("newstest") and stem[len("newstest") :].isdecimal():
        role = "src" if language == source_language else "ref"
        names += [f"{stem}-{role}.{language}.sgm", f"{stem}-deen-{role}.{language}.sgm"]
    folders = ("",) if stem == "train" else ("", "*/")
    return [folder + name for name in names for folder in folders]
