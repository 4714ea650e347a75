"""Who may import whom, who may read which setting, and no state in modules; read off the sources.

Mutants tried: torch imported inside a function of the scheduler, a relative import, a name of
`os.environ` read under an alias, a module-level dict written by a function.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
OURS = ("ftkernels", "ftruntime", "autotune", "bench_kernels", "tests")

# third-party packages of each of ours; ftruntime's are those of its extras
THIRD_PARTY = {
    "ftkernels": {"torch", "triton", "numpy", "einops"},
    "autotune": {"torch", "triton", "numpy", "click", "rich"},
    "ftruntime": {
        "torch", "numpy", "safetensors", "pynvml", "tokenizers", "fastapi", "starlette", "uvicorn",
        "pydantic", "pydantic_core", "prometheus_client", "click", "rich", "msgspec", "httpx",
        "matplotlib",
    },
}  # fmt: skip
FIRST_PARTY = {
    "ftkernels": {"ftkernels"},
    "autotune": {"ftkernels", "autotune"},
    "bench_kernels": {"ftkernels", "bench_kernels"},
    "ftruntime": {"ftkernels", "ftruntime"},
}
# a folder or file, and what none of its files may import
FORBIDDEN = {
    "ftruntime/types.py": ("torch", "ftkernels", "ftruntime.engine", "ftruntime.server"),
    "ftruntime/scheduler": (
        "torch", "ftkernels", "ftruntime.engine", "ftruntime.server", "ftruntime.model",
    ),
    "ftruntime/kvcache": ("torch", "ftkernels", "ftruntime.engine", "ftruntime.scheduler"),
    "ftruntime/sim": ("torch", "ftkernels", "ftruntime.engine", "ftruntime.model"),
    "ftruntime/server": ("torch", "ftkernels", "ftruntime.model"),
    "ftruntime/tokenizer": ("torch", "ftkernels", "ftruntime.model"),
    "ftruntime/model": ("ftruntime.scheduler", "ftruntime.server", "ftruntime.engine"),
    "ftruntime/engine": ("ftruntime.server",),
}  # fmt: skip
EXEMPT = {"ftruntime/kvcache/storage.py"}  # the tensors
TORCH_FREE = (
    "ftruntime.types", "ftruntime.scheduler.scheduler", "ftruntime.kvcache.manager",
    "ftruntime.server.app", "ftruntime.tokenizer.chat", "ftruntime.simulate",
)  # fmt: skip
READERS = {"TRITON_INTERPRET", "FTKERNELS_BACKEND"}
MUTATING = {
    "append", "extend", "insert", "add", "update", "setdefault", "pop", "popitem", "clear",
    "remove", "discard", "appendleft",
}  # fmt: skip


def _sources(*roots: str) -> list[Path]:
    found = []
    for root in roots:
        path = ROOT / root
        found += [path] if path.is_file() else sorted(path.rglob("*.py"))
    return [path.relative_to(ROOT) for path in found]


@cache
def _tree(path: Path) -> ast.Module:
    return ast.parse((ROOT / path).read_text(), str(path))


def _run_time_nodes(node: ast.AST) -> Iterator[ast.AST]:
    """Every node but those that only type checkers see."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            children: list[ast.AST] = list(child.orelse)
        else:
            children = [child]
        for kept in children:
            yield kept
            yield from _run_time_nodes(kept)


def _imports(path: Path) -> set[str]:
    """Dotted names that a file imports when it runs, at any depth of the file."""
    found: set[str] = set()
    for node in _run_time_nodes(_tree(path)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}: relative import, expected full names"
            found.add(str(node.module))
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def _is_or_under(name: str, package: str) -> bool:
    return name == package or name.startswith(package + ".")


@pytest.mark.parametrize("package", FIRST_PARTY)
def test_packages_import_only_what_they_may(package):
    for path in _sources(package):
        for name in _imports(path):
            top = name.split(".")[0]
            if top in sys.stdlib_module_names:
                continue
            allowed = FIRST_PARTY[package]
            if top not in OURS and package in THIRD_PARTY:
                allowed = THIRD_PARTY[package]
            elif top not in OURS:
                continue
            assert top in allowed, f"{path} imports {name}, expected one of {sorted(allowed)}"


