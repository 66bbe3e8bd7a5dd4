"""The official metrics of SCROLLS, computed here: the benchmark's own evaluator downloads code when it runs.

SCROLLS (arXiv 2201.03533), section 3.2: token F1 and exact match after SQuAD's normalisation, and the geometric mean of
corpus-mean ROUGE-1/2/L F-measures without a stemmer; of several references the best counts, for each example and each
ROUGE on its own. Metrics are fractions of one; a `Score` is × 100.

Notable: standard errors are taken over documents, not over questions, for the questions of one document are not
independent; where every document has one question, they are the usual ones.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from typing import Any

import numpy as np

from supra.errors import UserError
from supra_eval.results import Score

from .data import QASPER_YES_NO, SCROLLS, YES_NO, Example, Task

ROUGES = ("rouge1", "rouge2", "rougeL")
_ARTICLES = re.compile(r"\b(a|an|the)\b")
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalize(text: str) -> str:
    """SQuAD 1.1's normalisation: lower case, no punctuation, no articles, single spaces."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_NO_PUNCTUATION)).split())


def token_f1(prediction: str, references: Sequence[str]) -> float:
    """Best F1 of the bags of tokens over the references; without a common token it is 0, also for two empty texts."""

    def f1(reference: str) -> float:
        predicted, wanted = normalize(prediction).split(), normalize(reference).split()
        common = (Counter(predicted) & Counter(wanted)).total()
        return 2 * common / (len(predicted) + len(wanted)) if common else 0.0

    return max(f1(reference) for reference in references)


def exact_match(prediction: str, references: Sequence[str]) -> float:
    """1 where the normalised prediction equals a normalised reference, otherwise 0."""
    return float(any(normalize(prediction) == normalize(reference) for reference in references))


def rouge(prediction: str, references: Sequence[str]) -> tuple[float, float, float]:
    """F-measures of ROUGE-1, ROUGE-2 and ROUGE-L, each the best over the references.

    Raises:
        UserError: the package `rouge-score` is not installed.
    """
    best = _rouge_scorer().score_multi(list(references), prediction)
    one, two, longest = (float(best[name].fmeasure) for name in ROUGES)
    return one, two, longest


def geometric_mean(scores: np.ndarray) -> float:
    """Geometric mean over columns of the column means of [N, M]: SCROLLS' score of a summarisation task."""
    return float(np.prod(scores.mean(axis=0)) ** (1 / scores.shape[1]))


def macro_f1(pairs: np.ndarray) -> float:
    """Mean F1 of the classes 0 and 1 over [N, 2] of (predicted, gold); a class that never occurs counts 0."""
    predicted, gold = pairs[:, 0], pairs[:, 1]
    scores = []
    for label in (0, 1):
        hits = np.sum((predicted == label) & (gold == label))
        named = np.sum(predicted == label) + np.sum(gold == label)
        scores.append(2 * hits / named if named else 0.0)
    return float(np.mean(scores))


def mean_stderr(values: Sequence[float], documents: Sequence[str]) -> float | None:
    """Standard error of the mean of `values` when whole documents are drawn; None for a single document.

    sqrt(C/(C-1) * sum over documents (sum of their deviations)^2) / N, for C documents and N values: with one value a
    document this is the sample standard deviation over sqrt(N).
    """
    groups = _groups(documents)
    if len(groups) < 2:
        return None
    deviations = np.asarray(values, dtype=float) - np.mean(values)
    sums = np.array([deviations[rows].sum() for rows in groups])
    return float(np.sqrt(len(groups) / (len(groups) - 1) * np.sum(sums**2)) / len(values))


def bootstrap_stderr(
    statistic: Callable[[np.ndarray], float], rows: np.ndarray, documents: Sequence[str], seed: int,
    resamples: int = 1000,
) -> float | None:  # fmt: skip
    """Standard deviation of `statistic(rows [N, M])` when documents are drawn anew; None for a single document."""
    groups = _groups(documents)
    if len(groups) < 2:
        return None
    generator = np.random.default_rng(seed)
    drawn = (generator.integers(len(groups), size=len(groups)) for _ in range(resamples))
    values = [statistic(rows[np.concatenate([groups[i] for i in picks])]) for picks in drawn]
    return float(np.std(values, ddof=1))


