"""The agent program for verifiers: a chat with tools, in this process.

The harnesses of verifiers start a script for each rollout and fetch its dependencies from the network. This one is the same
loop without the script; every call of the model goes through the rollout's endpoint, as the contract requires.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable
from typing import Any

import httpx
import verifiers.v1 as vf
from verifiers.v1.dialects.chat import message_to_wire
from verifiers.v1.harnesses.utils.mcp import call_mcp, connect_mcp

NAME = "prime_node_harness"
DEPTH_MAX = 64
"""Nesting of a tool call's arguments."""
CALLS_MAX = 64
"""Tool calls of one answer that are sent."""
ERROR_CHARS_MAX = 200


class InProcessConfig(vf.HarnessConfig):
    """Configuration without further fields."""


class InProcess(vf.Harness[InProcessConfig]):
    """An assistant that may call the task's tools until it answers without a call."""

    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_MCP = True
    SUPPORTS_RESUME = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self,
        ctx: Any,
        trace: Any,
        runtime: Any,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: Any,
        **_: Any,
    ) -> vf.ProgramResult:
        """Run the chat of one rollout to its end."""
        system, prompt = self.resolve_prompt(data)
        messages = [{"role": "system", "content": system}] if system else []
        if isinstance(prompt, str):
            messages.append({"role": "user", "content": prompt})
        else:
            messages += [message_to_wire(message) for message in prompt or []]
        async with contextlib.AsyncExitStack() as stack:
            tools, dispatch, servers = [], {}, {}
            if mcp_urls:
                named = {name: {"url": url, "timeout": self.config.tool_timeout} for name, url in mcp_urls.items()}
                tools, dispatch, servers = await connect_mcp({"mcpServers": named}, stack)
            client = await stack.enter_async_context(httpx.AsyncClient(timeout=None))
            body: dict[str, Any] = {"model": ctx.model, "messages": messages} | ({"tools": tools} if tools else {})
            while True:
                answer = await client.post(
                    f"{endpoint.rstrip('/')}/chat/completions",
                    json=body,
                    headers={"authorization": f"Bearer {secret}"},
                )
                if answer.status_code == httpx.codes.BAD_REQUEST:  # no turn or room left: the chat so far counts
                    return vf.ProgramResult(0, "", "")
                if answer.is_error:
                    raise RuntimeError(f"the model's endpoint: {answer.status_code} {answer.text[:ERROR_CHARS_MAX]}")
                message = answer.json()["choices"][0]["message"]
                messages.append(message)
                calls = message.get("tool_calls") or ()
                if not calls:
                    return vf.ProgramResult(0, "", "")
                for number, call in enumerate(calls):
                    name = call["function"]["name"]
                    messages.append(
                        {
                            "role": "tool",
                            "tool_call_id": call["id"],
                            "name": name,
                            "content": await _result(call["function"], dispatch, servers)
                            if number < CALLS_MAX
                            else f"error: an answer may have {CALLS_MAX} calls",
                        }
                    )


async def _result(function: dict[str, Any], dispatch: dict[str, Any], servers: dict[str, Any]) -> Any:
    try:
        arguments = json.loads(function.get("arguments") or "{}")
        _require_sendable(arguments)
    except (ValueError, RecursionError) as error:  # also of a number that is too long
        return f"error: the arguments are not valid JSON ({error})"
    if function["name"] not in dispatch or not isinstance(arguments, dict):
        return f"error: there is no tool {function['name']!r}, or its arguments are not an object"
    return await call_mcp(servers, dispatch, function["name"], arguments)


def _require_sendable(arguments: Any) -> None:
    """Raise ValueError for what no tool can get: verifiers would try to send it six times, for half a minute."""
    json.dumps(arguments, ensure_ascii=False).encode()  # raises UnicodeEncodeError for a lone surrogate
    level, depth = [arguments], 0
    while level := [child for each in level for child in _children(each)]:
        depth += 1
        if depth > DEPTH_MAX:
            raise ValueError(f"they are nested more than {DEPTH_MAX} times")


def _children(value: Any) -> Iterable[Any]:
    return value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()


__all__ = ["InProcess"]
