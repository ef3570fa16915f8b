"""
Transfers between the stages of a model: hidden states to the next stage, sampled tokens from the
last one back to all others.

All stages make the same transfers in the order of steps. None waits for one of its own step to be
taken: a stage that has sent its hidden states goes on with the next step.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Sequence
from typing import TypeAlias

import torch
from torch import Tensor, distributed

from executor_svc.parallel.process_groups import ProcessGroups
from tandem.errors import InternalError

_Sent: TypeAlias = list[tuple[distributed.Work, Tensor]]

STEPS_ON_THE_WAY = 2
"""Steps whose sent tensors are kept, until the receiving stage has taken them."""


class Arrival:
    """Tensors on their way from another stage."""

    def __init__(self, transfers: Sequence[distributed.Work], device: torch.device) -> None:
        self._transfers = transfers
        self._is_on_gpu = device.type == "cuda"
        self._lock = threading.Lock()
        self._was_waited = False

    @property
    def is_here(self) -> bool:
        """True once `wait` would not wait for another stage."""
        if self._is_on_gpu:
            return all(transfer.is_completed() for transfer in self._transfers)
        return self._was_waited

    def wait(self) -> None:
        """
        Wait for the tensors, on any thread and any number of times. On a GPU the current stream
        waits, and not the host.
        """
        with self._lock:
            # Gloo would wait for another message the second time.
            if self._is_on_gpu or not self._was_waited:
                for transfer in self._transfers:
                    transfer.wait()
            self._was_waited = True


class StageLink:
    """One stage's end of all transfers; owned by the thread that launches steps."""

    def __init__(self, groups: ProcessGroups) -> None:
        """
        Args:
            groups: The ranks of a model of more than one stage.
        """
        self._groups = groups
        self._last = groups.pipeline_size - 1
        self._answering = range(self._last if groups.all_answer else 1)
        self._hidden_sent, self._tokens_sent = _Outbox(), _Outbox()

    @property
    def is_first(self) -> bool:
        """True for the stage that reads token ids."""
        return self._groups.pipeline_rank == 0

    @property
    def is_last(self) -> bool:
        """True for the stage that samples."""
        return self._groups.pipeline_rank == self._last

    @property
    def answers(self) -> bool:
        """True for a stage before the last one that gives the results of steps."""
        return self._groups.pipeline_rank in self._answering

    def receive_hidden(self, target: Tensor) -> Tensor:
        """Fill `target` with the hidden states of the stage before, and return it."""
        source = self._groups.pipeline_rank - 1
        _receiving(target, source, self._groups.pipeline).wait()
        return target

    def send_hidden(self, hidden: Tensor) -> None:
        """Send hidden states to the next stage; nothing may write them any more."""
        destination = self._groups.pipeline_rank + 1
        self._hidden_sent.keep([_sending(hidden.contiguous(), destination, self._groups.pipeline)])

    def send_back(self, tokens: Tensor, others: Sequence[Tensor]) -> None:
        """Send a step's tokens from the last stage to all before, others to those that answer."""
        group = self._groups.tokens
        sent = [(tokens, stage) for stage in range(self._last)]
        sent += [(each.contiguous(), stage) for stage in self._answering for each in others]
        self._tokens_sent.keep([_sending(*each, group) for each in sent if each[0].numel()])

    def receive_back(self, tensors: Sequence[Tensor]) -> Arrival:
        """Begin to fill tensors with those that the last stage sends for a step."""
        group = self._groups.tokens
        transfers = [_receiving(each, self._last, group) for each in tensors if each.numel()]
        return Arrival(transfers, tensors[0].device)


class _Outbox:
    """
    Sent tensors, which must stay as they are until they are taken: what is still on its way when
    this object goes would be taken back by gloo, and the receiver would wait for ever.
    """

    def __init__(self) -> None:
        self._steps: deque[_Sent] = deque()
        weakref.finalize(self, _wait_for_all, self._steps).atexit = False

    def keep(self, transfers: _Sent) -> None:
        """Keep a step's tensors; wait until those of some steps ago are taken."""
        self._steps.append(transfers)
        while len(self._steps) > STEPS_ON_THE_WAY:
            for transfer, _ in self._steps.popleft():
                transfer.wait()


def _wait_for_all(steps: deque[_Sent]) -> None:
    for step in steps:
        for transfer, _ in step:
            transfer.wait()


def _sending(
    tensor: Tensor, stage: int, group: distributed.ProcessGroup | None
) -> tuple[distributed.Work, Tensor]:
    return _begun(distributed.isend(tensor, group=group, group_dst=stage)), tensor


def _receiving(
    tensor: Tensor, stage: int, group: distributed.ProcessGroup | None
) -> distributed.Work:
    return _begun(distributed.irecv(tensor, group=group, group_src=stage))


def _begun(transfer: distributed.Work | None) -> distributed.Work:
    if transfer is None:
        raise InternalError("this process is no stage of the model")
    return transfer
