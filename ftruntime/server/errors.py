"""Errors as clients see them: one sentence in an OpenAI error object, with a fitting HTTP status.

A sentence names the field, its value and what was expected, as in
``max_tokens is '5', expected an integer >= 1``.
"""

from __future__ import annotations

import re
import reprlib
from collections.abc import Mapping

from pydantic import BaseModel, ValidationError

from ftruntime.types import RequestRejectedError

_MAX_SENTENCE = 400
_LEADING_FIELD = re.compile(r"[a-z_]+(\[\d+\]|\.[a-z_]+)*(?= is )")
_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "timeout_error",
    413: "invalid_request_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "service_unavailable_error",
}

_short = reprlib.Repr()
_short.maxstring = 80
_short.maxother = 80
_short.maxlist = 6
_short.maxdict = 4


class ApiError(Exception):
    """An error that is answered to the client; ``param`` is the field at fault."""

    def __init__(
        self, message: str, *, status: int = 400, code: str | None = None, param: str | None = None
    ) -> None:
        super().__init__(message)
        self.message = _shortened(message)
        self.status = status
        self.code = code
        self.param = param

    def body(self) -> dict[str, object]:
        """The OpenAI error object."""
        default = "invalid_request_error" if self.status < 500 else "server_error"
        return {
            "error": {
                "message": self.message,
                "type": _TYPES.get(self.status, default),
                "param": self.param,
                "code": self.code,
            }
        }

    def headers(self) -> dict[str, str]:
        """Extra response headers: when to come back, or how to authenticate."""
        if self.status in (429, 503):
            return {"Retry-After": "1"}
        return {"WWW-Authenticate": "Bearer"} if self.status == 401 else {}


def _shortened(sentence: str) -> str:
    """Without its middle when it is long: the field stands first, the expectation last."""
    if len(sentence) <= _MAX_SENTENCE:
        return sentence
    half = _MAX_SENTENCE // 2
    return f"{sentence[:half]} ... {sentence[-half:]}"


def show(value: object) -> str:
    """``value`` for a sentence: shortened, so that a megabyte of input is never echoed."""
    return _short.repr(value)


def bad_field(param: str, value: object, expected: str, *, code: str | None = None) -> ApiError:
    """The 400 of one wrong field; ``param`` may be a path such as ``messages[0].role``."""
    return ApiError(f"{param} is {show(value)}, expected {expected}", code=code, param=param)


def from_value_error(error: ValueError, *, rename: Mapping[str, str] | None = None) -> ApiError:
    """A 400 from a ``ValueError`` whose sentence starts with the field's name.

    Args:
        error: raised by a data type's own validation.
        rename: our field name -> the name the client used for it.
    """
    message = str(error)
    match = _LEADING_FIELD.match(message)
    if match is None:
        return ApiError(message)
    name = match.group()
    shown = (rename or {}).get(name, name)
    return ApiError(shown + message[len(name) :], param=shown)


def from_rejection(error: RequestRejectedError) -> ApiError:
    """The engine's refusal, with the status and code it chose."""
    match = _LEADING_FIELD.match(str(error))
    param = match.group() if match is not None and error.status == 400 else None
    return ApiError(str(error), status=error.status, code=error.code, param=param)


def from_validation(
    error: ValidationError, model: type[BaseModel], body: Mapping[str, object]
) -> ApiError:
    """One sentence for the first thing wrong with a body.

    What was expected is the ``description`` of the model's field, so every field must have one.
    """
    location = error.errors(include_url=False)[0]["loc"]
    name = str(location[0])
    expected = model.model_fields[name].description or "another value"
    if name not in body:
        return ApiError(f"{name} is missing, expected {expected}", param=name)
    return bad_field(name, body[name], expected)
