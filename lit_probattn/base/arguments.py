"""Constructors that forward arguments to their parts, which declare and document them.

    class LanguageModeling(Task):
        @takes(LanguageModel, Task, lr=5e-4)
        def __init__(self, *, top_k: int | None = None, **options: Any) -> None:
            super().__init__(**arguments_of(Task, options))
            self.model = LanguageModel(**arguments_of(LanguageModel, options))

The signature contains all arguments with types and defaults, so parsers, `help` and configurations
show them; the constructor receives a value for each. Type checkers do not check these arguments at
calls; they are checked at run time.

Arguments that are the fields of a frozen dataclass are declared only there:

    class MGKAttention(Attention):
        @by_name(MGKArguments)
        def __init__(self, options: MGKArguments) -> None:
            self.build(options)

`MGKAttention(64, 4, e_step="hard")` receives `MGKArguments(64, 4, e_step="hard")`. Parsers, `help`
and type checkers use the names and types of the fields.

The values of an argument are declared by its type alone, `Literal["a", "b"]` or a number with a
`Range` such as `Count`: records that derive from `Options`, constructors of data modules, and those
decorated with `takes` or `checks_arguments`, refuse others, and NaN for any argument. The type may
also declare the values of other arguments without which it has no effect; setting it nevertheless
is one warning:

        em_weighting: Annotated[Weighting, OnlyWith(e_step="soft")] = "uniform"
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import inspect
import math
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from inspect import Parameter, Signature
from itertools import takewhile
from types import NoneType, UnionType
from typing import (
    Annotated,
    Any,
    Concatenate,
    Literal,
    NoReturn,
    ParamSpec,
    TypeVar,
    Union,
    cast,
    get_args,
    get_origin,
    get_type_hints,
)

from lit_probattn.base.config_files import nearest
from lit_probattn.base.errors import ConfigError

Constructor = Callable[..., None]
_Constructor = TypeVar("_Constructor", bound=Callable[..., None])
_Fields = ParamSpec("_Fields")
_Record = TypeVar("_Record")
_Self = TypeVar("_Self")
_Class = TypeVar("_Class")


def takes(
    *parts: type, without: tuple[str, ...] = (), **defaults: Any
) -> Callable[[Constructor], Constructor]:
    """Decorate a constructor with the arguments of its parts, which it receives as `**options`.

    Args:
        parts: classes to which it forwards arguments. The first one with an argument documents it.
        without: arguments of the parts that the constructor sets itself.
        defaults: defaults that differ from the parts.

    Raises:
        TypeError: parts declare an argument differently, a part does not name its arguments, or
            `without` or `defaults` has an unknown argument.
    """

    def decorate(init: Constructor) -> Constructor:
        signature = _signature(init, parts, without, defaults)

        @functools.wraps(init)
        def construct(self: Any, *args: Any, **given: Any) -> None:
            known = [name for name in signature.parameters if name != "self"]
            for name in given.keys() - known:
                told = f"got an unexpected keyword argument {name!r}{nearest(name, known)}"
                raise TypeError(f"{init.__qualname__}() {told}")
            try:
                bound = signature.bind(self, *args, **given)
            except TypeError as error:
                raise TypeError(f"{init.__qualname__}() {error}") from None
            bound.apply_defaults()
            _check_arguments(construct.__annotations__, bound.arguments)
            with _warned(self, signature, bound.arguments):
                init(**bound.arguments)

        return _shown(construct, init, signature, parts)

    return decorate


def by_name(
    record: Callable[_Fields, _Record],
) -> Callable[[Callable[[_Self, _Record], None]], Callable[Concatenate[_Self, _Fields], None]]:
    """Decorate a constructor with one argument, a record, so that callers pass its fields by name.

    Args:
        record: a dataclass. Fields with `init=False` are not arguments.

    Raises:
        TypeError: at the call, an argument is unknown (the message has the nearest) or missing.
    """
    kind = cast(type, record)
    taken = _typed(kind, inspect.signature(kind).parameters)

    def decorate(init: Callable[[_Self, _Record], None]) -> Any:
        own = Parameter("self", Parameter.POSITIONAL_OR_KEYWORD)
        signature = Signature([own, *taken.values()], return_annotation=None)

        @functools.wraps(init)
        def construct(self: Any, *args: Any, **given: Any) -> None:
            for name in given.keys() - taken.keys():
                raise TypeError(_no_such_argument(type(self), name))
            try:
                bound = signature.bind(self, *args, **given)
            except TypeError as error:
                raise TypeError(f"{init.__qualname__}() {error}") from None
            options = record(*bound.args[1:], **bound.kwargs)
            for told in without_effect(options).values():
                warnings.warn(f"{type(self).__name__}: {told}", stacklevel=2)
            init(self, options)

        made = _shown(construct, init, signature, (kind,))
        made.record = kind
        return made

    return decorate


def checks_arguments(init: _Constructor) -> _Constructor:
    """Decorate a constructor so that arguments must have the values that their types declare.

    Raises:
        NameError: the module does not import a type at run time.
        ConfigError: at the call, an argument is none of the choices of its `Literal` type, outside
            of its `Range`, or NaN.
    """
    positional = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)
    parameters, hints = inspect.signature(init).parameters, _hints_of(init)
    names = [name for name, p in parameters.items() if p.kind in positional][1:]

    @functools.wraps(init)
    def construct(self: Any, *args: Any, **given: Any) -> None:
        values = dict(zip(names, args, strict=False)) | given
        _check_arguments(hints, values)
        with _warned(self, _signature_of(cast(Any, type(self))), values):
            init(self, *args, **given)

    return cast(_Constructor, construct)


@dataclass(frozen=True)
class Range:
    """The finite numbers that an argument accepts, as part of its type.

        dropout: Annotated[float, Range(0, below=1)] = 0.0

    Args:
        least: the smallest number.
        above: a number that all are above, instead of `least`.
        most: the largest number.
        below: a number that all are below, instead of `most`.
    """

    least: float | None = None
    above: float | None = None
    most: float | None = None
    below: float | None = None

    def __contains__(self, value: float) -> bool:
        return (
            math.isfinite(value)
            and (self.least is None or value >= self.least)
            and (self.above is None or value > self.above)
            and (self.most is None or value <= self.most)
            and (self.below is None or value < self.below)
        )

    def __str__(self) -> str:
        if self.most is None and self.below is None:
            return "positive" if self.least is None else f"at least {self.least}"
        low = f"({self.above}" if self.least is None else f"[{self.least}"
        high = f"{self.below})" if self.most is None else f"{self.most}]"
        return f"in {low}, {high}"


Count = Annotated[int, Range(1)]
WholeNumber = Annotated[int, Range(0)]
Positive = Annotated[float, Range(above=0)]
NotNegative = Annotated[float, Range(0)]
Rate = Annotated[float, Range(0, below=1)]
Probability = Annotated[float, Range(0, most=1)]


def parts_of(kind: Any) -> tuple[list[Any], list[Any]]:
    """Return the types of a union, or the type itself, and all that `Annotated` adds to them."""
    if get_origin(kind) is Annotated:
        parts, notes = parts_of(kind.__origin__)
        return parts, [*notes, *kind.__metadata__]
    if get_origin(kind) not in (Union, UnionType):
        return [kind], []
    found = [parts_of(part) for part in get_args(kind)]
    return [p for parts, _ in found for p in parts], [n for _, notes in found for n in notes]


def check_argument(name: str, value: object, kind: Any) -> None:
    """Check that an argument has a value that its type declares.

    Args:
        name: the argument.
        value: its value.
        kind: a `Literal` type, a number with a `Range`, or a union of such types and None; other
            types have no choices and no range.

    Raises:
        ConfigError: it is none of the choices, outside of the range, or NaN.
    """
    if isinstance(value, float) and math.isnan(value):
        raise ConfigError(f"{name} must be a number, received nan")
    parts, notes = parts_of(kind)
    if isinstance(value, int | float) and not isinstance(value, bool):
        for known in notes:
            if isinstance(known, Range) and value not in known:
                told = known if math.isfinite(value) else "finite"
                raise ConfigError(f"{name} must be {told}, received {value}")
    literals = [part for part in parts if get_origin(part) is Literal]
    if not literals or {*parts} - {*literals, NoneType}:
        return
    valid = [choice for part in literals for choice in get_args(part)]
    if value not in valid and not (value is None and NoneType in parts):
        told = f"must be one of {', '.join(map(str, valid))}, received {value!r}"
        raise ConfigError(f"{name} {told}")


@functools.cache
def _hints_of(declared: Any) -> dict[str, Any]:
    return get_type_hints(declared, include_extras=True)


def _check_arguments(hints: Mapping[str, Any], given: Mapping[str, Any]) -> None:
    for name, value in given.items():
        check_argument(name, value, hints.get(name))


@dataclass(frozen=True)
class Options:
    """Base class of records of options: fields accept only the values that their types declare.

    Raises:
        ConfigError: a field is none of the choices of its `Literal` type, outside of its `Range`,
            or NaN.
    """

    def __post_init__(self) -> None:
        kind: Any = type(self)
        _check_arguments(_hints_of(kind), vars(self))


class OnlyWith:
    """What an argument needs to have an effect, as part of its type.

    Args:
        needed: values of other arguments: one, or a tuple, range or `Range` of them, or a function
            that returns whether a value is one. Arguments that a class does not have are not needed
            there.
    """

    def __init__(self, **needed: Any) -> None:
        self.needed = needed

    def __eq__(self, other: object) -> bool:
        return isinstance(other, OnlyWith) and self.needed == other.needed

    def __hash__(self) -> int:
        return hash(tuple(self.needed))

    def __repr__(self) -> str:
        return f"OnlyWith({', '.join(f'{name}={value!r}' for name, value in self.needed.items())})"

    def missing(self, values: Mapping[str, Any]) -> str | None:
        """Return the first argument with a value that is not among the needed ones."""
        for name, wanted in self.needed.items():
            if name not in values:
                continue
            value = values[name]
            if isinstance(wanted, Range):
                fits = isinstance(value, int | float) and value in wanted
            elif callable(wanted):
                fits = wanted(value)
            else:
                fits = value in (wanted if isinstance(wanted, tuple | range) else (wanted,))
            if not fits:
                return name
        return None


def without_effect(options: Any) -> dict[str, str]:
    """Return fields that differ from their default but have no effect, each with the reason."""
    kind: Any = type(options)
    return _without_effect(_typed(kind, inspect.signature(kind).parameters), vars(options))


def _without_effect(
    parameters: Mapping[str, Parameter], values: Mapping[str, Any]
) -> dict[str, str]:
    found = {}
    for name, parameter in parameters.items():
        for known in parts_of(parameter.annotation)[1]:
            if not isinstance(known, OnlyWith) or _is_same(values[name], parameter.default):
                continue
            other = known.missing(values)
            if other is not None:
                told = f"has no effect with {other}={values[other]}"
                found[name] = f"{name}={values[name]} {told}"
    return found


def changed_arguments(cls: type, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values that differ from the defaults of a class, for arguments that it has."""
    parameters = _signature_of(cls).parameters
    return {
        name: value
        for name, value in values.items()
        if name in parameters and not _is_same(value, parameters[name].default)
    }


