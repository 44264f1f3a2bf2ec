"""Command line `python -m lit_probattn {fit,validate,test,predict}`.

Configurations are composed: a task, an attention, a trainer, then flags.

    python -m lit_probattn fit --task lra_listops --attention smgk --trainer one_gpu
    python -m lit_probattn test --config runs/lra_listops-smgk/0/config.yaml --ckpt_path best

--task, --attention and --trainer accept a name, as listed by `lit-probattn list tasks`
(attention, trainers), or the path of a file; --config FILE, which can be repeated, adds a file.
fit --init_from CHECKPOINT initialises the weights from another run, possibly of another task.
LIT_PROBATTN_CONFIGS lists your own folders with subfolders tasks/, attention/ and trainer/.

--debug (or LIT_PROBATTN_DEBUG=1) prints the traceback of every error. --allow_code MODULE, which
can be repeated, permits classes of a module that is not part of an installed package.
"""

import json
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

import lightning.pytorch as pl
import yaml
from lightning.pytorch.callbacks import Callback, ProgressBar
from lightning.pytorch.cli import LightningArgumentParser
from lightning.pytorch.loggers import Logger
from lightning.pytorch.plugins.io import CheckpointIO

from lit_probattn.base.config_files import load_yaml
from lit_probattn.base.errors import DEBUG_VARIABLE, ConfigError
from lit_probattn.base.files import replace_text
from lit_probattn.cli.errors import exit_status, quieten
from lit_probattn.cli.files import (
    files_before_flags,
    kept_name,
    prepared,
    run_folder_of,
    run_name,
)
from lit_probattn.cli.jsonargparse_internals import failure_of_link
from lit_probattn.cli.loggers import PendingLogger, pending, with_folder
from lit_probattn.cli.parser import Instantiator, RunParser, check_values, reject_more_arguments
from lit_probattn.configs import (
    SIZES_OF_DATA,
    SIZES_OF_SOME_DATA,
    load_classes,
    only_allowed_code,
)
from lit_probattn.tasks.base import Task
from lit_probattn.training.callbacks import (
    FinalValidation,
    PredictionWriter,
    RunRecord,
    SameSources,
    StepNumbers,
    Throughput,
    make_progress_bar,
)
from lit_probattn.training.checkpoints import CheckedCheckpointIO, selected_by_validation
from lit_probattn.training.evaluation import (
    SampleCount,
    Scope,
    TestScores,
    differences,
)
from lit_probattn.training.init_from import Taken, init_from
from lit_probattn.training.lightning_internals import BareCLI, meet_on_loopback, returns_results
from lit_probattn.training.logs import RunCSVLogger, tensorboard_logger
from lit_probattn.training.memory import MemoryAdvice
from lit_probattn.training.peers import Heartbeats
from lit_probattn.training.preemption import StopSignals, job_name
from lit_probattn.training.run_folder import (
    RunPlan,
    RunSettings,
    find_checkpoint,
    folder_of_checkpoint,
    plan_fit,
    share_plan,
)
from lit_probattn.training.run_record import (
    remove_leftovers,
    tested_during_training,
    write_record,
)
from lit_probattn.training.saving import RunCheckpoint, reject_test_monitors

TRAINER_DEFAULTS = {
    "use_distributed_sampler": False,  # the DataModules distribute samples over ranks
    "check_val_every_n_epoch": None,  # training is one endless epoch; validation counts batches
    "log_every_n_steps": 10,
    "enable_model_summary": False,  # its FLOPs column does not count attention
}
NAMES = """--task NAME, --attention NAME and --trainer NAME abbreviate --config FILE with the file
of that name; `lit-probattn list tasks` (attention, trainers) lists the names. --seed sets
--seed_everything. fit: --lr sets --model.init_args.lr, and --steps sets --trainer.max_steps,
with warm-up, schedule and intervals in proportion. --data.KEY sets an argument of the data."""


