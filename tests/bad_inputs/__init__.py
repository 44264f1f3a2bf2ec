"""Bad inputs and what is said about each: the cases behind `docs/bad_inputs.md` and its test.

python -m tests.bad_inputs                               prints the table
python -m tests.bad_inputs --write docs/bad_inputs.md    writes it
"""

from tests.bad_inputs.cases import Case, all_cases, message_of, page

__all__ = ["Case", "all_cases", "message_of", "page"]