def _groups(documents: Sequence[str]) -> list[np.ndarray]:
    """Row numbers of each distinct document."""
    rows: dict[str, list[int]] = {}
    for row, document in enumerate(documents):
        rows.setdefault(document, []).append(row)
    return [np.array(numbers) for numbers in rows.values()]


@cache
def _rouge_scorer() -> Any:
    try:
        from rouge_score.rouge_scorer import RougeScorer
    except ImportError as error:
        raise UserError(
            "the package rouge-score", f"is not there ({error})", "pip install 'supra-lm[eval]'"
        ) from error
    return RougeScorer(list(ROUGES), use_stemmer=False)


def require_rouge() -> None:
    """Raise a UserError unless `rouge` can be computed here."""
    _rouge_scorer()


def score_task(task: Task, predicted: Sequence[tuple[Example, str]], model: str, context_tokens: int,
          seed: int) -> list[Score]:  # fmt: skip
    """The task's metric, for yes/no questions also macro F1; nothing where a label is hidden."""
    if not all(example.references for example, _ in predicted):
        return []
    documents = [example.document for example, _ in predicted]
    chance: float | None

    def result(metric: str, value: float, stderr: float | None, chance: float | None) -> Score:
        percent = [None if number is None else 100 * number for number in (stderr, chance)]
        return Score(task.name, metric, model, 100 * value, percent[0], len(predicted), context_tokens,
                     chance=percent[1])  # fmt: skip

    def resampled(metric: str, statistic: Callable[[np.ndarray], float], rows: Any, chance: float | None
                  ) -> Score:  # fmt: skip
        rows = np.array(rows)
        stderr = bootstrap_stderr(statistic, rows, documents, seed)
        return result(metric, statistic(rows), stderr, chance)

    if task.metric == "rouge":
        rouges = [rouge(text, example.references) for example, text in predicted]
        return [resampled("rouge_geometric_mean", geometric_mean, rouges, None)]
    compare = token_f1 if task.metric == "f1" else exact_match
    values = [compare(text, example.references) for example, text in predicted]
    golds = Counter(normalize(example.references[0]) for example, _ in predicted)
    majority = golds.most_common(1)[0]
    chance = None
    if task.metric == "accuracy" or task.folder == "contract_nli":
        chance = majority[1] / len(predicted)  # always the commonest answer
    elif task.folder == "quality":
        chance = 0.25  # one of four options
    mean = float(np.mean(values))
    scores = [result(task.metric, mean, mean_stderr(values, documents), chance)]
    if task is QASPER_YES_NO:
        pairs = [[YES_NO.index(text), YES_NO.index(example.references[0])] for example, text in predicted]
        constant = [[YES_NO.index(majority[0]), gold] for _, gold in pairs]
        scores.append(resampled("macro_f1", macro_f1, pairs, macro_f1(np.array(constant))))
    return scores


def overall(scores: Iterable[Score], model: str, context_tokens: int) -> Score | None:
    """SCROLLS' own score, the mean of the seven; None unless all seven are there."""
    names = {task.name for task in SCROLLS}
    parts = [part for part in scores if part.task in names and part.model == model
             and part.context_tokens == context_tokens]  # fmt: skip
    if {part.task for part in parts} != names:
        return None
    errors = [part.stderr for part in parts]
    known = [error for error in errors if error is not None]
    stderr = float(np.sqrt(np.sum(np.square(known))) / 7) if len(known) == 7 else None
    value = float(np.mean([part.value for part in parts]))
    return Score("scrolls", "scrolls_score", model, value, stderr,
                 sum(part.num_samples for part in parts), context_tokens)  # fmt: skip
