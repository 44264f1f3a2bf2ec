"""Digests that name runs and caches keep their values."""

from __future__ import annotations

import hashlib

from lit_probattn.base.files import digest, digest_of, file_digest, fingerprint


def test_digests_are_those_of_the_standard_library(tmp_path):
    content = "größe\udcff".encode("utf-8", "surrogateescape")
    path = tmp_path / "a"
    path.write_bytes(content)
    whole = hashlib.sha256(content).hexdigest()
    assert digest("größe\udcff") == digest(content) == file_digest(path) == whole
    assert digest_of([content[:3], content[3:]]) == whole
    assert digest(content, 12) == whole[:12]
    salt = b"12345678"
    expected = hashlib.blake2b(content, digest_size=8, salt=salt).digest()
    assert fingerprint(content, 8, salt) == expected


def test_names_of_runs_and_caches_are_what_they_were():
    assert digest("", 8) == "e3b0c442"
    assert digest('{"a": 1}', 16) == "f9d86028c6e0d64e"
