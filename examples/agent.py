"""An agent as anyone writes it: the openai client, a loop, one tool. Nothing here knows that it is trained.

It answers one question, its first argument, and may use a calculator. `penstock run examples/agent.toml` runs it once for every sample.
"""

import ast
import json
import operator
import sys
from collections.abc import Callable
from typing import Any

from openai import OpenAI

TURNS = 4
OPERATORS: dict[type, Callable[[float, float], float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}
CALCULATOR = {
    "type": "function",
    "function": {
        "name": "calculate",
        "description": "The value of an arithmetic expression.",
        "parameters": {"type": "object", "properties": {"expression": {"type": "string"}}, "required": ["expression"]},
    },
}


def calculate(expression: str) -> str:
    """The value of an expression of numbers and + - * /, or what is wrong with it.

    Example:
        calculate("2 * (3 + 4)")  # -> "14"
    """
    try:
        value = _value(ast.parse(expression[:200], mode="eval").body)
        return f"{value:.10g}"
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError, OverflowError) as error:
        return f"error: {error}"


def _value(node: ast.expr) -> float:
    if isinstance(node, ast.Constant) and isinstance(node.value, int | float):
        return node.value
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        return OPERATORS[type(node.op)](_value(node.left), _value(node.right))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_value(node.operand)
    raise ValueError("only numbers and + - * / are supported")


def solve(question: str) -> str:
    """Call the model until it gives an answer in a box."""
    client = OpenAI()  # the address and the key are in the environment
    messages: list[Any] = [
        {"role": "system", "content": "Solve the problem. Use the calculator. End with the answer in the form \\boxed{number}."},
        {"role": "user", "content": question},
    ]
    answer = ""
    for _ in range(TURNS):
        message = client.chat.completions.create(model="policy", messages=messages, tools=[CALCULATOR]).choices[0].message
        messages.append(message.model_dump(exclude_none=True))
        answer = message.content or ""
        if "\\boxed{" in answer:
            break
        if not message.tool_calls:
            messages.append({"role": "user", "content": "Now give the number alone, in the form \\boxed{number}."})
        for call in message.tool_calls or []:
            try:
                result = calculate(str(json.loads(call.function.arguments)["expression"]))
            except (ValueError, KeyError) as error:
                result = f"error: write {{'expression': '...'}} ({error})"
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    return answer


if __name__ == "__main__":
    print(solve(sys.argv[1]))
