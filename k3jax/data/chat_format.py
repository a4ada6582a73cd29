"""Which chat format goes with a tokenizer: K3's, or that of the models before it."""

from __future__ import annotations

from collections.abc import Sequence

from k3jax.data import chat, chat_k2
from k3jax.data.conversation import Conversation
from k3jax.data.tokenizer import Tokenizer


def is_before_k3(tokenizer: Tokenizer) -> bool:
    """Whether its special tokens are K2's."""
    return '<|im_assistant|>' in tokenizer.special_tokens


def chat_prompt(
    tokenizer: Tokenizer,
    conversation: Conversation,
    image_sizes: Sequence[tuple[int, int]] = (),
    max_ids: int | None = None,
) -> chat.Prompt:
    """The prompt of a conversation in the format of the tokenizer's model.

    Args:
      image_sizes: (width, height) of each image's file, by its index.

    Raises:
      ChatError: a conversation that has no prompt. PromptTooLong: more than `max_ids` tokens.
    """
    render = chat_k2.render if is_before_k3(tokenizer) else chat.render
    return chat.encode(tokenizer, render(conversation, image_sizes), max_ids)
