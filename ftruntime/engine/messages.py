"""Messages between HTTP front and engine process: msgpack behind a 4-byte little-endian length.

The front sends `FrontMessage`s, the engine `EngineMessage`s; both are tagged unions, so a frame
names its type.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from typing import Final

import msgspec

from ftruntime.types import Request, TokenEvent

DEFAULT_BUILDER: Final = "ftruntime.engine.process:build_from_config"

_LENGTH: Final = struct.Struct("<I")
_MAX_FRAME_BYTES: Final = 2**32 - 1


class Start(msgspec.Struct, tag=True, frozen=True):
    """First message: `builder` is `module:function`, called with `(config, progress)`."""

    config: dict[str, object]
    builder: str
    log_level: str = "info"


class Submit(msgspec.Struct, tag=True, frozen=True):
    """Run a request; its `arrival_s` is replaced by the engine's clock on arrival."""

    request: Request


class Cancel(msgspec.Struct, tag=True, frozen=True):
    """End a request early. `aborted` is False when its reader had all it wanted (a stop string)."""

    request_id: str
    aborted: bool = True


class StatsQuery(msgspec.Struct, tag=True, frozen=True):
    query_id: int


class StepsQuery(msgspec.Struct, tag=True, frozen=True):
    query_id: int
    since: int


class Shutdown(msgspec.Struct, tag=True, frozen=True):
    """End after the present step; running requests are dropped."""


class Phase(msgspec.Struct, tag=True, frozen=True):
    """Start-up progress: a short name, and the share of it that is done, 0 to 1."""

    phase: str
    progress: float


class Ready(msgspec.Struct, tag=True, frozen=True):
    info: dict[str, object]


class Failed(msgspec.Struct, tag=True, frozen=True):
    """The engine could not be built, or cannot go on; `message` is one sentence."""

    message: str


class Events(msgspec.Struct, tag=True, frozen=True):
    events: list[TokenEvent]


class Rejected(msgspec.Struct, tag=True, frozen=True):
    """The fields of a `RequestRejectedError`."""

    request_id: str
    message: str
    code: str
    status: int


class StatsReply(msgspec.Struct, tag=True, frozen=True):
    query_id: int
    stats: dict[str, object]


class StepsReply(msgspec.Struct, tag=True, frozen=True):
    query_id: int
    steps: dict[str, object]


FrontMessage = Start | Submit | Cancel | StatsQuery | StepsQuery | Shutdown
EngineMessage = Phase | Ready | Failed | Events | Rejected | StatsReply | StepsReply

_encoder = msgspec.msgpack.Encoder()
_front_decoder: msgspec.msgpack.Decoder[FrontMessage] = msgspec.msgpack.Decoder(FrontMessage)
_engine_decoder: msgspec.msgpack.Decoder[EngineMessage] = msgspec.msgpack.Decoder(EngineMessage)


def frame(message: FrontMessage | EngineMessage) -> bytes:
    """One message as it travels: length, then msgpack."""
    body = _encoder.encode(message)
    if len(body) > _MAX_FRAME_BYTES:
        raise ValueError(
            f"message of type {type(message).__name__} is {len(body)} bytes, expected < 2**32"
        )
    return _LENGTH.pack(len(body)) + body


def receive(sock: socket.socket) -> FrontMessage | None:
    """Block for the front's next message; None when the front is gone."""
    head = _receive_exactly(sock, _LENGTH.size)
    if head is None:
        return None
    body = _receive_exactly(sock, _LENGTH.unpack(head)[0])
    return None if body is None else _front_decoder.decode(body)


def _receive_exactly(sock: socket.socket, num_bytes: int) -> bytes | None:
    buffer = bytearray(num_bytes)
    view = memoryview(buffer)
    done = 0
    while done < num_bytes:
        try:
            count = sock.recv_into(view[done:])
        except ConnectionError:
            return None
        if count == 0:
            return None
        done += count
    return bytes(buffer)


async def read(reader: asyncio.StreamReader) -> EngineMessage | None:
    """Await the engine's next message; None when the engine is gone."""
    try:
        head = await reader.readexactly(_LENGTH.size)
        body = await reader.readexactly(_LENGTH.unpack(head)[0])
    except (asyncio.IncompleteReadError, ConnectionError):
        return None
    return _engine_decoder.decode(body)
