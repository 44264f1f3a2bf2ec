"""Every command of the README and of docs runs, from first to last, in a fresh folder.

    python -m pytest -s tests/pages -k README     # one page, with the list of its commands

A page's commands share a folder: a copy of what git keeps, tiny data, an empty cache. Each runs as
it stands, in a process of its own, unless the table below shortens it or says how it is refused.
"""

from __future__ import annotations

import re
import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.datamodules.lra.test_text import write_folder
from tests.datamodules.test_commands import write_reviews
from tests.pages.blocks import Command, Result, Shell, commands, copy_repository, is_assignment
from tests.support.paths import ROOT

PAGES = ["README.md", *sorted(f"docs/{p.name}" for p in (ROOT / "docs").glob("*.md"))]
PAGES = [page for page in PAGES if commands(page)]


@dataclass(frozen=True)
class Row:
    """What is done with the commands in which a pattern is found; the first row that fits counts.

    Args:
        pattern: a regular expression.
        flags: added at the end.
        instead: a part of the command and what takes its place.
        refusal: a regular expression for the last line of a command that is refused. It may also
            succeed, as it does where the machine has what is missing here.
        not_here: why the command is not run.
    """

    pattern: str
    flags: str = ""
    instead: tuple[str, str] = ("", "")
    refusal: str = ""
    not_here: str = ""


LISTOPS = (
    "--data.init_args.num_train 64 --data.init_args.num_val 16 --data.init_args.num_test 16 "
    "--data.init_args.min_length 8 --data.init_args.max_length 32 "
    "--data.init_args.max_length_tokens 32 --data.init_args.batch_size 8 "
)
STEPS = (
    "--trainer.max_steps 4 --trainer.val_check_interval 2 --run.checkpoint_every 2 "
    "--model.init_args.warmup_steps 1 --model.init_args.schedule_steps 4 "
)
SERIES_STEPS = "--trainer.max_steps 4 --trainer.val_check_interval 2 --run.checkpoint_every 2 "
TEXT = "--data.init_args.batch_size 4 --data.init_args.eval_batch_size 32 " + STEPS
ON_CPU = "--trainer.accelerator cpu --trainer.precision 32-true "
NO_GPU = r"^error: .*(gpu|GPU|CUDA)"
NO_DATA = r"^(error|missing): .*\bno "
WITHOUT_DATA = r"[1-9]\d* tasks without data"
NOT_THERE = (
    r"(not found|[Nn]o such|not under|no training data|is not set|not a folder|no cache of|minari)"
)
TINY_DECISIONS = SERIES_STEPS + (
    "--model.init_args.warmup_steps 1 --model.init_args.embed_dim 16 --model.init_args.head_dim 4 "
    "--model.init_args.mlp_dim 16 --model.init_args.num_layers 1"
)

