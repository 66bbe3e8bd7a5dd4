"""Where a recipe's text comes from."""

from typing import Literal

from pydantic import Field, ValidationInfo, field_validator

from supra.config.fields import PositiveCount, Section


class Data(Section):
    """Where text comes from: a path, a glob, `package:NAME/inside/*.txt` or a `datasets` name[:config]."""

    train: tuple[str, ...] = Field(min_length=1)
    heldout: tuple[str, ...] = ()  # never trained on, even where `train` matches it too
    exclude: tuple[str, ...] = ()  # fnmatch patterns on file names, left out of both
    format: Literal["auto", "text", "jsonl", "parquet", "dataset"] = "auto"
    text_field: str = Field(default="text", min_length=1)
    split: str = Field(default="train", min_length=1)  # of a `datasets` name
    unwrap: bool = False  # join hard-wrapped lines; blank lines keep paragraphs apart
    max_tokens: PositiveCount | None = None  # stop reading after so many; a hub dataset is then streamed
    min_document_tokens: PositiveCount | None = None  # shorter documents are left out

    @field_validator("min_document_tokens")
    @classmethod
    def _some_document_may_stay(cls, value: int | None, info: ValidationInfo) -> int | None:
        most = info.data.get("max_tokens")
        if value is not None and most is not None and value > most:
            raise ValueError(f"more than max_tokens = {most}")
        return value
