"""The table of releases: every form is found whole, and what a form lacks is named."""

from __future__ import annotations

import pytest

from datamodules.core.files import Release
from datamodules.text.releases import IWSLT14, PAIRS, SQUAD, WIKITEXT, lm1b, wmt14
from lit_probattn.base.errors import MissingDataError

RELEASES = [*WIKITEXT.values(), *PAIRS.values(), *SQUAD.values(), IWSLT14, wmt14("de"), lm1b(2)]
FORMS = [
    pytest.param(release, form, id=f"{release.title} {number}")
    for release in RELEASES
    for number, form in enumerate(release.forms)
]


def write(folder, form) -> dict:
    """Write an empty file for each part, called by its last pattern."""
    paths = {part: folder / patterns[-1].replace("*", "x") for part, patterns in form.items()}
    for path in paths.values():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    return paths


@pytest.mark.parametrize(("release", "form"), FORMS)
def test_each_form_is_found_in_each_folder(release: Release, form, tmp_path):
    for folder in release.folders:
        paths = write(tmp_path / folder.replace("/", "_") / folder, form)
        found = release.find(tmp_path / folder.replace("/", "_"))
        assert found == {part: [path] for part, path in paths.items()}
    given = write(tmp_path / "given", form)
    assert release.find(tmp_path / "none", str(tmp_path / "given")).keys() == given.keys()


@pytest.mark.parametrize(("release", "form"), FORMS)
def test_a_part_that_is_missing_is_named(release: Release, form, tmp_path):
    parts = [*form]
    paths = write(tmp_path / "data" / release.folders[0], form)
    for part in parts[:: -(-len(parts) // 9)]:
        paths[part].unlink()
        if part in release.optional:
            assert part not in release.find(tmp_path / "data")
        elif len(form) == 1:
            message = r"the release is not under .*data; expected"
            with pytest.raises(MissingDataError, match=message):
                release.find(tmp_path / "data")
        else:
            with pytest.raises(MissingDataError) as told:
                release.find(tmp_path / "data")
            assert form[part][0] in str(told.value).partition("but missing")[2]
        paths[part].touch()


def test_a_complete_form_is_taken_before_an_incomplete_one(tmp_path):
    first, second, _ = PAIRS["mnli"].forms
    write(tmp_path, first)["val"].unlink()
    paths = write(tmp_path, second)
    assert PAIRS["mnli"].find(tmp_path, str(tmp_path)) == {k: [p] for k, p in paths.items()}
