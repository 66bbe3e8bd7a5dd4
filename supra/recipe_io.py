"""From YAML text and `a.b=c` overrides to a checked recipe, or to one report of everything wrong with it."""

import difflib
import re
import typing
from collections.abc import Iterator
from pathlib import Path
from types import UnionType
from typing import Any, NamedTuple, TypeVar

import yaml
from pydantic import BaseModel, ValidationError

from supra.config import Conversion, Recipe
from supra.errors import UserError

M = TypeVar("M", bound=BaseModel)


class Problem(NamedTuple):
    """One thing wrong with a recipe."""

    path: str
    value: str
    reason: str

    def __str__(self) -> str:
        return f"{self.path}{f' = {self.value}' if self.value else ''}: {self.reason}"


class RecipeError(UserError):
    """A recipe with fields that are wrong, each in `problems`."""

    def __init__(self, name: str, problems: list[Problem]) -> None:
        self.problems = problems
        if len(problems) == 1:
            super().__init__(name, str(problems[0]), "Correct this field.")
        else:
            lines = "".join(f"\n  {problem}" for problem in problems)
            super().__init__(name, f"{len(problems)} errors", f"Correct these fields:{lines}")


def shipped_folder() -> Path:
    """The recipes that come with supra: package data in a wheel, `recipes/` in a checkout."""
    inside = Path(__file__).parent / "_recipes"
    return inside if inside.is_dir() else Path(__file__).parent.parent / "recipes"


def locate(path_or_name: str | Path, kind: str = "") -> Path:
    """The file of a recipe given by path or by shipped name; `kind` is the folder of recipes of another kind.

    Raises:
        UserError: there is none; the nearest shipped name is suggested.
    """
    path, text = Path(path_or_name), str(path_or_name)
    if path.is_file():
        return path
    folder = shipped_folder() / kind
    names = [shipped.stem for shipped in sorted(folder.glob("*.yaml"))]
    if text in names:
        return folder / f"{text}.yaml"
    if path.is_dir():
        raise UserError(
            f"recipe {text}", "it is a folder, not a recipe file", "Give the YAML file or a shipped name."
        )
    hint = nearest(path.stem, names)
    known = f"Shipped recipes: {', '.join(names)}."
    looks_like_path = path.suffix in (".yaml", ".yml") or len(path.parts) > 1
    reason = "no such file" if looks_like_path else "no such file and no shipped recipe of that name"
    raise UserError(f"recipe {text}", reason, f"Did you mean {hint}? {known}" if hint else known)


def load(path_or_name: str | Path, overrides: list[str]) -> Recipe:
    """See `supra.config.load`."""
    return load_as(Recipe, locate(path_or_name), overrides, name=str(path_or_name))


def load_as(model: type[M], path: Path, overrides: list[str], *, name: str) -> M:
    """A file of any kind of recipe, `a.b=c` overrides applied, checked against its model.

    Raises:
        UserError: it cannot be read, is not YAML (with the line), or is invalid (every error at once).
    """
    return parse_as(model, _read_text(path), overrides, name=name)


def parse(text: str, overrides: list[str], *, name: str) -> Recipe:
    """A checked recipe from YAML text; see `parse_as`."""
    return parse_as(Recipe, text, overrides, name=name)


def parse_as(model: type[M], text: str, overrides: list[str], *, name: str) -> M:
    """A checked recipe of any kind from YAML text; `name` is what errors call it.

    Raises:
        UserError: with every problem found, one a line.
    """
    raw = _read_yaml(text, name)
    problems = [problem for override in overrides if (problem := _apply(raw, override))]
    recipe = None
    try:
        recipe = model.model_validate(raw)
    except ValidationError as error:
        problems += _problems(error, model, raw)
    if recipe is None or problems:
        raise _report(name, problems)
    return recipe


def parse_conversion(options: dict[str, Any]) -> Conversion:
    """A checked conversion from command-line options (None = not given).

    Raises:
        UserError: with every problem found.
    """
    given = {key: value for key, value in options.items() if value is not None}
    try:
        return Conversion.model_validate(given)
    except ValidationError as error:
        raise _report("conversion options", _problems(error, Conversion, given)) from None


def nearest(word: str, candidates: typing.Iterable[str]) -> str | None:
    """The candidate most like `word`, if any is much like it."""
    pool = list(candidates)
    found = difflib.get_close_matches(word, pool, n=1, cutoff=0.55)
    if found:
        return found[0]
    starts = [candidate for candidate in pool if len(word) > 2 and candidate.startswith(word)]
    return starts[0] if starts else None


