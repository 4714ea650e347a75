"""Every function of the packages says its types; `@triton.jit` functions have none to say."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = [
    path.relative_to(ROOT)
    for package in ("ftkernels", "ftruntime", "autotune")
    for path in sorted((ROOT / package).rglob("*.py"))
]


def _unannotated(tree: ast.AST) -> list[str]:
    found = []
    for node in ast.walk(tree):
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) or _is_kernel(node):
            continue
        arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
        arguments += [a for a in (node.args.vararg, node.args.kwarg) if a is not None]
        bare = [a.arg for a in arguments if a.annotation is None and a.arg not in ("self", "cls")]
        bare += [] if node.returns is not None else ["return"]
        if bare:
            found.append(f"{node.lineno}: {node.name}: {', '.join(bare)}")
    return found


def _is_kernel(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    return any(ast.unparse(decorator).startswith("triton.jit") for decorator in node.decorator_list)


@pytest.mark.parametrize("path", SOURCES, ids=str)
def test_functions_are_annotated(path):
    assert _unannotated(ast.parse((ROOT / path).read_text())) == []


def test_the_rule_sees_what_it_should():
    text = """
@triton.jit
def kernel(x_ptr, BLOCK: tl.constexpr): pass
def plain(self, a: int, *args, b=1): pass
def typed(cls, a: int, *args: int, **kwargs: int) -> None: pass
async def late(): pass
"""
    assert _unannotated(ast.parse(text)) == ["4: plain: b, args, return", "6: late: return"]
