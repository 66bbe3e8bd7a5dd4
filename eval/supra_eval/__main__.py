"""lm-eval's own command with the model class `supra` registered: `python -m supra_eval run --model supra …`."""

from lm_eval.__main__ import cli_evaluate

import supra_eval  # noqa: F401  (registers it)

if __name__ == "__main__":
    cli_evaluate()
