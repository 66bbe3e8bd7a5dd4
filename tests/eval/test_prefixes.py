"""The plan of shared prefixes: every request is read whole along its path, and nothing is read twice without need."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from supra_eval.harness.prefixes import Request, Segment, num_read_tokens, plan_segments, shorten


@st.composite
def requests(draw: st.DrawFn) -> list[Request]:
    made = []
    for _ in range(draw(st.integers(1, 12))):
        whole = tuple(draw(st.lists(st.integers(0, 2), min_size=2, max_size=12)))
        made.append(Request(whole[:-1], whole[draw(st.integers(1, len(whole) - 1)) :]))
    return made


def paths(roots: list[Segment]) -> list[tuple[Segment, ...]]:
    found, waiting = [], [(root,) for root in roots]
    while waiting:
        path = waiting.pop()
        found.append(path)
        waiting += [(*path, child) for child in path[-1].children]
    return found


@given(requests(), st.sampled_from([None, 0, 1, 3, 100]), st.integers(0, 12))
def test_every_target_is_predicted_once_after_its_own_prefix(
    asked: list[Request], min_saved_tokens: int | None, cut: int
) -> None:
    found: dict[int, dict[int, int]] = {number: {} for number in range(len(asked))}
    roots = plan_segments(asked, min_saved_tokens)
    for path in paths(roots) if cut else []:
        if path[-1].children:
            shorten(path[-1], max(1, len(path[-1].tokens) - cut))
    for path in paths(roots):
        tokens = tuple(token for segment in path for token in segment.tokens)
        segment = path[-1]
        assert segment.tokens
        assert segment.start == len(tokens) - len(segment.tokens)
        for readout in segment.readouts:
            request = asked[readout.request]
            for i, target in enumerate(readout.targets):
                position = segment.start + readout.column + i
                assert tokens[: position + 1] == request.inputs[: position + 1]
                assert position not in found[readout.request]
                found[readout.request][position] = target
    for number, request in enumerate(asked):
        expected = {request.first + i: target for i, target in enumerate(request.targets)}
        assert found[number] == expected


@given(requests())
def test_sharing_everything_reads_each_distinct_prefix_once(asked: list[Request]) -> None:
    prefixes = {request.inputs[: n + 1] for request in asked for n in range(len(request.inputs))}
    assert num_read_tokens(plan_segments(asked, 0)) == len(prefixes)


@given(requests())
def test_sharing_nothing_reads_each_distinct_input_once(asked: list[Request]) -> None:
    distinct = {request.inputs for request in asked}
    assert num_read_tokens(plan_segments(asked, None)) == sum(map(len, distinct))


@given(requests(), st.integers(1, 30))
def test_a_shared_segment_saves_what_it_must(asked: list[Request], min_saved_tokens: int) -> None:
    for path in paths(plan_segments(asked, min_saved_tokens)):
        segment = path[-1]
        if segment.children:
            own_end = sum(
                1 for request in {a.inputs for a in asked}
                if len(request) == segment.start + len(segment.tokens)
                and request == tuple(token for part in path for token in part.tokens)
            )  # fmt: skip
            branches = len(segment.children) + own_end
            # A branch that was itself not worth a state hangs its own branches here, so there may be more of them.
            assert len(segment.tokens) * (branches - 1) >= min_saved_tokens


def test_few_shot_questions_share_their_shots_and_choices_their_question() -> None:
    shots, questions = tuple(range(100, 150)), [tuple(range(n, n + 8)) for n in (200, 300, 400)]
    asked = [Request((*shots, *question), (choice,)) for question in questions for choice in (1, 2, 3, 4)]
    (root,) = plan_segments(asked, 24)
    assert root.tokens == shots
    assert sorted(child.tokens for child in root.children) == questions
    assert all(len(child.readouts) == 4 for child in root.children)
    assert num_read_tokens([root]) == 50 + 3 * 8


def test_a_thousand_prefixes_of_one_another_do_not_exhaust_the_stack() -> None:
    asked = [Request(tuple(range(n)), (n,)) for n in range(1, 1500)]
    assert num_read_tokens(plan_segments(asked, 0)) == 1499


def test_a_request_without_targets_is_refused() -> None:
    with pytest.raises(ValueError, match="request 0"):
        plan_segments([Request((1, 2), ())], 0)
