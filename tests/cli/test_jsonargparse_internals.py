"""What jsonargparse says and hides: mend `cli/jsonargparse_internals.py` on failure.

Every pattern over its wording meets the error that the library raises, from a parser like ours.
"""

from __future__ import annotations

from ast import parse
from collections.abc import Callable
from itertools import product
from typing import Literal

import pytest
from jsonargparse import ArgumentParser, Namespace
from jsonargparse._parameter_resolvers import get_signature_parameters
from jsonargparse._postponed_annotations import TypeCheckingVisitor
from jsonargparse._typehints import ActionTypeHint

from lit_probattn.attention import AttentionFactory
from lit_probattn.base.errors import ConfigError
from lit_probattn.cli import jsonargparse_internals as internals
from lit_probattn.cli.app import check_arguments
from lit_probattn.cli.parser import RunParser
from lit_probattn.configs import read_yaml
from tests.cli import sparing
from tests.support.paths import shipped


class Inner:
    def __init__(self, size: int, name: str = "a") -> None: ...


class Group:
    def __init__(self, count: int = 1) -> None: ...


def parser() -> RunParser:
    made = RunParser()
    made.add_argument("--number", type=int)
    made.add_argument("--choice", type=Literal["a", "b"])
    made.add_argument("--attention", type=AttentionFactory)
    made.add_argument("--numbered", type=dict[int, AttentionFactory] | None)
    made.add_class_arguments(Group, "group")
    made.add_subclass_arguments(Inner, "inner", required=False)
    return made


def library_error(arguments: list[str]) -> tuple[str, list[BaseException]]:
    """Message and causes of what the library raises for a command line."""
    told = []
    made = parser()

    def error(message, ex=None):
        told.append((message, list(internals._causes(ex))))
        raise SystemExit(2)

    made.error = error
    with pytest.raises(SystemExit):
        made.parse_args(arguments)
    return told[0]


INNER = f"{__name__}.Inner"
WORDING = [
    (internals.UNKNOWN_FLAG, ["--num_ber", "3"], ("num_ber",)),
    (internals.KEY, ["--number", "x"], ("number",)),
    (internals.NOT_KEYS, ["--group", "null"], ("null",)),
    (internals.EXPECTED, ["--number", "x"], ("<class 'int'>", "x")),
    (internals.EXPECTED, ["--choice", "c"], ("typing.Literal['a', 'b']", "c")),
]
CAUSES = [
    (internals.UNKNOWN_KEY, ["--inner", INNER, "--inner.size", "1", "--inner.sze", "2"], "sze"),
    (internals.MISSING, ["--inner", INNER], "size"),
    (internals.NOT_A_PATH, ["--attention", "Softmx"], "Softmx"),
    (internals.NOT_A_SUBCLASS, ["--attention.class_path", "torch.nn.Linear"], "torch.nn.Linear"),
]


@pytest.mark.parametrize(("pattern", "arguments", "groups"), WORDING)
def test_wording_of_messages(pattern, arguments, groups):
    message, _ = library_error(arguments)
    found = pattern.search(message)
    assert found, message
    assert found.groups() == groups


@pytest.mark.parametrize(("pattern", "arguments", "group"), CAUSES)
def test_wording_of_causes(pattern, arguments, group):
    _, causes = library_error(arguments)
    found = pattern.search(str(causes[-1]))
    assert found, causes
    assert found[1] == group


def test_keys_of_a_file_and_of_a_class_are_key_errors():
    _, causes = library_error(["--inner", INNER, "--inner.size", "1", "--inner.sze", "2"])
    assert isinstance(causes[-1], KeyError)
    (refused,) = (cause for cause in causes if isinstance(cause, internals.Rejected))
    assert refused.owner is Inner
    assert refused.names == ["size", "name"]
    with pytest.raises(ConfigError, match="unknown key 'numberx'; did you mean 'number'"):
        parser().parse_object({"numberx": 3})


def test_an_unknown_class_is_told_by_python():
    _, causes = library_error(["--attention", "lit_probattn.attention.Softmx"])
    assert isinstance(causes[-1], AttributeError)
    assert (causes[-1].obj.__name__, causes[-1].name) == ("lit_probattn.attention", "Softmx")
    _, causes = library_error(["--attention", "nowhere.Softmx"])
    assert isinstance(causes[-1], ModuleNotFoundError)
    assert causes[-1].name == "nowhere"


def test_of_classes_by_number_the_refused_one_is_found():
    softmax = "class_path: lit_probattn.attention.SoftmaxAttention, init_args: "
    given = f"{{2: {{{softmax}{{num_heads: 1}}}}, 3: {{{softmax}{{num_heads: 1, heads: 4}}}}}}"
    _, causes = library_error(["--numbered", given])
    assert any(internals.BY_NUMBER.search(str(cause)) for cause in causes)
    assert internals._rejected_number(causes) == 3
    assert internals._rejected_number(library_error(["--number", "x"])[1]) is None


