"""The stages of the plan, in the order of their value."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from lit_probattn.configs import ConfigError
from profiling.stages.checks import checks, environment, tests, train
from profiling.stages.place import Phase, Place, Stage, table_page
from profiling.stages.profile import profile, profile_page
from profiling.stages.released import released, released_page
from profiling.stages.speed import kernel_stage
from profiling.stages.sweeps import sweep_stage
from profiling.stages.trainings import training_stage
from profiling.stages.tuned import speed_tuned, tuned_page, tuning


def _table_stage(
    name: str, about: str, minutes: float, phases: Callable[[Place], list[Phase]]
) -> Stage:
    return Stage(name, about, minutes, phases, partial(table_page, about))


STAGES = (
    _table_stage("environment", "Versions, and what the GPU reaches", 1, environment),
    _table_stage("checks", "Whether the kernels are right", 6, checks),
    kernel_stage("speed", "kernels_cuda", "Softmax, MGK and sMGK, with gates", 8, 0, 2),
    kernel_stage("speed_fish", "kernels_fish_cuda", "FiSH and linear attention, with gates", 6),
    Stage("profile", "Kernels of the sides of gates", 3, profile, profile_page),
    kernel_stage("memory", "kernels_memory_cuda", "Memory of a step over N", 3),
    sweep_stage("table7", "mgk_table7_cuda", "MGK, Table 7", 3),
    sweep_stage("lm", "lm_cuda", "The language model over D and N", 8),
    sweep_stage("lm_fish", "lm_fish_cuda", "The language model with FiSH over D", 4),
    _table_stage("train", "Losses with kernels and with the reference", 4, train),
    _table_stage("tests", "The tests of the kernels", 8, tests),
    _table_stage("tuning", "The fastest launch configurations", 8, tuning),
    Stage("speed_tuned", "The gates with these configurations", 6, speed_tuned, tuned_page),
    sweep_stage("lm_long", "lm_long_cuda", "The language model, N of 128 and 8192", 8),
    sweep_stage("lm_wide", "lm_wide_cuda", "The language model, D of 4096", 8),
    training_stage("listops", "Trainings on ListOps, MGK's tables 1, 2 and 5", 8),
    training_stage("text", "Trainings on Text, MGK's tables 1, 2 and 5", 8),
    Stage("released", "A model beside its released form", 4, released, released_page),
    sweep_stage("attention", "attention_cuda", "One layer over D and N", 8),
    sweep_stage("encoder_decoder", "encoder_decoder_cuda", "FiSH, Figure 4: translation over D", 8),
    sweep_stage("lm_linear", "lm_linear_cuda", "The language model with MLK over D and N", 8),
    sweep_stage("lm_fish_long", "lm_fish_long_cuda", "The language model with FiSH over N", 8),
    sweep_stage("retrieval_heads", "retrieval_heads_cuda", "Retrieval over heads", 6),
    sweep_stage("listops_settings", "listops_settings_cuda", "ListOps: settings of MGK", 6),
    kernel_stage("speed_more", "kernels_cuda", "Other lengths, heads of 32, float32", 8, 2),
)


def stages_named(names: Sequence[str]) -> list[Stage]:
    """Return stages in the order of the plan, all without names; unknown ones are a ConfigError."""
    known = [stage.name for stage in STAGES]
    wrong = [name for name in names if name not in known]
    if wrong:
        raise ConfigError(f"unknown stage {wrong[0]!r}; expected some of: {' '.join(known)}")
    return [stage for stage in STAGES if not names or stage.name in names]
