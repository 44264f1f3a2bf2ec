"""Faults are small, told apart and planted; the tests of a line are those that run it."""

from __future__ import annotations

import textwrap

import pytest

from tests.mutants import __main__ as mutants
from tests.mutants.faults import c_faults, python_faults
from tests.mutants.sources import Changed, Probes, module_name, probed_lines
from tests.support.fresh import fresh_python

SOURCE = textwrap.dedent(
    '''
    """A module: 1 < 2."""
    from math import pi

    LIMIT = 3

    def clipped(x: int, most: int = 5, *, loud: bool = False) -> int:
        """At most `most` + 0."""
        if x > most and not loud:
            x = most
        elif x < -1:
            raise ValueError(f"expected more than -1, received {x + 0}")
        return max(x, LIMIT - 3)
    '''
).lstrip("\n")


def changes_of(found):
    return {(line, what) for line, faults in found.items() for what, _ in faults}


def test_faults_of_python_are_those_that_a_run_can_see():
    assert changes_of(python_faults(SOURCE)) == {
        (4, "constant 3"),
        (6, "constant 5"),
        (6, "constant False"),
        (8, "Gt -> GtE"),
        (8, "And -> Or"),
        (8, "condition negated"),
        (9, "statement left out"),
        (10, "Lt -> LtE"),
        (10, "condition negated"),
        (10, "without minus"),
        (10, "constant 1"),
        (12, "Sub -> Add"),
        (12, "constant 3"),
        (12, "arguments exchanged"),
    }


@pytest.mark.parametrize(
    ("line", "what", "call", "before", "after"),
    [
        (8, "Gt -> GtE", "clipped(5, 5)", 5, 5),
        (8, "condition negated", "clipped(3)", 3, 5),
        (9, "statement left out", "clipped(9)", 5, 9),
        (10, "constant 1", "clipped(-1)", 0, 0),
        (12, "Sub -> Add", "clipped(2)", 2, 6),
    ],
)
def test_a_planted_fault_changes_what_it_says(line, what, call, before, after):
    (planted,) = [made for name, made in python_faults(SOURCE)[line] if name == what]
    found = []
    for source in (SOURCE, planted()):
        names: dict[str, object] = {}
        exec(source, names)
        found.append(eval(call, names))
    assert found == [before, after]
    assert planted() == planted() != SOURCE


def test_faults_alike_on_one_line_have_different_names():
    names = [what for what, _ in python_faults("x = 2 + 2 + 2\n")[1]]
    assert len(names) == len(set(names)) == 5


def test_faults_of_c_leave_comments_directives_and_loops_alone():
    source = "#define A 1\n/* a + b */\nfor (int i = 0; i < n; i++) x[i] = a + b; // 1\n"
    found = c_faults(source)
    assert changes_of(found) == {(3, "0 -> 1"), (3, "< -> <="), (3, "+ -> -")}
    (planted,) = [made for what, made in found[3] if what == "+ -> -"]
    assert planted() == source.replace("a + b; ", "a - b; ")


def test_a_larger_sample_begins_with_the_smaller_one_and_the_seed_matters():
    texts = {"a.py": SOURCE, "b.c": "int f(int a) { return a + 1; }\n"}
    small, large = (mutants.drawn(texts, size, 3) for size in (3, 100))
    places = [(file, line, what) for file, line, what, _ in large]
    assert [place[:3] for place in small] == places[:3]
    assert {file for file, *_ in places} == {"a.py", "b.c"}
    assert [place[:3] for place in mutants.drawn(texts, 3, 4)] != places[:3]


def test_the_tests_of_a_folder_are_those_of_its_name():
    assert mutants.tests_of("lit_probattn/attention/core.py") == "tests/attention/test_core.py"
    assert mutants.tests_of("lit_probattn/attention/masks.py") == "tests/attention"
    assert mutants.tests_of("lit_probattn/attention") == "tests/attention"
    assert mutants.tests_of("datamodules/core") == "tests/datamodules/core"
    assert mutants.tests_of("lit_probattn/kernels/cpu/rows.h") == "tests/kernels/cpu"


def test_a_fault_outside_functions_has_the_tests_of_its_file():
    assert probed_lines(SOURCE) == {8, 9, 10, 11, 12}
    runs = {"a.py": {9: ["t::one"], 12: ["t::one", "t::two"]}}
    found = {4: ["t::one", "t::two"], 8: [], 9: ["t::one"], 12: ["t::one", "t::two"]}
    found[10] = found[9]  # what a forked process runs leaves no traces
    for line, names in found.items():
        chosen = mutants.chosen_tests(runs, SOURCE, "a.py", line, ["t"], 0)
        assert sorted(chosen) == names, line
    assert mutants.chosen_tests({}, SOURCE, "a.py", 9, ["t"], 0) == []
    decorated = SOURCE.replace("def clipped", "@cache\ndef clipped")
    assert mutants.chosen_tests(runs, decorated, "a.py", 6, ["t"], 0) == ["t::one", "t::two"]
    assert mutants.chosen_tests({}, "", "a.c", 1, ["t"], 0) == ["t"]


