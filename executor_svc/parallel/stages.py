"""
The layers that each stage of a model holds.

Stages have as many layers each, or one more on the first ones: the last stage also computes the
logits and samples, so that it never has more layers than another.
"""

from __future__ import annotations

from dataclasses import dataclass

from tandem.errors import InvalidConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """
    A run of layers; the first stage has the embedding as well, the last one the final norm and the
    output projection. Made by `stage_of`, which checks the sizes.

    Attributes:
        rank: Place among the stages.
        size: Number of stages.
        layers: Indices of its layers in the model.
    """

    rank: int
    size: int
    layers: range

    @property
    def is_first(self) -> bool:
        """True for the stage that reads token ids."""
        return self.rank == 0

    @property
    def is_last(self) -> bool:
        """True for the stage that samples."""
        return self.rank == self.size - 1


def stage_of(num_layers: int, rank: int, size: int) -> Stage:
    """
    Return the layers of one stage.

    Raises:
        InvalidConfig: There are more stages than layers; names the numbers that fit.
    """
    if size > num_layers:
        legal = f"sizes are 1 to {num_layers}" if num_layers > 1 else "size is 1"
        raise InvalidConfig(
            f"pp_size {size} does not fit a model of {num_layers} layers, of which each stage "
            f"holds one at least: its legal {legal}"
        )
    each, more = divmod(num_layers, size)
    first = rank * each + min(rank, more)
    return Stage(rank=rank, size=size, layers=range(first, first + each + (rank < more)))
