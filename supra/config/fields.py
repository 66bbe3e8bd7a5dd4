"""The kinds of value a recipe holds, and what every section of one has in common."""

from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field


def _number(value: Any) -> Any:
    """YAML 1.1 reads `1e-3` as text and `true` as a number: accept the first, refuse the second."""
    if isinstance(value, bool):
        raise ValueError("a number is needed, not true/false")
    if isinstance(value, str):
        try:
            return float(value)
        except ValueError:
            raise ValueError("a number is needed") from None
    return value


def comma_list(value: Any) -> Any:
    """A command line gives a list as `0,5,11`."""
    return [part.strip() for part in value.split(",") if part.strip()] if isinstance(value, str) else value


Real = Annotated[float, BeforeValidator(_number)]
Count = Annotated[int, BeforeValidator(_number)]  # 2_000_000, 2e6 and "2e6" alike; 2.5 is refused
PositiveCount = Annotated[Count, Field(gt=0)]


class Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class Documented(Section):
    """What every kind of recipe says of itself: what it does, its source, its cost and what to expect."""

    name: str = Field(min_length=1)
    description: str = ""
    source: str = ""
    cost: str = ""
    expected: str = ""
    command: str = ""


PROSE = frozenset(Documented.model_fields) - {"name"}  # changes no result
