"""The build step that `pyproject.toml` cannot say: the configurations travel in the package."""

from __future__ import annotations

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

SOURCE = Path("configs")


class BuildWithConfigs(build_py):
    """Packs `configs/` as `lit_probattn/_configs/`; an editable install reads `configs/` itself."""

    def run(self) -> None:
        """Copy modules, then configurations in place of those of an earlier build."""
        super().run()
        if not self.editable_mode:
            packed = self._packed()
            shutil.rmtree(packed, ignore_errors=True)
            shutil.copytree(SOURCE, packed)

    def get_source_files(self) -> list[str]:
        """Return what belongs into a source distribution."""
        return [*super().get_source_files(), *map(str, self._configs())]

    def get_outputs(self, include_bytecode: bool = True) -> list[str]:
        """Return the built files."""
        built = [] if self.editable_mode else self._configs()
        packed = [str(self._packed() / path.relative_to(SOURCE)) for path in built]
        return [*super().get_outputs(include_bytecode), *packed]

    def get_output_mapping(self) -> dict[str, str]:
        """Return the built files with their sources."""
        built = [] if self.editable_mode else self._configs()
        packed = {str(self._packed() / path.relative_to(SOURCE)): str(path) for path in built}
        return {**super().get_output_mapping(), **packed}

    def _configs(self) -> list[Path]:
        return sorted(path for path in SOURCE.rglob("*") if path.is_file())

    def _packed(self) -> Path:
        return Path(self.build_lib) / "lit_probattn" / "_configs"


setup(cmdclass={"build_py": BuildWithConfigs})
