"""Write `defaults.json`: `python -m tests.tasks.contract`."""

from tests.tasks.contract.test_options import DEFAULTS, defaults_of_tasks

DEFAULTS.write_text(defaults_of_tasks(), encoding="utf-8")
