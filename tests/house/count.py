"""Concepts of the package, counted: `python -m tests.house.count [ROOT] [--no-run]`.

ROOT is the folder of a revision, by default this one; its files are read as text, so a revision of
an older layout is counted by the same rules. Each function's first sentence is its rule. `--no-run`
leaves the training of ListOps out.
"""

from __future__ import annotations

import argparse
import ast
import builtins
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from tests.support.paths import ROOT

CORE = ("lit_probattn/attention", "lit_probattn/functional")
LIMITS_OF_MGK = (*CORE, "lit_probattn/kernels", "profiling/kernels")
OPTION = "key_norm_weight"  # the option of MGK that was added last


class Found(NamedTuple):
    """What is counted, and where."""

    number: int
    what: list[str]


def trees(root: Path, *folders: str) -> Iterator[tuple[str, ast.Module]]:
    """Yield path and syntax tree of every module in folders."""
    for folder in folders:
        for path in sorted((root / folder).rglob("*.py")):
            yield str(path.relative_to(root)), ast.parse(path.read_text(encoding="utf-8"))


def classes(root: Path, *folders: str) -> Iterator[tuple[str, ast.ClassDef]]:
    """Yield path and syntax tree of every class in folders."""
    for path, tree in trees(root, *folders):
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                yield path, node


def functions(root: Path, *folders: str) -> Iterator[tuple[str, ast.FunctionDef]]:
    """Yield path and syntax tree of every function and method in folders."""
    for path, tree in trees(root, *folders):
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef):
                yield path, node


def found(items: Any) -> Found:
    """Return items with their number."""
    what = [str(item) for item in items]
    return Found(len(what), what)


def is_record(node: ast.ClassDef) -> bool:
    """Whether a class is a dataclass or a NamedTuple."""
    heads = [*node.bases, *node.decorator_list]
    return any(re.search(r"dataclass|NamedTuple", ast.unparse(head)) for head in heads)


# ---- the core ----------------------------------------------------------------------------------


def call_types(root: Path) -> Found:
    """Records of attention/ that stand for one call: a parameter `call`, `heads`, `given` or
    `choice` is annotated with them, or a function `choose` or `pick` returns them; a variant's
    `…Arguments` are its numbers.
    """
    named = set()
    for _, node in functions(root, *CORE):
        arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
        hints = [a.annotation for a in arguments if a.arg in ("call", "heads", "given", "choice")]
        hints += [node.returns] if node.name in ("choose", "pick") else []
        named |= {name for hint in hints if hint for name in re.findall(r"\w+", ast.unparse(hint))}
    records = {node.name for _, node in classes(root, *CORE) if is_record(node)}
    return found(sorted(n for n in named & records if not n.endswith("Arguments")))


def cells(root: Path) -> Found:
    """Entries of `backends`, `own_engines` or `NORMAL_FORM` of attention/: a variant times a
    backend, written by hand. A table made of the one of a class has as many; one that is only
    named counts where it is written.
    """
    tables: dict[str, list[str]] = {}
    made_of: list[tuple[str, str]] = []
    for path, tree in trees(root, CORE[0]):
        owners = {
            part: n.name for n in ast.walk(tree) if isinstance(n, ast.ClassDef) for part in n.body
        }
        for node in ast.walk(tree):
            if not isinstance(node, ast.Assign | ast.AnnAssign):
                continue
            target = node.targets[0] if isinstance(node, ast.Assign) else node.target
            name = ast.unparse(target).rpartition(".")[2]
            owner = owners.get(node, ast.unparse(target).rpartition(".")[0] or path)
            if name not in ("backends", "engines", "own_engines", "NORMAL_FORM"):
                continue
            if isinstance(node.value, ast.Dict):
                keys = [ast.unparse(key) for key in node.value.keys if key is not None]
                tables[owner] = [f"{path}: {key}" for key in keys]
            elif isinstance(node.value, ast.DictComp):
                source = re.search(r"(\w+)\.(backends|engines)", ast.unparse(node.value))
                made_of += [(path, source[1])] if source else []
    entries = [entry for table in tables.values() for entry in table]
    for path, source_class in made_of:
        entries += [f"{path}: as {entry}" for entry in tables.get(source_class, ())]
    return found(entries)