def require_known(values: typing.Iterable[str], known: typing.Iterable[str], what: str) -> None:
    """UserError that names the first of `values` that is not `known`, and the one most like it."""
    names = list(known)
    for value in values:
        if value not in names:
            hint = nearest(value, names)
            mend = f"Did you mean {hint}? " if hint else ""
            raise UserError(f"{what} {value}", "is unknown", f"{mend}Choose among {', '.join(names)}")


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise UserError(
            str(path), f"not UTF-8 text (byte {error.start})", "A recipe is a YAML text file."
        ) from None
    except OSError as error:
        raise UserError(str(path), f"cannot be read ({error.strerror})", "Check its permissions.") from None


class _Loader(yaml.SafeLoader):
    """SafeLoader that refuses a key written twice (YAML would keep the last one silently)."""


def _mapping(loader: _Loader, node: yaml.MappingNode) -> dict[Any, Any]:
    seen: set[str] = set()
    for key_node, _ in node.value:
        if key_node.value in seen and isinstance(key_node, yaml.ScalarNode):
            raise yaml.constructor.ConstructorError(
                None, None, f"`{key_node.value}` is written twice", key_node.start_mark
            )
        if isinstance(key_node, yaml.ScalarNode):
            seen.add(key_node.value)
    loader.flatten_mapping(node)
    return loader.construct_mapping(node, deep=True)


_Loader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _mapping)


