"""Steps of no request that launch every kernel serving can launch, so that all are compiled.

Which variant of a kernel a step launches follows from the model and its numerics, from the phase,
from thresholds of the number of rows, of which at most one lies between two powers of two, from
whether it is 1 or a multiple of 16, and in prefill from whether there is one sequence or several,
and more rows than a query picks. So there are

* prefill steps of 1, 2, 3, 4, 5, 8, 9 tokens and so on up to the longest chunk;
* one with two sequences, one of them behind a page of another row, which loads its carry;
* one far enough along that rows are scored and picked;
* decode steps of as many rows, up to the running limit.

Each draws with adjusted logits; those of prefill report log-probabilities of the prompt.
"""

from __future__ import annotations

from collections.abc import Iterator

from ftruntime.engine.executor import LOGIT_ROWS, Runs
from ftruntime.plan import Plan
from ftruntime.types import PAGE_TOKENS, SampleSpec, SeqPlan, StepKind, StepPlan

_FEW = 3


def warm_up(executor: Runs, plan: Plan, *, picked_tokens: int, every: bool) -> None:
    """Run the steps on the padding row and page.

    Args:
        picked_tokens: context whose compressed rows a query picks without looking.
        every: where kernels are compiled; else a few tokens of each kind of step are enough.
    """
    for number, (kind, seqs) in enumerate(steps(plan, picked_tokens, every)):
        executor.execute(StepPlan(number, kind, seqs, (0, executor.num_layers)))


def steps(
    plan: Plan, picked_tokens: int, every: bool
) -> Iterator[tuple[StepKind, tuple[SeqPlan, ...]]]:
    """Kind and sequences of each step."""
    row, longest = plan.max_running, max(1, plan.max_model_len - 1)
    few = min(_FEW, longest, plan.chunk_tokens)
    for count in _sizes(plan.chunk_tokens) if every else [few]:
        whole, rest = divmod(count, longest)
        parts = [longest] * whole + [rest] * (rest > 0)
        yield "prefill", tuple(_part(row, 0, part) for part in parts)
    if plan.chunk_tokens > 1 and longest > PAGE_TOKENS:
        yield "prefill", (_part(row, 0, 1), _part(row, PAGE_TOKENS, 1))
    start = picked_tokens // PAGE_TOKENS * PAGE_TOKENS + PAGE_TOKENS
    if every and start < longest:
        yield "prefill", (_part(row, start, min(plan.chunk_tokens, longest - start)),)
    for count in _sizes(plan.max_running) if every else [1]:
        yield "decode", _decode(plan, count)


def padding_step(plan: Plan, num_layers: int) -> StepPlan:
    """A decode step of one row that is nobody's."""
    return StepPlan(0, "decode", _decode(plan, 1), (0, num_layers))


def _decode(plan: Plan, count: int) -> tuple[SeqPlan, ...]:
    row, place = plan.max_running, min(1, plan.max_model_len - 1)
    return tuple(_part(row, place, 1, prompt=False) for _ in range(count))


def _sizes(most: int) -> list[int]:
    """Both ends of each span between powers of two up to ``most``, and its last multiple of 16."""
    powers = [1 << n for n in range((most - 1).bit_length())]
    ends = {most, most // 16 * 16, *powers, *(n + 1 for n in powers)}
    return sorted(n for n in ends if 0 < n <= most)


def _part(row: int, start: int, count: int, *, prompt: bool = True) -> SeqPlan:
    """Tokens ``start..start+count-1`` of a row whose pages are all the padding page."""
    end = start + count
    pages = tuple((page, 0, 0) for page in range(-(-end // PAGE_TOKENS)))
    sample = SampleSpec(1.0, 0, 1.0, 0.0, 0, end, adjust=((0, 1.0, 0.0),))
    return SeqPlan(
        row, "warm-up", start, (0,) * count, pages, fresh=prompt, sample=sample,
        prompt_targets=(0,) * min(count, LOGIT_ROWS) if prompt else None,
    )  # fmt: skip
