"""lm-eval's own command with the model class `supra` registered: `python -m supra_eval run --model supra …`."""

import sys

from lm_eval.__main__ import cli_evaluate

import supra_eval  # noqa: F401  (registers it)
from supra.errors import SupraError

if __name__ == "__main__":
    try:
        cli_evaluate()
    except SupraError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
