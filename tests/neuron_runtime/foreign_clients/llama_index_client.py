"""LlamaIndex: pictures in chats and in Responses, whole and streamed."""

from __future__ import annotations

import sys

from llama_index.core.base.llms.types import ChatMessage, ImageBlock, TextBlock
from llama_index.llms.openai_like import OpenAILike, OpenAILikeResponses

url, name, RED, BLUE, NUM_TOKENS = sys.argv[1:]
to = {"api_base": url, "api_key": "any", "model": name, "max_retries": 0}
for model in (OpenAILike(is_chat_model=True, **to), OpenAILikeResponses(**to)):
    for picture, color in ((RED, "red"), (BLUE, "blue")):
        asked = [ChatMessage(role="user", blocks=[TextBlock(text="What color?"), ImageBlock(url=picture)])]
        answer = model.chat(asked)
        assert answer.message.content == color, answer
        usage = answer.raw.usage
        assert NUM_TOKENS in {str(getattr(usage, key, "")) for key in ("prompt_tokens", "input_tokens")}, usage
        *_, streamed = model.stream_chat(asked)
        assert streamed.message.content == color, streamed
