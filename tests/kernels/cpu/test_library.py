"""The compiled library is ours and complete before it is loaded; all failures are one error."""

import atexit
import fcntl
import os
import shlex
import shutil
import stat
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from lit_probattn.base.errors import UnsupportedError
from lit_probattn.kernels.cpu import library
from tests.support.caches import keep_libraries
from tests.support.forks import Forked

CC = shutil.which("cc") or shutil.which("gcc")
pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or CC is None, reason="needs Linux and a C compiler"
)

NAMES = ("peak_products", "peak_exponentials", "bfloat16_products", "keep_block", "noise_tile")
NAMES += ("tiles_forward_float", "tiles_forward_double")
NAMES += ("tiles_backward_float", "tiles_backward_double")
NAMES += ("linear_forward_float", "linear_forward_double")
NAMES += ("linear_backward_float", "linear_backward_double")

# A compiler in no time: copies a library that lies beside it to where -o says, and counts.
FAKE = """#!/bin/sh
echo "$@" >> "{log}"
while [ "$1" != "-o" ]; do shift; done
cp "{made}" "$2"
"""


def shared(path: Path, source: str) -> Path:
    """Compile a line of C to a library."""
    command = [CC, "-shared", "-fPIC", "-x", "c", "-", "-o", str(path)]
    subprocess.run(command, input=source, text=True, check=True)
    return path


def script(path: Path, text: str) -> str:
    path.write_text(text, encoding="utf-8")
    path.chmod(0o755)
    return str(path)


def complete() -> str:
    return " ".join(f"int {name}(void) {{ return 7; }}" for name in NAMES)


def marking(mark: Path) -> str:
    """C whose loading leaves a file."""
    return f"""#include <fcntl.h>
        __attribute__((constructor)) static void run(void) {{ creat("{mark}", 0600); }}
        {complete()}"""


@pytest.fixture(scope="module")
def stub(tmp_path_factory) -> Path:
    return shared(tmp_path_factory.mktemp("stub") / "stub.so", complete())


class Place:
    """Folders of one user, and a compiler that is quick."""

    def __init__(self, root: Path, made: Path) -> None:
        self.root, self.made, self.log = root, made, root / "log"
        self.cache = root / "cache" / "lit_probattn"
        self.temporary = root / "tmp" / f"lit_probattn-{os.getuid()}"
        self.temporary.parent.mkdir()
        self.compiler = script(root / "cc", FAKE.format(log=self.log, made=made))

    @property
    def environment(self) -> dict[str, str]:
        return {
            "XDG_CACHE_HOME": str(self.cache.parent),
            "TMPDIR": str(self.temporary.parent),
            "CC": shlex.quote(self.compiler),
        }

    def load(self) -> Path:
        library.load.cache_clear()
        return Path(library.load().path)

    def links(self) -> int:
        """Count the libraries that were linked."""
        return self.log.read_text(encoding="utf-8").count("-shared") if self.log.exists() else 0


@pytest.fixture
def place(tmp_path, stub, monkeypatch):
    found = Place(tmp_path, stub)
    for name, value in found.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("tempfile.tempdir", str(found.temporary.parent))
    yield found
    library.load.cache_clear()


def test_the_library_is_made_once_and_only_its_owner_can_write_it(place):
    path = place.load()
    assert path.parent == place.cache
    assert stat.S_IMODE(path.stat().st_mode) & 0o022 == 0
    assert place.load() == path
    assert place.links() == 1
    assert not list(place.temporary.parent.iterdir())
    assert sorted(p.name for p in place.cache.iterdir()) == sorted([".lock", path.name])


def test_the_temporary_folder_is_used_if_the_cache_cannot_be_written(place):
    place.cache.parent.write_text("a file where a folder is meant")
    assert place.load().parent == place.temporary
    shutil.rmtree(place.temporary)
    place.temporary.write_text("this too")
    with pytest.raises(UnsupportedError, match=r"cannot be kept .*Not a directory.*File exists"):
        place.load()


# ---- whose files they are ----------------------------------------------------------------------

