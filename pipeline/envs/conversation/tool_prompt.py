"""Tools for a chat template that knows none: described in the first message, called and answered in Hermes' format."""

import json
from typing import Any

from penstock.pipeline.envs.conversation.messages import TemplateRefused, Tools

_INSTRUCTIONS = """You may call one or more functions. These are their signatures, in <tools></tools>:
<tools>
{tools}
</tools>

For each call, write a JSON object with the function's name and arguments in <tool_call></tool_call>:
<tool_call>
{{"name": <function-name>, "arguments": <args-json-object>}}
</tool_call>"""


def without_tools(messages: list[dict[str, Any]], tools: Tools | None) -> list[dict[str, Any]]:
    """The same conversation for a template that has only system, user and assistant text."""
    made = [_as_text(message) for message in messages]
    if tools:
        described = _INSTRUCTIONS.format(tools="\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools))
        if not made:
            raise TemplateRefused("tools need a first message, which describes them")
        # Not every template takes a system message that was not there.
        pieces = [made[0]["content"], described]
        made[0] = {**made[0], "content": "\n\n".join(pieces if made[0]["role"] == "system" else pieces[::-1])}
    return _results_together(made)


def _as_text(message: dict[str, Any]) -> dict[str, Any]:
    if message["role"] == "tool":
        return {"role": "tool", "content": f"<tool_response>\n{message['content']}\n</tool_response>"}
    if not (calls := message.get("tool_calls")):
        return message
    written = [f"<tool_call>\n{json.dumps(call['function'], ensure_ascii=False)}\n</tool_call>" for call in calls]
    kept = {key: value for key, value in message.items() if key != "tool_calls"}
    return {**kept, "content": "\n".join([*([message["content"]] if message["content"] else []), *written])}


def _results_together(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Results of tools as one message of the user, since many templates want roles to alternate."""
    made: list[dict[str, Any]] = []
    joinable = False
    for message in messages:
        if message["role"] == "tool" and joinable:
            made[-1] = {"role": "user", "content": f"{made[-1]['content']}\n{message['content']}"}
        else:
            made.append({"role": "user", "content": message["content"]} if message["role"] == "tool" else message)
        joinable = message["role"] == "tool"
    return made