def _read_yaml(text: str, name: str) -> dict[str, Any]:
    try:
        raw = yaml.load(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        raise UserError(name, f"not valid YAML: {where}{error.problem}", "Correct that line.") from None
    except (yaml.YAMLError, ValueError) as error:
        first_line = str(error).splitlines()[0]
        raise UserError(name, f"not valid YAML: {first_line}", "A recipe is a YAML text file.") from None
    if not isinstance(raw, dict):
        kind = "empty" if raw is None else f"a {type(raw).__name__}"
        raise UserError(
            name, f"a recipe is a mapping of fields, this is {kind}", "See `supra recipes show demo`."
        )
    return raw


def _apply(raw: dict[str, Any], override: str) -> Problem | None:
    """Set one `a.b=c` in place; lists are addressed by index, stages by name as well."""
    path, equals, text = override.partition("=")
    path = path.strip()
    if not equals or not path or "" in path.split("."):
        return Problem("--set", override, "write it as field.path=value")
    try:
        value = yaml.load(text, Loader=_Loader)
    except yaml.YAMLError:
        return Problem(
            path, text, "the value is not valid YAML; put quotes around text with special characters"
        )
    here: Any = raw
    *parents, last = path.split(".")
    for depth, part in enumerate(parents):
        at = ".".join(parents[: depth + 1])
        if isinstance(here, dict):
            if here.get(part) is None:
                here[part] = {}
            here = here[part]
        elif isinstance(here, list):
            index = _index(here, part)
            if isinstance(index, str):
                return Problem(at, "", index)
            here = here[index]
        else:
            return Problem(at, "", f"`{'.'.join(parents[:depth])}` is a value, it has no fields")
    if isinstance(here, dict):
        here[last] = value
    elif isinstance(here, list):
        index = _index(here, last)
        if isinstance(index, str):
            return Problem(path, "", index)
        here[index] = value
    else:
        return Problem(path, "", f"`{'.'.join(parents)}` is a value, it has no fields")
    return None


def _index(items: list[Any], part: str) -> int | str:
    """Position of a list entry given by number or by its `name`; a sentence when there is none."""
    names = [str(item.get("name")) for item in items if isinstance(item, dict)]
    if part.isdigit():
        return (
            int(part) if int(part) < len(items) else f"there is no entry {part}, the last is {len(items) - 1}"
        )
    if part in names:
        return [item.get("name") if isinstance(item, dict) else None for item in items].index(part)
    hint = nearest(part, names)
    return f"no entry of that name; there are {', '.join(names) or 'none'}" + (
        f". Did you mean `{hint}`?" if hint else ""
    )


def _report(name: str, problems: list[Problem]) -> RecipeError:
    # A field that is reported twice (an override and its validation) is one mistake to the reader.
    return RecipeError(name, list(dict.fromkeys(problems)))


def _problems(error: ValidationError, model: type[BaseModel], raw: dict[str, Any]) -> list[Problem]:
    entries = [dict(entry) for entry in error.errors(include_url=False)]
    # A list whose entries are all invalid is reported as too short as well: that is not the user's mistake.
    return [
        _problem(entry, model, raw) for entry in entries if entry["type"] != "too_short" or not entry["input"]
    ]


def _problem(entry: dict[str, Any], root: type[BaseModel], raw: dict[str, Any]) -> Problem:
    loc: tuple[Any, ...] = entry["loc"]
    absent = entry["type"] == "missing"
    if entry["type"] == "in_field":
        loc = (*loc, entry["ctx"]["field"])
        absent = not isinstance(entry["input"], dict) or loc[-1] not in entry["input"]
        entry["input"] = None if absent else entry["input"][loc[-1]]
    path = ".".join(str(part) for part in _named(loc, raw))
    value = "" if absent else _short(entry["input"])
    if entry["type"] == "extra_forbidden":
        return Problem(path, value, _unknown_field(str(loc[-1]), _model_at(root, loc[:-1]), root))
    if entry["type"] in ("literal_error", "enum"):
        choices = re.findall(r"'([^']*)'", entry["ctx"]["expected"])
        hint = nearest(str(entry["input"]), choices)
        reason = f"must be one of {', '.join(choices)}" + (f"; did you mean `{hint}`?" if hint else "")
        return Problem(path, value, reason)
    if entry["type"] == "missing":
        return Problem(path, "", "required, but missing")
    return Problem(path, value, _reason(entry))


_REASONS = {
    "greater_than": "must be greater than {gt}",
    "greater_than_equal": "must be at least {ge}",
    "less_than": "must be less than {lt}",
    "less_than_equal": "must be at most {le}",
    "finite_number": "must be a finite number",
    "int_from_float": "must be a whole number",
    "string_type": "must be text",
    "string_too_short": "must not be empty",
    "string_pattern_mismatch": "must be one word: letters, digits, _ and -, a letter first",
    "tuple_type": "must be a list",
    "bool_parsing": "must be true or false",
    "bool_type": "must be true or false",
    "model_type": "must be a mapping of fields",
    "model_attributes_type": "must be a mapping of fields",
    "dict_type": "must be a mapping of fields",
    "int_type": "must be a whole number",
    "float_type": "must be a number",
    "too_short": "must hold at least {min_length}",
    "too_long": "must hold at most {max_length}",
}


def _reason(entry: dict[str, Any]) -> str:
    template = _REASONS.get(entry["type"])
    if template:
        return template.format(**entry.get("ctx", {}))
    return str(entry["msg"]).removeprefix("Value error, ")


def _unknown_field(name: str, model: type[BaseModel] | None, root: type[BaseModel]) -> str:
    """Say what the field may have been: a sibling spelt nearly so, or one that lives in another section."""
    siblings = list(model.model_fields) if model else []
    sections = [section for section, inner in _sections(root) if name in inner.model_fields]
    if sections:
        return f"unknown field here; it belongs in {' or '.join(f'`{section}`' for section in sections)}"
    hint = nearest(name, siblings)
    return (
        f"unknown field; did you mean `{hint}`?"
        if hint
        else f"unknown field; known here: {', '.join(siblings)}"
    )


def _sections(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, type[BaseModel]]]:
    for field, info in model.model_fields.items():
        inner = _inner_model(info.annotation)
        if inner:
            section = f"{prefix}.{field}" if prefix else field
            yield section, inner
            yield from _sections(inner, section)


def _inner_model(annotation: Any) -> type[BaseModel] | None:
    """The model inside `M`, `M | None` or `tuple[M, ...]`."""
    if isinstance(annotation, type) and not typing.get_origin(annotation):
        return annotation if issubclass(annotation, BaseModel) else None
    if typing.get_origin(annotation) in (tuple, UnionType, typing.Union):
        return next((found for arg in typing.get_args(annotation) if (found := _inner_model(arg))), None)
    return None


def _model_at(root: type[BaseModel], loc: tuple[Any, ...]) -> type[BaseModel] | None:
    model: type[BaseModel] | None = root
    for part in loc:
        if isinstance(part, int):
            continue
        if model is None or part not in model.model_fields:
            return None
        model = _inner_model(model.model_fields[part].annotation)
    return model


def _named(loc: tuple[Any, ...], raw: Any) -> Iterator[Any]:
    """`stages, 0, lr` as `stages, transfer, lr` where the entry has a usable name."""
    for part in loc:
        try:
            raw = raw[part]
        except (KeyError, IndexError, TypeError):
            raw = None
        name = raw.get("name") if isinstance(part, int) and isinstance(raw, dict) else None
        yield name if isinstance(name, str) and name else part


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}…"