# The only ways in which a command differs from what its page says.
TABLE = [
    Row(r"^make ", not_here="`make quickstart` and `make test` are run on a fresh clone"),
    Row(r"^pip install ", not_here="changes the environment; tests/test_wheel.py installs a wheel"),
    Row(r"completion bash", instead=("~/.local/share/bash-completion/completions/lit-probattn",
                                     "completion.bash")),
    Row(r"completion zsh", instead=('"${fpath[1]}/_lit-probattn"', "completion.zsh")),
    Row(r"two_nodes\.sh", not_here="needs root, for network namespaces: run by hand"),
    Row(r"^sbatch ", refusal=r"sbatch: (command )?not found"),
    Row(r"cluster=.slurm", refusal=r"slurm"),
    Row(r"^torchrun ", ON_CPU + "--trainer.num_nodes 1 --trainer.devices 2 " + LISTOPS + STEPS,
        instead=("--nnodes 2 --nproc-per-node 8 --max-restarts 3 --rdzv-backend c10d "
                 "--rdzv-id listops-1 --rdzv-endpoint head-node:29400",
                 "--standalone --nproc-per-node 2")),
    # what needs a GPU
    Row(r"profiling/cuda\.sh", refusal=NO_GPU),
    Row(r"fit .*lra_listops(\.yaml| ).*trainer[/ ](one_gpu|ddp)", LISTOPS + STEPS, refusal=NO_GPU),
    Row(r"fit \$RUN --trainer\.precision", TEXT, refusal=NO_GPU),  # the small model
    Row(r"(sweep|kernels) .*_cuda\.yaml", refusal=NO_GPU),
    Row(r"profiling kernels --tune", refusal=NO_GPU),
    Row(r"reproduce .*--accelerator gpu", refusal=NO_GPU),
    # published tables and figures whose data are not here
    Row(r"reproduce low_rank_table.*--dry-run", "--shortened"),
    Row(r"reproduce (low_rank_table|mgk_figure1 )", refusal=WITHOUT_DATA),
    Row(r"reproduce mgk_figure2 --report", refusal=r"no run of mgk_figure2 is finished"),
    Row(r"reproduce mgk_table8 --dry-run", "--shortened"),
    # what needs a release
    Row(r"data check (text|wikitext103)\b", refusal=r"(DIFFERENT|published.*)$"),
    Row(r"data check uea", refusal=NO_DATA),
    Row(r"reproduce\.uea .*--accelerator gpu", refusal=rf"{NO_GPU}|{NO_DATA}"),
    Row(r"reproduce\.uea --dry-run", "--archives JapaneseVowels Heartbeat"),
    Row(r"check trajectories --path", refusal=NOT_THERE),
    Row(r"convert prune", refusal=r"nothing to prune"),
    Row(r"data check FOLDER", refusal=r"unknown data set"),
    Row(r"data (prepare|check) iwslt14", refusal=NOT_THERE),
    Row(r"analyse translations", refusal=NOT_THERE),
    Row(r"bert-base-uncased|_transformers", refusal=NOT_THERE),
    Row(r"(prepare|check) (question_answering|text_pairs)", refusal=NOT_THERE),
    Row(r"(cloze_questions|shuffled_sentences) --text TEXT", refusal=NOT_THERE),
    Row(r"(squad|mnli|own_pairs|bert_pretraining|task lm1b)", refusal=NOT_THERE),
    # shortened
    Row(r"d4rl_by_search", "--num_steps 2000"),
    Row(r"fit --task d4rl", "--data.init_args.data_dir tiny_data " + TINY_DECISIONS),
    Row(r"test .*d4rl", "--model.init_args.test_episodes 1"),
    Row(r"studies\.decoding", "--lengths 8 --tokens 8 --source 8 --batch 1 --repeats 1 "
        "--embed_dim 16 --layers 1 --vocab 50 --train_batch 1"),
    Row(r"fit .*tasks/tiny/"),
    Row(r"fit .*(Wandb|MLFlow)Logger", LISTOPS + STEPS, refusal=r"requires the package"),
    Row(r"fit .*lra_listops", LISTOPS + STEPS),
    Row(r"fit .*uea\.yaml", SERIES_STEPS),
    Row(r"fit --task own_texts .*reviews\.csv$", SERIES_STEPS),
    Row(r"fit .*(wikitext103|masked_lm)_", TEXT),
    Row(r"fit \$RUN", TEXT),
    Row(r"(test|validate|predict) \$RUN", TEXT),
    Row(r"prepare listops", "--num_train 200 --num_val 40 --num_test 40"),
    Row(r"reproduce low_rank_figure.*--tflops"),
    Row(r"reproduce low_rank_figure.*--shortened", "--only 'fixed-h4-*' --seeds 0 --steps 4",
        refusal=WITHOUT_DATA),  # the small data are no text
    Row(r"reproduce value_aware_table2", "--steps 4 --only exponential_8"),
    Row(r"reproduce .*--dry-run", "--shortened"),
    Row(r"reproduce .*--shortened", "--only listops smgk_4 --steps 4"),
    Row(r"^lit-probattn compare ", "--seeds 0 --steps 4"),
    Row(r"reproduce\.uea .*--epochs", "--epochs 1 --seeds 0"),
    Row(r"reproduce head_size", "--steps 4 --only 'fixed-h4*'"),
    Row(r"analyse theory", "--steps 20"),
    Row(r"analyse approximate ", "--num_samples 2 --solver_samples 1 --local_samples 1 "
        "--ranks 1 4 --rounds 1 --features 16 --draws 1"),
    Row(r"kernels --config .*kernels_cpu", "--seq-lens 64 --head-dims 16"),
    Row(r"kernels --parity", "--dtypes float32 --head-dims 16 --cases smgk"),
    Row(r"kernels --compile-table", "--head-dims 16 --cases smgk --passes forward"),
    Row(r"kernels --train-steps", "--train-steps 1"),
    Row(r"kill_loop", "--kills 2 --kinds training"),
    Row(r"studies\.layouts", "--steps 5 --variants softmax"),
    Row(r"studies\.ddp_overhead", "--steps 5 --rounds 1 --variants softmax"),
    Row(r"tests\.fuzzing", "--seconds 1"),
]  # fmt: skip
# Words that stand for something of the reader's.
PLACEHOLDERS = {"DIR": "{data}"}
# Commands of another page that a page's own need.
TINY_FIT = "python -m lit_probattn fit --config configs/tasks/tiny/lra_listops.yaml --attention"
HOPPER = "python examples/sets/d4rl_by_search.py --env Hopper --quality medium --out DIR"
BEFORE = {
    "docs/analysis.md": [f"{TINY_FIT} smgk"],
    "docs/reproduce.md": [HOPPER],
    "docs/swap.md": [f"{TINY_FIT} mgk --run.name listops-mgk"],
}
# Settings of files that commands name, made small.
SMALL_FILES = {
    "configs/profiling/kernels_cpu.yaml": [
        (r"seq_lens: \[\d+\], head_dims: \[.*?\]", "seq_lens: [64], head_dims: [16]"),
        (r"repeats: \d+", "repeats: 1"),
    ],
    "configs/profiling/mgk_table7.bundle.yaml": [
        (r"seq_len: \[.*\]", "seq_len: [64]"),
        (r"repeats: \d+", "repeats: 1"),
    ],
    "configs/profiling/quick.yaml": [
        (r"embed_dim: \[.*\]", "embed_dim: [32]"),
        (r"seq_len: \[.*\]", "seq_len: [16, 32]"),
    ],
}


