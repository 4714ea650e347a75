"""`LLM`: the engine of the server, inside the calling process."""

from __future__ import annotations

import itertools
import signal
import threading
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from types import FrameType, TracebackType

from ftruntime.completion import Completion, RequestOutput, request_output
from ftruntime.config import RuntimeConfig
from ftruntime.engine.build import build_engine
from ftruntime.engine.collect import fewer_collections
from ftruntime.engine.loop import EngineLoop
from ftruntime.engine.request import choice_params, make_request
from ftruntime.model.config import ModelConfig
from ftruntime.progress import StartProgress
from ftruntime.tokenizer.tokenizer import Tokenizer
from ftruntime.types import Request, RequestRejectedError, SamplingParams

Prompt = str | Sequence[int]


class LLM:
    """A model and its engine. Every flag of `ftruntime serve` is a keyword, with `_` for `-`.

    Args:
        model: checkpoint directory; None is the trained demo of this installation.
        flags: `max_running_requests=8`, `num_tokens=8192` and so on.

    Raises:
        ValueError: a flag is unknown or its value refused, or the checkpoint is; one sentence.
        FileNotFoundError: no such directory, or no ``config.json`` in it; one sentence.
    """

    def __init__(self, model: str | Path | None = None, **flags: object) -> None:
        if "explicit" in flags:
            raise ValueError("explicit is not a setting, expected a flag of serve")
        given = flags if model is None else {"model": str(model), **flags}
        config = RuntimeConfig.from_flags(**given).with_model()
        with StartProgress() as progress:
            self._tokenizer = _tokenizer(Path(str(config.model)))
            self._loop: EngineLoop | None = build_engine(config, progress)
        info = self._loop.info
        self._max_model_len = _integer(info.get("max_model_len"), "max_model_len")
        self._vocab_size = _integer(info.get("vocab_size"), "vocab_size")
        self._ids = itertools.count()
        self._lock = threading.Lock()

    @property
    def tokenizer(self) -> Tokenizer:
        """The checkpoint's tokenizer."""
        return self._tokenizer

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """Run prompts to their ends, as many together as the running limit allows.

        Args:
            prompts: a text, a list of token ids, or a list of those. A text is encoded as it is,
                behind a BOS token unless it starts with one; token ids are taken as they are.
            sampling_params: one for all prompts, or one for each; None is `SamplingParams()`.

        Returns:
            One output for each prompt, in their order.

        Raises:
            TypeError, ValueError: a prompt or its parameters; names which, before anything runs.
            RuntimeError: a step failed, or `shutdown` was called.
        """
        loop = self._require_loop()
        texts, token_ids = self._encode(_prompt_list(prompts))
        params = _params_list(sampling_params, len(token_ids))
        with self._lock:
            batch = _Batch(loop, self._tokenizer)
            for number, (ids, p) in enumerate(zip(token_ids, params, strict=True)):
                for choice in range(p.n):
                    batch.add(
                        (number, choice), self._request(number, ids, choice_params(p, choice))
                    )
            batch.run()
        return [
            request_output(text, ids, batch.completions(number))
            for number, (text, ids) in enumerate(zip(texts, token_ids, strict=True))
        ]

    def stats(self) -> dict[str, object]:
        """The dict of `/v1/stats`."""
        return self._require_loop().stats()

    def shutdown(self) -> None:
        """Free the engine: pages, slots, weights, pinned bytes. Later calls do nothing."""
        loop, self._loop = self._loop, None
        if loop is not None:
            loop.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.shutdown()

    def _require_loop(self) -> EngineLoop:
        if self._loop is None:
            raise RuntimeError("LLM was shut down, expected a live one")
        return self._loop

    def _encode(self, prompts: Sequence[Prompt]) -> tuple[list[str | None], list[list[int]]]:
        texts: list[str | None] = []
        token_ids: list[list[int]] = []
        for number, prompt in enumerate(prompts):
            text = prompt if isinstance(prompt, str) else None
            texts.append(text)
            ids = _token_ids(prompt, number) if text is None else self._encode_text(text)
            token_ids.append(ids)
        return texts, token_ids

    def _encode_text(self, text: str) -> list[int]:
        ids, bos = self._tokenizer.encode(text), self._tokenizer.bos_token_id
        return ids if ids[:1] == [bos] else [bos, *ids]

    def _request(self, number: int, token_ids: list[int], params: SamplingParams) -> Request:
        loop = self._require_loop()
        try:
            return make_request(
                f"llm-{next(self._ids)}", token_ids, params,
                max_model_len=self._max_model_len, vocab_size=self._vocab_size,
                arrival_s=loop.clock.now(), eos_token_ids=loop.eos_token_ids,
            )  # fmt: skip
        except RequestRejectedError as error:
            text = f"prompts[{number}]: {error}"
            raise RequestRejectedError(text, code=error.code, status=error.status) from None


