"""`takes`: a constructor has the arguments of its parts, each declared by one of them."""

from __future__ import annotations

import argparse
import inspect
import warnings
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Annotated, Any, Literal

import pytest
from jsonargparse import ArgumentParser

from lit_probattn.base.arguments import (
    Count,
    NotNegative,
    OnlyWith,
    Parser,
    Positive,
    Probability,
    Range,
    Rate,
    WholeNumber,
    add_data,
    arguments_of,
    at_least,
    by_name,
    check_argument,
    checks_arguments,
    takes,
    with_defaults,
)
from lit_probattn.base.errors import ConfigError
from tests.support.helpers import error_of


class Inner:
    """A part.

    Args:
        width: of the
            inner part.
        rate: of the inner part.
    """

    def __init__(self, make: str, *, width: int, rate: float = 0.5) -> None:
        self.given = (make, width, rate)


class Outer:
    """Takes a part.

    Args:
        depth: its own.
    """

    @takes(Inner, rate=0.25)
    def __init__(self, *, depth: int = 3, **options: Any) -> None:
        self.given, self.depth = options, depth
        self.inner = Inner(**arguments_of(Inner, options))


class Top(Outer):
    """Takes a part that takes one, and sets one argument by itself."""

    @takes(Outer, without=("width",))
    def __init__(self, **options: Any) -> None:
        super().__init__(width=7, **options)


def test_every_argument_has_its_place_type_and_default():
    assert str(inspect.signature(Outer)) == (
        "(make: str, *, width: int, rate: float = 0.25, depth: int = 3)"
    )
    assert list(inspect.signature(Top).parameters) == ["make", "rate", "depth"]
    assert Outer("x", width=2).given == {"make": "x", "width": 2, "rate": 0.25}
    assert Top("x", depth=5).inner.given == ("x", 7, 0.25)
    assert Top(make="x", rate=1.0).inner.given == ("x", 7, 1.0)


def test_a_parser_sees_types_defaults_and_descriptions():
    parser = ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(Top, "it")
    text = " ".join(parser.format_help().split())
    assert "of the inner part. (type: float, default: 0.25)" in text
    assert "its own. (type: int, default: 3)" in text
    assert parser.parse_args(["--it.make=x"]).it.depth == 3


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"widthh": 1}, r"Outer.__init__\(\) .*'widthh'; did you mean 'width'\?"),
        ({"make": "x"}, r"Outer.__init__\(\) missing a required .*'width'"),
    ],
)
def test_wrong_arguments_are_named(given, told):
    with pytest.raises(TypeError, match=told):
        Outer(**given)


class Other:
    def __init__(self, *, rate: int = 0) -> None: ...


class Open:
    def __init__(self, **anything: Any) -> None: ...


@pytest.mark.parametrize(
    ("parts", "more", "told"),
    [
        ((Inner, Other), {}, "declare rate differently"),
        ((Open,), {}, "Open does not name its arguments"),
        ((Inner,), {"without": ("widthh",)}, "widthh"),
        ((Inner,), {"widthh": 1}, "widthh"),
        ((Inner,), {"depth": 1}, "depth"),
    ],
)
def test_wrong_parts_are_refused_where_the_class_is_written(parts, more, told):
    with pytest.raises(TypeError, match=told):

        @takes(*parts, **more)
        def __init__(self, *, depth: int = 3, **options: Any) -> None: ...


@dataclass(frozen=True, kw_only=True)
class Options:
    """A record.

    Args:
        width: of the record.
        rate: of the record.
    """

    width: int = 2
    rate: float = 0.5


@dataclass(frozen=True)
class Sizes:
    """Another record.

    Args:
        size: of the sizes.
    """

    size: int
    _: KW_ONLY
    depth: int = 3
    turns: int = 0


@dataclass(frozen=True, kw_only=True)
class Arguments(Options, Sizes):
    """Both."""

    turns: int = field(default=0, init=False)


class Layer:
    """Has the fields of records as arguments."""

    @by_name(Arguments)
    def __init__(self, options: Arguments) -> None:
        self.given = options


