"""The Python SDK of the 1.x line as a client. Usage: py1.py URL (see README.md). A URL that ends in
`/sse` is spoken to over HTTP+SSE (2024-11-05)."""

from contextlib import asynccontextmanager
from datetime import timedelta
from typing import Any, AsyncIterator
from urllib.parse import urlparse

from mcp import ClientSession, types
from mcp.client.sse import sse_client
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

    async def sample(_context: Any, _params: Any) -> types.CreateMessageResult:
        return types.CreateMessageResult.model_validate(await inbox.sample())

    async def received(message: Any) -> None:
        if isinstance(message, types.ServerNotification):
            inbox.received(message.root)

    def watched(**options: Any) -> Any:
        http_client = create_mcp_http_client(**options)
        wire.watch(http_client)
        return http_client

    @asynccontextmanager
    async def streams() -> AsyncIterator[tuple[Any, Any]]:
        if urlparse(url).path.endswith("/sse"):
            async with sse_client(url, httpx_client_factory=watched) as (reader, writer):
                yield reader, writer
            return
        async with watched() as http_client:
            async with streamable_http_client(url, http_client=http_client) as (reader, writer, _):
                yield reader, writer

    async with (
        streams() as (reader, writer),
        ClientSession(
            reader,
            writer,
            elicitation_callback=elicit,
            sampling_callback=sample,
            message_handler=received,
        ) as session,
    ):
        yield Session(session, await session.initialize())


drive(open_session)
