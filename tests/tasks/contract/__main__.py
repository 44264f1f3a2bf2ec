"""Write `defaults.json`: `python -m tests.tasks.contract`."""

import json

from tests.tasks.contract.test_options import DEFAULTS, TASKS, defaults_of

text = json.dumps({name: defaults_of(name) for name in TASKS}, indent=1, sort_keys=True)
DEFAULTS.write_text(text + "\n", encoding="utf-8")