class RunCLI(BareCLI):
    """LightningCLI with run folders, verified checkpoints and readable errors.

    Args:
        arguments: command line after the program's name.
    """

    def __init__(self, arguments: Sequence[str]) -> None:
        self.arguments = list(arguments)
        words, self.files = prepared(self.arguments)
        load_classes(words)
        self.given = words[:1]
        words = with_folder(words, self.files.values())
        super().__init__(
            model_class=pl.LightningModule,
            datamodule_class=pl.LightningDataModule,
            subclass_mode_model=True,
            subclass_mode_data=True,
            parser_class=RunParser,
            parser_kwargs={"prog": "python -m lit_probattn", "description": __doc__},
            save_config_callback=None,
            auto_configure_optimizers=False,
            trainer_defaults=TRAINER_DEFAULTS,
            args=files_before_flags(words),
        )

    # ---- the command line ----------------------------------------------------------------------

    def subcommands(self) -> dict[str, set[str]]:  # type: ignore[override]
        """Return the command on the command line; all commands, for help, if there is none.

        Building a command's parser takes a tenth of a second, so other commands are skipped.
        """
        every = BareCLI.subcommands()
        return {name: every[name] for name in self.given if name in every} or every

    def add_default_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Add the seed."""
        parser.add_argument(
            "--seed_everything",
            type=int,
            default=0,
            help="Seed of the run: weights, sample order, dropout and noise depend on it.",
        )

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Add the run's settings; link sizes of the data and the seed to the model."""
        parser.description = f"{parser.description}\n\n{NAMES}"
        parser.add_class_arguments(RunSettings, "run")
        for size in SIZES_OF_DATA:
            target = f"model.init_args.{size}"
            if size in SIZES_OF_SOME_DATA:  # other data, also from other packages, can lack it
                find = _finder(size)
                parser.link_arguments("data", target, find, apply_on="instantiate")
            else:
                parser.link_arguments(f"data.{size}", target, apply_on="instantiate")
        parser.link_arguments("seed_everything", "model.init_args.seed")
        parser.link_arguments("seed_everything", "data.init_args.seed")

    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        """Parse the command line; `args` is always set."""
        with only_allowed_code():
            self.config = parser.parse_args(args)
        command = self.config.get("subcommand")
        if command is not None:
            check_values(self.config[command], {"run": RunSettings}, SIZES_OF_DATA)
            reject_more_arguments(self.config[command])
            if self.config[command].get("ckpt_path") == "":
                raise ConfigError("--ckpt_path is empty: pass best, last, auto or a path")

    def instantiate_classes(self) -> None:
        """Instantiate everything; errors of the data in a link are raised unchanged."""
        try:
            super().instantiate_classes()
        except ValueError as error:
            raise failure_of_link(error) or error from None

    def add_instantiators(self) -> None:
        """Instantiate model and data by `Instantiator`."""
        for key, base in (("model", pl.LightningModule), ("data", pl.LightningDataModule)):
            self.parser.add_instantiator(Instantiator(cli=self, key=key), base, subclasses=True)
        self.parser.add_instantiator(PendingLogger, Logger, subclasses=True)

    # ---- trainer and run folder ----------------------------------------------------------------

    @property
    def settings(self) -> RunSettings:
        """The `run` part of the configuration."""
        return self.part(self.config_init, "run")

    @property
    def run_name(self) -> str:
        """`run.name`, or `<task>-<attention>` after the files that set them."""
        return self.settings.name or run_name(self.files, self.part(self.config, "model"))

    def instantiate_trainer(self, **kwargs: Any) -> pl.Trainer:
        """Return a trainer with this package's checkpoints and progress, without loggers."""
        config = self.part(self.config_init, "trainer")
        self._own_loggers = config.get("logger") in (None, True)
        self._named_loggers = pending(config.get("logger"))
        if self._own_loggers or self._named_loggers:
            kwargs["logger"] = False
        plugins = config.get("plugins") or []
        plugins = plugins if isinstance(plugins, list) else [plugins]
        if not any(isinstance(plugin, CheckpointIO) for plugin in plugins):
            kwargs["plugins"] = [*plugins, CheckedCheckpointIO()]
        callbacks = config.get("callbacks") or []
        callbacks = callbacks if isinstance(callbacks, list) else [callbacks]
        reject_test_monitors(callbacks)
        added = [MemoryAdvice(), Heartbeats(), SameSources(), StepNumbers(), Throughput()]
        added.append(FinalValidation())
        if self.settings.test_during_training is not None:
            added.append(TestScores(self.settings.test_during_training))
        wants_bar = config.get("enable_progress_bar") is not False
        if wants_bar and not any(isinstance(callback, ProgressBar) for callback in callbacks):
            added.append(make_progress_bar())
        if config.get("enable_checkpointing") is not False:
            settings = self.settings
            self.checkpoints = RunCheckpoint(
                every_n_steps=settings.checkpoint_every,
                keep=settings.keep_checkpoints,
                monitor=settings.monitor,
                mode=settings.monitor_mode,
            )
            added.append(self.checkpoints)
        trainer: pl.Trainer = super().instantiate_trainer(**kwargs, callbacks=[*callbacks, *added])
        if returns_results(trainer):
            raise ConfigError(
                "trainer.strategy must start this command once per process, received a strategy "
                "that forks or spawns processes: use ddp"
            )
        self._require_division(trainer)
        self._meeting_place = meet_on_loopback(trainer)
        return trainer

    def _require_division(self, trainer: pl.Trainer) -> None:
        """Raise a ConfigError if every process would read all data of another package."""
        by_lightning = self.part(self.config_init, "trainer").get("use_distributed_sampler")
        is_divided = by_lightning or hasattr(self.datamodule, "test_as_validation")  # ours
        if trainer.world_size > 1 and not is_divided:
            raise ConfigError(
                f"data.class_path: each of {trainer.world_size} processes would read all samples "
                f"of {self.part(self.config, 'data').class_path}: to divide them by Lightning's "
                "sampler, set --trainer.use_distributed_sampler true; to score each sample once, "
                "--trainer.devices 1"
            )

    def _add_callback(self, callback: Callback) -> None:
        """Add a callback that needs the run folder, before the checkpoints."""
        vars(self.trainer)["callbacks"].insert(0, callback)

    def fit(self, ckpt_path: str | None = None, **kwargs: Any) -> None:
        """Train in a run folder.

        Raises:
            ConfigError: the model of a run with checkpoints is not a `Task`, on which they depend.
        """
        trainer = self.part(self.config, "trainer")
        saves = trainer.enable_checkpointing is not False and not trainer.fast_dev_run
        if saves and not isinstance(self.model, Task):
            raise ConfigError(
                f"model.class_path: {self.part(self.config, 'model').class_path} is not a task, "
                "on whose steps checkpoints depend: derive it from lit_probattn.tasks.Task or "
                "from one of its subclasses, or train without checkpoints by "
                "--trainer.enable_checkpointing false"
            )
        if trainer.fast_dev_run:
            self._take_weights(None)
            self.trainer.fit(**kwargs, ckpt_path=ckpt_path)
            return
        config = self._config_dict()

        def make() -> RunPlan:
            name, sources = self.run_name, self._sources
            plan = plan_fit(self.settings, name, config, ckpt_path, sources)
            plan.notes += filter(None, [kept_name(self.files, name)])
            return plan

        plan = share_plan(self.trainer, config, make)
        try:
            self._train(plan, config, kwargs)
        except BaseException:
            if self.trainer.is_global_zero:
                plan.discard_if_unused()
            raise
        finally:
            plan.release_lock()

    def _train(self, plan: RunPlan, config: dict[str, Any], kwargs: dict[str, Any]) -> None:
        self._reject_two_sources(plan)
        if 0 < self.trainer.max_steps <= plan.steps_done:
            self._report_finished(plan)
            return
        taken = self._take_weights(plan)
        self._add_callback(RunRecord(plan.folder))
        if hasattr(self, "checkpoints"):
            self.checkpoints.folder = plan.folder / "checkpoints"
        csv = RunCSVLogger(plan.folder, plan.steps_done)
        if self._own_loggers:
            self.trainer.loggers = [csv, *tensorboard_logger(plan.folder, plan.steps_done)]
        elif self._named_loggers:
            self.trainer.loggers = [csv, *self._make_loggers(plan)]
        if self.trainer.is_global_zero:
            remove_leftovers(plan.folder)
            if self.trainer.loggers:
                csv.load()
            write_record(
                plan.folder,
                config_text=yaml.safe_dump(config, sort_keys=False),
                seed=self.part(self.config, "seed_everything"),
                arguments=self.arguments,
                checkpoint=plan.checkpoint,
                job=job_name(),
                initial_weights=None if taken is None else taken.record(),
                test_during_training=TestScores.asked_of(self.trainer),
            )
            print("\n".join([*plan.notes, f"run folder: {plan.folder}"]), flush=True)
        signals = StopSignals()
        if hasattr(self, "checkpoints"):
            self._add_callback(signals)
        try:
            self.trainer.fit(**kwargs, ckpt_path=plan.checkpoint)
        finally:
            signals.restore()

    def _reject_two_sources(self, plan: RunPlan) -> None:
        """Raise a ConfigError if weights have two sources."""
        source, start = self.settings.init_from, plan.checkpoint
        if source is not None and start is not None and folder_of_checkpoint(start) != plan.folder:
            raise ConfigError(
                f"--init_from {source} and --ckpt_path, which starts from {start}, are mutually "
                "exclusive: --ckpt_path also restores optimiser and step, --init_from only weights"
            )

    def _take_weights(self, plan: RunPlan | None) -> Taken | None:
        """Load the weights of `run.init_from`, unless the run resumes.

        Raises:
            ConfigError: the weights do not match.
        """
        source = self.settings.init_from
        if source is None:
            return None
        if plan is not None and plan.checkpoint is not None:
            plan.notes.append(
                f"--init_from {source} is ignored: the run resumes from its checkpoint"
            )
            return None
        tokeniser = getattr(self.datamodule, "tokeniser_digest", None)
        taken = init_from(self.model, source, tokeniser)
        if self.trainer.is_global_zero:
            print("\n".join(taken.lines()), flush=True)
        return taken

    def _make_loggers(self, plan: RunPlan) -> list[Logger]:
        return [logger.make(plan.folder) for logger in self._named_loggers]

    def _report_finished(self, plan: RunPlan) -> None:
        if self.trainer.is_global_zero:
            plan.discard_if_unused()
            lines = [
                f"nothing to train: {plan.checkpoint} is at step {plan.steps_done} and "
                f"trainer.max_steps is {self.trainer.max_steps}"
            ]
            if plan.created:  # the checkpoint is of another configuration or other data
                lines = [*plan.notes, f"{lines[0]}; omit --ckpt_path to train from the beginning"]
            print("\n".join(lines))

    def validate(self, ckpt_path: str | None = None, **kwargs: Any) -> None:
        """Score the validation split."""
        self._evaluate("validate", ckpt_path, kwargs)

    def test(self, ckpt_path: str | None = None, **kwargs: Any) -> None:
        """Score the test split."""
        self._evaluate("test", ckpt_path, kwargs)

    def predict(self, ckpt_path: str | None = None, **kwargs: Any) -> None:
        """Write predictions."""
        plan, scope = self._plan_evaluation("predict", ckpt_path)
        assert plan.checkpoint is not None
        path = scope.path(plan.folder, f"predictions-{plan.checkpoint.stem}", ".parquet")
        writer = PredictionWriter(path)
        self._add_callback(writer)
        kwargs["return_predictions"] = False
        self.trainer.predict(**kwargs, ckpt_path=plan.checkpoint)
        if self.trainer.is_global_zero:
            source = getattr(self.datamodule, "predicted", "the data")
            written = ", ".join(map(str, writer.written))
            print(f"predictions: {written} ({writer.num_samples} samples of {source})")

    def _evaluate(self, command: str, request: str | None, kwargs: dict[str, Any]) -> None:
        plan, scope = self._plan_evaluation(command, request)
        assert plan.checkpoint is not None
        samples = SampleCount()
        self._add_callback(samples)
        results = getattr(self.trainer, command)(**kwargs, ckpt_path=plan.checkpoint)
        if not self.trainer.is_global_zero:
            return
        values = {key: value for part in results for key, value in part.items()}
        name = f"{command.replace('validate', 'val')}/accuracy"
        above = samples.above_chance(values[name]) if name in values else None
        report = {
            **values,
            "checkpoint": str(plan.checkpoint),
            "selected_on_test": bool(getattr(self.datamodule, "select_on_test", False))
            and selected_by_validation(plan.checkpoint),
            "test_during_training": tested_during_training(plan.folder),
            "num_samples": samples.count,
            "most_frequent_label": samples.most_frequent_label,
            "above_chance": above,
            "limit_batches": scope.limit,
            "attention": _attention_of(self._config_dict()),
            "differs_from_run": scope.differences,
            **getattr(self.datamodule, "provenance", {}),
            **getattr(self.model, "provenance", {}),
        }
        path = scope.path(plan.folder, f"{command}-{plan.checkpoint.stem}", ".json")
        replace_text(path, json.dumps(report, indent=2) + "\n")
        if above is False:
            print(f"{name} {values[name]:.4f} is not above chance: {samples.chance()}")
        print(f"results: {path}")

    def _plan_evaluation(self, command: str, request: str | None) -> tuple[RunPlan, Scope]:
        if request is None:
            raise ConfigError(
                f"{command} requires trained weights: add --ckpt_path best, last or a path"
            )
        config = self._config_dict()
        scope = Scope.of(self.trainer, command)

        def plan() -> RunPlan:
            checkpoint = find_checkpoint(
                self.settings, self.run_name, request, run_folder_of(self.files), config
            )
            scope.differences = differences(checkpoint, config, self._sources, scope.limit)
            new = getattr(self.datamodule, "new_path", None)
            scope.new_sha256 = None if new is None else self.datamodule.new_digest(new)
            folder = folder_of_checkpoint(checkpoint)
            return RunPlan(folder, checkpoint, notes=list(filter(None, [scope.note(folder)])))

        shared = share_plan(self.trainer, config, plan)
        if self.trainer.is_global_zero:
            print("\n".join([*shared.notes, f"checkpoint: {shared.checkpoint}"]), flush=True)
        self.trainer.loggers = [*self.trainer.loggers, *self._make_loggers(shared)]
        return shared, scope

    def _sources(self) -> dict[str, str]:
        """Prepare the data; return the hashes of their sources."""
        self.datamodule.prepare_data()
        found: dict[str, str] = getattr(self.datamodule, "source_hashes", {})
        return found

    def _config_dict(self) -> dict[str, Any]:
        """The resolved configuration to store: with the run's name, without a checkpoint."""
        parser = self.command_parser()
        config = self.config[str(self.subcommand)].clone()
        config["run"]["name"] = self.run_name
        loaded: dict[str, Any] = load_yaml(parser.dump(config, skip_none=False))
        loaded.pop("ckpt_path")
        return loaded


