"""Documents as token ids, in the order of their sources, from any place on."""

from collections.abc import Iterator
from itertools import islice
from typing import Any, NamedTuple

from supra.config import Data
from supra.train.chat import ChatEncoder
from supra.train.documents import document_of, read_rows
from supra.train.sources import Source


class Place(NamedTuple):
    """A row of a source among the sources."""

    source: int
    row: int


START = Place(0, 0)


class Document(NamedTuple):
    """`ids` with eos at their end, if the tokenizer has one; `answers`: which are an answer's, empty for plain text."""

    ids: list[int]
    answers: list[bool]
    place: Place


def encode(sources: list[Source], data: Data, tokenizer: Any, first: Place = START) -> Iterator[Document]:
    """The documents of `sources` from the row `first` on; a chat is as the chat template has it.

    Raises:
        UserError: a source cannot be read, or a chat does not fit the tokenizer's template.
    """
    rows = (
        (Place(number, row.number), row)
        for number in range(first.source, len(sources))
        for row in read_rows(sources[number], data, first.row if number == first.source else 0)
    )
    if data.messages_field is not None:
        encode_chat = ChatEncoder(tokenizer)
        for place, row in rows:
            yield Document(*encode_chat(row.value, row.where), place)
        return
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    texts = ((text, place) for place, row in rows if (text := document_of(row, data)))
    while batch := list(islice(texts, 64)):
        # verbose=False: a document longer than the model's context is meant to be cut by the packing
        encoded = tokenizer([text for text, _ in batch], add_special_tokens=True, verbose=False)["input_ids"]
        for ids, (_, place) in zip(encoded, batch, strict=True):
            yield Document(ids if ids[-1:] == end else ids + end, [], place)
