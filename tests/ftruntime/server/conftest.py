"""A small tokenizer, and a front over a scripted engine that is talked to without a socket."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from ftruntime.server.app import create_app
from ftruntime.tokenizer.chat import ChatFormat
from ftruntime.tokenizer.tokenizer import Tokenizer
from tests.ftruntime.server.fake_engine import FakeEngine, settings, write_tokenizer


@pytest.fixture(scope="session")
def tokenizer_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="session")
def tokenizer(tokenizer_dir: Path) -> Tokenizer:
    return Tokenizer.from_dir(tokenizer_dir)


@pytest.fixture(scope="session")
def chat(tokenizer_dir: Path) -> ChatFormat:
    return ChatFormat.from_dir(tokenizer_dir)


@dataclass
class Site:
    """An app, its engine, and one-call requests to it."""

    app: FastAPI
    engine: FakeEngine
    headers: dict[str, str] = field(default_factory=dict)

    def run(self, work: Callable[[httpx.AsyncClient], Awaitable[Any]]) -> Any:
        async def main() -> Any:
            transport = httpx.ASGITransport(self.app, raise_app_exceptions=False)
            async with httpx.AsyncClient(
                transport=transport, base_url="http://site", headers=self.headers
            ) as client:
                return await asyncio.wait_for(work(client), 20)

        return asyncio.run(main())

    def post(self, path: str, body: object = None, **kwargs: Any) -> httpx.Response:
        if body is not None:
            kwargs["json"] = body
        return self.run(lambda client: client.post(path, **kwargs))

    def get(self, path: str, **kwargs: Any) -> httpx.Response:
        return self.run(lambda client: client.get(path, **kwargs))


@pytest.fixture
def make_site(tokenizer: Tokenizer, chat: ChatFormat) -> Callable[..., Site]:
    def make(answer: str = "Hello there, sailor.", *, engine: dict[str, Any] | None = None,
             **changes: object) -> Site:  # fmt: skip
        fake = FakeEngine(tokenizer, chat, lambda *_: tokenizer.encode(answer), **(engine or {}))
        return Site(create_app(fake, tokenizer, chat, settings(**changes)), fake)

    return make


@pytest.fixture
def site(make_site: Callable[..., Site]) -> Site:
    return make_site()
