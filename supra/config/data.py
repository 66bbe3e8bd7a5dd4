"""Where a recipe's text comes from."""

from fractions import Fraction
from math import gcd, lcm
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationInfo, field_validator, model_validator
from pydantic_core import PydanticCustomError

from supra.config.fields import PositiveCount, Real, Section

_MOST_SHARES = 100_000  # of all components together: the order in which they take turns repeats after so many


Documents = Literal["all", "even", "odd"]


class Reading(Section):
    """Texts (a path, a glob, `package:NAME/inside/*.txt` or a `datasets` name[:config]) and how they are read."""

    train: tuple[str, ...] = ()
    format: Literal["auto", "text", "jsonl", "parquet", "mediawiki", "dataset"] = "auto"
    text_field: str = Field(default="text", min_length=1)
    split: str = Field(default="train", min_length=1)  # of a `datasets` name
    unwrap: bool = False  # join hard-wrapped lines; blank lines keep paragraphs apart
    messages_field: Annotated[str, Field(min_length=1)] | None = (
        None  # rows are chats: only answers are learned
    )
    max_tokens: PositiveCount | None = None  # stop reading after so many; a hub dataset is then streamed
    min_document_tokens: PositiveCount | None = None  # shorter documents are left out
    documents: Documents = "all"  # of each source, counted from 0: train on half, test on the other
    streaming: bool = False  # read and tokenised while training goes on, not all before

    @field_validator("messages_field")
    @classmethod
    def _chats_are_rows(cls, value: str | None, info: ValidationInfo) -> str | None:
        if value is not None and info.data.get("format") == "text":
            raise ValueError("format: text has no rows of messages")
        if value is not None and info.data.get("unwrap"):
            raise ValueError("unwrap joins lines of plain text: set one of the two")
        return value

    @field_validator("streaming")
    @classmethod
    def _a_stream_has_no_end(cls, value: bool, info: ValidationInfo) -> bool:
        if value and info.data.get("max_tokens") is not None:
            raise ValueError("it reads as much as the stage needs: leave out max_tokens")
        return value

    @field_validator("min_document_tokens")
    @classmethod
    def _some_document_may_stay(cls, value: int | None, info: ValidationInfo) -> int | None:
        most = info.data.get("max_tokens")
        if value is not None and most is not None and value > most:
            raise ValueError(f"more than max_tokens = {most}")
        return value


class Component(Reading):
    """One part of a mixture; a field that it leaves out is as in the section around it."""

    train: tuple[str, ...] = Field(min_length=1)
    weight: Annotated[Real, Field(gt=0)]


class Data(Reading):
    """What a stage reads: `train`, or several weighted texts in `mixture`."""

    heldout: tuple[str, ...] = ()  # never trained on, even where `train` or `mixture` matches it too
    exclude: tuple[str, ...] = ()  # fnmatch patterns on file names, left out of all
    mixture: tuple[Component, ...] = ()  # tokens are drawn in proportion to the weights

    @field_validator("mixture", mode="before")
    @classmethod
    def _take_over_what_components_leave_out(cls, value: Any, info: ValidationInfo) -> Any:
        shared = {name: info.data[name] for name in Reading.model_fields if name in info.data}
        shared.pop("train", None)
        components = value if isinstance(value, (list, tuple)) else ()
        given = [c.model_dump(exclude_unset=True) if isinstance(c, Component) else c for c in components]
        return [{**shared, **c} if isinstance(c, dict) else c for c in given] if components else value

    @field_validator("mixture")
    @classmethod
    def _weights_have_a_short_cycle(cls, value: tuple[Component, ...]) -> tuple[Component, ...]:
        if sum(_whole_numbers(tuple(component.weight for component in value))) > _MOST_SHARES:
            raise ValueError(
                f"as whole numbers the weights must add up to at most {_MOST_SHARES:,}: round them"
            )
        return value

    @model_validator(mode="after")
    def _text_comes_from_one_place(self) -> "Data":
        if bool(self.train) == bool(self.mixture):
            reason = (
                "used only without `mixture`" if self.train else "must hold at least 1, or give `mixture`"
            )
            raise PydanticCustomError("in_field", reason, {"field": "train"})  # type: ignore[arg-type]
        return self

    def components(self) -> tuple["Data", ...]:
        """Each component of the mixture as data of its own, or this alone where there is no mixture."""
        if not self.mixture:
            return (self,)
        own = (component.model_dump(exclude={"weight"}) for component in self.mixture)
        return tuple(Data(heldout=self.heldout, exclude=self.exclude, **fields) for fields in own)

    def shares(self) -> tuple[int, ...]:
        """The components' weights as the smallest whole numbers in the same proportion."""
        return _whole_numbers(tuple(component.weight for component in self.mixture) or (1.0,))


def _whole_numbers(weights: tuple[float, ...]) -> tuple[int, ...]:
    exact = [Fraction(repr(weight)) for weight in weights]  # 0.7 is 7/10 to whom wrote it
    unit = lcm(*(fraction.denominator for fraction in exact))
    numbers = [int(fraction * unit) for fraction in exact]
    return tuple(number // gcd(*numbers) for number in numbers)