@pytest.mark.parametrize("area", FORBIDDEN)
def test_directions(area):
    for path in _sources(area):
        if str(path) in EXEMPT:
            continue
        for name in _imports(path):
            for package in FORBIDDEN[area]:
                assert not _is_or_under(name, package), f"{path} imports {name}"


def test_the_areas_named_here_exist():
    assert [area for area in FORBIDDEN if not (ROOT / area).exists()] == []


def test_policy_runs_without_torch():
    code = f"import sys, {', '.join(TORCH_FREE)}; print('torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.stdout.strip() == "False", done.stderr


def test_only_the_backend_reads_its_settings():
    for path in _sources("ftkernels", "ftruntime", "autotune"):
        for node in ast.walk(_tree(path)):
            if isinstance(node, ast.Constant) and node.value in READERS:
                assert str(path) == "ftkernels/backend.py", f"{path}:{node.lineno}: {node.value}"
            if isinstance(node, ast.Attribute) and ast.unparse(node).endswith("runtime.interpret"):
                assert str(path) == "ftkernels/backend.py", f"{path}:{node.lineno}"


def test_only_config_names_the_folder_of_tuned_entries():
    for path in _sources("ftkernels", "ftruntime"):
        for node in ast.walk(_tree(path)):
            if isinstance(node, ast.Constant) and node.value in ("configs", "configs/"):
                assert str(path) == "ftkernels/config.py", f"{path}:{node.lineno}"


def _mutable_names(tree: ast.Module) -> dict[str, int]:
    """Module-level names bound to a list, dict or set, and the line where."""
    found = {}
    for node in tree.body:
        targets = node.targets if isinstance(node, ast.Assign) else []
        targets = [node.target] if isinstance(node, ast.AnnAssign) else targets
        for target in targets:
            if isinstance(target, ast.Name) and _is_mutable(node.value):  # type: ignore[attr-defined]
                found[target.id] = node.lineno
    return found


def _is_mutable(value: ast.expr | None) -> bool:
    displays = (ast.List, ast.Dict, ast.Set, ast.ListComp, ast.DictComp, ast.SetComp)
    if isinstance(value, displays):
        return True
    makers = {"list", "dict", "set", "defaultdict", "deque", "Counter", "OrderedDict"}
    return isinstance(value, ast.Call) and ast.unparse(value.func).split(".")[-1] in makers


def _written_names(tree: ast.Module) -> set[str]:
    """Names whose contents some statement of the module changes in place."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Subscript) and isinstance(node.ctx, (ast.Store, ast.Del)):
            found.add(ast.unparse(node.value))
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            if node.func.attr in MUTATING:
                found.add(ast.unparse(node.func.value))
        elif isinstance(node, ast.AugAssign):
            found.add(ast.unparse(node.target))
    return found


def test_modules_hold_no_mutable_state():
    for path in _sources("ftkernels", "ftruntime", "autotune"):
        tree = _tree(path)
        written = _written_names(tree)
        for name, line in _mutable_names(tree).items():
            constant = name.isupper() or (name.startswith("__") and name.endswith("__"))
            assert constant, f"{path}:{line}: {name} is a mutable module variable"
            assert name not in written, f"{path}:{line}: {name} is changed in place"
        for node in ast.walk(tree):
            assert not isinstance(node, ast.Global), f"{path}:{node.lineno}: global statement"


def test_the_rules_see_what_they_should(tmp_path):
    tree = ast.parse(
        "import a\nfrom b.c import d\n_cache = {}\nTABLE = [1]\n"
        "def f():\n    import e.f\n    TABLE.append(2)\n    _cache[1] = 2\n"
        "if TYPE_CHECKING:\n    import g\n"
    )
    assert _mutable_names(tree) == {"_cache": 3, "TABLE": 4}
    assert _written_names(tree) == {"TABLE", "_cache"}
    path = tmp_path / "module.py"
    path.write_text(ast.unparse(tree))
    assert _imports(path) == {"a", "b.c", "b.c.d", "e.f"}
