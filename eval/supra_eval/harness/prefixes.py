"""Which tokens of many requests are read once: a tree of shared prefixes, worth its states or not built.

Notable: no torch here. A segment is shared only where that saves enough tokens, because each shared end costs a state
to keep and to copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Request:
    """Score `targets` after the tokens `inputs`: position `first + i` of the inputs predicts `targets[i]`.

    The last target is not among the inputs, so `first + len(targets) == len(inputs)`.
    """

    inputs: tuple[int, ...]
    targets: tuple[int, ...]

    @property
    def first(self) -> int:
        return len(self.inputs) - len(self.targets)


@dataclass
class Readout:
    """The part of a request's targets that one segment predicts: `targets[i]` at column `column + i` of it."""

    request: int
    column: int
    targets: tuple[int, ...]


@dataclass
class Segment:
    """Tokens read from the state after their parent segment, from position `start` of the sequence."""

    tokens: tuple[int, ...]
    start: int
    children: list[Segment] = field(default_factory=list)
    readouts: list[Readout] = field(default_factory=list)


@dataclass
class _Node:
    """A branching of the full tree: the first `depth` tokens of input number `item`."""

    item: int
    depth: int
    children: list[_Node] = field(default_factory=list)
    ends_here: list[int] = field(default_factory=list)


def plan_segments(requests: Sequence[Request], min_saved_tokens: int | None) -> list[Segment]:
    """Segments without a parent, whose trees together read every request's inputs.

    A shared segment of n tokens with b branches saves n·(b − 1) tokens and is made where that is at least
    `min_saved_tokens`; None shares nothing but wholly equal inputs.
    """
    by_inputs: dict[tuple[int, ...], list[int]] = {}
    for number, request in enumerate(requests):
        if not request.targets or request.first < 0:
            raise ValueError(f"request {number}: its targets must be 1 to {len(request.inputs)} tokens long")
        by_inputs.setdefault(request.inputs, []).append(number)
    items = sorted(by_inputs)
    roots: list[Segment] = []
    # (node, where its segment starts, the path of segments above it)
    waiting: list[tuple[_Node, int, tuple[Segment, ...]]] = [(_tree(items), 0, ())]
    while waiting:
        node, start, path = waiting.pop()
        branches = len(node.children) + len(node.ends_here)
        saved = (node.depth - start) * (branches - 1)
        shared = node.children and min_saved_tokens is not None and saved >= min_saved_tokens
        if shared and node.depth > start:
            path, start = _grow(items[node.item], start, node.depth, path, roots), node.depth
        waiting += [(child, start, path) for child in node.children]
        for item in node.ends_here:
            inputs = items[item]
            # Where a shared segment ends exactly here, nothing is left to read.
            whole = path if start == len(inputs) else _grow(inputs, start, len(inputs), path, roots)
            for number in by_inputs[inputs]:
                _read_along(whole, number, requests[number])
    return roots


def shorten(segment: Segment, length: int) -> None:
    """Keep `length` tokens of a segment with children; each child reads the rest again, the first answers for it."""
    rest, segment.tokens = segment.tokens[length:], segment.tokens[:length]
    if not rest:
        return
    for child in segment.children:
        child.tokens, child.start = rest + child.tokens, child.start - len(rest)
        for readout in child.readouts:
            readout.column += len(rest)
    kept: list[Readout] = []
    for readout in segment.readouts:
        inside = min(max(length - readout.column, 0), len(readout.targets))
        if inside:
            kept.append(Readout(readout.request, readout.column, readout.targets[:inside]))
        if inside < len(readout.targets):
            column = readout.column + inside - length
            segment.children[0].readouts.append(Readout(readout.request, column, readout.targets[inside:]))
    segment.readouts = kept


def num_read_tokens(roots: Sequence[Segment]) -> int:
    """Tokens that all segments together read."""
    total, waiting = 0, list(roots)
    while waiting:
        segment = waiting.pop()
        total += len(segment.tokens)
        waiting += segment.children
    return total


def _tree(items: Sequence[tuple[int, ...]]) -> _Node:
    """The compressed prefix tree of sorted inputs, built from neighbours alone and without recursion."""
    root = _Node(0, 0)
    open_nodes = [root]
    previous: tuple[int, ...] = ()
    for number, item in enumerate(items):
        shared = _shared_length(previous, item)
        closed = None
        while open_nodes[-1].depth > shared:
            closed = open_nodes.pop()
        if open_nodes[-1].depth < shared:
            assert closed is not None
            between = _Node(number, shared, [closed])
            open_nodes[-1].children[-1] = between
            open_nodes.append(between)
        if len(item) == open_nodes[-1].depth:
            open_nodes[-1].ends_here.append(number)
        else:
            leaf = _Node(number, len(item), ends_here=[number])
            open_nodes[-1].children.append(leaf)
            open_nodes.append(leaf)
        previous = item
    return root


def _shared_length(a: tuple[int, ...], b: tuple[int, ...]) -> int:
    """Length of the longest common prefix; by halves, for comparing slices is much faster than a loop."""
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def _grow(
    inputs: tuple[int, ...], start: int, end: int, path: tuple[Segment, ...], roots: list[Segment]
) -> tuple[Segment, ...]:
    segment = Segment(inputs[start:end], start)
    (path[-1].children if path else roots).append(segment)
    return (*path, segment)


def _read_along(path: tuple[Segment, ...], number: int, request: Request) -> None:
    """Give every segment of the path its part of the request's targets."""
    first, end = request.first, len(request.inputs)
    for segment in reversed(path):
        low, high = max(first, segment.start), min(end, segment.start + len(segment.tokens))
        if low >= high:
            break
        part = request.targets[low - first : high - first]
        segment.readouts.append(Readout(number, low - segment.start, part))
