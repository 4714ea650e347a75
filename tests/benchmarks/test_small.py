"""Small cases for a memory checker: all of them, and no model's.

Mutants tried: reference-only ops among them, a model's cases among them, the budget never asked,
the second cases of an op ahead of another's first, success without a card.
"""

from __future__ import annotations

import itertools

from bench_kernels import small
from ftkernels import registry

OPS = {spec.name for spec in registry() if spec.kernel}


def test_every_op_with_kernels_comes_first_once():
    names = [spec.name for spec, _ in small.small_cases()]
    assert set(names[: len(OPS)]) == set(names) == OPS
    assert len(names) > len(OPS)
    large = ("flash", "pro", "exact")
    assert not [case for _, case in small.small_cases() if case["name"].startswith(large)]
    sizes = [size for _, case in small.small_cases() for size in case.values()]
    assert max(size for size in sizes if isinstance(size, int)) <= 10_000


def test_they_run(monkeypatch):
    some = small.small_cases()[::9]
    monkeypatch.setattr(small, "small_cases", lambda: some)
    assert small.run("cpu", 600) == (len(some), [])


def test_what_the_budget_leaves_out_is_named(monkeypatch):
    some = small.small_cases()[:5]
    monkeypatch.setattr(small, "small_cases", lambda: some)
    clock = itertools.count()
    done, left_out = small.run("cpu", 3, now=lambda: next(clock))
    assert done == 2
    assert left_out == [f"{spec.name} {case['name']}" for spec, case in some[2:]]


def test_without_a_card_it_is_one_sentence(monkeypatch, capsys):
    monkeypatch.setattr(small.torch.cuda, "is_available", lambda: False)
    assert small.main([]) == 1
    told = capsys.readouterr()
    assert told.err == "bench_kernels.small needs a CUDA card, and there is none here\n"
    assert told.out == ""