class Wide(Layer):
    """Hands all on."""

    def __init__(self, size: int, *, length: int = 3, **common: Any) -> None:
        super().__init__(size, **common)


def test_a_constructor_receives_the_record_of_its_arguments():
    assert str(inspect.signature(Layer)) == (
        "(size: int, *, depth: int = 3, width: int = 2, rate: float = 0.5) -> None"
    )
    assert Layer(7).given == Layer(size=7).given == Arguments(7)
    assert Layer(7, width=3).given == Arguments(7, width=3)


@pytest.mark.parametrize(
    ("cls", "given", "told"),
    [
        (Layer, {}, r"^Layer.__init__\(\) missing a required argument: 'size'"),
        (Layer, {"size": 1, "wdth": 3}, "^Layer received .*'wdth'; did you mean 'width'"),
        (Layer, {"size": 1, "turns": 3}, "^Layer received .*'turns'; expected depth, width, rate"),
        (Wide, {"size": 1, "leng": 3}, "^Wide received .*'leng'; did you mean 'length'"),
        (Wide, {"size": 1, "dept": 3}, "^Wide received .*'dept'; did you mean 'depth'"),
    ],
)
def test_unknown_and_missing_arguments_are_named(cls, given, told):
    with pytest.raises(TypeError, match=told):
        cls(**given)


class Chooser:
    """Has choices of several types."""

    @checks_arguments
    def __init__(
        self,
        mode: Literal["a", "b"],
        size: Literal[32, 128] | None = None,
        unit: Literal["x"] | Literal["y"] = "x",
        path: Literal["all"] | float = "all",
        **more: Any,
    ) -> None:
        self.given = (mode, size, unit, path, more)


def test_choices_are_those_of_the_type():
    assert Chooser("a").given == ("a", None, "x", "all", {})
    assert Chooser("b", 32, unit="y", path=0.5, deep="z").given == (
        "b",
        32,
        "y",
        0.5,
        {"deep": "z"},
    )
    assert Chooser("a", path="anything").given[3] == "anything"  # not only choices
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'mode'"):
        Chooser()


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (("c",), "^mode must be one of a, b, received 'c'$"),
        ((None,), "^mode must be one of a, b, received None$"),
        (("a", 64), "^size must be one of 32, 128, received 64$"),
        (("a", None, "z"), "^unit must be one of x, y, received 'z'$"),
    ],
)
def test_other_values_than_the_choices_are_refused(given, told):
    with pytest.raises(ConfigError, match=told):
        Chooser(*given)


class Several:
    """Takes any number of positional values."""

    @checks_arguments
    def __init__(self, first: str, *paths: Any, mode: Literal["a", "b"] = "a", **more: Any) -> None:
        self.given = (first, paths, mode, more)


def test_values_of_variadic_arguments_are_not_those_of_the_arguments_behind_them():
    assert Several("x", "y", "z", mode="b").given == ("x", ("y", "z"), "b", {})
    assert Several("x", "y", "z", float("inf"), paths=1).given[1:] == (
        *(("y", "z", float("inf")), "a"),
        {"paths": 1},
    )
    with pytest.raises(ConfigError, match=r"^mode must be one of a, b, received 'c'$"):
        Several("x", "y", mode="c")


def test_a_parser_sees_the_fields_of_records_through_subclasses():
    parser = ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(Wide, "it")
    text = " ".join(parser.format_help().split())
    assert "of the record. (type: int, default: 2)" in text
    assert "of the record. (type: float, default: 0.5)" in text
    assert list(parser.parse_args(["--it.size=1"]).it.__dict__) == [
        *("size", "length", "depth", "width", "rate")
    ]


@pytest.mark.parametrize("rest", [[], ["--other", "a"], ["--data.name=x"]])
def test_a_key_of_the_data_requires_a_value(rest):
    parser = Parser("a program")
    add_data(parser)
    parser.add_argument("--other")
    assert "--data.path" in error_of(["--data.path", *rest], parser.parse_args)
    assert parser.parse_args(["--data.path", "-3"]).data == ["path=-3"]


