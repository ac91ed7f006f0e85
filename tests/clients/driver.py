"""The line protocol by which a test steers one of the Python clients: JSON commands on stdin, one
JSON answer a line on stdout, everything else on stderr. README.md lists the commands.

What a client did on the wire is counted in event hooks of its HTTP client, never inferred from what
its SDK says. The session id appears on the stdout pipe only.
"""

import asyncio
import json
import os
import sys
from collections import deque
from contextlib import AbstractAsyncContextManager, suppress
from dataclasses import dataclass, field
from typing import Any, Callable, Protocol

NOTIFICATIONS_MAX = 10_000
PAGES_MAX = 100
COMMANDS_MAX = 1024
LINE_BYTES_MAX = 16 * 1024 * 1024
# After stdin has closed: how long commands already read may still take.
DRAIN_S = 10


def say(answer: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(answer, separators=(",", ":")) + "\n")
    sys.stdout.flush()


def note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


@dataclass
class Wire:
    """Counts what passes through the HTTP client."""

    initializes: int = 0
    requests: dict[str, int] = field(default_factory=lambda: {"POST": 0, "GET": 0, "DELETE": 0})
    sessions: set[str] = field(default_factory=set)
    # The id that the client used or was given last.
    session: str | None = None

    def watch(self, http_client: Any) -> None:
        http_client.event_hooks = {"request": [self._request], "response": [self._response]}

    async def _request(self, request: Any) -> None:
        self.requests[request.method] = self.requests.get(request.method, 0) + 1
        if request.method == "POST":
            body = json.loads(request.content)
            messages = body if isinstance(body, list) else [body]
            self.initializes += sum(m.get("method") == "initialize" for m in messages)
        self._see(request.headers.get("mcp-session-id"))

    async def _response(self, response: Any) -> None:
        self._see(response.headers.get("mcp-session-id"))

    def _see(self, session: str | None) -> None:
        if session is not None:
            self.sessions.add(session)
            self.session = session


class User:
    """How the user answers one kind of question."""

    def __init__(self, answer: dict[str, Any]) -> None:
        self._answer: dict[str, Any] | None = answer
        self._decided = asyncio.Event()
        self._decided.set()

    def decide(self, answer: dict[str, Any] | None) -> None:
        """``None`` leaves users undecided: their forms stay open until an answer is set."""
        self._answer = answer
        if answer is None:
            self._decided.clear()
        else:
            self._decided.set()

    async def ask(self) -> dict[str, Any]:
        while self._answer is None:
            await self._decided.wait()
        return self._answer


class Inbox:
    """What the server sent of its own accord, and how it is answered."""

    def __init__(self) -> None:
        self.notifications: deque[dict[str, Any]] = deque(maxlen=NOTIFICATIONS_MAX)
        self.requests: list[str] = []
        # What the program was told of the progress of its calls.
        self.progress: list[float] = []
        self.elicitation = User({"action": "decline"})
        self.sampling = User(
            {"role": "assistant", "model": "driver", "content": {"type": "text", "text": "a sample"}}
        )

    def received(self, notification: Any) -> None:
        dumped = notification.model_dump(by_alias=True, mode="json", exclude_none=True)
        params = dumped.get("params")
        entry = {"method": dumped["method"], "params": params}
        if isinstance(params, dict) and "progress" in params:
            entry["progress"] = params["progress"]
        self.notifications.append(entry)

    async def elicit(self) -> dict[str, Any]:
        self.requests.append("elicitation/create")
        return await self.elicitation.ask()

    async def sample(self) -> dict[str, Any]:
        self.requests.append("sampling/createMessage")
        return await self.sampling.ask()


class Session(Protocol):
    """What the two SDKs' sessions have in common; ``call`` and ``list_page`` smooth the rest."""

    protocol: str
    server: dict[str, Any]

    async def call(self, command: dict[str, Any]) -> Any: ...

    async def list_page(self, cursor: str | None) -> tuple[list[str], str | None]: ...


Open = Callable[[str, Wire, Inbox], AbstractAsyncContextManager[Session]]