def all_arguments(cls: type, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values, and the defaults of the other arguments of a class."""
    parameters = _signature_of(cls).parameters.values()
    return {p.name: p.default for p in parameters if p.default is not p.empty} | {**values}


def _is_same(value: object, default: object) -> bool:
    """Whether a value is the default; configurations contain lists in place of tuples."""
    both = (value, default)
    if all(isinstance(one, list | tuple) for one in both):
        value, default = (list(cast(Any, one)) for one in both)
    return value == default


_IS_PART: ContextVar[bool] = ContextVar("is_part", default=False)


@contextlib.contextmanager
def _warned(owner: object, signature: Signature, given: Mapping[str, Any]) -> Iterator[None]:
    """Warn of arguments without effect; in this context, parts of the object do not warn again."""
    if not _IS_PART.get():
        values = {name: p.default for name, p in signature.parameters.items()} | {**given}
        for told in _without_effect(signature.parameters, values).values():
            warnings.warn(f"{type(owner).__name__}: {told}", stacklevel=_depth())
    token = _IS_PART.set(True)
    try:
        yield
    finally:
        _IS_PART.reset(token)


def _depth() -> int:
    """Return the `stacklevel` by which a warning of the caller names the code outside of here."""
    frame = inspect.currentframe()
    files = []
    while frame is not None:
        files.append(frame.f_code.co_filename)
        frame = frame.f_back
    inside = (__file__, contextlib.__file__)
    return next((level for level, file in enumerate(files) if level and file not in inside), 1)


@functools.cache
def _signature_of(cls: type) -> Signature:
    try:
        return _whole_signature(cls, {})
    except NameError:  # a subclass with types that its module does not import at run time
        return Signature()


def with_defaults(**defaults: Any) -> Callable[[type[_Class]], type[_Class]]:
    """Decorate a class with other defaults for arguments of its bases (`**kwargs`).

        @with_defaults(merges=10000, lower=True)
        class IWSLT14(Translation): ...

    Parsers and `help` show them. Arguments that an intermediate class sets itself are listed in its
    `sets` and not shown.

    Raises:
        TypeError: an argument is unknown to all bases.
    """

    def decorate(cls: type[_Class]) -> type[_Class]:
        inherited: Any = getattr(cls, "__init__")  # noqa: B009
        signature = _whole_signature(cls, defaults)

        @functools.wraps(inherited)
        def construct(self: Any, *args: Any, **given: Any) -> None:
            inherited(self, *args, **(defaults | given))

        made: Any = cls
        made.__init__ = _shown(construct, inherited, signature, (cls,))
        return cls

    return decorate


def _whole_signature(cls: type, defaults: Mapping[str, Any]) -> Signature:
    """Return the arguments of a class and of the bases to which it forwards arguments."""
    found: dict[str, Parameter] = {}
    hidden: set[str] = set()
    for base in cls.__mro__[:-1]:
        hidden |= {*vars(base).get("sets", ())}
        if "__init__" not in vars(base):
            continue
        constructor: Any = vars(base)["__init__"]
        parameters = _typed(constructor, inspect.signature(constructor).parameters)
        handed_on = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
        named = {n: p for n, p in parameters.items() if p.kind is not p.VAR_KEYWORD}
        found |= {n: p for n, p in named.items() if n not in found and n not in hidden}
        if not handed_on:
            break
    if absent := defaults.keys() - found.keys():
        raise TypeError(f"{cls.__name__}: no base accepts {', '.join(sorted(absent))}")
    changed = {name: p.replace(default=defaults.get(name, p.default)) for name, p in found.items()}
    own = {n for n in changed if n == "self"}
    ordered = [p if name in own else p.replace(kind=p.KEYWORD_ONLY) for name, p in changed.items()]
    return Signature(ordered)


def _no_such_argument(cls: type, name: str) -> str:
    keywords: list[str] = []
    for base in cls.__mro__:
        init = vars(base).get("__init__")
        parameters = inspect.signature(init).parameters.values() if init else ()
        keywords += [p.name for p in parameters if p.kind is p.KEYWORD_ONLY]
        if init and all(p.kind is not p.VAR_KEYWORD for p in parameters):
            break  # arguments are not forwarded
    return f"{cls.__name__} received an unexpected keyword argument {name!r}" + (
        nearest(name, keywords, lists=False) or f"; expected {', '.join(keywords)}"
    )


def _shown(
    construct: Constructor, init: Constructor, signature: Signature, parts: tuple[type, ...]
) -> Any:
    """Return a constructor with the signature, types and descriptions of its parts' arguments."""
    hints = {name: found.annotation for name, found in signature.parameters.items()}
    made: Any = construct
    made.__signature__ = signature
    made.__annotations__ = {k: v for k, v in hints.items() if v is not Parameter.empty}
    made.__doc__ = f"{inspect.cleandoc(init.__doc__ or '')}\n{_described(parts)}"
    return made


def arguments_of(part: type, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options that a part accepts."""
    names = inspect.signature(part).parameters
    return {name: value for name, value in options.items() if name in names}


def _signature(
    init: Constructor,
    parts: tuple[Any, ...],
    without: tuple[str, ...],
    defaults: Mapping[str, Any],
) -> Signature:
    """Return the signature of a constructor with the arguments of its parts."""
    own = inspect.signature(init).parameters
    shown = {name: p for name, p in _typed(init, own).items() if p.kind is not p.VAR_KEYWORD}
    taken: dict[str, Parameter] = {}
    for part in parts:
        for name, found in _typed(part.__init__, inspect.signature(part).parameters).items():
            if found.kind in (found.VAR_KEYWORD, found.VAR_POSITIONAL):
                raise TypeError(f"{part.__name__} does not name its arguments: use `takes` there")
            if name in defaults:
                found = found.replace(default=defaults[name])
            if name in shown or name in without:
                continue
            if found.default is not found.empty:
                found = found.replace(kind=found.KEYWORD_ONLY)
            if taken.setdefault(name, found).replace(kind=found.kind) != found:
                raise TypeError(f"{init.__qualname__}: two parts declare {name} differently")
    absent = {*without, *defaults} - {
        name for part in parts for name in inspect.signature(part).parameters
    }
    if absent or shown.keys() & {*without, *defaults}:
        raise TypeError(
            f"{init.__qualname__}: expected arguments of its parts, received "
            f"{', '.join(absent) or 'its own argument'}"
        )
    positional = [p for p in shown.values() if p.kind is not p.KEYWORD_ONLY]
    own_options = [p for p in shown.values() if p.kind is p.KEYWORD_ONLY]
    ordered = sorted([*positional, *taken.values(), *own_options], key=lambda p: p.kind)
    return Signature(ordered)


def _typed(init: Any, parameters: Mapping[str, Parameter]) -> dict[str, Parameter]:
    """Return parameters with evaluated annotations."""
    hints = get_type_hints(init, include_extras=True)
    return {n: p.replace(annotation=hints.get(n, p.annotation)) for n, p in parameters.items()}


def _described(parts: tuple[type, ...]) -> str:
    """Return the descriptions of the parts' arguments as a docstring section."""
    blocks: list[str] = []
    for part in reversed(parts):  # parsers use the last of two descriptions
        for cls in reversed(part.__mro__[:-1]):
            for text in (getattr(vars(cls).get("__init__"), "__doc__", None), cls.__doc__):
                lines = inspect.cleandoc(text or "").partition("Args:\n")[2].splitlines()
                blocks += takewhile(lambda line: line.startswith(" "), lines)
    return "\n".join(["Args:", *blocks]) if blocks else ""


# ---- arguments of commands ----------------------------------------------------------------------


class _Store(argparse.Action):
    """Store an option: the values of a repeated one are joined, a single value is given once."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option: Any = None) -> None:
        if option is not None and self.dest in parser.given:
            if self.nargs not in ("+", "*"):
                parser.error(f"duplicate {option}; keep one")
            values = [*getattr(namespace, self.dest), *values]
        parser.given.add(self.dest)
        setattr(namespace, self.dest, values)


class _Formatter(argparse.RawDescriptionHelpFormatter):
    """Formatter that adds the default to the text of each option that has one."""

    def _get_help_string(self, action: argparse.Action) -> str:
        default = action.default
        values = default if isinstance(default, list) else [default]
        if action.nargs == 0 or not values or default in (None, "", argparse.SUPPRESS):
            return action.help or ""
        return f"{action.help}; default: {' '.join(map(str, values))}"


class Parser(argparse.ArgumentParser):
    """Parser of a command: flags must be spelled out, and errors are one line.

    An option with several values can be repeated; an option with one value cannot. Line breaks of
    the description are kept. Help texts show defaults.

    Args:
        prog: the command.
        description: description in the help text.
        more: further arguments of `argparse.ArgumentParser`.
    """

    def __init__(self, prog: str | None = None, description: str | None = None, **more: Any):
        own: dict[str, Any] = {"allow_abbrev": False, "formatter_class": _Formatter}
        super().__init__(prog, description=description, **own | more)
        self.given: set[str] = set()  # names of options among the words, without flags
        for action in (None, "store"):
            self.register("action", action, _Store)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse words, including `--data.NAME VALUE` for parsers with `add_data`."""
        words = sys.argv[1:] if args is None else list(args)
        if DATA in self.format_usage():
            try:
                words = _data_words(words)
            except ValueError as error:
                self.error(str(error))
        self.given.clear()
        return super().parse_known_args(words, namespace)

    def error(self, message: str) -> NoReturn:
        """Print the message and exit with status 2."""
        self.exit(2, f"error: {message} (see {self.prog} --help)\n")


DATA = "--data.KEY"


def add_data(parser: Any) -> None:
    """Add `--data.KEY VALUE`, which sets an argument of the data as in `fit`.

    The option `data` is a list of strings `KEY=VALUE`.

    Args:
        parser: a parser, or a group of its arguments.
    """
    text = "argument of the data, such as --data.data_dir FOLDER; can be repeated"
    more: dict[str, Any] = {"dest": "data", "action": "append", "default": [], "help": text}
    parser.add_argument(DATA, metavar="VALUE", **more)


def _data_words(words: Sequence[str]) -> list[str]:
    """Convert `--data.NAME VALUE` and `--data.NAME=VALUE` to a form that argparse supports.

    A word with a space before its `=` is the value of another option, as for argparse.

    Raises:
        ValueError: a value is missing.
    """
    found: list[str] = []
    rest = iter(words)
    for word in rest:
        flag, equals, value = word.partition("=")
        name = flag.removeprefix("--data.")
        if name == flag or not name or " " in name or flag == DATA:
            found.append(word)
            continue
        value = value if equals else next(rest, "--")
        if not equals and value.startswith("--"):
            raise ValueError(f"argument {flag}: expected a value; {flag}=VALUE may begin with --")
        found.append(f"{DATA}={name.removeprefix('init_args.')}={value}")
    return found


def at_least(least: int) -> Callable[[str], int]:
    """Return an argument type: whole numbers that are not below a bound."""

    def number(text: str) -> int:
        value = int(text)
        if value < least:
            raise argparse.ArgumentTypeError(f"must be at least {least}, received {value}")
        return value

    number.__name__ = int.__name__  # argparse's name of the type in its messages
    return number
