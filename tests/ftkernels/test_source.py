"""Hashes of source: which modules an op's entries follow from, and what of a module counts.

Mutants tried: comments counted, docstrings counted, a `#` in a string taken for a comment, every
string on its own line taken for a docstring, modules without kernels left out, infrastructure
counted, roots left out where they are infrastructure, imports of imports or of infrastructure not
followed, modules followed into other packages, the order that imports stand in counted.
"""

from __future__ import annotations

import ast
import inspect
import io
import sys
import time
import tokenize
from collections.abc import Callable
from hashlib import sha256
from types import ModuleType

import pytest

from ftkernels import config, registry, source, spec
from tests.support.edited import changes

SOURCE = '''"""Words of the module."""
import os

NAME = "a # b"
"""What the name is."""


class Box:
    """A \\"box\\"."""

    text = (
        """first # line"""
        'second'
    )
    table = {1:
        "one",
    }


def f(x):  # one
    """Twice."""
    return 2 * x
'''
SAME_CODE = {
    "other docstring": ("Words of the module", "Other\n\nwords # and"),
    "no docstring": ('    """Twice."""\n', ""),
    "a docstring with a quote": ("Twice.", "It's \\\\"),
    "a docstring of single quotes": ('"""Twice."""', "'Twice.'"),
    "a comment": ("    return", "    # it's why\n    return"),
    "a comment behind code": ("2 * x", "2 * x  # why"),
    "another comment": ("# one", '# """two'),
    "a comment before a docstring": ('"""A', '# why\n    """A'),
    "a blank line": ("import os", "\nimport os\n"),
    "other words on a name": ("What the name is", "A name"),
}
OTHER_CODE = {
    "a factor": ("2 * x", "3 * x"),
    "text behind a hash in a string": ("a # b", "a # c"),
    "a text": ("a # b", "b # b"),
    "a text on its own line": ("first # line", "first # word"),
    "a text below a text": ("second", "third"),
    "a name": ("def f", "def g"),
    "an order": ("    return 2 * x\n", "    y = 1\n    return 2 * x\n"),
    "a text behind a colon in brackets": ('"one",', '"two",'),
}


@pytest.mark.parametrize("change", SAME_CODE.values(), ids=SAME_CODE)
def test_words_do_not_count(change):
    assert SOURCE.replace(*change) != SOURCE
    ast.parse(SOURCE.replace(*change))
    assert source.code_lines(SOURCE.replace(*change)) == source.code_lines(SOURCE)


@pytest.mark.parametrize("change", OTHER_CODE.values(), ids=OTHER_CODE)
def test_code_counts(change):
    assert source.code_lines(SOURCE.replace(*change)) != source.code_lines(SOURCE)


def _parsed_lines(text: str) -> list[str]:
    """The lines that count, by Python's own tokens and parser."""
    lines = text.splitlines()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            lines[token.start[0] - 1] = lines[token.start[0] - 1][: token.start[1]]
    for node in ast.walk(ast.parse(text)):
        value = node.value if isinstance(node, ast.Expr) else None
        if isinstance(value, ast.Constant) and isinstance(value.value, str):
            last = value.end_lineno or value.lineno
            lines[value.lineno - 1] = lines[value.lineno - 1][: value.col_offset]
            lines[value.lineno : last] = [""] * (last - value.lineno)
    return [line.rstrip() for line in lines if line.strip()]


def test_in_the_library_what_counts_is_what_a_parser_finds():
    modules = [x for x in sys.modules.values() if x and x.__name__.startswith("ftkernels.")]
    assert len(modules) > 60
    for module in modules:
        text = inspect.getsource(module)
        assert source.code_lines(text) == _parsed_lines(text), module.__name__


@pytest.fixture
def hashed(monkeypatch):
    """Hash of functions of a small package, whose modules are `PARTS` and what is given."""

    def of(*names: str, **texts: str) -> str:
        parts = {f"pkg.{name}": text for name, text in {**PARTS, **texts}.items()}
        for name in (*parts, "torch.op"):
            monkeypatch.setitem(sys.modules, name, ModuleType(name))
        monkeypatch.setattr(inspect, "getsource", lambda module: parts[module.__name__])
        source._module.cache_clear()
        return source.source_hash(*(_function(f"pkg.{name}") for name in names or ("op",)))

    yield of
    source._module.cache_clear()


def _function(module: str) -> Callable[[], None]:
    def function() -> None: ...

    function.__module__ = module
    return function


_KERNEL = "import triton\n@triton.jit\ndef k(x):\n    return x + 1\n"
PARTS = {
    "op": "import torch.op\nfrom pkg import plain, gone\nfrom pkg.tiles import (\n    k as t,\n)\n",
    "plain": "import pkg.deep\nFIGURE = 3\n",
    "deep": f"from pkg.ring import FIGURE\nfrom pkg import check\n{_KERNEL}",
    "ring": "import pkg.deep\nFIGURE = 1\n",
    "check": "from pkg.counters import BYTES\n",
    "counters": "BYTES = 64\n",
    "quant.check": "FIGURE = 1\n",
    "tiles": _KERNEL,
    "stray": _KERNEL,
    "other": "from pkg.tiles import k\n",
}


