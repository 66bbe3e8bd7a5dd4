"""Turn pretrained Transformers into RNNs that generate in constant memory (the SUPRA method, arXiv 2405.06640).

`import supra` registers the converted model with transformers' Auto classes, so that `from_pretrained` loads it.
"""

import sys
from pathlib import PurePath

__version__ = "0.1.0"


def _runs_as_command() -> bool:
    """Whether this process is the `supra` command: `supra --help` must not wait for torch and transformers."""
    return PurePath(sys.argv[0] if sys.argv else "").stem == "supra" or "-m supra" in " ".join(
        sys.orig_argv[1:3]
    )


if not _runs_as_command():
    from . import models as models