# As root: another user owns the folder below the temporary one, and changes what the name means
# between a program of root and its own library, while the package looks for its library there.
RACE = """
import os, pathlib, signal, sys
from lit_probattn.base.errors import UnsupportedError
from lit_probattn.kernels.cpu import library
folder, evil = library.cache_folders()[1], sys.argv[1]
target = folder / f"cpu-{library._digest(library._compiler())}.so"
attacker = os.fork()
if attacker == 0:
    os.setgid(12345); os.setuid(12345)
    folder.mkdir(mode=0o755)
    while True:
        for name in ("/bin/ls", evil):
            os.symlink(name, folder / "link")
            os.rename(folder / "link", target)
try:
    while not os.path.lexists(target):
        pass
    for _ in range(300):
        try:
            library.load.cache_clear()
            print(library.load())
        except UnsupportedError as error:
            said = str(error)
    print(said)
finally:
    os.kill(attacker, signal.SIGKILL)
"""


@pytest.mark.skipif(os.getuid() != 0, reason="needs root, to be two users")
def test_another_users_library_is_never_loaded(stub):
    root = Path(tempfile.mkdtemp())
    try:
        root.chmod(0o711)
        place = Place(root, stub)
        place.temporary.parent.chmod(0o1777)
        evil = shared(root / "evil.so", marking(root / "mark"))
        place.cache.parent.write_text("the cache folder cannot be made")
        command = [sys.executable, "-c", RACE, str(evil)]
        environment = {**os.environ, **place.environment}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        assert place.temporary.stat().st_uid == 12345
        assert not (root / "mark").exists()
        assert str(place.temporary) in done.stdout
    finally:
        shutil.rmtree(root)


def writable(path: Path) -> None:
    path.chmod(0o777)


def moved(path: Path) -> None:
    """Put a link in the place of a file or folder."""
    path.symlink_to(path.rename(path.with_name("moved")))


@pytest.mark.parametrize("change", [writable, moved])
def test_a_folder_that_others_write_or_name_is_passed_by(place, change):
    place.load()
    change(place.cache)
    assert place.load().parent == place.temporary
    change(place.temporary)
    with pytest.raises(UnsupportedError, match=r"cannot be kept .*lit_probattn"):
        place.load()


def damaged(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def emptied(path: Path) -> None:
    os.truncate(path, 0)


def a_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def loaded_elsewhere(place: Place) -> Path:
    """Load the library in a fork; return its path."""
    log = place.root / "loaded"
    log.unlink(missing_ok=True)

    def work() -> int:
        print(place.load())
        return 0

    assert Forked(work, dict(os.environ), log).wait() == 0, log.read_text(encoding="utf-8")
    return Path(log.read_text(encoding="utf-8").strip())


@pytest.mark.parametrize("change", [writable, moved, damaged, cut, emptied, a_pipe])
def test_a_file_that_is_not_as_it_was_written_is_made_again(place, change):
    """In processes of their own: one whose library is cut off ends by a signal, if only at exit."""
    path = loaded_elsewhere(place)
    whole = path.read_bytes()
    change(path)
    assert loaded_elsewhere(place) == path
    assert (path.read_bytes(), place.links()) == (whole, 2)
    assert stat.S_ISREG(path.lstat().st_mode)
    assert stat.S_IMODE(path.lstat().st_mode) & 0o022 == 0


def test_what_was_checked_is_what_is_loaded(place, tmp_path, monkeypatch):
    """The name may mean another file by the time the system's loader opens it."""
    path = place.load()
    evil = shared(tmp_path / "evil.so", marking(tmp_path / "mark"))
    checked = library._sound

    def swapped(*arguments):
        found = checked(*arguments)
        if found is not None:
            evil.replace(path)
        return found

    monkeypatch.setattr(library, "_sound", swapped)
    assert place.load() == path
    assert not (tmp_path / "mark").exists()


def test_without_proc_a_name_is_loaded_only_where_nobody_else_can_change_it(place, monkeypatch):
    monkeypatch.setattr(library, "_HANDLES", Path("/no/such/folder"))
    assert place.load().parent == place.cache
    place.root.chmod(0o777)
    with pytest.raises(UnsupportedError, match="/proc"):
        place.load()
    place.root.chmod(0o700)


# ---- compilers -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("exit 0", "cannot be linked by .*no output"),
        (r"printf '\377\376 wrong' >&2; exit 1", "cannot be compiled by .*wrong"),
        ("exit 3", "cannot be compiled by .*status 3"),
        ("kill -9 $$", "cannot be compiled by .*status -9"),
        (
            'while [ "$1" != "-o" ]; do shift; done; echo junk > "$2"',
            "cannot be kept or loaded: .*\\.so",
        ),
    ],
)
def test_what_a_compiler_does_wrong_is_one_line(place, text, message):
    script(Path(place.compiler), f"#!/bin/sh\n{text}\n")
    with pytest.raises(UnsupportedError, match=message) as told:
        place.load()
    assert len(str(told.value).splitlines()) == 1