@pytest.mark.parametrize(
    "words", [["--data.num_train", "3"], ["--data.num_train=3"], ["--data.init_args.num_train=3"]]
)
def test_arguments_of_the_data_are_written_as_for_fit(words):
    parser = Parser("a program")
    parser.add_argument("--other", nargs="+")
    add_data(parser)
    options = parser.parse_args([*words, "--other", "a", "b", "--data.name", "x=y"])
    assert options.data == ["num_train=3", "name=x=y"]
    assert options.other == ["a", "b"]
    options = parser.parse_args(["--other", "--data.num_workers 2", *words])
    assert (options.data, options.other) == (["num_train=3"], ["--data.num_workers 2"])
    with pytest.raises(SystemExit):
        parser.parse_args(["--data", "num_train=3"])


def test_a_wrong_option_is_one_line():
    parser = Parser("a program")
    parser.add_argument("--seed", type=int)
    told = error_of(["--seed", "one"], parser.parse_args)
    assert told.startswith("error: argument --seed: invalid int value: 'one'")
    assert told.endswith(" (see a program --help)")


@pytest.mark.parametrize(
    ("words", "values"),
    [
        (["--set", "a=1", "--set", "b=2", "c=3"], ["a=1", "b=2", "c=3"]),
        (["--set", "a=1"], ["a=1"]),  # without the default, also when parsed again
        ([], ["default"]),
    ],
)
def test_values_of_a_repeated_option_are_joined(words, values):
    parser = Parser("a program")
    parser.add_argument("--set", nargs="+", default=["default"])
    assert parser.parse_args(["--set", "z"]).set == ["z"]
    assert parser.parse_args(words).set == values


def test_an_option_of_one_value_can_be_given_once():
    parser = Parser("a program")
    parser.add_argument_group().add_argument("--seed", type=int)
    told = error_of(["--seed", "1", "--seed=2"], parser.parse_args)
    assert told == "error: duplicate --seed; keep one (see a program --help)"
    assert parser.parse_args(["--seed", "1"]).seed == 1


def test_numbers_below_their_bound_are_refused():
    parser = Parser("a program")
    parser.add_argument("--sizes", type=at_least(1), nargs="+", default=[1, 2])
    parser.add_argument("--count", type=at_least(2))
    assert vars(parser.parse_args([])) == {"sizes": [1, 2], "count": None}
    options = parser.parse_args(["--sizes", "3", "1", "--count", "2"])
    assert vars(options) == {"sizes": [3, 1], "count": 2}
    for words, expected in (
        (["--sizes", "3", "0"], "argument --sizes: must be at least 1, received 0"),
        (["--count", "1"], "argument --count: must be at least 2, received 1"),
        (["--count", "2.5"], "argument --count: invalid int value: '2.5'"),
    ):
        assert expected in error_of(words, parser.parse_args)


def test_help_shows_defaults():
    parser = Parser("a program", add_help=False)
    parser.add_argument("--rate", type=float, default=0.5, help="of it")
    parser.add_argument("--none", type=int, default=0, help="of it")
    parser.add_argument("--sizes", type=int, nargs="+", default=[1, 2], help="of it")
    parser.add_argument("--changed", type=int, default=1, help="of it")
    parser.add_argument("--count", type=int, help="of it")
    parser.add_argument("--all", action="store_true", help="of it")
    parser.add_argument("--words", nargs="+", default=[], help="of it")
    parser.add_argument("--empty", default="", help="of it")
    parser.add_argument("--absent", default=argparse.SUPPRESS, help="of it")
    parser.set_defaults(changed=7)
    _, *parts = parser.format_help().partition("options:")[2].split("--")
    assert {part.split()[0]: part.partition("of it")[2].strip() for part in parts} == {
        "rate": "; default: 0.5",
        "none": "; default: 0",
        "sizes": "; default: 1 2",
        "changed": "; default: 7",
        **dict.fromkeys(("count", "all", "words", "empty", "absent"), ""),
    }


# ---- arguments without effect ------------------------------------------------------------------