def failure(error: BaseException) -> dict[str, Any]:
    """A JSON-RPC error as the SDK raised it, or whatever else went wrong, innermost first."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    detail = getattr(error, "error", None)
    return {
        "ok": False,
        "error": str(error) or type(error).__name__,
        "code": getattr(detail, "code", None),
        "data": getattr(detail, "data", None),
    }


def success(result: Any) -> dict[str, Any]:
    dumped = result.model_dump(by_alias=True, mode="json", exclude_none=True)
    texts = [block["text"] for block in dumped.get("content", []) if block["type"] == "text"]
    return {
        "ok": True,
        "text": "\n".join(texts),
        "isError": dumped.get("isError", False),
        "meta": dumped.get("_meta"),
    }


class Driver:
    def __init__(self, url: str, open_session: Open) -> None:
        self._url = url
        self._open_session = open_session
        self._wire = Wire()
        self._inbox = Inbox()
        self._session: Session | None = None
        self._closing = asyncio.Event()
        # The task that holds the SDK's context open. It ends early when an error escapes from the
        # SDK's task group, which is how these clients break for good.
        self._life: asyncio.Task[None] | None = None
        self._calls: set[asyncio.Task[None]] = set()

    async def connect(self, _command: dict[str, Any]) -> dict[str, Any]:
        ready: asyncio.Future[Session] = asyncio.get_running_loop().create_future()
        self._life = asyncio.create_task(self._live(ready))
        await asyncio.wait({ready, self._life}, return_when=asyncio.FIRST_COMPLETED)
        if not ready.done():
            await self._life
        self._session = await ready
        return {
            "ok": True,
            "session": self._wire.session,
            "protocol": self._session.protocol,
            "server": self._session.server,
        }

    async def _live(self, ready: asyncio.Future[Session]) -> None:
        async with self._open_session(self._url, self._wire, self._inbox) as session:
            ready.set_result(session)
            await self._closing.wait()

    async def _while_alive(self, work: Any) -> Any:
        """The result of `work`, or the error that ended the client while it was waiting."""
        if self._session is None or self._life is None:
            work.close()
            raise RuntimeError("not connected")
        task = asyncio.ensure_future(work)
        await asyncio.wait({task, self._life}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
        await self._life
        raise RuntimeError("the client has ended")

    async def call(self, command: dict[str, Any]) -> dict[str, Any]:
        if self._session is None:
            raise RuntimeError("not connected")
        return success(await self._while_alive(self._session.call(command)))

    async def call_start(self, command: dict[str, Any]) -> dict[str, Any]:
        if self._session is None:
            raise RuntimeError("not connected")
        task = asyncio.create_task(self._call_and_say(command))
        self._calls.add(task)
        task.add_done_callback(self._calls.discard)
        return {"ok": True}

    async def _call_and_say(self, command: dict[str, Any]) -> None:
        try:
            answer = await self.call(command)
        except Exception as error:
            answer = failure(error)
        say({"done": command.get("tag"), **answer})

    async def list(self, _command: dict[str, Any]) -> dict[str, Any]:
        if self._session is None:
            raise RuntimeError("not connected")
        tools: list[str] = []
        cursor: str | None = None
        for _ in range(PAGES_MAX):
            page, cursor = await self._while_alive(self._session.list_page(cursor))
            tools.extend(page)
            if cursor is None:
                break
        return {"ok": True, "tools": tools}

    async def session(self, _command: dict[str, Any]) -> dict[str, Any]:
        wire = self._wire
        return {
            "ok": True,
            "session": wire.session,
            "initializes": wire.initializes,
            "sessions": len(wire.sessions),
            "requests": wire.requests,
        }

    async def notifications(self, _command: dict[str, Any]) -> dict[str, Any]:
        inbox = self._inbox
        return {
            "ok": True,
            "notifications": [*inbox.notifications],
            "requests": inbox.requests,
            "progress": inbox.progress,
        }

    async def listen(self, command: dict[str, Any]) -> dict[str, Any]:
        """Asks for the changes of one resource, and of the tools."""
        if self._session is None:
            raise RuntimeError("not connected")
        await self._while_alive(self._session.listen(command["uri"]))
        return {"ok": True}

    async def elicit(self, command: dict[str, Any]) -> dict[str, Any]:
        self._inbox.elicitation.decide(command["answer"])
        return {"ok": True}

    async def sample(self, command: dict[str, Any]) -> dict[str, Any]:
        self._inbox.sampling.decide(command["answer"])
        return {"ok": True}

    async def close(self, _command: dict[str, Any]) -> dict[str, Any]:
        """Leaves the SDK's context, which ends the session on the server (DELETE)."""
        self._closing.set()
        if self._life is not None:
            await self._life
        return {"ok": True}


OPS = {
    "connect",
    "call",
    "call_start",
    "list",
    "session",
    "notifications",
    "listen",
    "elicit",
    "sample",
    "close",
}


async def perform(driver: Driver, line: bytes) -> bool:
    """Answers one command; true if it was the last."""
    op = None
    try:
        command = json.loads(line)
        op = command.get("op")
        if op not in OPS:
            raise ValueError(f"unknown op `{op}`")
        say(await getattr(driver, op)(command))
    except Exception as error:
        say(failure(error))
    return op == "close"


async def serve(open_session: Open) -> None:
    driver = Driver(sys.argv[1], open_session)
    stdin = asyncio.StreamReader(limit=LINE_BYTES_MAX)
    await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(stdin), sys.stdin
    )
    # Commands run one after another; `call_start` is the way to have several calls in flight. They
    # are read by a task of their own so that a call that hangs cannot hide the end of stdin.
    lines: asyncio.Queue[bytes | None] = asyncio.Queue(COMMANDS_MAX)

    async def read() -> None:
        while line := await stdin.readline():
            if line.strip():
                await lines.put(line)
        await lines.put(None)

    async def work() -> None:
        while (line := await lines.get()) is not None:
            if await perform(driver, line):
                return

    reader, worker = asyncio.create_task(read()), asyncio.create_task(work())
    await asyncio.wait({reader, worker}, return_when=asyncio.FIRST_COMPLETED)
    await asyncio.wait({worker}, timeout=DRAIN_S)
    # Without `close` the program ends as a client that was killed would: no DELETE, no farewell.
    os._exit(0)


def drive(open_session: Open) -> None:
    """Serves the line protocol for the client that ``open_session`` makes."""
    if len(sys.argv) not in (2, 3):
        note(f"usage: {sys.argv[0]} URL [auto]")
        sys.exit(2)
    asyncio.run(serve(open_session))
