"""Invalid inputs and their messages: the cases behind `messages.md` and its test.

python -m tests.bad_inputs                               prints the table
python -m tests.bad_inputs --write tests/bad_inputs/messages.md    writes it
"""

from tests.bad_inputs.cases import Case, all_cases, message_of, page

__all__ = ["Case", "all_cases", "message_of", "page"]