def lowerings(root: Path) -> Found:
    """Methods `lower` of attention/ that do more than raise."""
    return found(
        path
        for path, node in functions(root, CORE[0])
        if node.name == "lower" and not isinstance(node.body[-1], ast.Raise)
    )


def engine_functions(root: Path) -> Found:
    """Functions at the top level of attention/engines/ that take a call, by the name of their first
    parameter.
    """
    return found(
        f"{path}: {node.name}"
        for path, tree in trees(root, f"{CORE[0]}/engines")
        for node in tree.body
        if isinstance(node, ast.FunctionDef) and node.args.args[:1]
        if node.args.args[0].arg == "call"
    )


def stand_ins(root: Path) -> Found:
    """Classes whose name begins with `_Given`: modules that skip their constructor."""
    return found(n.name for _, n in classes(root, *CORE) if n.name.startswith("_Given"))


def named_types(root: Path) -> Found:
    """Classes at the top level of the shared modules of attention/ (not in the folder or module of
    a family) and of functional/, and aliases of types there (`Name = Literal[…]` and the like).
    """
    family = re.compile(
        r"attention/(mgk|fish|linear|own|cost|released)/|/(softmax|polynomial|ast)\.py"
    )
    names = []
    for path, tree in trees(root, *CORE):
        if path.startswith(CORE[0]) and family.search(path):
            continue
        for node in tree.body:
            if isinstance(node, ast.ClassDef):
                names.append(node.name)
            elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                kind = ast.unparse(node.value)
                if re.match(r"(Literal|Callable|Union|type)\[|\w+ \| ", kind):
                    names.append(node.targets[0].id)
    return found(names)


def option_files(root: Path) -> Found:
    """Files of lit_probattn/ that mention the option of MGK that was added last."""
    return found(_mentions(root))


def option_mentions(root: Path) -> Found:
    """Lines of lit_probattn/ that mention it."""
    return found(f"{path} {n}" for path, n in _mentions(root).items() for _ in range(n))


def _mentions(root: Path) -> Counter[str]:
    counted: Counter[str] = Counter()
    for path in sorted((root / "lit_probattn").rglob("*.py")):
        lines = path.read_text(encoding="utf-8").splitlines()
        if number := sum(OPTION in line for line in lines):
            counted[str(path.relative_to(root))] = number
    return counted


def places_of_terms(root: Path) -> Found:
    """Functions of attention/, functional/ and kernels, here and in profiling/, that make terms of
    MGK: a squared norm or distance meets a variance or its inverse. Left out are the M-step, sums
    of gradients (`store_…_sums`) and self-tests.
    """
    square = re.compile(r"\.square\(\)\.sum|squared_distance\(|sum\((\w+) \* \1,|norms\b.*= ")
    spread = re.compile(r"\b(variance|precision|sigma2|tau)\b")
    return found(
        f"{path}: {node.name}"
        for path, node in functions(root, *LIMITS_OF_MGK)
        if square.search(_body(node)) and spread.search(_body(node))
        if not re.search(r"m_step|selftest", path) and not node.name.startswith("store_")
    )


def _body(node: ast.FunctionDef) -> str:
    """Return a function's code without its docstring."""
    told = ast.get_docstring(node) is not None
    return "\n".join(ast.unparse(part) for part in node.body[told:])


def refusal_methods(root: Path) -> Found:
    """Methods of attention/, without linear/, whose name ends in `refusal`."""
    return found(
        f"{path}: {node.name}.{part.name}"
        for path, node in classes(root, CORE[0])
        for part in node.body
        if isinstance(part, ast.FunctionDef) and part.name.endswith("refusal")
        if "/linear/" not in path
    )