class _Batch:
    """The requests of one `generate` call, fed to the engine as its queue takes them."""

    def __init__(self, loop: EngineLoop, tokenizer: Tokenizer) -> None:
        self._loop = loop
        self._tokenizer = tokenizer
        self._waiting: deque[Request] = deque()
        self._running: dict[str, Completion] = {}
        self._all: dict[tuple[int, int], Completion] = {}

    def add(self, key: tuple[int, int], request: Request) -> None:
        """Take in choice `key[1]` of prompt `key[0]`."""
        completion = Completion.begin(request.params, self._tokenizer)
        self._all[key] = completion
        self._running[request.request_id] = completion
        self._waiting.append(request)

    def completions(self, number: int) -> dict[int, Completion]:
        """The sequences of one prompt by choice number."""
        return {choice: c for (prompt, choice), c in self._all.items() if prompt == number}

    def run(self) -> None:
        """Step until every sequence has ended; whatever ends it early, no page stays taken."""
        with fewer_collections(), _InterruptBetweenSteps(self._loop) as interrupt:
            try:
                while self._running:
                    self._submit()
                    interrupt.check()
                    self._step()
            finally:
                for request_id in self._running:
                    self._loop.cancel(request_id)
                self._loop.idle()

    def _submit(self) -> None:
        while self._waiting:
            try:
                self._loop.submit(self._waiting[0])
            except RequestRejectedError as error:
                if error.status == 429 and self._loop.has_work:
                    return
                raise
            self._waiting.popleft()

    def _step(self) -> None:
        before = self._loop.num_steps
        for event in self._loop.step():
            completion = self._running.get(event.request_id)
            if completion is None:
                continue
            if completion.take(event):
                self._loop.cancel(event.request_id, aborted=False)
            if completion.finish_reason is not None:
                del self._running[event.request_id]
        if self._loop.num_steps == before and self._running:
            raise RuntimeError(
                f"{len(self._running)} requests are unfinished but no step could be planned"
            )


class _InterruptBetweenSteps:
    """Keeps an interrupt off the scheduler's bookkeeping: it comes inside or between steps."""

    def __init__(self, loop: EngineLoop) -> None:
        self._loop = loop
        self._pending = False
        self._installed = False

    def __enter__(self) -> _InterruptBetweenSteps:
        in_main = threading.current_thread() is threading.main_thread()
        # a handler that the program chose itself stays
        if in_main and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, self._on_signal)
            self._installed = True
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._installed:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        if kind is None:
            self.check()

    def check(self) -> None:
        """Raise an interrupt that came since the last call."""
        if self._pending:
            self._pending = False
            raise KeyboardInterrupt

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._loop.executing:
            raise KeyboardInterrupt
        self._pending = True


def _tokenizer(directory: Path) -> Tokenizer:
    """The checkpoint's tokenizer, known to fit its model."""
    shape = ModelConfig.from_dir(directory)
    tokenizer = Tokenizer.from_dir(directory)
    tokenizer.check_model(
        bos_token_id=shape.bos_token_id, eos_token_ids=shape.eos_token_ids,
        vocab_size=shape.vocab_size,
    )  # fmt: skip
    return tokenizer


def _prompt_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt or a list of prompts as a list of prompts."""
    if isinstance(prompts, str):
        return [prompts]
    if not isinstance(prompts, list | tuple):
        raise TypeError(
            f"prompts is a {type(prompts).__name__}, "
            "expected a text, a list of token ids, or a list of those"
        )
    if prompts and all(_is_id(item) for item in prompts):
        return [prompts]
    return list(prompts)


def _token_ids(prompt: object, number: int) -> list[int]:
    if not isinstance(prompt, list | tuple):
        raise TypeError(
            f"prompts[{number}] is a {type(prompt).__name__}, "
            "expected a text or a list of token ids"
        )
    for position, item in enumerate(prompt):
        if not _is_id(item):
            raise TypeError(f"prompts[{number}][{position}] is {item!r}, expected a token id")
    return list(prompt)


def _is_id(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _params_list(
    params: SamplingParams | Sequence[SamplingParams] | None, num_prompts: int
) -> list[SamplingParams]:
    if params is None:
        params = SamplingParams()
    if isinstance(params, SamplingParams):
        return [params] * num_prompts
    if not isinstance(params, list | tuple) or not all(
        isinstance(p, SamplingParams) for p in params
    ):
        raise TypeError(
            f"sampling_params is {params!r}, "
            "expected a SamplingParams, or a list with one for each prompt"
        )
    if len(params) != num_prompts:
        raise ValueError(
            f"sampling_params has {len(params)} entries, "
            f"expected one for each of {num_prompts} prompts"
        )
    return list(params)


def _integer(value: object, name: str) -> int:
    if not isinstance(value, int):
        raise TypeError(f"engine info {name} is {value!r}, expected an integer")
    return value
