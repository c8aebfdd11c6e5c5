"""Conversations as chunks: chat-templated text with the assistant's tokens marked.

Each conversation is a sequence of its own, formatted by the model's chat template and tokenized with special tokens. It
is cut after the context. The assistant's tokens are what a model would have generated: those after the generation
prompt, up to and including the token that ends the turn. To find them, the template formats the messages before each
turn with its generation prompt. The result has to be the beginning of the whole conversation.
"""

from __future__ import annotations

import bisect
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from quantkit.errors import DataError, QuantkitError
from quantkit.evaluate.corpus import Conversation, conversations
from quantkit.evaluate.text import Chunks
from quantkit.formats.kld.scored_tokens import ScoredTokens

if TYPE_CHECKING:
    from quantkit.tokenizers.tokenizer import Tokenizer


def chat_chunks(
    tokenizer: Tokenizer,
    path: str | os.PathLike[str],
    n_ctx: int,
    score: str = "assistant",
    limit: int | None = None,
    by_category: bool = False,
) -> Chunks:
    """The conversations of a file as chunks, one each, of at most `n_ctx` tokens.

    score         "assistant": the assistant's tokens are scored; "all": all tokens of the conversation
    limit         use the first conversations only; None: all
    by_category   the chunks are ordered by category, and each has its own as label

    Chunks are as long as the longest conversation; shorter ones are filled with copies of their last token, which no
    scored token sees. Raises DataError for a file without conversations and, with `by_category`, for a conversation
    without a category; QuantkitError for a template that hides which tokens are the assistant's.
    """
    found = conversations(path)[:limit]
    if by_category:
        for c in found:
            if c.category is None:
                raise DataError(f'{c.where} has no "category"; --by-category needs one on every line')
        order = list(dict.fromkeys(c.category for c in found))
        found.sort(key=lambda c: order.index(c.category))
    encoded = []
    cut = left_out = 0
    for conversation in found:
        ids, mask = _encoded(tokenizer, conversation, score)
        cut += len(ids) > n_ctx
        ids, mask = ids[:n_ctx], mask[:n_ctx]
        if mask.any():
            encoded.append((ids, mask, conversation.category or ""))
        else:
            left_out += 1
    if not encoded:
        what = "of the assistant" if score == "assistant" else "that can be scored"
        raise DataError(
            f"{path}: {len(found)} conversations without a token {what} among their first {n_ctx}; use another file or "
            "a larger -c"
        )
    notes = []
    if cut:
        notes.append(f"{path}: {cut} of {len(found)} conversations are cut after {n_ctx} tokens (-c)")
    if left_out:
        notes.append(f"{path}: {left_out} of {len(found)} conversations have no scored token and are left out")
    width = max(4, *(len(ids) for ids, _, _ in encoded))
    tokens = np.array([ids + [ids[-1]] * (width - len(ids)) for ids, _, _ in encoded], np.int32)
    mask = np.zeros(tokens.shape, np.bool_)
    for row, (_, scored, _) in zip(mask, encoded):
        row[: len(scored)] = scored
    labels = [label for _, _, label in encoded] if by_category else []
    return Chunks(tokens, tokens, str(path), choice=ScoredTokens(mask, score, True, labels), notes=tuple(notes))


def _encoded(tokenizer: Tokenizer, conversation: Conversation, score: str) -> tuple[list[int], np.ndarray]:
    """The tokens of a conversation, and bool[tokens]: which are scored."""
    messages = conversation.messages
    try:
        text = tokenizer.apply_chat_template(messages, add_generation_prompt=False)
        ids, starts, ends = tokenizer.encode_with_offsets(text)
        mask = np.ones(len(ids), np.bool_)
        if score == "assistant":
            mask = _of_assistant(tokenizer, conversation, text, ids, starts, ends)
    except QuantkitError as error:
        where = f"{conversation.where}: "
        raise type(error)(str(error) if str(error).startswith(where) else f"{where}{error}") from None
    mask[:1] = False  # nothing predicts the first token
    return ids, mask


def _of_assistant(
    tokenizer: Tokenizer, conversation: Conversation, text: str, ids: Sequence[int], starts: Sequence[int],
    ends: Sequence[int],
) -> np.ndarray:  # fmt: skip
    """bool[tokens]: those of the assistant in a formatted conversation."""
    messages, where = conversation.messages, conversation.where
    remedy = "with this template the assistant's tokens cannot be found; use --score all"
    mask = np.zeros(len(ids), np.bool_)
    for i, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        head = tokenizer.apply_chat_template(messages[:i], add_generation_prompt=True)
        if not text.startswith(head):
            raise DataError(
                f"{where}: message {i + 1}: the assistant's turn does not begin with the generation prompt: {remedy}"
            )
        upto = tokenizer.apply_chat_template(messages[: i + 1], add_generation_prompt=False)
        known = text.startswith(upto)  # templates may format the last turn otherwise than those before
        first = bisect.bisect_right(ends, len(head))  # a token may begin with the prompt's last space
        stop = bisect.bisect_left(starts, len(upto)) if known else len(ids)
        end = next((at for at in range(first, stop) if ids[at] in tokenizer.turn_end_ids), None)
        if end is None and not known:
            raise DataError(f"{where}: message {i + 1}: no token ends the assistant's turn: {remedy}")
        mask[first : stop if end is None else end + 1] = True
    return mask