def _changed(part: str) -> dict[str, str]:
    return {part: PARTS[part] + "MORE = 1\n"}


def test_what_is_reached_counts_but_for_infrastructure(hashed):
    base = hashed()
    assert hashed() == base
    assert len(base) == 16
    for part in ("op", "tiles", "deep", "plain", "ring", "counters"):
        assert hashed(**_changed(part)) != base, part
    for part in ("stray", "other", "check"):
        assert hashed(**_changed(part)) == base, part
    assert hashed(tiles="# words\n" + _KERNEL) == base
    assert hashed("other", **_changed("deep")) == hashed("other")
    for part in ("check", "quant.check"):  # where it is asked for, or only called alike
        assert hashed(part, **_changed(part)) != hashed(part), part
    through = {"tiles": "import pkg.quant.check\n"}
    assert hashed(**through, **_changed("quant.check")) != hashed(**through)


def test_the_hash_is_of_names_and_code_in_order(hashed):
    """So that every process has the same."""
    reached = ["counters", "deep", "op", "plain", "ring", "tiles"]
    parts = []
    for name in reached:
        code = "\n".join(source.code_lines(PARTS[name]))
        parts.append(f"pkg.{name} {sha256(code.encode()).hexdigest()}")
    assert hashed() == sha256("\n".join(parts).encode()).hexdigest()[:16]


def test_several_functions_count_together_in_any_order(hashed):
    both = hashed("op", "other")
    assert hashed("other", "op") == both
    assert both not in (hashed("op"), hashed("other"))


def test_all_ops_are_hashed_before_anyone_waits():
    specs = [(spec.name, spec.default) for spec in registry() if spec.default and spec.kernel]
    for cache in (source._module, source.source_hash):
        cache.cache_clear()
    started = time.process_time()
    hashes = {config.made_from(*spec) for spec in specs}
    assert time.process_time() - started < 0.2
    # ops of one module share theirs
    assert len(specs) / 2 < len(hashes) <= len(specs)


def test_an_op_follows_from_the_helpers_that_its_kernels_stand_in():
    """By hand, from what the kernels call."""
    found = {
        "moe_gemm_fp4": ("moe.fp4_tiles", "moe.gemm_fp4", "quant.formats"),
        "hc_pre": ("mhc.mixing", "linear.products", "quant.formats"),
        "mla_decode": ("attention.decode", "attention.tiles", "attention.queries", "rope.rope"),
        "index_select": ("attention.index_kernels", "attention.index_scores", "attention.topk"),
        "compress_kv": ("attention.pooling", "attention.stores"),
        "linear": ("linear.linear", "linear.products"),
    }
    _require_follows(found)
    assert not _follows("moe_align", "ftkernels.linear.products")


def test_an_op_follows_from_where_its_kernels_are_launched():
    """By hand: grids, splits, constexprs, forms of what is read, and the sizes of counters."""
    _require_follows({
        "fp8_linear": ("linear.fp8_product", "rows", "scratch"),
        "grouped_linear": ("linear.fp8_product", "linear.fp8_linear"),
        "mla_prefill": ("attention.pools", "attention.dense"),
        "mla_decode": ("attention.pools", "scratch"),
        "append_kv": ("attention.compressor",),
        "moe_gemm_fp4": ("moe.experts", "quant.pack"),
        "hc_post_pre": ("mhc.pre", "mhc.sinkhorn"),
        "hadamard": ("rows",),
    })  # fmt: skip
    for name in source._INFRASTRUCTURE:
        assert not _follows("fp8_linear", f"ftkernels.{name}"), name


def test_of_infrastructure_ops_use_no_figure():
    """A number of it that went into a launch would not be counted."""
    allowed = {
        "backend": ("INTERPRET", "UnsupportedDeviceError"), "config": (), "work": ("Work",),
        "spec": ("COUNTER_BYTES", "Case", "Inputs", "KernelSpec"), "target": ("Target",),
    }  # fmt: skip
    for module in _ops():
        for node in ast.walk(ast.parse(inspect.getsource(module))):
            if not isinstance(node, ast.ImportFrom) or node.module is None:
                continue
            package, _, name = node.module.partition(".")
            if package == "ftkernels" and name in allowed:
                for alias in node.names:
                    held = getattr(sys.modules[node.module], alias.name)
                    is_function = inspect.isfunction(held)
                    assert is_function or alias.name in allowed[name], (module, alias.name)
            if node.module == "ftkernels":
                assert "target" not in [alias.name for alias in node.names], module


def _ops() -> list[ModuleType]:
    folders = {name.partition(".")[0] for name in spec.MODULES}
    names = [name.split(".") for name in sys.modules if name.startswith("ftkernels.")]
    return [sys.modules[".".join(x)] for x in names if len(x) > 2 and x[1] in folders]


def _require_follows(found: dict[str, tuple[str, ...]]) -> None:
    for op, helpers in found.items():
        for helper in helpers:
            assert _follows(op, f"ftkernels.{helper}"), (op, helper)


def _follows(op: str, module: str) -> bool:
    default = next(x.default for x in registry() if x.name == op)
    assert default is not None
    return changes(lambda: config.made_from(op, default), module)