def test_a_library_without_its_functions_is_one_line(place, tmp_path):
    lacking = shared(tmp_path / "lacking.so", complete().replace("keep_block", "keep_blocks"))
    script(Path(place.compiler), FAKE.format(log=place.log, made=lacking))
    with pytest.raises(UnsupportedError, match=r"cannot be loaded: .*keep_block"):
        place.load()


@pytest.mark.parametrize("form", ["env {}", "{} -DMARK", "'{}'"])
def test_cc_may_hold_a_launcher_and_flags(place, form, monkeypatch):
    quoted = place.compiler if form == "'{}'" else shlex.quote(place.compiler)
    monkeypatch.setenv("CC", form.format(quoted))
    assert place.load().parent == place.cache
    assert place.links() == 1
    assert ("-DMARK" in place.log.read_text(encoding="utf-8")) == ("-DMARK" in form)


@pytest.mark.parametrize("value", ["'gcc", "no-such-compiler -O2"])
def test_cc_that_names_no_compiler_is_one_line(place, value, monkeypatch):
    monkeypatch.setenv("CC", value)
    with pytest.raises(UnsupportedError, match=f"CC={value}"):
        place.load()
    assert f"CC={value}" in str(library.obstacle())


@pytest.mark.parametrize("flag", ["-ffast-math", "-Ofast"])
def test_loading_keeps_denormal_numbers_whatever_the_flags_of_cc(flag, tmp_path, monkeypatch):
    """A self-test that refuses the library cannot undo what loading it has changed."""
    monkeypatch.setattr(library, "_SOURCES", {"draws.o": ("draws.c", "-O0", "-DDOUBLE")})
    library._compiled([CC, flag], tmp_path)
    code = "import ctypes, sys; ctypes.CDLL(sys.argv[1]); print(float('1e-310') * 1.0)"
    command = [sys.executable, "-c", code, str(tmp_path / "linked.so")]
    assert subprocess.check_output(command, text=True) == "1e-310\n"


# ---- other processes -----------------------------------------------------------------------------


def test_a_lock_that_is_never_freed_costs_a_limited_time(place, monkeypatch):
    monkeypatch.setattr(library, "_PATIENCE", 0.2)
    place.cache.mkdir(parents=True)
    with open(place.cache / ".lock", "w", encoding="utf-8") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        before = time.monotonic()
        assert place.load().parent == place.cache
        assert 0.2 <= time.monotonic() - before < 10


def test_what_a_killed_compilation_leaves_is_cleared_later(place):
    path = place.load()
    leftover, running = place.cache / "build-left", place.cache / "build-runs"
    for folder in (leftover, running):
        folder.mkdir()
        (folder / "draws.o").write_text("half")
    (place.cache / f".{path.name}.1234").write_text("half")
    long_ago = time.time() - 86_400
    for old in (leftover, place.cache / f".{path.name}.1234"):
        os.utime(old, (long_ago, long_ago))
    path.unlink()
    place.load()
    left = {p.name for p in place.cache.iterdir()}
    assert left == {".lock", path.name, running.name}


def test_four_first_starts_at_once_build_one_library(place, tmp_path):
    slow = FAKE.replace("while", "sleep 0.2\nwhile", 1)
    script(Path(place.compiler), slow.format(log=place.log, made=place.made))

    def load() -> int:
        print(place.load())
        return 0

    logs = [tmp_path / f"{number}.log" for number in range(4)]
    starts = [Forked(load, dict(os.environ), log) for log in logs]
    assert [start.wait() for start in starts] == [0] * 4
    names = {log.read_text(encoding="utf-8").strip() for log in logs}
    assert [str(p) for p in place.cache.glob("*.so")] == list(names)
    assert place.links() == 1


def test_the_next_run_of_the_tests_compiles_nothing_again(tmp_path, monkeypatch):
    at_exit = []
    monkeypatch.setattr(
        atexit, "register", lambda function, *given: at_exit.append((function, given))
    )
    kept = tmp_path / "kept"
    for number in range(5):
        run = tmp_path / str(number)
        keep_libraries(run, kept)
        assert len(list(run.iterdir())) == min(number, 3)
        (run / f"cpu-{number}.so").write_bytes(b"compiled")
        os.utime(run / f"cpu-{number}.so", (number, number))
        function, given = at_exit.pop()
        function(*given)
    assert {path.name for path in kept.iterdir()} == {"cpu-2.so", "cpu-3.so", "cpu-4.so"}
