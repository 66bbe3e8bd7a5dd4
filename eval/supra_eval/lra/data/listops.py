"""ListOps (arXiv 1804.06028, by Long Range Arena's rules): nested MIN, MAX, MED and SM over digits, generated in bulk.

A node at depth 1 to 9 is an operator with probability .25 and has 2 to 10 arguments, else it is a digit; at depth 10
all are digits. MED is the median cut to a whole number, SM the sum modulo 10. An expression's length counts operators,
digits and closing brackets.

Notable: trees grow a level at a time, thousands at once, as arrays; only those of the right length are ever put in
order and evaluated. The original keeps its expressions in a set, so that its order changes from run to run; here it is
the order of drawing. The test split is drawn first, then validation, then train: more training data leaves the others
as they are.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import xxhash

from supra.errors import UserError

from ..task import Examples, Task

OPERATORS = ("MIN", "MAX", "MED", "SM")
# Token ids: 0 is padding, then the ten digits, the four operators with their opening bracket, the closing bracket.
DIGIT, OPERATOR, END = 1, 11, 15
NUM_TOKENS = 16
WORDS = ("", *map(str, range(10)), *(f"[{name}" for name in OPERATORS), "]")
OPERATOR_CHANCE = 0.25
TREES_AT_ONCE = 4096


@dataclass(frozen=True)
class Level:
    """The nodes of many trees at one depth: `parent` indexes the level above, `operator` is −1 for a digit."""

    tree: np.ndarray
    parent: np.ndarray
    operator: np.ndarray
    digit: np.ndarray

    def keep(self, which: np.ndarray, above: np.ndarray | None) -> Level:
        """The nodes `which`, where `above` gives the kept parents' new indices."""
        parent = self.parent[which] if above is None else above[self.parent[which]]
        return Level(self.tree[which], parent, self.operator[which], self.digit[which])


def make(
    *, seed: int, train: int = 96_000, validation: int = 2_000, test: int = 2_000, min_length: int = 500,
    max_length: int = 2_000, max_depth: int = 10, max_args: int = 10, say: Callable[[str], None] = lambda text: None,
) -> Task:  # fmt: skip
    """The task with `min_length` < length < `max_length` (in tokens), no expression twice.

    Raises:
        UserError: sizes or lengths that cannot be had.
    """
    sizes = {"test": test, "validation": validation, "train": train}
    if min(sizes.values()) < 1:
        raise UserError("the splits", "each need an example at least", "Give a size of 1 or more")
    if max_depth < 2 or max_args < 2:
        raise UserError("--max-depth and --max-args", "are 2 or more", "Give larger ones")
    if min_length < 0 or max_length < max(min_length, 3) + 2:
        raise UserError(
            f"--min-length {min_length} --max-length {max_length}",
            "leave no length between them (both are excluded; the shortest expression has 4 tokens)",
            "Move them apart",
        )
    wanted, rng = sum(sizes.values()), np.random.default_rng(seed)
    found: list[np.ndarray] = []
    values: list[int] = []
    seen: set[bytes] = set()
    num_barren, start, last = 0, time.monotonic(), 0.0
    while len(found) < wanted:
        before = len(found)
        for tokens, value in draw(rng, TREES_AT_ONCE, min_length, max_length, max_depth, max_args):
            key = xxhash.xxh3_128_digest(tokens.data)
            if key not in seen:
                seen.add(key)
                found.append(tokens)
                values.append(value)
        num_barren = num_barren + 1 if len(found) == before else 0
        if num_barren == 50:
            raise UserError(
                f"--min-length {min_length} --max-length {max_length}",
                f"give {len(found)} different expressions and no other in {50 * TREES_AT_ONCE:,} trees",
                "Move them apart, or ask for fewer examples",
            )
        if (now := time.monotonic() - start) - last > 5:
            last = now
            say(f"listops: {len(found):,} of {wanted:,} · {len(found) / now:,.0f} examples/s")
    taken = time.monotonic() - start
    say(f"listops: {wanted:,} examples in {taken:.1f} s · {wanted / taken:,.0f} examples/s")
    splits, at = {}, 0
    for name, size in sizes.items():
        splits[name] = pad(found[at : at + size], values[at : at + size])
        at += size
    return Task("listops", 10, NUM_TOKENS, 1, splits["train"], splits["validation"], splits["test"])


def pad(rows: list[np.ndarray], values: list[int]) -> Examples:
    """Token rows of different lengths as one array, `PAD` (0) behind each end."""
    lengths = np.array([len(row) for row in rows], dtype=np.int32)
    inputs = np.zeros((len(rows), int(lengths.max())), dtype=np.uint8)
    for number, row in enumerate(rows):
        inputs[number, : len(row)] = row
    return Examples(inputs, np.array(values, dtype=np.int64), lengths)


