"""Commands under test keep their files in a home folder of the test."""

from __future__ import annotations

import os
from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def home(tmp_path_factory, monkeypatch):
    """Of this process and of those that it starts; Triton's own cache stays where it was."""
    monkeypatch.setenv("TRITON_HOME", os.environ.get("TRITON_HOME", str(Path.home())))
    found = tmp_path_factory.mktemp("home")
    monkeypatch.setenv("HOME", str(found))
    return found
