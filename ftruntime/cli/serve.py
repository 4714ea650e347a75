"""``ftruntime serve``: the flags resolved and logged, then the hand-over to the HTTP front."""

from __future__ import annotations

import logging
import os
import platform
import signal
from dataclasses import replace
from pathlib import Path

import click

from ftruntime import log
from ftruntime.cli.common import checkpoint_shape, log_lines
from ftruntime.cli.group import FAILED, USAGE, Failure, refusals
from ftruntime.cli.sections import SectionedCommand
from ftruntime.config import RuntimeConfig
from ftruntime.distribution import DISTRIBUTION
from ftruntime.effective import inactive_flags
from ftruntime.engine.meeting import Meeting, meeting_for
from ftruntime.facts import probe
from ftruntime.model.config import ModelConfig
from ftruntime.options import flag_options, flag_sections, read_config
from ftruntime.plan import Plan, resolve

_logger = logging.getLogger(__package__)


@click.command(cls=SectionedCommand, sections=flag_sections())
@click.argument("model_dir", metavar="[MODEL]", required=False)
@flag_options
def serve(model_dir: str | None, **params: str | bool | None) -> int:
    """Serve MODEL, a checkpoint directory, over HTTP; without one, the trained demo."""
    with refusals(USAGE):
        config = read_config(params, model_dir)
        facts = probe(config.device)
        meeting = meeting_for(config.tensor_parallel_size, os.environ)
    log.setup()
    _check_platform()
    with refusals(FAILED):
        config = config.with_model()
    shape = checkpoint_shape(config)
    with refusals(USAGE):
        plan = resolve(config, shape, facts)
    if meeting is not None and meeting.rank > 0:
        return _run_rank(config, meeting, plan.kind)
    _log_plan(config, plan)
    with refusals(FAILED):
        return _run(config, shape)


def _run_rank(config: RuntimeConfig, meeting: Meeting, kind: str) -> int:
    # torchrun ends all ranks at once: rank 0 lets requests finish first, and then ends the others
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")  # its errors come to us as exceptions
    from ftruntime.engine.worker import run_rank

    return run_rank(config, meeting, kind)


def _run(config: RuntimeConfig, shape: ModelConfig) -> int:
    """Hand over to the HTTP front; returns when the server has shut down."""
    try:
        _front()
    except ModuleNotFoundError as error:
        sentence = f"{error.name} is not installed, expected: pip install '{DISTRIBUTION}[serve]'"
        raise Failure(sentence, FAILED) from error
    from ftruntime.server.bridge import Bridge
    from ftruntime.server.serve import claim_port, run_server
    from ftruntime.tokenizer.chat import ChatFormat
    from ftruntime.tokenizer.tokenizer import Tokenizer

    # held from here on, so that nobody takes the port while the model loads
    listener = claim_port(config.host, config.port)
    directory = Path(str(config.model))
    tokenizer, chat = Tokenizer.from_dir(directory), ChatFormat.from_dir(directory)
    tokenizer.check_model(
        bos_token_id=shape.bos_token_id, eos_token_ids=shape.eos_token_ids,
        vocab_size=shape.vocab_size,
    )  # fmt: skip
    # the engine has no use for the key
    engine_config = replace(config, api_key=None).to_dict()
    client = Bridge(
        engine_config, stall_timeout_s=config.stall_timeout_s,
        end_stalled=config.tensor_parallel_size > 1,
    )  # fmt: skip
    return run_server(config, client, tokenizer, chat, listener=listener)


def _front() -> None:
    """Import what an installation without the extra lacks."""
    import fastapi
    import tokenizers
    import uvicorn

    _logger.debug(
        "front fastapi=%s tokenizers=%s uvicorn=%s",
        fastapi.__version__, tokenizers.__version__, uvicorn.__version__,
    )  # fmt: skip


def _check_platform() -> None:
    system, machine = platform.system(), platform.machine()
    if (system, machine) != ("Linux", "x86_64"):
        raise Failure(f"this machine is {system} {machine}, expected Linux x86_64", FAILED)


def _log_plan(config: RuntimeConfig, plan: Plan) -> None:
    _logger.info(
        "plan ready chunk_tokens=%d limiting=%s window_pages=%d reserved_window_pages=%d "
        "num_tokens=%d max_model_len=%d max_running=%d device=%s moe_backend=%s expert_slots=%d "
        "num_experts=%d",
        plan.chunk_tokens, plan.limiting, plan.window_pages, plan.reserved_window_pages,
        plan.num_tokens, plan.max_model_len, plan.max_running, plan.kind, plan.moe_backend,
        plan.expert_slots, plan.num_experts,
    )  # fmt: skip
    log_lines((*plan.notes, *inactive_flags(config, plan)), plan.warnings)
