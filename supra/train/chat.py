"""Chats as token ids by the tokenizer's own template, and which of these tokens are answers.

Where the template marks what the assistant generates (`{% generation %}`), the marks say it. Otherwise an answer is
what the template adds when a conversation that ends with the prompt for it (`add_generation_prompt`) goes on with the
answer: its text and the end of its turn. That needs each of these beginnings to be the beginning of the whole chat,
token by token, which is checked.
"""

import re
from typing import Any

from jinja2 import TemplateError

from supra.errors import UserError

_MARKS = re.compile(r"\{%-?\s*generation\s*-?%\}")


class ChatEncoder:
    """Call it with a row's messages to get their ids and, for each id, whether it is part of an answer.

    Raises:
        UserError: the tokenizer has no chat template.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.template = chat_template(tokenizer)

    def __call__(self, messages: Any, where: str) -> tuple[list[int], list[bool]]:
        """`messages`: dictionaries with `role` and `content`; `where` is what errors call the row.

        Raises:
            UserError: these are no messages, the template refuses them, or nothing in them is an answer.
        """
        _check(messages, where)
        if _MARKS.search(self.template):
            rendered = self._render(messages, where, return_assistant_tokens_mask=True)
            ids, answers = rendered["input_ids"], [mark == 1 for mark in rendered["assistant_masks"]]
        else:
            ids = self._render(messages, where)["input_ids"]
            answers = self._added_by_answers(messages, ids, where)
        if not any(answers):
            raise UserError(
                where,
                "no message of it is an assistant's answer",
                "Remove that row: nothing is learned from it.",
            )
        return ids, answers

    def _added_by_answers(self, messages: list[dict[str, Any]], ids: list[int], where: str) -> list[bool]:
        answers = [False] * len(ids)
        for number, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            if number == 0:
                raise UserError(
                    where, "it begins with an answer", "Put a message before it or remove that row."
                )
            prompt = self._render(messages[:number], where, add_generation_prompt=True)["input_ids"]
            answered = self._render(messages[: number + 1], where)["input_ids"]
            if answered[: len(prompt)] != prompt or ids[: len(answered)] != answered:
                raise UserError(
                    f"{where}, message {number}",
                    "by the tokenizer's chat template, tokens before the answer change when it is added, so that it "
                    "cannot be told which are its own",
                    "Use a chat template that marks them with {% generation %}.",
                )
            answers[len(prompt) : len(answered)] = [True] * (len(answered) - len(prompt))
        return answers

    def _render(self, messages: list[dict[str, Any]], where: str, **options: bool) -> Any:
        try:
            # verbose=False: a chat longer than the model's context is meant to be cut by the packing
            return self.tokenizer.apply_chat_template(
                messages, return_dict=True, tokenizer_kwargs={"verbose": False}, **options
            )
        except (TemplateError, TypeError, ValueError) as error:
            raise UserError(
                where, f"the tokenizer's chat template refuses it ({error})", "Correct or remove that row."
            ) from None


def chat_template(tokenizer: Any) -> str:
    """The tokenizer's chat template.

    Raises:
        UserError: it has none.
    """
    try:
        return str(tokenizer.get_chat_template())
    except ValueError:
        raise UserError(
            "data.messages_field",
            "the model's tokenizer has no chat template",
            "Use an instruction-tuned model, or leave it out and train on text.",
        ) from None


def _check(messages: Any, where: str) -> None:
    if not isinstance(messages, list) or not messages:
        kind = "empty" if isinstance(messages, list) else type(messages).__name__
        raise UserError(where, f"the field is {kind}, not a list of messages", "Set data.messages_field.")
    for number, message in enumerate(messages):
        missing = {"role", "content"} - (message.keys() if isinstance(message, dict) else set())
        if missing:
            raise UserError(
                f"{where}, message {number}",
                f"it has no {' and no '.join(sorted(missing, reverse=True))}",
                "A message is {role: …, content: …}.",
            )