def verdict_engines(root: Path) -> Found:
    """Files of lit_probattn/ and profiling/ that decide a verdict: `differs` is returned, a value
    of a condition, an argument of a call, or a constant of its own. The engine of analyses at
    965794e has its words in the file of figures, so they count once.
    """
    decides = re.compile(r"differs( beyond the spread)?")
    paths = []
    for path, tree in trees(root, "lit_probattn", "profiling"):
        for node in ast.walk(tree):
            parts = []
            if isinstance(node, ast.IfExp):
                parts = [node.body, node.orelse]
            elif isinstance(node, ast.Return) and isinstance(node.value, ast.Name | ast.Constant):
                parts = [node.value]
            elif isinstance(node, ast.Call):
                parts = [*node.args, *(keyword.value for keyword in node.keywords)]
            elif isinstance(node, ast.Assign) and isinstance(node.value, ast.Tuple):
                parts = node.value.elts
            values = [part.value for part in parts if isinstance(part, ast.Constant)]
            if any(isinstance(v, str) and decides.fullmatch(v) for v in values):
                paths.append(path)
    return found(sorted(set(paths)))


# ---- around the core ---------------------------------------------------------------------------

PACKAGES = ("lit_probattn", "datamodules", "profiling")
_INSIDE = ("attention", "functional", "kernels", "models", "tasks", "interop", "base")


def _named_files(root: Path, pattern: str, *more: str) -> Found:
    """Return the files of the packages in which each of some regular expressions is found."""
    paths = sorted(path for top in PACKAGES for path in (root / top).rglob("*.py"))
    texts = ((path, path.read_text(encoding="utf-8")) for path in paths)
    every = [re.compile(one) for one in (pattern, *more)]
    return found(p.relative_to(root) for p, text in texts if all(one.search(text) for one in every))


def row_stores(root: Path) -> Found:
    """Files with a store of results that outlive a command: they write JSON, parse what stands
    there and go on from it, and speak of rows, cells or units.
    """
    keeps = r"append_lines\(|replace_text\(|write_whole\(|write_text\(|atomic|\.write\("
    kinds = r"\.jsonl|Row\b|\brows?\b|\bcells\b|\bunits\b"
    writes = r"json\.dumps?\b|model_dump_json"
    goes_on = r"class \w*Store\b|def (keep|finished|done|repair|has)\("
    return _named_files(root, keeps, kinds, writes, goes_on)


def digests(root: Path) -> Found:
    """Files that call hashlib themselves."""
    calls = (
        path
        for path, tree in trees(root, *PACKAGES)
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and ast.unparse(node.func).startswith("hashlib.")
    )
    return found(sorted(set(calls)))


def locks(root: Path) -> Found:
    """Files that lock files themselves: flock, lockf, a file that may not exist, a library."""
    return _named_files(root, r"fcntl\.(flock|lockf)|\bO_EXCL\b|filelock|portalocker")


def flag_dialects(root: Path) -> Found:
    """Ways in which options of commands are declared: argparse's `add_argument` written out, and
    classes or functions of our own that stand for an option.
    """
    plain = r"add_argument\(\s*\"--|\badd\(\s*\"--"
    ways = ["add_argument"] if _named_files(root, plain).number else []
    for path, tree in trees(root, *PACKAGES):
        for node in tree.body:
            if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name in ("Flag", "flag"):
                ways.append(f"{path}: {node.name}")
    return found(ways)


def argument_parsers(root: Path) -> Found:
    """Calls of `ArgumentParser`, and classes that derive from it."""
    made = []
    for path, tree in trees(root, *PACKAGES):
        for node in ast.walk(tree):
            named = [node.func] if isinstance(node, ast.Call) else []
            named += node.bases if isinstance(node, ast.ClassDef) else []
            for name in named:
                if ast.unparse(name).rpartition(".")[2] == "ArgumentParser":
                    made.append(f"{path}:{node.lineno}")  # type: ignore[attr-defined]
    return found(made)


def exception_classes(root: Path) -> Found:
    """Classes that derive from an exception, through classes of the packages too."""
    every = [(path, node) for path, node in classes(root, *PACKAGES)]
    known = {name for name, item in vars(builtins).items() if _is_exception(item)}
    bases = {n.name: {ast.unparse(b).rpartition(".")[2] for b in n.bases} for _, n in every}
    for _ in bases:  # as far as one derives from another
        known |= {name for name, found in bases.items() if found & known}
        known |= {
            b for found in bases.values() for b in found if re.search(r"(Error|Exception)$", b)
        }
    return found(f"{path}: {node.name}" for path, node in every if node.name in known)


