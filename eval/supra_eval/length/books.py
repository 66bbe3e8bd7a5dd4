"""Whole books as token sequences of one length."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import xxhash
from torch import Tensor

from supra.config import Data
from supra.errors import UserError
from supra.train.documents import read_documents
from supra.train.sources import find_sources


def read_books(
    data: Sequence[str], tokenizer: Any, length: int, max_sequences: int
) -> tuple[Tensor, list[str]]:
    """Sequences [N, length] from the first `max_sequences` texts (several from each where there are fewer), and names.

    A text is read whole, its hard-wrapped lines joined, tokenised without special tokens; its sequences do not
    overlap and are spread evenly over it, the first one from its beginning.

    Raises:
        UserError: a text that cannot be read or has fewer than `length` tokens; each is named with what it has.
    """
    if max_sequences < 1:
        raise UserError(f"--max-sequences {max_sequences}", "is out of range", "Use at least 1")
    settings = Data(train=tuple(data), unwrap=True)
    try:
        sources, _ = find_sources(settings)
        sources = sources[:max_sequences]
        texts = [tokenise("\n\n".join(read_documents(source, settings)), tokenizer) for source in sources]
    except UserError as error:
        raise UserError(error.thing.replace("data.train", "--data"), error.reason, error.mend) from None
    names = [source.name for source in sources]
    short = {name: len(ids) for name, ids in zip(names, texts, strict=True) if len(ids) < length}
    if short:
        listed = ", ".join(f"{name} has {count:,}" for name, count in list(short.items())[:5])
        more = f" and {len(short) - 5} more" if len(short) > 5 else ""
        fitting = len(texts) - len(short)
        mend = f"Leave {'it' if len(short) == 1 else 'them'} out of --data, or use shorter --contexts"
        raise UserError(
            f"{len(short)} of {len(short) + fitting} texts",
            f"are shorter than the {length:,} tokens that are read (the longest context, and 15 x 256 more where "
            f"it slides): {listed}{more}",
            mend,
        )
    per_text = max(1, max_sequences // len(texts))
    sequences = []
    for ids in texts:
        available = ids.shape[0] // length
        count = min(per_text, available)
        sequences += [ids[i * available // count * length :][:length] for i in range(count)]
    return torch.stack(sequences), names


def tokenise(text: str, tokenizer: Any) -> Tensor:
    """Token ids [T] without special tokens."""
    return torch.tensor(tokenizer(text, add_special_tokens=False, verbose=False).input_ids, dtype=torch.int64)


def hash_of(ids: Tensor) -> str:
    """What identifies the tokens of a measurement."""
    return xxhash.xxh3_128(ids.contiguous().numpy().tobytes()).hexdigest()
