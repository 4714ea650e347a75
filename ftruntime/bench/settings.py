"""Settings of ``ftruntime bench-stall``, and the error that ends it."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import NoReturn
from urllib.parse import unquote, urlsplit

from ftruntime.flags import FlagSpec, checked, choice, integer, number, refuse, words

_SHOWN_CHARS = 300
_BASE_URL = "the URL of a server, for example http://127.0.0.1:1919"


class BenchError(RuntimeError):
    """The experiment cannot go on; the text is one sentence that names the server."""


@dataclass(frozen=True, kw_only=True)
class StallSettings:
    """One experiment: victims that decode, and the long prompt that arrives among them.

    Raises:
        ValueError: ``--flag is VALUE, expected ...``.
    """

    base_url: str | None = words(
        None, "Server to measure, with or without /v1 at the end.", shown_default="none, required"
    )
    model: str | None = words(
        None, "Model to ask for.", shown_default="the first one the server lists"
    )
    api_key: str | None = words(
        None, "Bearer token to send, or FTRUNTIME_API_KEY.", env="FTRUNTIME_API_KEY", secret=True,
        shown_default="none",
    )  # fmt: skip
    endpoint: str = choice(
        "completions", "What to call: completions (/v1/completions) or chat "
        "(/v1/chat/completions).", ("completions", "chat"),
    )  # fmt: skip
    victims: int = integer(1, "Streams that decode when the long prompt arrives.", low=1, high=1024)
    victim_tokens: int = integer(700, "Tokens each victim asks for.", low=2)
    attacker_tokens: int = integer(200019, "Tokens of the long prompt.", low=1, high=10_000_000)
    attack_after: float = number(
        6.0, "Seconds from the moment every victim streams to the arrival of the long prompt.",
        low=0,
    )  # fmt: skip
    seed: int | None = integer(
        None, "Seed of the long prompt's words.", low=0,
        shown_default="another one each time, so that no prefix cache knows the prompt",
    )  # fmt: skip
    timeout_s: float = number(
        600.0, "Longest wait for the next piece of any stream in seconds.", low=0, low_open=True
    )

    def __post_init__(self) -> None:
        for name, spec in stall_specs().items():
            object.__setattr__(self, name, checked(name, getattr(self, name), spec))
        if self.base_url is None:
            raise ValueError(f"--base-url is missing, expected {_BASE_URL}")
        try:
            parts = urlsplit(self.base_url)
            usable = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
        except ValueError:
            usable = None
        if not usable or parts.query or parts.fragment or not self.base_url.isprintable():
            self.refuse_url()
        if self.api_key is not None and not (self.api_key.isascii() and self.api_key.isprintable()):
            refuse("api_key", "***", "printable ASCII characters")

    @property
    def root(self) -> str:
        """The base URL without a login, and without a slash or ``/v1`` at its end."""
        parts = urlsplit(str(self.base_url))
        path = parts.path.rstrip("/").removesuffix("/v1")
        return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{path}"

    @property
    def login(self) -> tuple[str, str] | None:
        """User and password of the base URL, None without them."""
        parts = urlsplit(str(self.base_url))
        user, password = unquote(parts.username or ""), unquote(parts.password or "")
        return (user, password) if user or password else None

    def refuse_url(self) -> NoReturn:
        """Raise the one sentence about the base URL; a login in it is not shown."""
        login, at, rest = str(self.base_url).rpartition("@")
        scheme, slashes, _ = login.rpartition("//")
        url = f"{scheme}{slashes}***@{rest}" if at else rest
        refuse(
            "base_url", url if len(url) <= _SHOWN_CHARS else url[:_SHOWN_CHARS] + "...", _BASE_URL
        )


def stall_specs() -> dict[str, FlagSpec]:
    """Field name -> its flag, in the order of the help."""
    return {f.name: f.metadata["flag"] for f in fields(StallSettings)}