def _is_exception(item: object) -> bool:
    return isinstance(item, type) and issubclass(item, BaseException)


def options_around(root: Path) -> Found:
    """Options outside of layers, models, tasks, interop and base: arguments with a default of
    constructors, and fields with one of dataclasses and pydantic models, of public classes; flags
    of commands.
    """
    names = []
    inside = tuple(f"lit_probattn/{name}/" for name in _INSIDE)
    models = {"BaseModel"}
    parts = [(p, n) for p, n in classes(root, *PACKAGES) if not p.startswith(inside)]
    for _ in range(3):
        models |= {n.name for _, n in parts if {ast.unparse(b) for b in n.bases} & models}
    for _, node in parts:
        if node.name.startswith("_"):
            continue
        fields = is_record(node) or node.name in models
        for part in node.body:
            if isinstance(part, ast.FunctionDef) and part.name == "__init__":
                given = [*part.args.posonlyargs, *part.args.args]
                own = given[len(given) - len(part.args.defaults) :]
                pairs = zip(part.args.kwonlyargs, part.args.kw_defaults, strict=True)
                own += [argument for argument, default in pairs if default is not None]
                names += [f"{node.name}.{argument.arg}" for argument in own]
            elif fields and isinstance(part, ast.AnnAssign) and part.value is not None:
                constant = ast.unparse(part.annotation).startswith("ClassVar")
                names += [] if constant else [f"{node.name}.{ast.unparse(part.target)}"]
    for path, tree in trees(root, *PACKAGES):
        for call in ast.walk(tree):
            if isinstance(call, ast.Call) and call.args and isinstance(call.args[0], ast.Constant):
                name, text = ast.unparse(call.func).rpartition(".")[2], str(call.args[0].value)
                flag = name in ("add_argument", "add") and text.startswith("--")
                if flag or name == "Flag":
                    names.append(f"{path} {text}")
    return found(names)


# ---- options -----------------------------------------------------------------------------------


def constructor_parameters(root: Path) -> list[tuple[str, str, str, str]]:
    """Return class, name, type and default of the parameters of every constructor."""
    rows = []
    for _, node in classes(root, "lit_probattn"):
        for part in node.body:
            if not (isinstance(part, ast.FunctionDef) and part.name == "__init__"):
                continue
            given = part.args
            own = [*given.posonlyargs, *given.args][1:]
            missing: list[ast.expr | None] = [None] * (len(own) - len(given.defaults))
            defaults = [*missing, *given.defaults][-len(own) :] if own else []
            pairs = [*zip(own, defaults, strict=True)]
            pairs += zip(given.kwonlyargs, given.kw_defaults, strict=True)
            for argument, default in pairs:
                kinds = (argument.annotation, default)
                kind, value = ("" if k is None else ast.unparse(k) for k in kinds)
                rows.append((node.name, argument.arg, kind, value))
    return rows


def parameters(root: Path) -> Found:
    """Parameters of all constructors that are written in the package."""
    return found(" ".join(row[:2]) for row in constructor_parameters(root))


def repeated_parameters(root: Path) -> Found:
    """Those whose name, type and default another constructor has already."""
    return _repeated(constructor_parameters(root))


def repeated_options(root: Path) -> Found:
    """The same of those with a default: sizes that a layer cannot do without (`embed_dim: int`) are
    left out.
    """
    return _repeated([row for row in constructor_parameters(root) if row[3]])


def repeated_in_tasks_and_models(root: Path) -> Found:
    """Those of tasks/ and models/ whose name, type and default a constructor there has already."""
    own = {n.name for _, n in classes(root, "lit_probattn/tasks", "lit_probattn/models")}
    return _repeated([row for row in constructor_parameters(root) if row[0] in own])


def _repeated(rows: list[tuple[str, str, str, str]]) -> Found:
    seen: set[tuple[str, ...]] = set()
    again = []
    for cls, *key in rows:
        if tuple(key) in seen:
            again.append(f"{cls} {key[0]}")
        seen.add(tuple(key))
    return found(again)


# ---- sizes and imports -------------------------------------------------------------------------