def write_text(folder: Path, words: int = 6500) -> None:
    """Write a running text with more words than the reduced recipe's cutoffs."""
    folder.mkdir(parents=True, exist_ok=True)
    every = [f"w{number}" for number in range(words)]
    for name, chosen in (("train", every), ("valid", every[:200]), ("test", every[:150])):
        lines = [" ".join(chosen[i : i + 20]) for i in range(0, len(chosen), 20)]
        text = "".join(f" <unk> {line} \n" for line in ["The game", *lines])
        (folder / f"wiki.{name}.tokens").write_text(text)


def make_world(folder: Path) -> Shell:
    """Return a shell in a fresh copy, with data of every kind that the pages read."""
    copy_repository(folder)
    for name, changes in SMALL_FILES.items():
        text = (folder / name).read_text(encoding="utf-8")
        for pattern, small in changes:
            assert re.search(pattern, text), (name, pattern)
            text = re.sub(pattern, small, text)
        (folder / name).write_text(text)
    for name in ("reviews", "new", "labelled"):
        write_reviews(folder / f"{name}.csv")
    shutil.copy2(ROOT / "examples/own_variant.py", folder)
    page = (ROOT / "docs/own_variant.md").read_text(encoding="utf-8")
    for name, block in re.findall(r"^```yaml\n# (\w+\.yaml)\n(.*?)^```$", page, re.DOTALL | re.M):
        (folder / name).write_text(block)
    data = folder / "tiny_data"
    write_text(data)
    write_folder(data)
    return Shell(folder, data)


def row_of(command: Command) -> Row:
    """Return the first row of the table that fits a command."""
    fits = (row for row in TABLE if re.search(row.pattern, command.text))
    return next(fits, Row(""))


def as_run(command: Command, row: Row, data: str) -> str:
    """Return a command with what the table changes."""
    text = command.text
    if row.instead[0]:
        assert row.instead[0] in text, (row, text)
        text = text.replace(*row.instead)
    for word, stands_for in PLACEHOLDERS.items():
        text = re.sub(rf"\b{word}\b", stands_for.format(data=data), text)
    for flag in re.findall(r"(?<!\S)--\S+", row.flags):  # in place of the page's
        text = re.sub(rf"(?<!\S){re.escape(flag)}( (?!--|[|>&])\S+)*(?!\S)", "", text)
    return f"{text} {row.flags}".strip() if not command.python else text


def verdict(result: Result, row: Row) -> str:
    """Return what is wrong with a result, nothing if it is as it should be."""
    if result.status == 0:
        return ""
    if row.refusal and re.search(row.refusal, result.last_line):
        return "" if "Traceback" not in result.output or result.command.python else "a traceback"
    return "no refusal that the table expects" if row.refusal else "failed"


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("page", PAGES)
def test_every_command_of_a_page_runs(page, tmp_path):
    shell = make_world(tmp_path)
    before = [Command("before", 0, text) for text in BEFORE.get(page, [])]
    wrong = []
    print(f"\n{page}\nline  status  seconds  command")
    for command in [*before, *commands(page)]:
        row = row_of(command)
        if row.not_here:
            print(f"{command.line:4}       -        -  {command.text}  ({row.not_here})")
            continue
        result = shell.run(command, as_run(command, row, "tiny_data"))
        shown = f"{command.line:4}  {result.status:6}  {result.seconds:7.1f}  {result.shown}"
        print(shown + (f"  | {result.last_line}" if result.status else ""), flush=True)
        fault = verdict(result, row)
        if fault:
            wrong.append(f"{page}:{command.line}: {fault}: {result.shown}\n{result.output[-2000:]}")
    assert not wrong, "\n\n".join(wrong)


def test_no_row_of_the_table_is_idle():
    found = {row_of(command) for page in PAGES for command in commands(page)}
    assert [row.pattern for row in TABLE if row not in found] == []
    assert set(BEFORE) <= set(PAGES)


def test_commands_are_found():
    assert sum(len(commands(page)) for page in PAGES) >= 60
    assert "docs/language_models.md" in PAGES
    assert is_assignment('RUN="--config a.yaml --config b.yaml"')
    assert is_assignment("export A=1 B=2")
    assert not is_assignment("A=1 python -m profiling kernels")
    (line,) = [c for c in commands("docs/measuring.md") if "cuda.sh" in c.text]
    assert line.text == "bash profiling/cuda.sh"
