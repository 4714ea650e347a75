"""What figures follow from: the code that makes them, and that of the kernels they are of.

Mutants tried: each of the model's sources left out, the sources of a trial left out.
"""

from __future__ import annotations

import pytest

from autotune import search, tune
from autotune.trials import Job
from ftkernels import registry
from tests.support.edited import changes


@pytest.mark.parametrize(
    "module",
    [
        "autotune.static", "autotune.passes", "autotune.pipes", "ftkernels.target",
        "ftkernels.offline", "ftkernels.work", "ftkernels.testing.sass", "ftkernels.testing.loops",
        "ftkernels.testing.aot", "ftkernels.testing.report",
    ],
)  # fmt: skip
def test_the_models_figures_follow_from_their_sources(module):
    assert changes(tune.model_hash, module)


def test_a_trial_follows_from_the_helpers_of_its_op():
    spec = next(spec for spec in registry() if spec.name == "moe_gemm_fp4")
    problem = search.problems([spec], arch=89, ranks=[8])[0]
    job = Job(spec.name, problem.key, problem.default, problem.users, 89, lambda *_: 1.0, "model")
    assert changes(lambda: job.identity, "ftkernels.moe.fp4_tiles")
    assert not changes(lambda: job.identity, "ftkernels.mhc.mixing")