def draw(
    rng: np.random.Generator, num_trees: int, min_length: int, max_length: int, max_depth: int, max_args: int
) -> list[tuple[np.ndarray, int]]:
    """Tokens and value of each tree, out of `num_trees`, that has a right length, in the order of drawing.

    A tree that is a digit alone would never be long enough: each root is an operator.
    """
    levels: list[Level] = []
    lengths = np.zeros(num_trees, dtype=np.int64)
    tree, parent = np.arange(num_trees), np.zeros(num_trees, dtype=np.int64)
    for depth in range(1, max_depth + 1):
        chance = 1.0 if depth == 1 else OPERATOR_CHANCE if depth < max_depth else 0.0
        inner = rng.random(len(tree)) < chance
        operator = np.where(inner, rng.integers(0, len(OPERATORS), len(tree)), -1)
        levels.append(Level(tree, parent, operator, rng.integers(0, 10, len(tree))))
        lengths += np.bincount(tree, minlength=num_trees) + np.bincount(tree[inner], minlength=num_trees)
        # A tree that is too long already is not grown any further.
        growing = np.flatnonzero(inner & (lengths[tree] < max_length))
        if not len(growing):
            break
        parent = np.repeat(growing, rng.integers(2, max_args + 1, len(growing)))
        tree = tree[parent]
    good = (lengths > min_length) & (lengths < max_length)
    kept: list[Level] = []
    above = None
    for level in levels:
        which = good[level.tree]
        kept.append(level.keep(which, above))
        above = np.cumsum(which) - 1
    return linearise([level for level in kept if len(level.tree)], num_trees)


def linearise(levels: list[Level], num_trees: int) -> list[tuple[np.ndarray, int]]:
    """Tokens in reading order, and the value, of each tree in these levels."""
    if not levels:
        return []
    # From the leaves up: how many tokens each subtree has, and what it is worth.
    sizes: list[np.ndarray] = [np.zeros(0)] * len(levels)
    values: list[np.ndarray] = [np.zeros(0)] * len(levels)
    for depth in reversed(range(len(levels))):
        level = levels[depth]
        size = np.where(level.operator < 0, 1, 2)
        value = level.digit.copy()
        if depth + 1 < len(levels):
            below = levels[depth + 1]
            size += np.bincount(below.parent, sizes[depth + 1], minlength=len(size)).astype(np.int64)
            inner = np.flatnonzero(level.operator >= 0)
            value[inner] = evaluate(level.operator[inner], below.parent, values[depth + 1])
        sizes[depth], values[depth] = size, value
    # From the root down: where each node's first token stands in the row of all trees.
    row_starts = np.concatenate([[0], np.cumsum(sizes[0])])
    tokens = np.zeros(row_starts[-1], dtype=np.uint8)
    start = row_starts[:-1]
    for depth, level in enumerate(levels):
        if depth:
            ends = np.cumsum(sizes[depth])
            first = np.flatnonzero(np.diff(level.parent, prepend=-1))
            before = (ends - sizes[depth])[first]  # tokens at this depth ahead of a node's eldest child
            counts = np.diff(np.append(first, len(level.parent)))
            start = start[level.parent] + 1 + ends - sizes[depth] - np.repeat(before, counts)
        is_inner = level.operator >= 0
        tokens[start] = np.where(is_inner, OPERATOR + level.operator, DIGIT + level.digit)
        tokens[(start + sizes[depth] - 1)[is_inner]] = END
    return [
        (tokens[row_starts[row] : row_starts[row + 1]], int(values[0][row]))
        for row in range(len(levels[0].tree))
    ]


def evaluate(operator: np.ndarray, parent: np.ndarray, value: np.ndarray) -> np.ndarray:
    """What each operator makes of its arguments; `parent` is sorted and names each operator at least once."""
    first = np.flatnonzero(np.diff(parent, prepend=-1))
    counts = np.diff(np.append(first, len(parent)))
    ordered = value[np.lexsort((value, parent))]
    lower, upper = ordered[first + (counts - 1) // 2], ordered[first + counts // 2]
    results = np.stack([
        ordered[first],
        ordered[first + counts - 1],
        (lower + upper) // 2,
        np.add.reduceat(value, first) % 10,
    ])  # fmt: skip
    return results[operator, np.arange(len(operator))]


def source(tokens: np.ndarray) -> str:
    """An expression as the original's files have it: `( ( ( [MAX 2 ) 9 ) ] )`, a pair of parentheses an argument."""
    pieces: list[str] = []
    num_arguments: list[int] = []  # of the operators still open, read from the end
    for token in reversed(tokens.tolist()):
        if token == END:
            pieces.append("] ) )" if num_arguments else "] )")
            if num_arguments:
                num_arguments[-1] += 1
            num_arguments.append(0)
        elif token >= OPERATOR:
            pieces.append("( " * (num_arguments.pop() + 1) + WORDS[token])
        else:
            num_arguments[-1] += 1
            pieces.append(f"{WORDS[token]} )")
    return " ".join(reversed(pieces))


def write_tsv(task: Task, folder: Path) -> None:
    """The three splits as the original names and writes them: `basic_{train,val,test}.tsv`."""
    for name, examples in (("train", task.train), ("val", task.validation), ("test", task.test)):
        with (folder / f"basic_{name}.tsv").open("w", encoding="utf-8") as file:
            file.write("Source\tTarget\n")
            for row in range(len(examples)):
                file.write(
                    f"{source(examples.inputs[row, : examples.lengths[row]])}\t{examples.labels[row]}\n"
                )
