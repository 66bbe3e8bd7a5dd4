"""What a model answered before: lm-eval's own request cache, one file for each model, so that a killed run goes on.

A key is lm-eval's hash of the request; the file's name holds the model's fingerprint and what else decides an answer.
"""

from __future__ import annotations

import logging
import sqlite3
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import xxhash
from lm_eval.api.model import LM, CacheHook, CachingLM

from supra.errors import SupraError
from supra.train.tokens import cache_folder

COMMIT_SECONDS = 2.0


class _CommittingHook(CacheHook):
    """Keeps each answer as it comes, and commits every few seconds: sqlitedict would write to the disk for each."""

    def __init__(self, caching: CachingLM) -> None:
        super().__init__(caching)
        self._committed = time.monotonic()

    def add_partial(self, attr: str, req: Iterable[Any], res: Any) -> None:
        super().add_partial(attr, req, res)
        if time.monotonic() - self._committed > COMMIT_SECONDS:
            assert self.dbdict is not None
            self.dbdict.commit(blocking=False)
            self._committed = time.monotonic()


def with_cache(lm: LM, fingerprint: str, *decisive: object, folder: Path | None = None) -> CachingLM:
    """`lm` with its answers kept in `folder` (by default below supra's cache folder).

    `decisive` is whatever else changes an answer: the window's length, the kernel backend.

    Raises:
        SupraError: the folder cannot be written.
    """
    folder = folder or cache_folder() / "answers"
    name = xxhash.xxh3_64(repr((fingerprint, *decisive)).encode()).hexdigest()
    path = folder / f"{fingerprint[:12]}-{name}.sqlite"
    logging.getLogger("sqlitedict").setLevel(logging.CRITICAL)  # it logs a traceback before it raises
    try:
        folder.mkdir(parents=True, exist_ok=True)
        caching = CachingLM(lm, str(path))
        len(caching.dbdict)  # a damaged file shows when it is read
    except sqlite3.DatabaseError as error:
        raise SupraError(
            str(path), f"is damaged ({error})", "Remove it; its answers are computed again"
        ) from error
    except (OSError, RuntimeError) as error:
        raise SupraError(
            str(folder),
            f"cannot be written ({error})",
            "Free some space, or set SUPRA_CACHE to another folder",
        ) from error
    caching.dbdict.autocommit = False
    lm.set_cache_hook(_CommittingHook(caching))
    return caching