def test_a_fault_in_kernels_has_the_tests_of_their_folder():
    kernels = "@triton.jit\ndef double(x):\n    return x + x\n"
    assert python_faults(kernels)[3]
    runs = {"k/operators.py": {3: ["t::one"]}, "a.py": {3: ["t::two"]}}
    assert mutants.chosen_tests(runs, kernels, "k/kernels.py", 3, ["t"], 0) == ["t::one"]


PROGRAM = """
import json, sys
from pathlib import Path
from tests.mutants.sources import Changed, Probes
root = Path(sys.argv[1])
probes = Probes()
Changed(root, ["made.py"], probes.change, __ran__=probes.ran).install()
import made
found = made.clipped(9)
print(json.dumps([found, sorted(line for _, line in probes.ran)]))
"""


def test_probes_say_which_lines_ran_and_change_nothing(tmp_path):
    (tmp_path / "made.py").write_text(SOURCE)
    assert fresh_python("-c", PROGRAM, tmp_path).stdout == "[5, [8, 9, 12]]\n"


def test_what_was_judged_is_not_judged_again(tmp_path, monkeypatch, capsys):
    (tmp_path / "pkg").mkdir()
    (tmp_path / "pkg/made.py").write_text(SOURCE)
    monkeypatch.setattr(mutants, "ROOT", tmp_path)
    monkeypatch.setattr(mutants, "which_run", lambda *_: {"pkg/made.py": {9: ["t"], 12: ["t"]}})
    tried = []

    def judged(file, source, tests):
        tried.append(source)
        return mutants.SURVIVED if len(tried) == 1 else mutants.SEEN

    monkeypatch.setattr(mutants, "tried", judged)
    first = list(mutants.judge("pkg", ["t"], 100, 0, tmp_path))
    assert len(first) == len(python_faults(SOURCE)) > len(tried) > 1
    count = len(tried)
    kept = tmp_path / "pkg.jsonl"
    kept.write_text(kept.read_text(encoding="utf-8") + '{"cut": ')
    assert list(mutants.judge("pkg", ["t"], 100, 0, tmp_path)) == first
    assert len(tried) == count
    assert mutants.report(first) == 1
    assert "survived: pkg/made.py:" in capsys.readouterr().out
    assert [v.verdict for v in first].count(mutants.UNREACHED) == len(first) - count


def test_tests_that_fail_without_a_fault_are_not_used():
    probes = Probes()
    probes.tests = {"a.py": {3: ["t::good", "t::bad"]}}
    probes.failed.add("t::bad")
    assert probes.passed() == {"a.py": {3: ["t::good"]}}


def test_what_changes_nothing_is_not_counted(tmp_path, monkeypatch, capsys):
    verdict = mutants.Verdict(
        *("lit_probattn/a.py", 3, "x = 1", "constant 1", "0", mutants.SURVIVED, "t", 1, 0.5)
    )
    monkeypatch.setattr(mutants, "EQUIVALENT", tmp_path / "equivalent.txt")
    mutants.EQUIVALENT.write_text(f"{verdict.words}\n    it is not read\n")
    assert mutants.report([verdict]) == 0
    assert "1 faults, 1 of them change nothing; 0 of 0 seen" in capsys.readouterr().out


def test_a_fork_that_does_not_end_is_ended():
    import time

    assert mutants.forked(lambda: time.sleep(60) or 0, 0.2) is None
    assert mutants.forked(lambda: 3, 10.0) == 3


def test_tests_that_run_too_long_are_counted_apart(monkeypatch, capsys):
    monkeypatch.setattr(mutants, "forked", lambda work, limit: None)
    verdict = mutants.tried("a.py", SOURCE, ["t"])
    assert verdict not in (mutants.SEEN, mutants.SURVIVED)
    found = mutants.Verdict(*("a.py", 3, "x = 1", "constant 1", "0", verdict, "t", 1, 0.5))
    assert mutants.report([found]) == 0
    assert "1 of 1 seen, 1 of these as the tests ran longer" in capsys.readouterr().out


def test_names_of_modules():
    assert module_name("a/b/__init__.py") == "a.b"
    assert module_name("a/b.py") == "a.b"
    assert Changed(mutants.ROOT, ["a/b.py"], Probes().change).find_spec("a.c") is None
