"""A training state in its file: what a run goes on from and what exports and scores are made of."""

from __future__ import annotations

import io
import pickle
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from demo import shape
from demo.files import digest, replaced
from demo.model import weight_shapes
from ftruntime.model.config import ModelConfig

FILE: Final = "state.pt"
# fields of the recipe as they are given on the command line
_FLAGS: Final = {
    "seed": "--seed", "total_tokens": "--tokens", "lr": "--lr", "matrix_lr": "--matrix-lr",
}  # fmt: skip
_TYPES: Final = {
    "recipe": dict, "step": int, "tokens": int, "seconds": float, "optimizer": dict,
    "weights": dict, "digests": dict,
}  # fmt: skip


class OtherRecipe(ValueError):
    """A run was asked to go on with other settings than it began with."""


@dataclass(frozen=True)
class State:
    """A run after `step` steps and `tokens` tokens.

    `optimizer` and `weights` are by name as in `demo.optimizer` and `demo.model`; `digests` are
    those of the files that the run depends on, by the files' names, none in a state without them.
    """

    recipe: dict[str, float]
    step: int
    tokens: int
    seconds: float
    optimizer: dict[str, Tensor]
    weights: dict[str, Tensor]
    digests: dict[str, str] = field(default_factory=dict)

    @property
    def total_tokens(self) -> int:
        """Tokens of the whole run."""
        return int(self.recipe["total_tokens"])

    def check_recipe(self, recipe: Mapping[str, float]) -> None:
        """Refuse to go on with other settings.

        Raises:
            OtherRecipe: names each that differs, with both values.
        """
        different = [
            f"{_FLAGS.get(name, name)} is {value}, expected {self.recipe.get(name)}"
            for name, value in recipe.items()
            if value != self.recipe.get(name)
        ]
        if different:
            raise OtherRecipe(f"{'; '.join(different)} as the run in this folder began with")

    def check_file(self, file: Path) -> None:
        """Refuse another file than the run's.

        Raises:
            ValueError: the digest differs.
        """
        found = digest(file.read_bytes())
        wanted = self.digests.get(file.name, found)
        if found != wanted:
            raise ValueError(
                f"{file} has sha256 {found[:16]}, expected {wanted[:16]} as in {FILE}: put back "
                "the file that the run began with, or take another folder"
            )


def load(folder: Path) -> State:
    """The state of the run in `folder`; tensors are read when they are used.

    Raises:
        OSError: there is none, or it cannot be opened.
        ValueError: it is cut, or not a state of this shape of model.
    """
    file = folder / FILE
    advice = "put a whole copy in its place, or remove it and train anew"
    try:
        content = torch.load(file, weights_only=True, mmap=True)
    except (RuntimeError, ValueError, pickle.UnpicklingError) as error:
        raise ValueError(f"{file} cannot be read as a training state: {advice}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{file} is no training state: {advice}")
    content = {"digests": {}, **content}
    wrong = [name for name, kind in _TYPES.items() if not isinstance(content.get(name), kind)]
    if wrong or "total_tokens" not in content["recipe"]:
        raise ValueError(f"{file} lacks {(wrong or ['total_tokens'])[0]}: {advice}")
    state = State(**{name: content[name] for name in _TYPES})
    shapes = weight_shapes(ModelConfig.from_dict(shape.config()))
    if {n: w.shape for n, w in state.weights.items()} != {n: s for n, (s, _) in shapes.items()}:
        raise ValueError(f"{file} holds weights of another shape than demo/shape.py: {advice}")
    return state


def save(folder: Path, state: State) -> None:
    """Write the state; the file appears whole or not at all.

    Raises:
        FloatingPointError: a weight is not finite; the file there is kept.
        OSError: it cannot be written; the file there is kept.
    """
    if not all(bool(weight.isfinite().all()) for weight in state.weights.values()):
        raise FloatingPointError(
            f"weights of step {state.step} are not finite: {FILE} is left as it was, begin anew "
            "with a lower --lr or --matrix-lr"
        )
    # torch writing to a file itself would not say why it cannot
    content = io.BytesIO()
    torch.save(vars(state), content)
    with replaced(folder / FILE) as partial:
        partial.write_bytes(content.getbuffer())
