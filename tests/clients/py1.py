"""The Python SDK of the 1.x line as a client. Usage: py1.py URL (see README.md)."""

from contextlib import asynccontextmanager
from datetime import timedelta
from typing import Any, AsyncIterator

from mcp import ClientSession, types
from mcp.client.streamable_http import streamable_http_client
from mcp.shared._httpx_utils import create_mcp_http_client

from driver import Inbox, Wire, drive


async def ignore_progress(*_: Any) -> None:
    """Declared only when wanted: a request carries a progress token exactly then."""


class Session:
    def __init__(self, session: ClientSession, opened: types.InitializeResult) -> None:
        self._session = session
        self.protocol = str(opened.protocolVersion)
        self.server = opened.serverInfo.model_dump(mode="json", exclude_none=True)

    async def call(self, command: dict[str, Any]) -> types.CallToolResult:
        timeout_ms = command.get("timeout_ms")
        return await self._session.call_tool(
            command["tool"],
            command.get("args", {}),
            read_timeout_seconds=None if timeout_ms is None else timedelta(milliseconds=timeout_ms),
            progress_callback=ignore_progress if command.get("progress") else None,
            meta=command.get("meta"),
        )

    async def list_page(self, cursor: str | None) -> tuple[list[str], str | None]:
        params = None if cursor is None else types.PaginatedRequestParams(cursor=cursor)
        listed = await self._session.list_tools(params=params)
        return [tool.name for tool in listed.tools], listed.nextCursor


@asynccontextmanager
async def open_session(url: str, wire: Wire, inbox: Inbox) -> AsyncIterator[Session]:
    async def elicit(_context: Any, _params: Any) -> types.ElicitResult:
        return types.ElicitResult.model_validate(await inbox.elicit())

    async def received(message: Any) -> None:
        if isinstance(message, types.ServerNotification):
            inbox.received(message.root)

    async with create_mcp_http_client() as http_client:
        wire.watch(http_client)
        async with (
            streamable_http_client(url, http_client=http_client) as (reader, writer, _),
            ClientSession(
                reader, writer, elicitation_callback=elicit, message_handler=received
            ) as session,
        ):
            yield Session(session, await session.initialize())


drive(open_session)