class Part:
    @checks_arguments
    def __init__(
        self,
        cuts: Annotated[Sequence[int], OnlyWith(mode="a")] = (1, 2),
        tone: Annotated[str, OnlyWith(mode=str.isupper)] = "",
    ) -> None:
        self.cuts = cuts


class Base:
    @checks_arguments
    def __init__(self, share: Annotated[Rate, OnlyWith(split=("x", "y"))] = 0.1) -> None:
        self.share = share


class Whole(Base):
    @takes(Part)
    def __init__(
        self,
        mode: Literal["a", "b", "C"] = "a",
        heat: float = 0.0,
        top: Annotated[Count | None, OnlyWith(heat=Range(above=0))] = None,
        **options: Any,
    ) -> None:
        super().__init__(share=0.2)
        self.part = Part(**arguments_of(Part, options))
        self.other = Split(share=0.3, split="z")  # not set by the caller


@with_defaults(share=0.15)
class Split(Base):
    @checks_arguments
    def __init__(self, split: str = "x", **options: Any) -> None:
        super().__init__(**options)


@pytest.mark.parametrize(
    ("cls", "given", "told"),
    [
        (Whole, {"mode": "b"}, []),
        (Whole, {"cuts": [3]}, []),
        (Whole, {"cuts": [1, 2], "mode": "b"}, []),  # the default, as files write it
        (Whole, {"cuts": [3], "mode": "b"}, ["Whole: cuts=[3] has no effect with mode=b"]),
        (Whole, {"top": 5}, ["Whole: top=5 has no effect with heat=0.0"]),
        (Whole, {"top": 5, "heat": 0.5}, []),
        (Whole, {"tone": "x"}, ["Whole: tone=x has no effect with mode=a"]),
        (Whole, {"tone": "x", "mode": "C"}, []),
        (Part, {"cuts": [3], "tone": "x"}, []),  # which has no mode
        (Base, {"share": 0.3}, []),
        (Split, {"share": 0.3, "split": "y"}, []),
        (Split, {"split": "z"}, []),
        (Split, {"share": 0.3, "split": "z"}, ["Split: share=0.3 has no effect with split=z"]),
    ],
)
def test_an_argument_without_effect_is_one_warning(cls, given, told):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        cls(**given)
    assert [str(one.message) for one in caught] == told
    assert [one.filename for one in caught] == [__file__] * len(told)


@pytest.mark.parametrize(
    ("kind", "accepted", "refused"),
    [
        (Count, [1, 2**70], [0, -1]),
        (WholeNumber, [0, 1], [-1]),
        (Positive, [1e-300, 1e300], [0.0, -1e-300]),
        (NotNegative, [0.0, 1e300], [-1e-300]),
        (Rate, [0.0, 0.999], [-1e-300, 1.0]),
        (Probability, [0.0, 1.0], [-1e-300, 1.001]),
    ],
)
def test_ranges_end_where_their_names_say(kind, accepted, refused):
    for optional in (kind, kind | None):
        for value in accepted:
            check_argument("it", value, optional)
        for value in refused:
            with pytest.raises(ConfigError, match=r"^it must be"):
                check_argument("it", value, optional)
    check_argument("it", None, kind | None)


def test_a_number_outside_of_its_range_is_refused():
    for value, told in ((0, "at least 1"), (-1, "at least 1")):
        with pytest.raises(ConfigError, match=f"^top must be {told}, received {value}$"):
            Whole(top=value, heat=1.0)
    with pytest.raises(ConfigError, match=r"^share must be in \[0, 1\), received 1$"):
        Base(1)
    assert Base(0).share == 0
    assert Whole(top=True, heat=1.0).part.cuts == (1, 2)  # booleans are checked elsewhere


def test_types_of_other_classes_need_not_be_known():
    class Unknown(Base):
        def __init__(self, extra: OfNoModule, **options: Any) -> None:  # noqa: F821
            super().__init__(**options)

    assert Unknown(3, share=0.5).share == 0.5
    with pytest.raises(ConfigError, match="share must be in"):
        Unknown(3, share=2)