def _finder(name: str) -> Callable[[Any], Any]:
    """Return a function that reads a size of the data or None; help displays its name."""

    def find(data: Any) -> Any:
        return getattr(data, name, None)

    find.__name__ = name
    return find


def _attention_of(config: dict[str, Any]) -> str | None:
    entry = config["model"].get("init_args", {}).get("attention")
    return entry.get("class_path") if isinstance(entry, dict) else None


def check_arguments(arguments: Sequence[str]) -> None:
    """Parse a command line without instantiating anything.

    Raises:
        ConfigError: a key, a value or a file is invalid.
    """
    try:
        _ParsingCLI(arguments)
    except SystemExit as end:
        if end.code:
            raise


class _ParsingCLI(RunCLI):
    """Parses a command line and exits."""

    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        """Parse and exit."""
        super().parse_arguments(parser, args)
        raise SystemExit(0)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command given after the program's name; default: this process's arguments.

    Returns:
        Exit status; see `lit_probattn.cli.errors`.
    """
    if arguments is None:
        if "--debug" in sys.argv:
            sys.argv.remove("--debug")
            os.environ[DEBUG_VARIABLE] = "1"  # child processes of a distributed run read it
        arguments = sys.argv[1:]
    quieten()
    return exit_status(lambda: RunCLI(arguments))
