"""The Python SDK of the 2.x line as a client in legacy mode (it initializes; no probe for the
stateless revision), or with `auto` in that one which asks for the stateless revision first.
Usage: py2.py URL [auto] (see README.md).
"""

import sys
from contextlib import asynccontextmanager
from typing import Any, AsyncIterator

import mcp_types as types
from mcp import Client
from mcp.client.streamable_http import streamable_http_client
from mcp.shared._httpx_utils import create_mcp_http_client

from driver import Inbox, Wire, drive


class Session:
    def __init__(self, client: Client, inbox: Inbox) -> None:
        self._client = client
        self._inbox = inbox
        self.protocol = client.protocol_version
        info = client.server_info
        self.server = {} if info is None else info.model_dump(mode="json", exclude_none=True)

    async def call(self, command: dict[str, Any]) -> types.CallToolResult:
        timeout_ms = command.get("timeout_ms")
        return await self._client.call_tool(
            command["tool"],
            command.get("args", {}),
            read_timeout_seconds=None if timeout_ms is None else timeout_ms / 1000,
            # Declared only when wanted: a request carries a progress token exactly then.
            progress_callback=self._progressed if command.get("progress") else None,
            meta=command.get("meta"),
        )

    async def _progressed(self, progress: float, *_: Any) -> None:
        self._inbox.progress.append(progress)

    async def listen(self, uri: str) -> None:
        """A stateless client listens; one with a session subscribes, and hears of tools anyway."""
        if self.protocol != "2026-07-28":
            await self._client.subscribe_resource(uri)
            return
        self._listening = self._client.listen(tools_list_changed=True, resource_subscriptions=[uri])
        await self._listening.__aenter__()

    async def list_page(self, cursor: str | None) -> tuple[list[str], str | None]:
        listed = await self._client.list_tools(cursor=cursor)
        return [tool.name for tool in listed.tools], listed.next_cursor


@asynccontextmanager
async def open_session(url: str, wire: Wire, inbox: Inbox) -> AsyncIterator[Session]:
    async def elicit(_context: Any, _params: Any) -> types.ElicitResult:
        return types.ElicitResult.model_validate(await inbox.elicit())

    async def sample(_context: Any, _params: Any) -> types.CreateMessageResult:
        return types.CreateMessageResult.model_validate(await inbox.sample())

    async def received(message: Any) -> None:
        if not isinstance(message, Exception):
            inbox.received(message)

    async with create_mcp_http_client() as http_client:
        wire.watch(http_client)
        async with Client(
            streamable_http_client(url, http_client=http_client),
            mode=sys.argv[2] if len(sys.argv) > 2 else "legacy",
            elicitation_callback=elicit,
            sampling_callback=sample,
            message_handler=received,
        ) as client:
            yield Session(client, inbox)


drive(open_session)