def lines(root: Path) -> dict[str, int]:
    """Lines of code files (Python, C) of every folder of lit_probattn/, and of the other roots."""
    counted: Counter[str] = Counter()
    for top in ("lit_probattn", "profiling", "datamodules", "tests"):
        for path in (root / top).rglob("*"):
            if path.suffix in (".py", ".pyi", ".c", ".h"):
                parts = path.relative_to(root).parts
                folder = "/".join(parts[:2]) if top == "lit_probattn" and len(parts) > 2 else top
                counted[folder] += len(path.read_text(encoding="utf-8").splitlines())
    return dict(sorted(counted.items()))


_FIT = """
import json, os, sys
root, out = os.getcwd(), sys.argv[1]
from lit_probattn.cli.app import main
called = set()
def note(frame, event, argument):
    code = frame.f_code
    if code.co_name != "<module>" and code.co_filename.startswith(root):
        called.add(code.co_filename)
words = ["fit", "--config", "configs/tasks/tiny/lra_listops.yaml"]
words += ["--config", "configs/attention/smgk.yaml", "--trainer.max_steps", "2"]
words += ["--trainer.val_check_interval", "2", "--trainer.accelerator", "cpu", "--run.root", out]
words += ["--data.init_args.cache_dir", out + "/cache"]
sys.setprofile(note)
status = main(words)
sys.setprofile(None)
loaded = {n: m.__file__ for n, m in list(sys.modules.items()) if getattr(m, "__file__", None)}
ours = {n: f for n, f in loaded.items() if f.startswith(root) and f.endswith(".py")}
print("FOUND" + json.dumps([status, ours, sorted(called)]))
"""
_IMPORT = """
import importlib, json, sys, time
begin = time.process_time()
import torch
middle = time.process_time()
for name in json.loads(sys.argv[1]):
    importlib.import_module(name)
print(json.dumps([middle - begin, time.process_time() - begin]))
"""


def run_of_listops(root: Path) -> dict[str, Any]:
    """Files of lit_probattn/ that two steps of sMGK on tiny ListOps execute; those with a function
    that is called; time to import them with all that they import, over `import torch` (CPU time,
    median of three processes each).
    """
    env = {**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}

    def child(code: str, argument: str) -> str:
        words = [sys.executable, "-c", code, argument]
        done = subprocess.run(words, cwd=root, env=env, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(done.stderr)
        return done.stdout

    with tempfile.TemporaryDirectory() as folder:
        told = child(_FIT, folder).rpartition("FOUND")[2]
    status, ours, called = json.loads(told)
    assert status == 0
    package = {n: f for n, f in ours.items() if n.startswith("lit_probattn")}
    names = json.dumps(sorted(ours))
    times = [json.loads(child(_IMPORT, names)) for _ in range(3)]
    torch, whole = (statistics.median(column) for column in zip(*times, strict=True))
    return {
        "files executed": len(set(package.values())),
        "files called": len({f for f in called if "/lit_probattn/" in f}),
        "import torch, s": round(torch, 2),
        "imports of the run, s": round(whole, 2),
        "ratio to import torch": round(whole / torch, 2),
    }


COUNTS: tuple[Callable[[Path], Found], ...] = (
    *(call_types, cells, engine_functions, lowerings, stand_ins, named_types),
    *(option_files, option_mentions, places_of_terms, refusal_methods),
    *(parameters, repeated_parameters, repeated_options, repeated_in_tasks_and_models),
    *(verdict_engines, row_stores, digests, locks, flag_dialects, argument_parsers),
    *(exception_classes, options_around),
)


def main() -> None:
    """Print a row per notion, and with `--show NAME` what is counted."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("root", nargs="?", type=Path, default=ROOT)
    parser.add_argument("--no-run", action="store_true")
    parser.add_argument("--show", default="", help="name of a count whose items are printed too")
    options = parser.parse_args()
    root = options.root.resolve()
    for count in COUNTS:
        number, what = count(root)
        print(f"{count.__name__.replace('_', ' '):32} {number}")
        if options.show == count.__name__:
            print(*(f"    {item}" for item in what), sep="\n")
    for folder, number in lines(root).items():
        print(f"lines of {folder:23} {number}")
    if not options.no_run:
        for name, value in run_of_listops(root).items():
            print(f"{name:32} {value}")


if __name__ == "__main__":
    main()
