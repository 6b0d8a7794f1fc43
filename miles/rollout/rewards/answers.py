"""Rewards that compare the answer with the label as text."""

import re
import string
from collections import Counter

from miles.config.root import MilesConfig
from miles.contracts.types import Sample

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


def label_of(sample: Sample) -> str:
    """The label. Raises ``ValueError`` when the row has none."""
    if sample.prompt.label is None:
        raise ValueError("the row has no label")
    return sample.prompt.label


def exact_match(sample: Sample, answer: str, config: MilesConfig) -> float:
    """1 when answer and label are the same text but for white space around it, else 0."""
    return float(answer.strip() == label_of(sample).strip())


def f1(sample: Sample, answer: str, config: MilesConfig) -> float:
    """Harmonic mean of the precision and recall of words, as in the SQuAD evaluation: lower case,
    without punctuation and articles. Two empty texts are equal: 1."""
    given, wanted = _words(answer), _words(label_of(sample))
    if not given or not wanted:
        return float(given == wanted)
    common = sum((Counter(given) & Counter(wanted)).values())
    return 2 * common / (len(given) + len(wanted))


def _words(text: str) -> list[str]:
    return _ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split()