def test_options_of_a_parser_and_of_its_commands():
    outer, inner = RunParser(), RunParser()
    inner.add_argument("--size", type=int)
    assert isinstance(outer, ArgumentParser)
    outer.add_subcommands().add_subcommand("fit", inner)
    assert {"help", "size"} <= set(internals.option_names(outer))
    assert "size" in internals.option_names(inner)


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--number", "x"], "number: expected int, received 'x'"),
        (["--choice", "c"], "choice: expected one of 'a', 'b', received 'c'"),
        (["--inner", INNER], "inner: missing size"),
    ],
)
def test_what_a_user_reads(arguments, line):
    make: Callable[[], object] = lambda: parser().parse_args(arguments)  # noqa: E731
    with pytest.raises(ConfigError) as told:
        make()
    assert str(told.value) == line


def test_a_whole_number_is_one_whatever_was_imported_before():
    class Limits:
        def __init__(self, first: float | int | None = None, second: int | float = 1) -> None: ...

    made = RunParser()
    made.add_class_arguments(Limits, "limits")
    given = made.parse_args(["--limits.first", "1", "--limits.second", "0.5"]).limits
    assert (type(given.first), type(given.second)) == (int, float)
    assert type(made.parse_args(["--limits.first", "1.0"]).limits.first) is float


def test_the_source_of_a_module_is_parsed_once(monkeypatch):
    """And what its conditions import for type checkers is found as the library finds it."""
    parsed = []

    def noted(source):
        parsed.append(source)
        return parse(source)

    monkeypatch.setattr(internals.ast, "parse", noted)
    source = (
        "from typing import TYPE_CHECKING\nimport typing\n\n"
        "if TYPE_CHECKING:\n    from decimal import Decimal\n"
        "if typing.TYPE_CHECKING or 1:\n    import fractions\n"
        f"if 0:\n    import colorsys\n# {id(parsed)}\n"
    )
    for _ in range(2):
        found: dict[str, object] = {}
        TypeCheckingVisitor().update_aliases(source, "a_module", found)
        assert {"Decimal", "fractions"} <= set(found)
        assert "colorsys" not in found
    assert parsed.count(source) == 1


def test_configuration_files_are_read_as_utf8_in_every_locale(monkeypatch):
    encodings, plain = {}, open

    def recorded(file, mode="r", *args, **options):
        if str(file).endswith(".yaml") and "b" not in mode:
            encodings[str(file)] = options.get("encoding")
        return plain(file, mode, *args, **options)

    monkeypatch.setattr("builtins.open", recorded)
    check_arguments(["fit", "--task", "tiny/lra_text", "--attention", "smgk"])
    assert encodings
    assert set(encodings.values()) == {"utf-8"}


def test_parameters_that_tests_keep_are_copies():
    kept = sparing.kept(get_signature_parameters)
    first, second = kept(Inner), kept(Inner)
    assert first == second == get_signature_parameters(Inner)
    assert [one is other for one, other in zip(first, second, strict=True)] == [False, False]


def test_texts_that_tests_write_in_c_are_those_of_python():
    words = ["1e-3", "yes", "null", "", "a: b", "'", "\u00e9", "two\nlines"]
    exact = {"text": words, "numbers": [1e-30, 0.5], "none": None}
    for path in [*shipped("task"), *shipped("attention"), *shipped("trainer")][::7]:
        content = read_yaml(path)
        assert sparing.dump(content) == sparing.slow_dump(content), path
    assert sparing.dump(exact) == sparing.slow_dump(exact)


def test_actions_that_tests_keep_are_found_anew_in_a_changed_parser():
    find, made = sparing.found_once(sparing.slow_find), parser()
    keys = ["number", "group.count", "inner", "inner.size", "later", "help", "group"]
    for _ in range(2):
        for key, exclude in product(keys, [None, (ActionTypeHint,)]):
            assert find(made, key, exclude) == sparing.slow_find(made, key, exclude), key
        if find(made, "later")[0] is None:
            made.add_argument("--later", type=int)
    assert find(made, "later")[0] is made._actions[-1]


@pytest.mark.parametrize("key", ["a", "items", "a.b", "items.a", "x.y", "c-d", "", " ", "a.", 3])
def test_keys_that_tests_read_at_once_are_those_of_the_library(key):
    def outcome(parse):
        try:
            leaf, parent, rest = parse(namespace, key)
        except KeyError as error:
            return str(error)
        return leaf, id(parent), rest

    namespace = Namespace(a=Namespace(b=1))
    assert outcome(sparing.parsed_at_once(sparing.slow_parse)) == outcome(sparing.slow_parse)
