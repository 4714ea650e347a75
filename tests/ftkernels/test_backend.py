"""Where an op runs, by device and settings: the table of the one switch.

Mutants tried: a bad FTKERNELS_BACKEND ignored, a late TRITON_INTERPRET honoured, capability
compared as text, a device query at import.
"""

from __future__ import annotations

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from ftkernels import UnsupportedDeviceError, backend

SETTINGS = ("TRITON_INTERPRET", "FTKERNELS_BACKEND")
# which path each device takes, and whether the kernel itself ran
PROBE = """
import torch, ftkernels
from ftkernels import backend
from ftkernels.testing import count_launches
with count_launches() as names:
    ftkernels.rms_norm(torch.ones(2, 8), None)
on = {kind: backend.use_reference(torch.empty(1, device=kind)) for kind in ("cpu", "meta")}
print(on["cpu"], on["meta"], backend.interpreted(), len(names))
"""


def _python(code: str, **settings: str) -> subprocess.CompletedProcess[str]:
    env = {name: value for name, value in os.environ.items() if name not in SETTINGS}
    return subprocess.run(
        [sys.executable, "-c", code], env={**env, **settings}, capture_output=True, text=True,
        timeout=120, check=False,
    )  # fmt: skip


def _tensor_on(device: str) -> torch.Tensor:
    return SimpleNamespace(device=torch.device(device))  # type: ignore[return-value]


@pytest.fixture
def card(monkeypatch):
    """Pretends that CUDA devices have these capabilities."""

    def pretend(*capabilities: tuple[int, int]) -> None:
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda i: capabilities[i])
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda i: f"Card {i}")

    backend._check_capability.cache_clear()
    yield pretend
    backend._check_capability.cache_clear()


@pytest.fixture
def once(lane):
    if lane == "interpreter":
        pytest.skip("starts processes of its own; once is enough")


@pytest.mark.usefixtures("once")
@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, "True False False 0"),
        ({"FTKERNELS_BACKEND": ""}, "True False False 0"),
        ({"TRITON_INTERPRET": "1"}, "False False True 1"),
        ({"FTKERNELS_BACKEND": "reference"}, "True True False 0"),
        ({"FTKERNELS_BACKEND": "reference", "TRITON_INTERPRET": "1"}, "True True True 0"),
    ],
    ids=str,
)
def test_path_by_settings(settings, expected):
    done = _python(PROBE, **settings)
    assert done.stdout.strip() == expected, done.stderr


@pytest.mark.usefixtures("once")
def test_a_bad_setting_is_refused():
    done = _python("import ftkernels", FTKERNELS_BACKEND="refrence")
    assert done.returncode == 1
    line = done.stderr.strip().splitlines()[-1]
    assert line == "ValueError: FTKERNELS_BACKEND is 'refrence', expected 'reference' or unset"


@pytest.mark.usefixtures("once")
def test_interpretation_set_between_triton_and_ftkernels_is_refused():
    done = _python("import os, triton; os.environ['TRITON_INTERPRET'] = '1'; import ftkernels")
    assert done.returncode == 1
    line = done.stderr.strip().splitlines()[-1]
    assert line.startswith("ImportError: TRITON_INTERPRET was changed after triton was imported")


@pytest.mark.usefixtures("once")
def test_import_asks_no_device():
    code = """
import torch, triton
def fail(*args, **kwargs): raise SystemExit("a device was asked at import")
for name in ("is_available", "device_count", "current_device", "get_device_capability",
             "get_device_name", "get_device_properties", "_lazy_init", "init"):
    setattr(torch.cuda, name, fail)
import ftkernels
ftkernels.registry()
print(torch.cuda.is_initialized(), triton.runtime.driver._active)
"""
    done = _python(code)
    assert done.stdout.strip() == "False None", done.stderr


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_later_change_of_interpretation_is_refused(device, lane, monkeypatch):
    if lane == "interpreter":
        monkeypatch.delenv("TRITON_INTERPRET")
    else:
        monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(RuntimeError, match="TRITON_INTERPRET was changed after ftkernels"):
        backend.use_reference(torch.empty(1, device=device))


def test_another_spelling_of_the_same_interpretation_passes(lane, monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "true" if lane == "interpreter" else "0")
    assert backend.use_reference(torch.empty(1)) == (lane != "interpreter")


@pytest.mark.parametrize("capability", [(7, 5), (8, 6)])
def test_a_device_too_old_is_named_with_the_way_out(capability, card):
    card((9, 0), capability)
    with pytest.raises(UnsupportedDeviceError) as error:
        backend.use_reference(_tensor_on("cuda:1"))
    assert isinstance(error.value, RuntimeError)
    assert str(error.value) == (
        f"device cuda:1 (Card 1) has capability {capability[0]}.{capability[1]}, expected 8.9 or "
        "newer; FTKERNELS_BACKEND=reference runs the plain-torch path"
    )


@pytest.mark.parametrize("capability", [(8, 9), (9, 0), (10, 0), (12, 0)])
def test_newer_devices_run_kernels(capability, card):
    card(capability)
    assert backend.use_reference(_tensor_on("cuda:0")) is False


def test_other_devices_are_refused():
    with pytest.raises(UnsupportedDeviceError, match="device is xpu:0, expected cuda, cpu or meta"):
        backend.use_reference(_tensor_on("xpu:0"))


def test_the_reference_setting_runs_on_any_device(monkeypatch):
    monkeypatch.setattr(backend, "_REFERENCE_ALWAYS", True)
    assert backend.use_reference(_tensor_on("cuda:0"))
    assert backend.use_reference(_tensor_on("xpu:0"))


def test_q03_triton_versions(recwarn):
    for version in ("3.6.0", "3.7.1", "3.9.0+git1"):
        backend._check_triton(version)
    assert not recwarn
    with pytest.raises(ImportError, match=r"triton is 3\.5\.1, expected 3\.6 to 3\.9"):
        backend._check_triton("3.5.1")
    with pytest.warns(UserWarning, match=r"triton is 3\.10\.0, tested are 3\.6 to 3\.9"):
        backend._check_triton("3.10.0")


def test_on_device_leaves_other_devices_alone():
    with backend.on_device(torch.empty(1)), backend.on_device(torch.empty(1, device="meta")):
        assert not torch.cuda.is_initialized()
