"""`python -m lit_probattn.kernels.package FOLDER`: the layout of a Hugging Face `kernels` package.

    FOLDER/build.toml
    FOLDER/build/torch-noarch/metadata.json
    FOLDER/build/torch-noarch/__init__.py    attention, functional, kernels and their imports

There is one build variant, because the kernels are Triton, and C that is compiled where it runs.
Such a package is imported from any path under any name, with several versions in one process:
imports are made relative, and operators get a separate namespace, named after the contents. It
requires only torch. Publish it with the `kernel-builder` tool.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from lit_probattn.base.arguments import Parser
from lit_probattn.base.errors import ConfigError
from lit_probattn.base.files import digest_of

ROOT = Path(__file__).parents[1]
NAME, VARIANT = "lit_probattn", "torch-noarch"
# Packages that are included completely, together with the other modules that they import.
WHOLE = ("attention", "functional", "kernels")
_SUFFIXES = {".py", ".pyi", ".c", ".h"}
_IMPORT = re.compile(rf"\bfrom {NAME}((?:\.\w+)*) import\b")
_INIT = '''"""Attention of lit_probattn: layers, functional forms and operators."""

from . import attention, functional

__all__ = ["attention", "functional"]
'''
_BUILD = """[general]
name = "{name}"
version = {version}
license = "{license}"
backends = ["cuda"]

[torch-noarch]
"""


def sources() -> dict[str, Path]:
    """Return the packaged files, by path inside the package."""
    waiting = [path for name in WHOLE for path in sorted((ROOT / name).rglob("*"))]
    found: dict[str, Path] = {}
    while waiting:
        path = waiting.pop(0)
        if path.suffix not in _SUFFIXES or path == Path(__file__):
            continue
        name = path.relative_to(ROOT).as_posix()
        if name not in found:
            found[name] = path
            waiting += _imported(path.read_text(encoding="utf-8"))
    return dict(sorted(found.items()))


def _imported(text: str) -> Iterator[Path]:
    """Yield the files of the modules that a file imports, and of their packages."""
    for match in _IMPORT.finditer(text):
        parts = match[1].split(".")[1:]
        for count in range(1, len(parts) + 1):
            path = ROOT.joinpath(*parts[:count])
            yield from (p for p in (path.with_suffix(".py"), path / "__init__.py") if p.is_file())


def relative(text: str, name: str, namespace: str) -> str:
    """Return a source file with relative imports and operators in a separate namespace.

    Args:
        text: the source.
        name: its path inside the package.
        namespace: namespace of the operators.
    """
    dots = "." * (name.count("/") + 1)
    text = _IMPORT.sub(lambda match: f"from {dots}{match[1].removeprefix('.')} import", text)
    text = text.replace(f"{NAME}::", f"{namespace}::")
    return re.sub(rf"\btorch\.ops\.{NAME}\b", f"torch.ops.{namespace}", text)


def write(folder: Path, version: int = 1, package_license: str = "Apache-2.0") -> Path:
    """Write the layout; return the folder of the build variant.

    Raises:
        ConfigError: the folder exists and is not empty.
    """
    if folder.exists() and any(folder.iterdir()):
        raise ConfigError(f"{folder} is not empty: choose another folder or remove it")
    files = {name: path.read_bytes() for name, path in sources().items()}
    contents = digest_of(part for name, data in files.items() for part in (name.encode(), data))
    namespace, target = f"{NAME}_{contents[:8]}", folder / "build" / VARIANT
    for name, data in files.items():
        path = target / name
        path.parent.mkdir(parents=True, exist_ok=True)
        text = data.decode("utf-8")
        is_python = path.suffix in (".py", ".pyi")
        path.write_text(relative(text, name, namespace) if is_python else text, encoding="utf-8")
    (target / "__init__.py").write_text(_INIT, encoding="utf-8")
    facts = {"name": NAME, "version": version, "license": package_license, "python-depends": []}
    (target / "metadata.json").write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")
    settings = _BUILD.format(name=NAME, version=version, license=package_license)
    (folder / "build.toml").write_text(settings, encoding="utf-8")
    return target


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the layout into the given folder; return the exit status."""
    parser = Parser(f"python -m {NAME}.kernels.package", __doc__)
    parser.add_argument("folder", type=Path, help="output folder; new or empty")
    parser.add_argument("--version", type=int, default=1, help="version of the published kernel")
    options = parser.parse_args(arguments)
    try:
        target = write(options.folder, options.version)
    except (ConfigError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"{target}: {sum(path.is_file() for path in target.rglob('*'))} files")
    return 0


if __name__ == "__main__":
    sys.exit(main())
